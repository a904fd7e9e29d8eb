"""Compaction with parts of the user: which ones fit, and merging in threads that the user owns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor as AnyPool
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final

from flagstone.config import Settings
from flagstone.errors import InvalidRequest
from flagstone.maintenance.compaction.picker import Scheduler
from flagstone.maintenance.compaction.task import Cancelled, CompactionTask, Executor
from flagstone.metadata.compactions import JobContext
from flagstone.metadata.manifest import SsTable

_LOOK_S: Final = 0.05


def check_compactor_parts(
    settings: Settings, scheduler: Scheduler | None, executor: Executor | ThreadPoolExecutor | None
) -> tuple[Executor | None, ThreadPoolExecutor | None]:
    """The executor and the threads that an `executor` argument means; at most one of them.

    Raises:
        InvalidRequest: a part has not the methods it needs, or the settings switch off what would use it.

    """
    options = settings.compactor_options
    if scheduler is not None and not callable(getattr(scheduler, "plan", None)):
        raise InvalidRequest(f"a scheduler has a method plan(manifest, compactions); {scheduler!r} has none")
    if scheduler is not None and options is None:
        raise InvalidRequest(
            "scheduler= is for the embedded compactor, which compactor_options=None switches off"
        )
    if executor is None:
        return None, None
    if options is None or options.worker is None:
        raise InvalidRequest("executor= is for the embedded worker, which the compactor_options switch off")
    if isinstance(executor, ThreadPoolExecutor):
        return None, executor
    if isinstance(executor, AnyPool):
        raise InvalidRequest(
            "executor= takes a ThreadPoolExecutor, or an object with run(task, record=, cancelled=); compaction shares "
            "memory with the database, so it cannot run in processes"
        )
    if not callable(getattr(executor, "run", None)):
        raise InvalidRequest(
            "an executor is a ThreadPoolExecutor, or has a method run(task, record=, cancelled=); "
            f"{executor!r} is neither"
        )
    return executor, None


class PooledExecutor:
    """An `Executor` that runs another one in a pool of the user.

    A job waits for a free thread. When it is cancelled before one is free it never begins. A pool that was shut down
    raises `InvalidRequest`, and the job is tried again later or by another worker.
    """

    def __init__(self, inner: Executor, pool: ThreadPoolExecutor) -> None:
        self._inner = inner
        self._pool = pool

    def run(
        self,
        task: CompactionTask,
        *,
        record: Callable[[JobContext], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SsTable, ...]:
        """See `task.Executor`."""
        try:
            future = self._pool.submit(self._inner.run, task, record=record, cancelled=cancelled)
        except RuntimeError as error:
            raise InvalidRequest(f"the pool given as executor= takes no more work: {error}") from error
        return _result(future, cancelled)


def _result(future: Future[tuple[SsTable, ...]], cancelled: Callable[[], bool]) -> tuple[SsTable, ...]:
    while True:
        try:
            return future.result(_LOOK_S)
        except FutureTimeout:
            if future.done():
                raise  # the job itself raised it
            if cancelled() and future.cancel():
                raise Cancelled from None
