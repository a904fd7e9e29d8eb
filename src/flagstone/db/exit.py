"""Closes handles that their owner did not close: after garbage collection, at exit, and in a forked child.

A handle (`Db`, `DbReader` and their async forms) is *watched* from its opening to its `close`. Background threads refer
to the engine, so Python never collects the engine. The watch is on an object that only the handles refer to. When
Python collects that object, a thread closes the engine. When the interpreter exits, all watched handles are flushed
concurrently, for a limited time.

A finalizer runs in any thread and between any two instructions, also while that thread holds a lock. So it takes no
lock, starts no thread and does no I/O: it puts a number into a queue, and a thread that reads the queue does the rest.

A process that is killed, or ends by `os._exit`, runs none of this: rows that were not durable are lost, as in any
crash. In a forked child every open database is closed at once, because its threads stayed in the parent.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet, finalize

import flagstone.runtime.service  # noqa: F401 - exit hooks run newest first: services must end after our flush
from flagstone.errors import Closed, FlagstoneError
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.sync import Event, Lock, ThreadHandle, simulated, start_thread
from flagstone.types import MAX_SEQ

if TYPE_CHECKING:
    from flagstone.db.reader.follower import Follower
    from flagstone.db.writer.engine import Engine

_log = logging.getLogger("flagstone.db")

FLUSH_SECONDS: Final = 10.0
"""How long the exit of the interpreter waits until all rows of all databases are durable."""

TIDY_SECONDS: Final = 3.0
"""How long it then waits until services have ended and checkpoints are released. No row depends on that."""

_ROWS_AT_ONCE: Final = 4096


class Unclosed(Protocol):
    """A handle that its owner may leave unclosed."""

    @property
    def label(self) -> str:
        """Its name in warnings."""
        ...

    def is_open(self) -> bool:
        """Whether the handle still works. Takes no lock."""
        ...

    def begin_flush(self) -> None:
        """Start to make all writes so far durable; do not wait."""
        ...

    def wait_flushed(self, timeout_s: float) -> FlagstoneError | None:
        """Wait until all writes so far are durable; return the error, or None."""
        ...

    def lost_rows(self) -> int:
        """The number of rows that are only in memory."""
        ...

    def close(self) -> None:
        """Flush, and end the threads. May wait for the store."""
        ...


class UnclosedWriter:
    """A database open for writing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def label(self) -> str:
        env = self._engine.env
        return f"database {env.paths.root!r} in {env.store.url}"

    def is_open(self) -> bool:
        return self._engine.state.now.closed is None

    def begin_flush(self) -> None:
        state = self._engine.state
        if state.durable_seq < state.last_seq and state.now.failure is None:
            state.request_durable()

    def wait_flushed(self, timeout_s: float) -> FlagstoneError | None:
        state = self._engine.state
        try:
            state.wait_durable(state.last_seq, round(timeout_s, 1))
        except FlagstoneError as error:
            return error
        return None

    def lost_rows(self) -> int:
        state = self._engine.state
        durable_seq = state.durable_seq
        if durable_seq >= state.last_seq:
            return 0
        lost = 0
        for memtable in state.now.memtables.newest_first():
            cursor, key = memtable.scan(None, None, MAX_SEQ, False), None
            while rows := cursor.next_rows(_ROWS_AT_ONCE):
                for row in rows:
                    if row[0] != key:
                        key = row[0]
                        lost += sum(version[1] > durable_seq for version in memtable.versions(key, MAX_SEQ))
        return lost

    def close(self) -> None:
        self._engine.close()


