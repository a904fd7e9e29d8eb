"""Compactions whose key ranges are merged by Spark's executors, which read and write the store themselves.

No row goes through the JVM: a task gets a range and the list of source tables, and returns the tables it made. What is
to be merged is decided, published and committed as for any compaction (`flagstone.compaction`), so jobs may
come from our coordinator or SlateDB's. Every finished range is recorded in the compactions file: after a crash the next
worker, of whatever kind, goes on with the others.
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
from flagstone.compaction.executor import ROWS_WRITTEN, LocalExecutor
from flagstone.compaction.extensions import Cancelled, CompactionTask
from flagstone.compaction.inputs import SstFetcher, plan_ranges, plan_sources, sample_view
from flagstone.compaction.on_demand import PATIENCE_S, Progress
from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.errors import InternalError, Unavailable
from flagstone.format.codec import Codec
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.metadata.compactions import JobContext, Subcompaction
from flagstone.metadata.manifest import SsTable
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

_LOOK_S: Final = 0.2
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
    """Compact a database now, with Spark's executors doing the merging; the ids of the jobs.

    As `Admin.compact`: with `full` everything (or `segment`) becomes one run, otherwise what the size-tiered scheduler
    would do is done until it has no more ideas; works beside a writer and under whatever coordinator is alive, which
    gets `patience` to answer. `tasks` is how many key ranges a job is cut into at most, by default as many as Spark
    runs at once. `merge_operator` must pickle. How much was merged, and how fast, is logged for every job.

    Raises:
        InvalidRequest: there is no database or segment, or merges without a `merge_operator`.
        Unavailable: not done within `timeout`, or the store did not answer. What was committed stays.

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
    """Do the compactions that a coordinator elsewhere decides, ours or SlateDB's, with Spark's executors.

    Returns when `stop` is set, or the call is interrupted: jobs under way are given back, with the ranges that are
    finished. Other workers may serve the same database.

    Raises:
        InvalidRequest: there is no database.
        Unavailable: Spark has ended meanwhile; `stop` is then set, too.

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
    """An `Executor` (`compaction.job_input`) whose ranges are Spark jobs of one task each.

    When Spark itself is gone, no job can ever be done here: then `lost` says so, and `spark_ended` is called.
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
        """See `task.Executor`."""
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
                done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    at, merged = running.pop(future), future.result()
                    parts[at] = replace(parts[at], output_ssts=merged.tables)
                    rows += merged.rows
                    context = replace(context, subcompactions=tuple(parts))
                    record(context)
                if cancelled():
                    raise Cancelled
        finally:
            self._interrupt(tag, running)
            pool.close()
        tables = tuple(table for part in parts for table in part.output_ssts)
        log_done(
            "compacted",
            database=self._address.name,
            job=ulid_text(task.job_id),
            ranges=len(parts),
            tables=len(tables),
            rows=rows,
            bytes_written=sum(table.info.estimated_size for table in tables),
            bytes=source_bytes(task.manifest, task.spec),
            seconds=SYSTEM_CLOCK.monotonic() - started,
        )
        return tables

    def _interrupt(self, tag: str, running: Collection[Future[_Merged]]) -> None:
        """End what still runs; again and again, because a job may only just be about to start."""
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
                self.lost = Unavailable("Spark has ended; start it, and this worker, again")
                self._spark_ended()
                raise self.lost from error
            raise find_cause(str(error)) or InternalError(f"a Spark job failed: {error}") from error
        merged: _Merged = pickle.loads(bytes(row.merged))  # noqa: S301 - made by our own task
        return merged


@dataclass(frozen=True)
class _Merged:
    """What came of a range: all its tables, also those that were recorded before, and how many rows this task wrote."""

    tables: tuple[SsTable, ...]
    rows: int


@dataclass(frozen=True)
class _RangeMerge:
    """What a task does: one range of a job, from its beginning or behind what is recorded of it."""

    address: DatabaseAddress
    work: CompactionWorkerOptions
    merge_operator: MergeOperator | None
    task: CompactionTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 - where it runs

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
            options=SstOptions(
                codec=Codec.NONE if codec is None else Codec[codec.upper()],
                min_filter_keys=self.work.min_filter_keys,
            ),
            work=self.work.replace(max_subcompactions=1),
            merge_operator=self.merge_operator,
            metrics=metrics,
        )
        tables = executor.run(self.task, record=lambda _: None, cancelled=lambda: False)
        return _Merged(tables, metrics.counter(ROWS_WRITTEN).value)
