"""Locks, events, conditions and threads, in one place so that a simulator can replace them.

Production code imports these names from here, never from `threading`. `Lock()` and the others return the standard
library's own objects, so they are as fast as those. While a simulator is installed they return the simulator's
objects, by which a seeded run decides which thread continues.

Only objects that the thread of the simulator creates while it is installed belong to it. A lock created at import time
stays a real lock, so it must never be held across a store call, a wait or a sleep.

Ctrl-C raises `KeyboardInterrupt` between any two steps of Python code. C code acquires and releases a lock of the
standard library, so an interrupt cannot split `with lock:`. Its `Condition` and `Event` are Python code around a lock:
an interrupt there leaves the lock held for ever, or `with` releases a lock that another thread holds. `Waiters`,
`Wakeup` and `Event` here wait without holding any lock, and use only locks that C code acquires.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

__all__ = [
    "Event",
    "Lock",
    "Primitives",
    "Queue",
    "ThreadHandle",
    "Waiters",
    "Wakeup",
    "install",
    "monotonic",
    "new_thread",
    "of_process",
    "simulated",
    "start_thread",
    "thread_ident",
    "wait_aside",
]

T = TypeVar("T")


class ThreadHandle(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Thread(ThreadHandle, Protocol):
    """A thread that has not been started."""

    def start(self) -> None: ...


class LockLike(Protocol):
    """The methods that a replacement for `threading.Lock` must have."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def locked(self) -> bool: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class QueueLike(Protocol):
    """The methods that a replacement for `queue.SimpleQueue` must have."""

    def put(self, item: Any) -> None: ...

    def get(self) -> Any: ...

    def get_nowait(self) -> Any: ...


class Primitives(Protocol):
    """The functions that a simulator provides. Timeouts are in the simulator's time, not the machine's."""

    def lock(self) -> LockLike: ...

    def queue(self) -> QueueLike: ...

    def thread(self, run: Callable[[], None], name: str) -> Thread: ...

    def thread_ident(self) -> int:
        """The identity of the simulated thread that runs now."""
        ...

    def monotonic(self) -> float:
        """Elapsed time in seconds, for timeouts."""
        ...

    def of_process(self, make: Callable[[], T]) -> T:
        """The object that `make` makes, one for each simulated process."""
        ...


_simulator: Primitives | None = None
_simulator_thread: int = 0


def _is_elsewhere() -> bool:
    """Whether this thread is not the one that runs the simulator: a database that was left open may have threads."""
    return threading.get_ident() != _simulator_thread


if TYPE_CHECKING:
    # Type checkers see the standard classes, so that `lock: Lock` is a valid annotation.
    from queue import SimpleQueue as Queue
    from threading import Lock
else:

    def Lock():  # noqa: N802
        return threading.Lock() if _simulator is None or _is_elsewhere() else _simulator.lock()

    def Queue():  # noqa: N802
        return SimpleQueue() if _simulator is None or _is_elsewhere() else _simulator.queue()


def monotonic() -> float:
    """Elapsed time in seconds: the machine's, or the simulator's."""
    return time.monotonic() if _simulator is None or _is_elsewhere() else _simulator.monotonic()


def thread_ident() -> int:
    """The identity of the thread that runs now. Two live threads never share it."""
    return threading.get_ident() if _simulator is None or _is_elsewhere() else _simulator.thread_ident()


_LONGEST_WAIT_S: Final = 86_400.0
"""A lock's wait has a largest timeout. A thread with a longer one wakes after a day."""


def _closed_gate() -> Lock:
    gate = Lock()
    gate.acquire()
    return gate


def _open_gate(gate: Lock | _LoopGate) -> None:
    if gate.locked():
        # Another thread may have opened it at the same moment.
        with suppress(RuntimeError):
            gate.release()


def _wait_at(gate: Lock, timeout: float | None) -> bool:
    if timeout is None:
        return gate.acquire()
    return gate.acquire(timeout=min(max(timeout, 0.0), _LONGEST_WAIT_S))


_LOOKS: Final = 64
_LOOK_EVERY_S: Final = 0.000_05


def wait_aside(lock: Lock) -> None:
    """Return when `lock` seems free, or after a few milliseconds. Call it before `with lock:` if the lock is taken.

    A thread that blocks in `acquire` gets the lock before it has the interpreter's lock. Until it has both, each other
    thread finds the lock taken and blocks, too: from then on the threads take turns at every single acquisition, which
    costs several microseconds. A thread that waits aside never has the lock without running.
    """
    if simulated():
        return  # its threads change only where the simulator says
    for _ in range(_LOOKS):
        time.sleep(_LOOK_EVERY_S)
        if not lock.locked():
            return


