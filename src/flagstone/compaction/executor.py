"""Executes compaction jobs in this process: plans the ranges once, merges them in parallel, uploads while it merges.

After a crash the next worker reuses the uploaded SSTs that were recorded; the others become garbage. The sources stay
untouched until a coordinator commits the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

from flagstone.compaction.extensions import Cancelled, CompactionTask
from flagstone.compaction.inputs import (
    INDEX_CACHE_BYTES,
    WHOLE,
    Part,
    SampledView,
    Source,
    SstFetcher,
    common_prefix,
    is_last_run,
    plan_ranges,
    plan_sources,
    sample_view,
)
from flagstone.compaction.merging import merge_sources
from flagstone.config.settings import CompactionWorkerOptions
from flagstone.lsm.compaction_filter import CompactionFilter, CompactionFilterFactory, CompactionJob
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import RetentionPolicy
from flagstone.lsm.tree import BytesRange
from flagstone.metadata.compactions import JobContext, Subcompaction
from flagstone.metadata.manifest import SsTable
from flagstone.runtime import metric_names
from flagstone.runtime.budget import MemoryBudget
from flagstone.runtime.ids import SYSTEM_IDS, Ids, ulid_ms
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.operations import Operation
from flagstone.runtime.pool import IoPool, cores, shared_pool
from flagstone.runtime.sync import Lock
from flagstone.sst.builder import BuiltSst, SstBuilder, SstOptions
from flagstone.sst.output import SstOutput
from flagstone.store.caching import CachingStore
from flagstone.store.kept_uploads import KeepingStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import NEARBY, ObjectStore
from flagstone.store.writing import Destination
from flagstone.types import KeyRange, Seq

_DECODED_INDEX: Final = 3
"""How many times as large as stored an index is in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """How an executor merges: `work` limits SSTs and requests, `sst` is the format, the rest is the user's."""

    work: CompactionWorkerOptions
    sst: SstOptions
    merge_operator: MergeOperator | None = None
    compaction_filter: CompactionFilterFactory | None = None


def plan_threads(work: CompactionWorkerOptions, url: str, available: int) -> int:
    """How many ranges are merged at a time: as many as there are processors, if the store has no network.

    More threads than processors wait for each other, and each range takes memory and room in the processor's cache.
    """
    return min(work.max_subcompactions, available) if url.startswith(NEARBY) else work.max_subcompactions


def plan_output_bytes(work: CompactionWorkerOptions, url: str) -> int:
    """What the output of one range takes in memory, at most.

    A store without a network takes it in small parts, so only the index of an SST and the hashes of its keys stay.
    """
    return work.max_sst_size // 4 if url.startswith(NEARBY) else work.max_sst_size


