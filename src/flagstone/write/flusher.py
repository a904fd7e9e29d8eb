"""The memtable flusher: writes frozen memtables to L0, in the order they were frozen.

It builds several SSTs at a time, uploads each while it is built, and adds them to the manifest one memtable after the
other, because in L0 a newer SST shadows an older one. A memtable is added only when all its rows are in the WAL:
otherwise a crash could keep a newer row and lose an older one.

A crash before the manifest lists an SST leaves an object that no manifest refers to. Garbage collection deletes it. Its
rows are still in the WAL.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Final, NamedTuple

from flagstone.config import Settings
from flagstone.errors import Unavailable
from flagstone.kernels import memtable as kernel
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import RetentionPolicy, apply_retention
from flagstone.lsm.segments import SegmentExtractor, route
from flagstone.metadata.manifest import Flush, SsTable, apply_flush, drop_empty_segments
from flagstone.runtime import allocator
from flagstone.runtime import metric_names as names
from flagstone.runtime.budget import MemoryBudget
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.operations import Operation
from flagstone.runtime.pool import Future, IoPool, cores
from flagstone.runtime.service import Supervisor
from flagstone.sst.builder import BuiltSst, Sink, SstBuilder, SstOptions
from flagstone.types import EntryTuple, KeyRange, Seq, Ulid
from flagstone.write.backpressure import L0Pressure, Pause, plan_upload_pause
from flagstone.write.manifest import WriterManifest
from flagstone.write.state import FrozenMemtable
from flagstone.write.writer_state import WriterState

_log = logging.getLogger("flagstone.write")

_IDLE_S: Final = 3600.0
_RETRY_S: Final = 1.0

_LARGE_BYTES: Final = 16 * 1024 * 1024
"""After the flush of such a memtable there may be much free memory for the system."""

_STREAM_BYTES: Final = 1 << 19
"""One step fills half of the buffer."""

SortedKeys = tuple[Any, ...]
"""The result of `Memtable.sort_completely`: the keys of the memtable in order, as the kernel keeps them."""

Uploaded = tuple[tuple[bytes, SsTable], ...]
"""The SSTs of one memtable, by segment prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOptions:
    """How memtables become SSTs."""

    settings: Settings
    sst: SstOptions
    merge_operator: MergeOperator | None = None
    extractor: SegmentExtractor | None = None
    memory: MemoryBudget | None = None
    on_disk: bool = False
    """Whether the store is a disk of this machine."""


class _Job(NamedTuple):
    frozen: FrozenMemtable
    future: Future[Uploaded]


def plan_flushes(settings: Settings, *, on_disk: bool, available: int) -> int:
    """How many memtables are flushed at a time.

    On a disk, flushes that share a processor take longer, and keep their memtables for so long. Two always run, so that
    one works while the other one waits for the disk.
    """
    allowed = settings.l0_flush_parallelism
    return min(allowed, max(available, 2)) if on_disk else allowed


