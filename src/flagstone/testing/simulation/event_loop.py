"""An event loop of asyncio in virtual time.

The loop of the standard library calls its callbacks in the order in which they were added, and asks a selector for more
when it has nothing to do. This selector has no files: it waits in the scheduler until the next timer of the loop, or
until another task calls `call_soon_threadsafe`. Calls on other threads run in a simulated pool. So nothing is left that
the seed does not decide.

asyncio keeps the running loop for each thread of the operating system, and all tasks share one. So a simulation has at
most one event loop at a time, and the other tasks must not ask for it.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from flagstone.runtime.pool import IoPool
from flagstone.runtime.sync import Wakeup
from flagstone.testing.simulation.scheduler import Machine

T = TypeVar("T")


class SimulatedLoop(base_events.BaseEventLoop):
    """The event loop of a simulated process. Made and run by one of its tasks."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._wakeup = Wakeup()
        self._pool = IoPool(name="loop")
        self._selector = self
        self._begun: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._begin)

    def time(self) -> float:
        return self._machine.monotonic()

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for the next timer or for a call from another task; the loop has no files that could be ready."""
        self._wakeup.wait(timeout)
        return []

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # noqa: ARG002
        """Call on another simulated thread of the process."""
        return asyncio.wrap_future(self._pool.submit(func, *args), loop=self)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run until `main` is over. After a crash every coroutine ends where it stands."""
        try:
            self.run_until_complete(main)
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            for task in self._begun:
                # Coroutines that wait for another call on their way out cannot: the loop is over.
                with suppress(BaseException):
                    task.get_coro().close()
            self._pool.close()
            self.close()

    def _begin(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._begun = [each for each in self._begun if not each.done()]
        self._begun.append(task)
        return task

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._wakeup.set()