class UnclosedReader:
    """A database open for reading: it has no rows to lose, but a checkpoint to release and a thread to end."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    @property
    def label(self) -> str:
        status = self._follower.status()
        return f"reader of database {status['path']!r} in {status['store']}"

    def is_open(self) -> bool:
        return not self._follower.closed

    def begin_flush(self) -> None:
        pass

    def wait_flushed(self, timeout_s: float) -> FlagstoneError | None:  # noqa: ARG002 - nothing to wait for
        return None

    def lost_rows(self) -> int:
        return 0

    def close(self) -> None:
        self._follower.close()


class ForkAware(Protocol):
    """An open database. Its threads stay in the parent, so a forked child cannot use it."""

    def abandon_in_child(self, reason: Closed) -> None: ...


_in_this_process: WeakSet[ForkAware] = WeakSet()


def abandon_in_children(opened: ForkAware) -> None:
    """From now on, a forked child calls `abandon_in_child` of `opened` before anything else."""
    _in_this_process.add(opened)


def renew_lock(lock: Any) -> None:
    """Free a lock in the child: a thread of the parent may hold it, and no thread of the child can release it."""
    renew = getattr(lock, "_at_fork_reinit", None)
    if renew is not None:
        renew()


class Watch:
    """The watch over one handle, from its opening to its `close`."""

    __slots__ = ("_finalizer", "_number", "closed", "label", "taken", "unclosed")

    def __init__(self, owner: object, unclosed: Unclosed) -> None:
        self.unclosed: Unclosed = unclosed
        self.label: str = unclosed.label
        self.taken: bool = False
        """Whether a thread is already closing it."""
        self.closed: Event = Event()
        self._number = next(_numbers)
        # The finalizer comes first: it ends the watch also if an interrupt cuts this short.
        self._finalizer = finalize(owner, _on_collected, self._number)
        self._finalizer.atexit = False
        _begin_watching(self._number, self)

    def end(self) -> None:
        """End the watch: the owner has closed the handle, or `close` has raised. May be called again."""
        self._finalizer.detach()
        _end_watching(self._number)


class _NoWatch:
    """For simulated runs, in which the simulator controls threads and time."""

    def end(self) -> None:
        pass


def watch(owner: object, unclosed: Unclosed) -> Watch | _NoWatch:
    """Close `unclosed` when `owner` is collected or the interpreter exits, unless the watch is ended before that.

    All forms of the handle refer to `owner`; no background thread does.
    """
    return _NoWatch() if simulated() else Watch(owner, unclosed)


# Every watched handle, in the order of opening. Finalizers read it; only ordinary calls change it.
_watches: Final[dict[int, Watch]] = {}
_numbers: Final = count(1)
_lock = Lock()
# `SimpleQueue.put` may be called by a finalizer that interrupts another `put` of the same thread.
_collected: SimpleQueue[int] = SimpleQueue()
_WAKE: Final = 0
"""The number of no handle: the closer looks if there is still one."""
_closer: ThreadHandle | None = None
_hooked_worker: int | None = None


def _begin_watching(number: int, watched: Watch) -> None:
    global _closer  # noqa: PLW0603
    with _lock:
        _hook_into_worker_process()
        _watches[number] = watched
        if _closer is None:
            # Without this thread a collected handle stays open, and is flushed at exit.
            with suppress(RuntimeError):
                _closer = start_thread(partial(_close_collected, _collected), name="flagstone-closer")


def _end_watching(number: int) -> None:
    with _lock:
        if _watches.pop(number, None) is not None and not _watches:
            _collected.put(_WAKE)


def _on_collected(number: int) -> None:
    """The finalizer. It warns last: with `-W error` the warning raises."""
    watched = _watches.get(number)
    if watched is not None:
        _collected.put(number)
        if watched.unclosed.is_open():
            _warn([_unclosed_message(watched)], ResourceWarning)


def _close_collected(collected: SimpleQueue[int]) -> None:
    """Close what is collected, until no handle is watched.

    This thread alone decides that it ends, because no interrupt (Ctrl-C) strikes it between the steps. An opening that
    was interrupted may have left a second one, which ends with it.
    """
    global _closer  # noqa: PLW0603
    while True:
        _close_soon(collected.get())
        with _lock:
            if not _watches:
                _closer = None
                collected.put(_WAKE)
                return


def _close_soon(number: int) -> None:
    """Close in another thread: a store that does not answer must not delay other handles."""
    watched = _watches.get(number)
    if watched is None or watched.taken:
        return
    watched.taken = True
    try:
        start_thread(partial(_close, number, watched), name="flagstone-close")
    except RuntimeError:
        # The system has no free thread, or the interpreter is exiting: from 3.12 on it then refuses new threads.
        _close(number, watched)


def _close(number: int, watched: Watch) -> None:
    cause: BaseException | None = None
    try:
        watched.unclosed.close()
    except BaseException as error:  # noqa: BLE001 - this thread has no caller
        cause = error
        _log.warning("cannot close a handle that was collected label=%s error=%s", watched.label, error)
    finally:
        lost = _lost_messages([(watched, cause)])
        _end_watching(number)
        watched.closed.set()
    _warn(lost, RuntimeWarning)


def _at_exit() -> None:
    """Flush all open handles concurrently; then close those that close quickly."""
    watched = dict(_watches)
    if not watched:
        return
    handles = list(watched.values())
    unclosed = [_unclosed_message(each) for each in handles if not each.taken and each.unclosed.is_open()]
    causes: dict[int, BaseException | None] = {}
    try:
        deadline = SYSTEM_CLOCK.monotonic() + FLUSH_SECONDS
        for each in handles:
            with suppress(FlagstoneError):
                each.unclosed.begin_flush()
        for number, each in watched.items():
            causes[number] = each.unclosed.wait_flushed(max(0.0, deadline - SYSTEM_CLOCK.monotonic()))
        _tidy({number: each for number, each in watched.items() if causes[number] is None})
    except KeyboardInterrupt as interrupt:
        # A second Ctrl-C: stop waiting, and report the rows that are lost.
        causes = {number: causes.get(number) or interrupt for number in watched}
    lost = _lost_messages([(each, causes[number]) for number, each in watched.items()])
    try:
        _warn(lost, RuntimeWarning)
    finally:
        _warn(unclosed, ResourceWarning)


def _tidy(watched: dict[int, Watch]) -> None:
    """Close handles whose rows are all durable: the next opening then has no WAL to replay, and no checkpoint stays."""
    if _closer is None:
        return
    deadline = SYSTEM_CLOCK.monotonic() + TIDY_SECONDS
    for number in watched:
        _collected.put(number)
    for each in watched.values():
        if not each.closed.wait(max(0.0, deadline - SYSTEM_CLOCK.monotonic())):
            _log.info("left a handle open at exit, all its rows are durable label=%s", each.label)


def _unclosed_message(watched: Watch) -> str:
    return f"unclosed {watched.label}; call close(), or use it as a context manager"


def _lost_messages(suspects: Iterable[tuple[Watch, BaseException | None]]) -> list[str]:
    messages = []
    for watched, cause in suspects:
        rows = watched.unclosed.lost_rows()
        if rows:
            reason = "" if cause is None else f" ({type(cause).__name__}: {cause})"
            messages.append(
                f"{rows} {'row' if rows == 1 else 'rows'} of the unclosed {watched.label} could not be written to the "
                f"store and are lost{reason}; call close() and handle what it raises"
            )
    return messages


def _warn(messages: Iterable[str], category: type[Warning]) -> None:
    """Issue every warning. A loss is a `RuntimeWarning`, because Python hides a `ResourceWarning` by default."""
    raised: Warning | None = None
    for message in messages:
        try:
            warnings.warn(message, category, stacklevel=3)
        except Warning as error:
            raised = error
    if raised is not None:
        raise raised


def _hook_into_worker_process() -> None:
    """A forked worker of `multiprocessing` does not run `atexit`, but it runs the finalizers of that package."""
    global _hooked_worker  # noqa: PLW0603
    if _hooked_worker == os.getpid() or "multiprocessing.process" not in sys.modules:
        return
    from multiprocessing import parent_process, util  # noqa: PLC0415 - already loaded

    if parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=100)
        _hooked_worker = os.getpid()


def _after_fork_in_child() -> None:
    """Close every open database and end its watch. The parent owns the handles and flushes them."""
    global _lock, _collected, _closer
    for opened in list(_in_this_process):
        opened.abandon_in_child(
            Closed(
                "this database was opened before the process forked, and its background work stayed in the "
                "parent; open it again in the child",
                reason="failed",
            )
        )
    _lock, _collected, _closer = Lock(), SimpleQueue(), None
    _watches.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
