"""The memtable flusher: frozen memtables become L0 tables, in the order they were frozen.

Tables are built and uploaded several at a time, and enter the manifest one memtable after the other, because
in L0 a newer table shadows an older one. A memtable enters only when all its rows are in the log: otherwise a
crash could keep a newer row and lose an older one.

A crash before the manifest knows a table leaves an object that nobody refers to, which garbage collection
removes; its rows are still in the log.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from flagstone.errors import Unavailable
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import RetentionPolicy
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.manifest import Flush, Manifest, SsTable
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import Future, IoPool
from flagstone.table.builder import EncodedTable, TableOptions
from flagstone.types import KeyRange, Seq, Ulid
from flagstone.write.backpressure import L0Load, Pause, plan_upload_pause
from flagstone.write.committer import Committer
from flagstone.write.memtables import FrozenMemtable
from flagstone.write.tables import build_tables

_log = logging.getLogger("flagstone.write")

_IDLE_S: Final = 3600.0
_RETRY_S: Final = 1.0

Uploaded = tuple[tuple[bytes, SsTable], ...]
"""The tables of one memtable, by segment prefix."""


@dataclass(frozen=True, slots=True)
class FlushTarget:
    """What the flusher needs of the engine.

    `upload` stores a table. `commit` makes a flush part of the manifest and of what reads see, and forgets the
    memtable; it raises `Closed` when a newer writer owns the database. `min_seq` is the oldest sequence
    number that any snapshot reads at, or None without one. `paused` hears when an upload has to wait for L0.
    """

    upload: Callable[[Ulid, EncodedTable], None]
    commit: Callable[[Flush, FrozenMemtable], None]
    manifest: Callable[[], Manifest]
    min_seq: Callable[[], int | None]
    request_log: Callable[[int], None]
    paused: Callable[[], None] = lambda: None


class _Job(NamedTuple):
    frozen: FrozenMemtable
    future: Future[Uploaded]


class Flusher:
    """A background service; `wake` it when a memtable was frozen, the log grew or L0 shrank."""

    name = "memtable-flush"

    def __init__(
        self,
        committer: Committer,
        target: FlushTarget,
        *,
        options: TableOptions,
        merge_operator: MergeOperator | None,
        extractor: SegmentExtractor | None,
        wal_enabled: bool,
        l0_max_ssts: int,
        l0_max_ssts_per_key: int,
        parallelism: int,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        wake: Callable[[], None],
    ) -> None:
        self._committer = committer
        self._target = target
        self._options = options
        self._merge_operator = merge_operator
        self._extractor = extractor
        self._wal_enabled = wal_enabled
        self._l0_max_ssts = l0_max_ssts
        self._l0_max_ssts_per_key = l0_max_ssts_per_key
        self._parallelism = parallelism
        self._clock = clock
        self._ids = ids
        self._wake = wake
        self._pool = IoPool(max_workers=parallelism, name="flagstone-flush")
        self._jobs: deque[_Job] = deque()
        self._retry_at = 0.0
        self._last_id_ms = 0
        self.pause: Pause | None = None
        """Why the oldest memtable is not being uploaded; None when nothing holds it up."""
        self._flushes = metrics.counter("slatedb.db.immutable_memtable_flushes")
        self._uploads = metrics.counter("slatedb.memtable_flush.l0_upload_count")
        self._l0_flushes = metrics.counter("slatedb.memtable_flush.l0_flush_count")
        self._flush_bytes = metrics.counter("slatedb.db.l0_flush_bytes")
        self._stalls = {
            kind: metrics.counter("slatedb.db.l0_stall_count", type=kind)
            for kind in ("num_ssts", "num_ssts_per_key")
        }

    def run_once(self) -> float | None:
        """Start what may start, commit what is ready."""
        self._start_uploads()
        while self._jobs and self._jobs[0].future.done():
            job = self._jobs[0]
            if self._wal_enabled and self._committer.durability.durable_seq < job.frozen.last_seq:
                self._target.request_log(job.frozen.last_seq)
                break
            try:
                uploaded = job.future.result()
                self._commit(job.frozen, uploaded)
            except Unavailable as error:
                # The rows are in the log and in memory: nothing is lost by trying again.
                _log.warning("cannot flush a memtable last_seq=%d error=%s", job.frozen.last_seq, error)
                self._retry_at = self._clock.monotonic() + _RETRY_S
                self._abandon_uploads()
                return _RETRY_S
            self._jobs.popleft()
            self._start_uploads()
        return _RETRY_S if self.pause is not None else _IDLE_S

    def close(self) -> None:
        """Give the threads back. Uploads under way are not waited for."""
        self._pool.close()

    def _start_uploads(self) -> None:
        if self._clock.monotonic() < self._retry_at:
            return
        with self._committer.lock:
            # Under the lock: the wake-up for a frozen memtable comes just before it is there.
            frozen_now = self._committer.memtables.frozen
        waiting = list(reversed(frozen_now))[len(self._jobs) :]
        for frozen in waiting[: self._parallelism - len(self._jobs)]:
            if not self._may_upload(frozen):
                return
            # Ids in the order of the memtables: a table must not look older than the one below it.
            newest = self._target.manifest().newest_l0
            floor_ms = max(self._last_id_ms, 0 if newest is None else ulid_ms(newest))
            self._last_id_ms = max(self._clock.now_ms(), floor_ms)
            future = self._pool.submit(self._build_and_upload, frozen, self._last_id_ms)
            self._jobs.append(_Job(frozen, future))
            future.add_done_callback(lambda _: self._wake())

    def _abandon_uploads(self) -> None:
        """Forget the uploads; the memtables are built again. What was uploaded becomes garbage."""
        for job in self._jobs:
            job.future.cancel()
        self._jobs.clear()

    def _may_upload(self, frozen: FrozenMemtable) -> bool:
        """Whether L0 has room for one more table of every tree. The table's own range is taken as unbounded."""
        manifest = self._target.manifest()
        in_flight = [KeyRange() for _ in self._jobs]
        loads = [
            L0Load(
                [view.effective_range(manifest.table(view).info) for view in tree.l0], in_flight, KeyRange()
            )
            for tree in manifest.trees
        ]
        pause = plan_upload_pause(
            loads, l0_max_ssts=self._l0_max_ssts, l0_max_ssts_per_key=self._l0_max_ssts_per_key
        )
        if pause is not None and self.pause is None:
            self._stalls[pause.reason].add()
            _log.info("holding back a memtable last_seq=%d reason=%s", frozen.last_seq, pause.message)
        self.pause = pause
        if pause is not None:
            self._target.paused()
        return pause is None

    def _build_and_upload(self, frozen: FrozenMemtable, id_ms: int) -> Uploaded:
        durability = self._committer.durability
        # The smallest number that a read may begin at once the SST has taken the memtable's place. With a WAL that is
        # what is durable now. Without one the commit of the SST makes its rows durable and visible, but a snapshot
        # that is taken before reads at what is visible now. Asked before the snapshots: one that is taken in between
        # reads at this number or later.
        min_seq = (
            durability.durable_seq if self._wal_enabled else min(durability.committed_seq, frozen.last_seq)
        )
        oldest_read = self._target.min_seq()
        policy = RetentionPolicy(
            min_seq=min_seq if oldest_read is None else min(min_seq, oldest_read),
            clock_ms=frozen.last_tick_ms,
            keep_tombstones=True,
            merge_operator=self._merge_operator,
            keep_unfoldable=True,
        )
        uploaded: list[tuple[bytes, SsTable]] = []
        for prefix, built in build_tables(
            frozen.table, options=self._options, policy=policy, extractor=self._extractor
        ):
            table = SsTable(_ulid_at(id_ms, self._ids), built.info)
            self._target.upload(table.id, built)
            self._flush_bytes.add(len(built.data))
            self._uploads.add()
            uploaded.append((prefix, table))
        return tuple(uploaded)

    def _commit(self, frozen: FrozenMemtable, uploaded: Uploaded) -> None:
        oldest_read = self._target.min_seq()
        flush = Flush(
            tables=uploaded,
            replay_after_wal_id=frozen.replay_after,
            wal_id_last_seen=self._committer.last_wal_id,
            last_clock_tick=frozen.last_tick_ms,
            last_seq=frozen.last_seq,
            snapshot_min_seq=Seq(
                frozen.last_seq if oldest_read is None else min(oldest_read, frozen.last_seq)
            ),
            points=frozen.points,
        )
        self._target.commit(flush, frozen)
        self._flushes.add()
        self._l0_flushes.add()


def _ulid_at(time_ms: int, ids: Ids) -> Ulid:
    """A fresh id stamped exactly then: all tables of a memtable carry one time."""
    return Ulid((time_ms << 80) | (ids.ulid() & ((1 << 80) - 1)))
