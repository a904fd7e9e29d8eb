"""The parts of compaction that a program may replace: the scheduler, which decides, and the executor, which merges.

The worker owns the job in the compactions file; an executor owns only the objects it uploads. That is why an executor
reports its progress through `record` and never writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor as AnyPool
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Final, Protocol

from flagstone.config import Settings
from flagstone.errors import InvalidRequest
from flagstone.metadata.compactions import Compactions, JobContext, Spec, TieredSpec
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.types import Ulid


class Cancelled(Exception):
    """The worker stopped the job. Uploaded SSTs stay: the next worker continues from them, or they become garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionTask:
    """One claimed job.

    `manifest` was read after the claim, so it has every source that the job names. `context` is what an earlier worker
    of the same job recorded, or None.
    """

    job_id: Ulid
    spec: TieredSpec
    manifest: Manifest
    context: JobContext | None = None


class Executor(Protocol):
    """Merges the sources of a job into new SSTs, in this process or elsewhere."""

    def run(
        self,
        task: CompactionTask,
        *,
        record: Callable[[JobContext], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SsTable, ...]:
        """Upload all output SSTs and return them in key order; none if no row of the sources remains.

        The executor calls `record` once before the work begins and again after each uploaded SST, from any thread, one
        call at a time. Ranges and barrier stay as first recorded, and the finished SSTs only grow in number, so after a
        crash any recorded context, even an outdated one, can be continued.

        Raises:
            Cancelled: `cancelled` returned True. It is called often, must be cheap, and never changes back to False.

        """
        ...


_CANCEL_CHECK_S: Final = 0.05


class Scheduler(Protocol):
    """Decides what to compact. Pass your own to a coordinator to compact by other rules."""

    def plan(self, manifest: Manifest, compactions: Compactions) -> Sequence[Spec]:
        """The jobs to add now, most urgent first.

        The coordinator calls this whenever something has changed, so it must be quick and make no I/O. Jobs that are
        not valid (`find_problem`) are dropped with a warning.
        """
        ...


def check_compactor_parts(
    settings: Settings, scheduler: Scheduler | None, executor: Executor | ThreadPoolExecutor | None
) -> tuple[Executor | None, ThreadPoolExecutor | None]:
    """The executor or the thread pool that was passed as `executor`; at most one of the two is not None.

    Raises:
        InvalidRequest: a part lacks a method, or the settings switch off the service that would use it.

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
    """An `Executor` that runs another one in a thread pool of the user.

    A job waits for a free thread. If it is cancelled before one is free it never begins. With a pool that was shut down
    `run` raises `InvalidRequest`, and the job is tried again later or by another worker.
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
        """See `Executor`."""
        try:
            future = self._pool.submit(self._inner.run, task, record=record, cancelled=cancelled)
        except RuntimeError as error:
            raise InvalidRequest(f"the pool given as executor= takes no more work: {error}") from error
        return _result(future, cancelled)


def _result(future: Future[tuple[SsTable, ...]], cancelled: Callable[[], bool]) -> tuple[SsTable, ...]:
    while True:
        try:
            return future.result(_CANCEL_CHECK_S)
        except FutureTimeout:
            if future.done():
                raise  # the job itself raised it
            if cancelled() and future.cancel():
                raise Cancelled from None
