"""Compaction on Spark: executors merge the key ranges of a job, and read and write the store themselves.

No row goes through the JVM: a task gets a key range and the list of source SSTs, and returns the SSTs it wrote. Jobs
are planned, published and committed as for any compaction (`flagstone.compaction`), so they may come from our
coordinator or from SlateDB's. Every finished range is recorded in the compactions file: after a crash the next worker
of any kind continues with the other ranges.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from flagstone.compaction.commit import source_bytes
from flagstone.compaction.executor import LocalExecutor, Merging
from flagstone.compaction.extensions import Cancelled, CompactionTask
from flagstone.compaction.inputs import SstFetcher, plan_ranges, plan_sources, sample_view
from flagstone.compaction.on_demand import PATIENCE_S, Progress
from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.errors import InternalError, Unavailable
from flagstone.format.codec import Codec
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.metadata.compactions import JobContext, Subcompaction
from flagstone.metadata.manifest import SsTable
from flagstone.runtime import metric_names
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import SYSTEM_IDS, ulid_text
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.runtime.sync import Event
from flagstone.spark.address import DatabaseAddress, open_store, shared_address
from flagstone.spark.error_translation import find_cause
from flagstone.spark.job_control import (
    cancel_tagged,
    described,
    log_done,
    parallelism,
    session_ended,
    tag_thread,
)
from flagstone.sst.builder import SstOptions
from flagstone.store.remote_options import OptionValue
from flagstone.types import Ulid

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_POLL_S: Final = 0.2
_INTERRUPTIONS: Final = 60
_INTERRUPTION_S: Final = 1.0


def compact(
    spark: SparkSession,
    url: str | os.PathLike[str],
    *,
    full: bool = False,
    segment: bytes | None = None,
    store: str | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    tasks: int | None = None,
    options: CompactorOptions | None = None,
    merge_operator: MergeOperator | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    timeout: timedelta | str | None = None,
    patience: timedelta | str = timedelta(seconds=PATIENCE_S),
) -> list[Ulid]:
    """Compact a database now on Spark's executors; returns the ids of the jobs.

    As `Admin.compact`: with `full` everything (or `segment`) becomes one sorted run, otherwise the
    scheduler chooses jobs until it finds no more. A writer may run beside it. A running coordinator, ours or SlateDB's,
    gets `patience` to answer. `tasks` is the largest number of key ranges per job, by default as many as Spark runs at
    once. `merge_operator` must pickle. Every job logs how much it merged, and how fast.

    Raises:
        InvalidRequest: there is no database or segment, or it has merges and there is no `merge_operator`.
        Unavailable: not done within `timeout`, or the store did not answer. Committed jobs stay.

    """
    address = shared_address(url, store=store, store_options=store_options)
    chosen = options or CompactorOptions()
    executor = SparkExecutor(
        spark,
        address,
        chosen.worker or CompactionWorkerOptions(),
        tasks=tasks,
        merge_operator=merge_operator,
    )
    return address.admin().compact(
        full=full,
        segment=segment,
        options=chosen,
        merge_operator=merge_operator,
        executor=executor,
        progress=progress,
        timeout=timeout,
        patience=patience,
    )


def run_worker(
    spark: SparkSession,
    url: str | os.PathLike[str],
    *,
    store: str | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    tasks: int | None = None,
    options: CompactionWorkerOptions | None = None,
    merge_operator: MergeOperator | None = None,
    stop: Event | None = None,
) -> None:
    """Run the compaction jobs of a coordinator in another process, ours or SlateDB's, on Spark's executors.

    Returns when `stop` is set, or when the call is interrupted. It then releases its running jobs, with their finished
    ranges recorded. Other workers may serve the same database.

    Raises:
        InvalidRequest: there is no database.
        Unavailable: Spark has ended; `stop` is then set as well.

    """
    address = shared_address(url, store=store, store_options=store_options)
    work, asked = options or CompactionWorkerOptions(), Event() if stop is None else stop
    executor = SparkExecutor(
        spark, address, work, tasks=tasks, merge_operator=merge_operator, spark_ended=asked.set
    )
    address.admin().run_worker(options=work, executor=executor, merge_operator=merge_operator, stop=asked)
    if executor.lost is not None:
        raise executor.lost


class SparkExecutor:
    """An `Executor` (`compaction.extensions`) that runs each key range as a Spark job of one task.

    If Spark has ended, this executor can run no job any more: it sets `lost` and calls `spark_ended`.
    """

    def __init__(
        self,
        spark: SparkSession,
        address: DatabaseAddress,
        work: CompactionWorkerOptions,
        *,
        tasks: int | None = None,
        merge_operator: MergeOperator | None = None,
        spark_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.lost: Unavailable | None = None
        self._spark = spark
        self._address = address
        self._work = work
        self._tasks = tasks or parallelism(spark)
        self._merge_operator = merge_operator
        self._spark_ended = spark_ended

    def run(
        self,
        task: CompactionTask,
        *,
        record: Callable[[JobContext], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SsTable, ...]:
        """See `Executor`."""
        started = SYSTEM_CLOCK.monotonic()
        context = task.context
        if context is None or not context.subcompactions:
            context = self._planned(task)
        parts = list(context.subcompactions)
        record(context)
        tag, pool = f"flagstone-{SYSTEM_IDS.token()}", IoPool(max_workers=len(parts), name="flagstone-spark")
        running: dict[Future[_Merged], int] = {}
        rows = 0
        try:
            for at, part in enumerate(parts):
                alone = replace(task, context=replace(context, subcompactions=(part,)))
                about = f"compact {self._address.name}, range {at + 1} of {len(parts)}"
                running[pool.submit(self._run_range, alone, tag, about)] = at
            while running:
                done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    at, merged = running.pop(future), future.result()
                    parts[at] = replace(parts[at], output_ssts=merged.ssts)
                    rows += merged.rows
                    context = replace(context, subcompactions=tuple(parts))
                    record(context)
                if cancelled():
                    raise Cancelled
        finally:
            self._interrupt(tag, running)
            pool.close()
        ssts = tuple(sst for part in parts for sst in part.output_ssts)
        log_done(
            "compacted",
            database=self._address.name,
            job=ulid_text(task.job_id),
            ranges=len(parts),
            tables=len(ssts),
            rows=rows,
            bytes_written=sum(sst.info.estimated_size for sst in ssts),
            bytes=source_bytes(task.manifest, task.spec),
            seconds=SYSTEM_CLOCK.monotonic() - started,
        )
        return ssts

    def _interrupt(self, tag: str, running: Collection[Future[_Merged]]) -> None:
        """End the running jobs; repeatedly, because a job may be about to start."""
        for _ in range(_INTERRUPTIONS):
            if not running or session_ended(self._spark):
                return
            cancel_tagged(self._spark, tag)
            _, running = wait(running, timeout=_INTERRUPTION_S)

    def _planned(self, task: CompactionTask) -> JobContext:
        store, paths = open_store(self._address)
        fetcher = SstFetcher(store)
        sources = plan_sources(task.manifest, task.spec, paths)
        views = shared_pool().map_ordered(
            lambda part: sample_view(
                fetcher.fetch_index(part.sst, part.path), part.keys, part.sst.info.estimated_size
            ),
            [part for parts in sources for part in parts],
        )
        ranges = plan_ranges(views, self._tasks)
        return JobContext(
            tuple(Subcompaction(keys) for keys in ranges), task.manifest.recent_snapshot_min_seq
        )

    def _run_range(self, task: CompactionTask, tag: str, about: str) -> _Merged:
        """One Spark job with one task; blocks until it is done."""
        try:
            tag_thread(self._spark, tag)
            with described(self._spark, about):
                merge = _RangeMerge(self._address, self._work, self._merge_operator, task)
                [row] = self._spark.range(0, 1, 1, 1).mapInArrow(merge, "merged binary").collect()
        except Exception as error:
            if session_ended(self._spark):
                self.lost = Unavailable("Spark has ended; start it and this worker again")
                self._spark_ended()
                raise self.lost from error
            raise find_cause(str(error)) or InternalError(f"a Spark job failed: {error}") from error
        merged: _Merged = pickle.loads(bytes(row.merged))  # noqa: S301 - made by our own task
        return merged


@dataclass(frozen=True)
class _Merged:
    """The result of a range: all its SSTs, also those recorded before, and the number of rows this task wrote."""

    ssts: tuple[SsTable, ...]
    rows: int


@dataclass(frozen=True)
class _RangeMerge:
    """The work of a task: it merges one range of a job, and continues after the SSTs that are recorded for it."""

    address: DatabaseAddress
    work: CompactionWorkerOptions
    merge_operator: MergeOperator | None
    task: CompactionTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 - needed only in the task

        for _ in batches:
            pass
        merged = pickle.dumps(self.run())
        yield pa.RecordBatch.from_arrays([pa.array([merged], pa.binary())], names=["merged"])

    def run(self) -> _Merged:
        store, paths = open_store(self.address)
        metrics = Metrics()
        codec = self.work.compression_codec
        executor = LocalExecutor(
            store,
            paths,
            Merging(
                work=self.work.replace(max_subcompactions=1),
                sst=SstOptions(
                    codec=Codec.NONE if codec is None else Codec[codec.upper()],
                    min_filter_keys=self.work.min_filter_keys,
                ),
                merge_operator=self.merge_operator,
            ),
            metrics=metrics,
        )
        ssts = executor.run(self.task, record=lambda _: None, cancelled=lambda: False)
        return _Merged(ssts, metrics.counter(metric_names.COMPACTOR_ROWS_WRITTEN).value)