class LocalExecutor:
    """Merges with threads of this process. Several jobs may run at once, each called from its own thread.

    That thread must not belong to `pool`: requests of the job run there, and the thread waits for them. The caller's
    thread merges a job of one range; of jobs with several ranges, `plan_threads` are merged at a time in all.

    Each running range has in memory a part of its output, with the index and the key hashes of that SST, and for each
    source one chunk of at most `bytes_to_fetch` being merged and one to `max_fetch_tasks` being fetched. Outputs go
    into `cache` as well, if there is one.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        merging: Merging,
        *,
        cache: CachingStore | None = None,
        pool: IoPool | None = None,
        ids: Ids = SYSTEM_IDS,
        metrics: Metrics | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._store = store
        self._destination: Destination = store if cache is None else KeepingStore(store, cache)
        self._paths = paths
        self._merging = merging
        self._work: Final = merging.work
        self._pool = pool or shared_pool()
        self._ids = ids
        self._memory = memory
        # Not threads of the shared pool: a range would wait there for requests that wait for a thread.
        threads = 0 if self._pool.max_workers == 0 else plan_threads(self._work, store.url, cores())
        self._ranges = (
            IoPool(max_workers=threads, name="flagstone-merge") if memory is None else memory.merge_pool
        )
        registry = metrics or Metrics()
        self._purged = registry.counter(metric_names.COMPACTOR_EXPIRED_ENTRIES_PURGED, entry_type="value")
        self._merges = Operation(registry.histogram(metric_names.COMPACTOR_MERGE_SECONDS), "compaction")
        self._rows = registry.counter(metric_names.COMPACTOR_ROWS_WRITTEN)

    def run(
        self,
        task: CompactionTask,
        *,
        record: Callable[[JobContext], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SsTable, ...]:
        """See `Executor`."""
        with self._merges.measure():
            sources = plan_sources(task.manifest, task.spec, self._paths)
            fetcher = SstFetcher(self._store)
            context = task.context
            if context is None or not context.subcompactions:
                ranges = self._plan_ranges(sources, fetcher)
                context = JobContext(
                    tuple(Subcompaction(keys) for keys in ranges), task.manifest.recent_snapshot_min_seq
                )
            job = _RunningJob(task, sources, fetcher, _Progress(context, record), cancelled)
            job.check()
            self._merge_ranges(job, len(context.subcompactions))
            return job.progress.outputs

    def _plan_ranges(self, sources: list[list[Part]], fetcher: SstFetcher) -> tuple[BytesRange, ...]:
        if self._work.max_subcompactions <= 1:
            return WHOLE

        def sample(part: Part) -> SampledView:
            index = fetcher.fetch_index(part.sst, part.path)
            return sample_view(index, part.keys, part.sst.info.estimated_size)

        views = self._pool.map_ordered(sample, [part for parts in sources for part in parts])
        return plan_ranges(views, self._work.max_subcompactions)

    def _merge_ranges(self, job: _RunningJob, count: int) -> None:
        try:
            self._ranges.map_ordered(lambda number: self._merge_range(job, number), range(count))
        except Cancelled:
            if job.failure is not None:
                # This range was cancelled only because another one failed.
                raise job.failure from None
            raise

    def _merge_range(self, job: _RunningJob, number: int) -> None:
        """Merge one range, from its start or from the last recorded row."""
        try:
            recorded = job.progress.context.subcompactions[number]
            keys, resume = recorded.range.keys, None
            if recorded.output_ssts:
                last = recorded.output_ssts[-1]
                resume = job.fetcher.fetch_last_row(last, self._paths.sst(last.id))
                # All versions of that key are read again: retention of the older ones depends on the newer.
                keys = KeyRange(resume[0], keys.stop)
            inside = [
                [part for part in (part.within(keys) for part in parts) if not part.keys.empty]
                for parts in job.sources
            ]
            inputs = [parts for parts in inside if parts]
            with self._room(job, inputs):
                self._merge(job, number, inputs, resume)
        except Cancelled:
            raise
        except BaseException as error:
            job.failure = error
            raise

    def _room(self, job: _RunningJob, inputs: list[list[Part]]) -> AbstractContextManager[None]:
        """The memory for one range; waits while other ranges of the process have it."""
        if self._memory is None:
            return nullcontext()
        work = self._work
        stored = sum(part.sst.info.index_len for parts in inputs for part in parts)
        size = (
            plan_output_bytes(work, self._store.url)
            + 2 * len(inputs) * work.bytes_to_fetch
            + min(stored, INDEX_CACHE_BYTES) * _DECODED_INDEX // len(job.progress.context.subcompactions)
        )
        return self._memory.merging(size, job.check)

    def _merge(
        self, job: _RunningJob, number: int, inputs: list[list[Part]], resume: tuple[bytes, int] | None
    ) -> None:
        policy = RetentionPolicy(
            min_seq=job.progress.context.retention_min_seq,
            clock_ms=job.task.manifest.last_l0_clock_tick,
            keep_tombstones=not is_last_run(job.task.manifest, job.task.spec),
            merge_operator=self._merging.merge_operator,
        )
        sources = [
            Source(
                parts,
                job.fetcher,
                pool=self._pool,
                bytes_to_fetch=self._work.bytes_to_fetch,
                max_fetch_tasks=self._work.max_fetch_tasks,
                reuse=True,
            )
            for parts in inputs
        ]
        # Not older than the job: SlateDB refuses an older output, and its garbage collector would delete it.
        output = SstOutput(self._destination, self._paths, lambda: self._ids.ulid(ulid_ms(job.task.job_id)))
        builder = SstBuilder(
            self._merging.sst, open_sink=output.open, max_bytes=self._work.max_sst_size, resume=resume
        )

        def finished(sst: BuiltSst) -> None:
            sst_id = output.commit(sst)
            self._rows.add(sst.rows)
            job.progress.add(number, SsTable(sst_id, sst.info, sst.format_version))

        try:
            with output:
                purged = merge_sources(
                    sources,
                    builder,
                    policy=policy,
                    chosen=self._new_filter(job.task, policy),
                    common=common_prefix([part.keys for parts in inputs for part in parts]),
                    finished=finished,
                    check=job.check,
                )
        finally:
            for source in sources:
                source.close()
        self._purged.add(purged)

    def _new_filter(self, task: CompactionTask, policy: RetentionPolicy) -> CompactionFilter | None:
        new_filter = self._merging.compaction_filter
        if new_filter is None:
            return None
        return new_filter(
            CompactionJob(
                job_id=task.job_id,
                segment=task.spec.segment,
                destination=task.spec.destination,
                is_last_run=not policy.keep_tombstones,
                clock_ms=policy.clock_ms,
                min_seq=Seq(policy.min_seq),
            )
        )


class _Progress:
    """The context of a job as it grows. Safe to use from many threads."""

    def __init__(self, context: JobContext, record: Callable[[JobContext], None]) -> None:
        self._lock = Lock()
        self._record = record
        self.context = context
        record(context)

    @property
    def outputs(self) -> tuple[SsTable, ...]:
        """All finished SSTs, in key order."""
        return tuple(sst for part in self.context.subcompactions for sst in part.output_ssts)

    def add(self, number: int, sst: SsTable) -> None:
        """Add a finished SST to range `number`, and record it."""
        with self._lock:
            parts = list(self.context.subcompactions)
            parts[number] = replace(parts[number], output_ssts=(*parts[number].output_ssts, sst))
            self.context = replace(self.context, subcompactions=tuple(parts))
            self._record(self.context)


@dataclass(slots=True)
class _RunningJob:
    """What all ranges of one job share. The first `failure` cancels the other ranges."""

    task: CompactionTask
    sources: list[list[Part]]
    fetcher: SstFetcher
    progress: _Progress
    cancelled: Callable[[], bool]
    failure: BaseException | None = None

    def check(self) -> None:
        """Raise `Cancelled` if the job was cancelled or another range has failed."""
        if self.failure is not None or self.cancelled():
            raise Cancelled
