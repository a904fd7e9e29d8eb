"""Signals and exit codes. Ctrl-C and SIGTERM end a command at once, and a service after its current step.

Python handles a signal between two of its own instructions, and a request of the native store client is one
instruction. Therefore a watcher thread receives Ctrl-C directly. It ends the process if the request does not return
in time. That is like a crash, which loses no durable write.
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
"""An interrupted progress display leaves the cursor hidden."""


class _Inputs:
    """How often this process has come to wait for input."""

    count = 0


def end_soon_when_interrupted() -> None:
    """From now on Ctrl-C ends this process within about a second, even during a request.

    A shell whose command gives up in time, so that it waits for input again, goes on.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            while os.read(read_end, 1)[0] != signal.SIGINT:
                pass
            before = _Inputs.count
            SYSTEM_CLOCK.sleep(_GRACE_S)
            if _Inputs.count == before:
                break
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR)
        os._exit(INTERRUPTED)

    start_thread(watch, name="flagstone-interrupt")


@contextmanager
def waiting_for_input() -> Iterator[None]:
    """In this block Ctrl-C raises `KeyboardInterrupt` and nothing else: there is no request that it must end."""
    _Inputs.count += 1
    watched = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(watched)


@contextmanager
def service(name: str) -> Iterator[Event]:
    """Run a long-running command. The first Ctrl-C or SIGTERM sets the event; a second one ends the process.

    After the first signal the work may take as long as it needs to finish. Then the command exits with 130 after
    Ctrl-C, and with 0 after SIGTERM, by which service managers stop a service.
    """
    stop = Event()
    received: list[int] = []

    def request_stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        received.append(number)
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    watched = signal.set_wakeup_fd(-1)
    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
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
    if signal.SIGINT in received:
        raise typer.Exit(INTERRUPTED)


ABSENT: Final = 1
UNAVAILABLE: Final = 5
DAMAGE: Final = 6
INTERNAL: Final = 70
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""The last two are the exit codes that a shell reports for a program ended by SIGINT or SIGPIPE."""

_BY_KIND: Final[tuple[tuple[type[FlagstoneError], int], ...]] = (
    (InvalidRequest, 2),
    (TransactionConflict, 3),
    (Closed, 4),
    (Unavailable, UNAVAILABLE),
    (CorruptData, DAMAGE),
)


def exit_code(error: FlagstoneError) -> int:
    """The exit code for the kind of an error; 70 (EX_SOFTWARE) for an internal error."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), INTERNAL)