class Flusher:
    """A background service. Wake it when a memtable was frozen, the WAL grew or L0 has more room."""

    name = "memtable-flush"

    def __init__(
        self,
        state: WriterState,
        manifest: WriterManifest,
        options: FlushOptions,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        supervisor: Supervisor,
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._options = options
        self._settings = options.settings
        self._parallelism = plan_flushes(options.settings, on_disk=options.on_disk, available=cores())
        self._clock = clock
        self._ids = ids
        self._supervisor = supervisor
        memory = options.memory
        self._own_pool = IoPool(max_workers=self._parallelism, name="flagstone-flush")
        self._pool = self._own_pool if memory is None else memory.flush_pool
        self._jobs: deque[_Job] = deque()
        self._retry_at = 0.0
        self._last_id_ms = 0
        self.pause: Pause | None = None
        """Why the upload of the oldest memtable waits; None if it does not."""
        self._flushes = metrics.counter(names.DB_IMMUTABLE_MEMTABLE_FLUSHES)
        self._uploads = metrics.counter(names.MEMTABLE_FLUSH_L0_UPLOAD_COUNT)
        self._flushing = Operation(
            metrics.histogram(names.DB_OPERATION_SECONDS, op="memtable_flush"), "memtable_flush"
        )
        self._l0_flushes = metrics.counter(names.MEMTABLE_FLUSH_L0_FLUSH_COUNT)
        self._flush_bytes = metrics.counter(names.DB_L0_FLUSH_BYTES)
        self._stalls = {
            kind: metrics.counter(names.DB_L0_STALL_COUNT, type=kind)
            for kind in ("num_ssts", "num_ssts_per_key")
        }

    def run_once(self) -> float | None:
        """Start the uploads that may start, and commit those that are done."""
        self._start_uploads()
        while self._jobs and self._jobs[0].future.done():
            job = self._jobs[0]
            if self._settings.wal_enabled and self._state.durable_seq < job.frozen.last_seq:
                self._state.request_durable()
                break
            try:
                uploaded = job.future.result()
                self._commit(job.frozen, uploaded)
            except Unavailable as error:
                # The rows are in the WAL and in memory: trying again loses nothing.
                _log.warning("cannot flush a memtable last_seq=%d error=%s", job.frozen.last_seq, error)
                self._retry_at = self._clock.monotonic() + _RETRY_S
                self._abandon_uploads()
                return _RETRY_S
            self._jobs.popleft()
            self._start_uploads()
            if job.frozen.memtable.size() >= _LARGE_BYTES and self._options.memory is None:
                allocator.trim_much()
        # Something else may have woken this service before it is time to try again.
        until_retry_s = self._retry_at - self._clock.monotonic()
        if until_retry_s > 0:
            return until_retry_s
        return _RETRY_S if self.pause is not None else _IDLE_S

    def close(self) -> None:
        """End the threads, without waiting for uploads under way."""
        self._own_pool.close()

    def _start_uploads(self) -> None:
        if self._clock.monotonic() < self._retry_at:
            return
        waiting = list(reversed(self._state.frozen_memtables()))[len(self._jobs) :]
        for frozen in waiting[: self._parallelism - len(self._jobs)]:
            if not self._may_upload(frozen):
                return
            # Ids in the order of the memtables: an SST must not look older than the one below it.
            newest = self._manifest.current.value.newest_l0
            floor_ms = max(self._last_id_ms, 0 if newest is None else ulid_ms(newest))
            self._last_id_ms = max(self._clock.now_ms(), floor_ms)
            future = self._pool.submit(self._flush, frozen, self._last_id_ms)
            self._jobs.append(_Job(frozen, future))
            future.add_done_callback(lambda _: self._supervisor.wake(self))

    def _abandon_uploads(self) -> None:
        """Drop the uploads: the memtables are built again. SSTs that were uploaded become garbage."""
        for job in self._jobs:
            job.future.cancel()
        self._jobs.clear()

    def _may_upload(self, frozen: FrozenMemtable) -> bool:
        """Whether L0 has room for one more SST in every tree. The range of that SST counts as unbounded."""
        manifest = self._manifest.current.value
        in_flight = [KeyRange() for _ in self._jobs]
        pressures = [
            L0Pressure(
                [view.effective_range(manifest.sst(view).info) for view in tree.l0], in_flight, KeyRange()
            )
            for tree in manifest.trees
        ]
        pause = plan_upload_pause(
            pressures,
            l0_max_ssts=self._settings.l0_max_ssts,
            l0_max_ssts_per_key=self._settings.l0_max_ssts_per_key,
        )
        if pause is not None and self.pause is None:
            self._stalls[pause.reason].add()
            _log.info("holding back a memtable last_seq=%d reason=%s", frozen.last_seq, pause.message)
        self.pause = pause
        if pause is not None:
            self._state.wake.follower()
            self._state.notify()
        return pause is None

    def _flush(self, frozen: FrozenMemtable, id_ms: int) -> Uploaded:
        memory = self._options.memory
        with (
            nullcontext() if memory is None else memory.flushing(frozen.memtable.size()),
            self._flushing.measure(),
        ):
            return self._build_and_upload(frozen, id_ms)

    def _build_and_upload(self, frozen: FrozenMemtable, id_ms: int) -> Uploaded:
        state = self._state
        # The smallest sequence number that a read may start at once the SST has replaced the memtable. With a WAL
        # that is `durable_seq`. Without one the commit of the SST makes its rows durable and visible, but an earlier
        # snapshot reads at what is visible now. Read before the snapshots: one that begins in between reads at this
        # number or later.
        min_seq = (
            state.durable_seq if self._settings.wal_enabled else min(state.committed_seq, frozen.last_seq)
        )
        oldest_read = state.min_active_seq()
        policy = RetentionPolicy(
            min_seq=min_seq if oldest_read is None else min(min_seq, oldest_read),
            clock_ms=frozen.last_tick_ms,
            keep_tombstones=True,
            merge_operator=self._options.merge_operator,
            keep_unfoldable=True,
        )
        uploaded: list[tuple[bytes, SsTable]] = []
        with self._manifest.views.ssts.output(lambda: _ulid_at(id_ms, self._ids)) as output:
            for prefix, built in build_ssts(
                frozen.memtable,
                open_sink=output.open,
                options=self._options.sst,
                policy=policy,
                extractor=self._options.extractor,
            ):
                uploaded.append((prefix, SsTable(output.commit(built), built.info)))
                self._flush_bytes.add(built.size)
                self._uploads.add()
        return tuple(uploaded)

    def _commit(self, frozen: FrozenMemtable, uploaded: Uploaded) -> None:
        oldest_read = self._state.min_active_seq()
        flush = Flush(
            ssts=uploaded,
            replay_after_wal_id=frozen.replay_after,
            wal_id_last_seen=self._state.last_wal_id,
            last_clock_tick=frozen.last_tick_ms,
            last_seq=frozen.last_seq,
            snapshot_min_seq=Seq(
                frozen.last_seq if oldest_read is None else min(oldest_read, frozen.last_seq)
            ),
            points=frozen.points,
        )
        written = self._manifest.commit(
            lambda now: drop_empty_segments(apply_flush(now.value, flush)),
            timeout_s=self._settings.manifest_update_timeout.total_seconds(),
        )
        if not self._settings.wal_enabled:
            # Before reads lose the memtable: it still has the versions that were visible until now.
            self._state.advance_durable(frozen.last_seq)
        self._manifest.adopt(written, frozen)
        self._flushes.add()
        self._l0_flushes.add()
        _log.info(
            "flushed memtable last_seq=%d ssts=%d bytes=%d manifest=%d",
            frozen.last_seq,
            len(uploaded),
            sum(sst.info.estimated_size for _, sst in uploaded),
            written.id,
        )


def _ulid_at(time_ms: int, ids: Ids) -> Ulid:
    """A new id with exactly that time: all SSTs of a memtable carry one time."""
    return Ulid((time_ms << 80) | (ids.ulid() & ((1 << 80) - 1)))


# -- building SSTs ------------------------------------------------------------------------------------------


def build_ssts(
    memtable: kernel.Memtable,
    *,
    open_sink: Callable[[], Sink],
    options: SstOptions,
    policy: RetentionPolicy,
    extractor: SegmentExtractor | None = None,
) -> Iterator[tuple[bytes, BuiltSst]]:
    """Each SST when it is finished, by segment prefix (b"" without segments), in key order.

    There is none if retention leaves no row. Works in small steps: other threads run between them.
    """
    while memtable.sort_some():
        pass
    run = memtable.sort_completely()
    if extractor is None:
        built = _one_sst(memtable, run, SstBuilder(options, open_sink=open_sink), policy)
        if built is not None:
            yield b"", built
        return
    for prefix, rows in _rows_by_segment(memtable, run, policy, extractor):
        output = SstBuilder(options, open_sink=open_sink)
        for row in rows:
            output.add_row(row)
        built = output.finish_if_any()
        if built is not None:
            yield prefix, built


def _one_sst(
    memtable: kernel.Memtable, run: SortedKeys, output: SstBuilder, policy: RetentionPolicy
) -> BuiltSst | None:
    # One buffer for all steps: allocating it costs more than filling it.
    stream = bytearray(_STREAM_BYTES)
    at, total = 0, len(run[0])
    while at < total:
        at, used = memtable.sorted_stream(run, at, stream, policy.min_seq, policy.clock_ms)
        if used:
            with memoryview(stream)[:used] as rows:
                output.write(rows)
        elif at < total:
            # The stream stops at a key with merge operands: only the operator can fold them.
            for row in apply_retention(memtable.versions_at(run, at), policy):
                output.add_row(row)
            at += 1
    return output.finish_if_any()


def _rows_by_segment(
    memtable: kernel.Memtable, run: SortedKeys, policy: RetentionPolicy, extractor: SegmentExtractor
) -> Iterator[tuple[bytes, Iterator[EntryTuple]]]:
    """The retained rows of each segment. Sorted keys are grouped by segment, because a segment is a prefix."""
    every_key = (memtable.versions_at(run, index) for index in range(len(run[0])))
    for prefix, keys in groupby(every_key, key=lambda versions: route(extractor, versions[0][0])):
        yield prefix, chain.from_iterable(apply_retention(versions, policy) for versions in keys)
