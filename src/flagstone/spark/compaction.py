"""Compactions whose key ranges are merged by Spark's executors, which read and write the store themselves.

No row goes through the JVM: a task gets a range and the list of source tables, and returns the tables it made. What is
to be merged is decided, published and committed as for any compaction (`flagstone.maintenance.compaction`), so jobs may
come from our coordinator or SlateDB's. Every finished range is recorded in the compactions file: after a crash the next
worker, of whatever kind, goes on with the others.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException

from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.db.admin import Admin
from flagstone.errors import InternalError
from flagstone.format.codec import Codec
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.maintenance.compaction.executor import LocalExecutor
from flagstone.maintenance.compaction.inputs import TableFetcher
from flagstone.maintenance.compaction.now import Progress
from flagstone.maintenance.compaction.planning import plan_sources
from flagstone.maintenance.compaction.split import plan_ranges, sample_view
from flagstone.maintenance.compaction.task import Cancelled, CompactionTask
from flagstone.metadata.compactions import JobContext, Subcompaction
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.runtime.sync import Event
from flagstone.spark.causes import find_cause
from flagstone.spark.options import Place
from flagstone.spark.plan import open_store
from flagstone.store.remote_options import OptionValue
from flagstone.table.builder import TableOptions
from flagstone.types import Ulid

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_LOOK_S: Final = 0.2
_DEFAULT_TASKS: Final = 8
_REMOTE_STOP: Final = timedelta(seconds=60)


def compact(
    spark: SparkSession,
    url: str | os.PathLike[str],
    *,
    full: bool = False,
    store: str | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    tasks: int | None = None,
    options: CompactorOptions | None = None,
    merge_operator: MergeOperator | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    timeout: timedelta | None = None,
) -> list[Ulid]:
    """Compact a database now, with Spark's executors doing the merging; the ids of the jobs.

    As `Admin.compact`: with `full` everything becomes one run, otherwise what the size-tiered scheduler would do is
    done until it has no more ideas; works beside a writer and under whatever coordinator is alive. `tasks` is how many
    key ranges a job is cut into at most, by default as many as Spark runs at once. `merge_operator` must pickle.

    Raises:
        InvalidRequest: there is no database, or merges without a `merge_operator`.
        Unavailable: not done within `timeout`, or the store did not answer. What was committed stays.

    """
    place = Place(os.fspath(url), store, None, dict(store_options or {}))
    chosen = options or CompactorOptions()
    executor = SparkExecutor(
        spark,
        place,
        chosen.worker or CompactionWorkerOptions(),
        tasks=tasks,
        merge_operator=merge_operator,
    )
    return _admin(place).compact(
        full=full,
        options=chosen,
        merge_operator=merge_operator,
        executor=executor,
        progress=progress,
        timeout=timeout,
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

    Returns when `stop` is set, or the call is interrupted. Other workers may serve the same database.

    Raises:
        InvalidRequest: there is no database.

    """
    place = Place(os.fspath(url), store, None, dict(store_options or {}))
    work = options or CompactionWorkerOptions()
    executor = SparkExecutor(spark, place, work, tasks=tasks, merge_operator=merge_operator)
    _admin(place).run_worker(options=work, executor=executor, merge_operator=merge_operator, stop=stop)


class SparkExecutor:
    """An `Executor` (`maintenance.compaction.task`) whose ranges are Spark jobs of one task each."""

    def __init__(
        self,
        spark: SparkSession,
        place: Place,
        work: CompactionWorkerOptions,
        *,
        tasks: int | None = None,
        merge_operator: MergeOperator | None = None,
    ) -> None:
        self._spark = spark
        self._place = place
        self._work = work
        self._tasks = tasks or _parallelism(spark)
        self._merge_operator = merge_operator

    def run(
        self,
        task: CompactionTask,
        *,
        record: Callable[[JobContext], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SsTable, ...]:
        """See `task.Executor`."""
        context = task.context
        if context is None or not context.subcompactions:
            context = self._planned(task)
        parts = list(context.subcompactions)
        record(context)
        tag, pool = f"flagstone-{SYSTEM_IDS.token()}", IoPool(max_workers=len(parts), name="flagstone-spark")
        running: dict[Future[tuple[SsTable, ...]], int] = {
            pool.submit(
                self._run_range, tag, replace(task, context=replace(context, subcompactions=(part,)))
            ): at
            for at, part in enumerate(parts)
        }
        try:
            while running:
                done, _ = wait(running, timeout=_LOOK_S)
                for future in done:
                    at = running.pop(future)
                    parts[at] = replace(parts[at], output_ssts=future.result())
                    context = replace(context, subcompactions=tuple(parts))
                    record(context)
                if cancelled():
                    raise Cancelled
        finally:
            if running:
                self._spark.interruptTag(tag)
                wait(running, timeout=_REMOTE_STOP.total_seconds())
            pool.close()
        return tuple(table for part in parts for table in part.output_ssts)

    def _planned(self, task: CompactionTask) -> JobContext:
        store, paths = open_store(self._place)
        fetcher = TableFetcher(store)
        sources = plan_sources(task.manifest, task.spec, paths)
        views = shared_pool().map_ordered(
            lambda part: sample_view(
                fetcher.fetch_index(part.table, part.path), part.keys, part.table.info.estimated_size
            ),
            [part for parts in sources for part in parts],
        )
        ranges = plan_ranges(views, self._tasks)
        return JobContext(
            tuple(Subcompaction(keys) for keys in ranges), task.manifest.recent_snapshot_min_seq
        )

    def _run_range(self, tag: str, task: CompactionTask) -> tuple[SsTable, ...]:
        """One Spark job with one task; blocks until it is done."""
        self._spark.addTag(tag)  # of this thread
        try:
            merge = _RangeMerge(self._place, self._work, self._merge_operator, task)
            [row] = self._spark.range(0, 1, 1, 1).mapInArrow(merge, "tables binary").collect()
        except PySparkException as error:
            raise find_cause(str(error)) or InternalError(f"a Spark task failed: {error}") from error
        else:
            tables: tuple[SsTable, ...] = pickle.loads(bytes(row.tables))  # noqa: S301 - made by our own task
            return tables
        finally:
            self._spark.removeTag(tag)


@dataclass(frozen=True)
class _RangeMerge:
    """What a task does: one range of a job, from its beginning or behind what is recorded of it."""

    place: Place
    work: CompactionWorkerOptions
    merge_operator: MergeOperator | None
    task: CompactionTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 - where it runs

        for _ in batches:
            pass
        tables = self.run()
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(tables)], pa.binary())], names=["tables"])

    def run(self) -> tuple[SsTable, ...]:
        store, paths = open_store(self.place)
        codec = self.work.compression_codec
        executor = LocalExecutor(
            store,
            paths,
            options=TableOptions(
                codec=Codec.NONE if codec is None else Codec[codec.upper()],
                min_filter_keys=self.work.min_filter_keys,
            ),
            max_sst_bytes=self.work.max_sst_size,
            max_subcompactions=1,
            max_fetch_tasks=self.work.max_fetch_tasks,
            bytes_to_fetch=self.work.bytes_to_fetch,
            merge_operator=self.merge_operator,
        )
        return executor.run(self.task, record=lambda _: None, cancelled=lambda: False)


def _admin(place: Place) -> Admin:
    return Admin(place.path, store=place.store, store_options=dict(place.store_options) or None)


def _parallelism(spark: Any) -> int:
    """How many tasks Spark runs at once, where it says so; a session of Spark Connect does not."""
    context = getattr(spark, "_sc", None)
    return _DEFAULT_TASKS if context is None else max(1, int(context.defaultParallelism))