class Wakeup:
    """Lets one thread sleep until another thread wakes it. A wake-up before the sleep ends that sleep at once."""

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate: Lock = _closed_gate()

    def set(self) -> None:
        """Wake the thread. Takes no lock, so a signal handler may call it."""
        _open_gate(self._gate)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until the next wake-up, and consume it; False after `timeout` seconds without one."""
        return _wait_at(self._gate, timeout)


class Waiters:
    """Threads that wait for a change of the state that `lock` guards.

    The thread that changes the state holds the lock and calls `notify_all` before the change. An exception between the
    two then causes an unneeded wake-up, but never a missing one.
    """

    __slots__ = ("_gates", "_lock")

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._gates: list[Lock | _LoopGate] = []

    def notify_all(self) -> None:
        """Let every waiting thread check its predicate when the lock is free. The caller holds the lock."""
        for gate in tuple(self._gates):  # a task may leave meanwhile
            _open_gate(gate)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until `predicate` is true, and return True; False after `timeout` seconds.

        The predicate is called with the lock held. The caller must not hold it.
        """
        deadline = None if timeout is None else monotonic() + timeout
        gate = _closed_gate()
        with self._lock:
            if predicate():
                return True
            self._gates.append(gate)
        try:
            while True:
                remaining = None if deadline is None else deadline - monotonic()
                woken = _wait_at(gate, remaining)
                with self._lock:
                    if predicate():
                        return True
                if not woken and deadline is not None and monotonic() >= deadline:
                    return False
        finally:
            with self._lock:
                self._gates.remove(gate)

    async def wait_for_async(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """`wait_for` for a coroutine: it occupies no thread."""
        # The caller has imported asyncio already; others need not.
        from asyncio import timeout_at  # noqa: PLC0415

        gate = _LoopGate()
        deadline = None if timeout is None else gate.loop.time() + timeout
        with self._lock:
            if predicate():
                return True
            self._gates.append(gate)
        try:
            while True:
                woken = False
                with suppress(TimeoutError):
                    async with timeout_at(deadline):
                        woken = await gate.wait()
                with self._lock:
                    if predicate():
                        return True
                if not woken:
                    return False
        finally:
            # Without the lock: if the task was dropped, this runs in a thread that may hold it.
            self._gates.remove(gate)


class _LoopGate:
    """A gate of `Waiters` at which one coroutine waits. Opening it wakes the coroutine's event loop."""

    __slots__ = ("_event", "_open", "loop")

    def __init__(self) -> None:
        from asyncio import Event as LoopEvent  # noqa: PLC0415
        from asyncio import get_running_loop  # noqa: PLC0415

        self.loop = get_running_loop()
        self._event = LoopEvent()
        self._open = False

    def locked(self) -> bool:
        return not self._open

    def release(self) -> None:
        self._open = True
        # A loop that was closed raises a `RuntimeError`, which `_open_gate` expects.
        self.loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> bool:
        """Return when the gate was opened, and close it. The caller tests its predicate afterwards."""
        await self._event.wait()
        self._event.clear()
        self._open = False
        return True


class Event:
    """A `threading.Event` that stays usable after an interrupt. Takes no lock, so a signal handler may set it."""

    __slots__ = ("_flag", "_gates")

    def __init__(self) -> None:
        self._flag = False
        self._gates: list[Lock] = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        for gate in list(self._gates):
            _open_gate(gate)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._flag:
            return True
        gate = _closed_gate()
        self._gates.append(gate)
        try:
            # Checked again, because `set` may have run before the gate was in the list.
            if not self._flag:
                _wait_at(gate, timeout)
        finally:
            self._gates.remove(gate)
        return self._flag


def new_thread(run: Callable[[], None], *, name: str) -> Thread:
    """A thread that is not started yet. It is a daemon: the interpreter does not wait for it to exit."""
    if _simulator is None or _is_elsewhere():
        return threading.Thread(target=run, name=name, daemon=True)
    return _simulator.thread(run, name)


def start_thread(run: Callable[[], None], *, name: str) -> ThreadHandle:
    """A started daemon thread.

    Raises:
        RuntimeError: the operating system refuses another thread.

    """
    thread = new_thread(run, name=name)
    thread.start()
    return thread


def of_process(make: Callable[[], T]) -> T | None:
    """The object that `make` makes for the simulated process that runs now; None without a simulator."""
    return None if _simulator is None or _is_elsewhere() else _simulator.of_process(make)


def simulated() -> bool:
    """Whether this thread runs a simulator."""
    return _simulator is not None and not _is_elsewhere()


@contextmanager
def install(primitives: Primitives) -> Iterator[None]:
    """Create the locks, events, conditions and threads of this thread with `primitives` while the block runs.

    Other threads of the process keep those of the standard library: a simulator cannot decide when they run.
    """
    global _simulator, _simulator_thread
    before = _simulator, _simulator_thread
    _simulator, _simulator_thread = primitives, threading.get_ident()
    try:
        yield
    finally:
        _simulator, _simulator_thread = before
