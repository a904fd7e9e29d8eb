"""Locks, events, conditions and threads, in one place so that a simulator can replace them.

Production code never imports `threading` for these: it takes the names from here. `Lock()` and its siblings
hand out the standard library's own objects, so holding one costs exactly what it always did. While a
simulator is installed they hand out the simulator's, which is how a seeded run decides who goes next.

Only what is created while the simulator is installed belongs to it. A lock made at import time stays a real
one, so it must never be held across a store call, a wait or a sleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "Primitives",
    "RLock",
    "ThreadHandle",
    "install",
    "simulated",
    "start_thread",
]


class ThreadHandle(Protocol):
    """A thread that was started: it can be waited for, and asked whether it still runs."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class LockLike(Protocol):
    """What a replacement for `threading.Lock` and `threading.RLock` must offer."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class EventLike(Protocol):
    """What a replacement for `threading.Event` must offer."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class ConditionLike(LockLike, Protocol):
    """What a replacement for `threading.Condition` must offer."""

    def wait(self, timeout: float | None = None) -> bool: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def notify(self, n: int = 1) -> None: ...

    def notify_all(self) -> None: ...


class Primitives(Protocol):
    """What a simulator provides. Timeouts are its own time, not the machine's."""

    def lock(self) -> LockLike: ...

    def rlock(self) -> LockLike: ...

    def event(self) -> EventLike: ...

    def condition(self, lock: LockLike | None) -> ConditionLike: ...

    def start_thread(self, run: Callable[[], None], name: str) -> ThreadHandle: ...


_simulator: Primitives | None = None

if TYPE_CHECKING:
    # Checkers see the standard classes, so that `lock: Lock` is a type like any other.
    from threading import Condition, Event, Lock, RLock
else:

    def Lock():  # noqa: N802
        return threading.Lock() if _simulator is None else _simulator.lock()

    def RLock():  # noqa: N802
        return threading.RLock() if _simulator is None else _simulator.rlock()

    def Event():  # noqa: N802
        return threading.Event() if _simulator is None else _simulator.event()

    def Condition(lock=None):  # noqa: N802
        return threading.Condition(lock) if _simulator is None else _simulator.condition(lock)


def start_thread(run: Callable[[], None], *, name: str) -> ThreadHandle:
    """A started thread. It is a daemon: the interpreter does not wait for it to exit.

    Raises:
        RuntimeError: the operating system refuses another thread.

    """
    if _simulator is not None:
        return _simulator.start_thread(run, name)
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def simulated() -> bool:
    """Whether a simulator is installed."""
    return _simulator is not None


@contextmanager
def install(primitives: Primitives) -> Iterator[None]:
    """Let everything created inside the block, by any thread, come from `primitives`."""
    global _simulator  # noqa: PLW0603
    before = _simulator
    _simulator = primitives
    try:
        yield
    finally:
        _simulator = before
