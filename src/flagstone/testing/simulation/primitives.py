"""The primitives of `flagstone.runtime.sync` for tasks of a `Scheduler`: lock, queue and thread in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flagstone.testing.simulation.scheduler import Scheduler, Task


class SimulatedLock:
    """`threading.Lock` in virtual time. Any task may release it, as with the standard one."""

    __slots__ = ("_held", "_scheduler", "_waiting")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.point()
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        task = scheduler.current
        if task is None:
            raise RuntimeError("a callback of the simulator must not wait for a lock")
        deadline = None if timeout < 0 else scheduler.monotonic() + timeout
        while self._held:
            remaining = None if deadline is None else deadline - scheduler.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            self._waiting.append(task)
            try:
                scheduler.park(remaining)
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release of a lock that is not held")
        self._held = False
        if self._waiting:
            self._scheduler.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


class SimulatedQueue:
    """`queue.SimpleQueue` in virtual time."""

    __slots__ = ("_items", "_scheduler", "_waiting")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._scheduler.wake(self._waiting.popleft())

    def get(self) -> Any:
        scheduler = self._scheduler
        scheduler.point()
        while not self._items:
            task = scheduler.current
            if task is None:
                raise RuntimeError("a callback of the simulator must not wait for a queue")
            self._waiting.append(task)
            scheduler.park()
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()


class SimulatedThread:
    """`threading.Thread` as a task of the process that starts it."""

    __slots__ = ("_name", "_run", "_scheduler", "_task")

    def __init__(self, scheduler: Scheduler, run: Callable[[], None], name: str) -> None:
        self._scheduler = scheduler
        self._run = run
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        current = self._scheduler.current
        if current is None:
            raise RuntimeError("only a task can start a thread")
        self._task = self._scheduler.spawn(self._run, self._name, current.process)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        scheduler, task, own = self._scheduler, self._task, self._scheduler.current
        if task is None or own is None:
            raise RuntimeError("only a task can wait for a thread that was started")
        scheduler.point()
        if not task.ended:
            task.joining.append(own)
            try:
                scheduler.park(timeout)
            finally:
                # After a timeout: the end of the thread must not wake the task from another wait.
                if own in task.joining:
                    task.joining.remove(own)
