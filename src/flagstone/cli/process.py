"""Ctrl-C and SIGTERM: a command ends at once, a long-running one when its work is in order.

Python handles a signal between two of its own instructions, and a request of the native store client is one
instruction. So a watcher hears of Ctrl-C directly and ends a process that does not come back from a request in time.
That is what a crash looks like, and every write is proof against one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import typer

from flagstone.errors import (
    Closed,
    CorruptData,
    FlagstoneError,
    InvalidRequest,
    TransactionConflict,
    Unavailable,
)
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.sync import Event, start_thread

_log = logging.getLogger("flagstone.cli")

_GRACE_S: Final = 1.0
_SHOW_CURSOR: Final = b"\x1b[?25h"
"""A progress display that is cut off leaves the cursor hidden."""


def end_soon_when_interrupted() -> None:
    """From now on Ctrl-C ends this process within about a second, even in the midst of a request."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(heard, 1)[0] != signal.SIGINT:
            pass
        SYSTEM_CLOCK.sleep(_GRACE_S)
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR)
        os._exit(INTERRUPTED)

    start_thread(watch, name="flagstone-interrupt")


@contextmanager
def service(name: str) -> Iterator[Event]:
    """Long-running work: gives an event that the first Ctrl-C or SIGTERM sets; a second one ends the process.

    Within it the work may take its time to finish: nobody ends the process meanwhile. After Ctrl-C the command then
    ends with 130, after SIGTERM, which is how services are told that all is well, with 0.
    """
    stop = Event()
    heard: list[int] = []

    def request(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        heard.append(number)
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    watched = signal.set_wakeup_fd(-1)
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    # Where services expect it: on standard error, a line at a time.
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    _log.info("started %s pid=%d", name, os.getpid())
    try:
        yield stop
        _log.info("stopped %s", name)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(watched)
    if signal.SIGINT in heard:
        raise typer.Exit(INTERRUPTED)


ABSENT: Final = 1
UNAVAILABLE: Final = 5
DAMAGE: Final = 6
INTERNAL: Final = 70
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""The last two are what a shell reports for a program that SIGINT or SIGPIPE ended."""

_BY_KIND: Final[tuple[tuple[type[FlagstoneError], int], ...]] = (
    (InvalidRequest, 2),
    (TransactionConflict, 3),
    (Closed, 4),
    (Unavailable, UNAVAILABLE),
    (CorruptData, DAMAGE),
)


def exit_code(error: FlagstoneError) -> int:
    """The exit code of an error's kind; 70 (EX_SOFTWARE) for what should never happen."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), INTERNAL)
