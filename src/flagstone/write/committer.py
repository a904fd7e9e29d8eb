"""Where writes become rows: each gets the next sequence number, a time, and its place in the memtable.

One lock orders all writes; nothing under it waits for the store. A write is in memory when `commit` returns, in
the log when its handle says so, and in a table some time later. A crash in between loses exactly what was not
in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Final

from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.runtime.clock import Clock
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Condition, Lock
from flagstone.types import KeyRange, Seq, WalId
from flagstone.write.backpressure import plan_write_pause
from flagstone.write.batch import BY_DEFAULT, Expiry, WriteBatch
from flagstone.write.conflicts import ConflictTracker, TransactionState
from flagstone.write.durability import DurabilityTracker, WriteHandle
from flagstone.write.memtables import FrozenMemtable, LogSpan, Memtables
from flagstone.write.segment_gate import KeyGate

_LONGEST_CLOCK_SLEEP_S: Final = 10.0
_POINT_EVERY_MS: Final = 60_000


class Committer:
    """Takes writes from any number of threads.

    `on_first_unlogged` is called when a row comes that is not in the log and none was before, `on_freeze` when a
    memtable has been frozen; both without the lock, and they must not block. `publish` is called under the lock
    whenever the set of memtables changed, so that no row is ever out of sight of readers. `gate` refuses
    keys that this database does not take.
    """

    def __init__(
        self,
        memtables: Memtables,
        durability: DurabilityTracker,
        conflicts: ConflictTracker,
        *,
        clock: Clock,
        last_tick_ms: int,
        last_wal_id: WalId,
        freeze_bytes: int,
        max_unflushed_bytes: int,
        default_ttl_ms: int | None,
        merge_operator: MergeOperator | None,
        metrics: Metrics,
        on_first_unlogged: Callable[[], None],
        on_freeze: Callable[[], None],
        publish: Callable[[], None],
        gate: KeyGate | None = None,
    ) -> None:
        self.memtables = memtables
        self.durability = durability
        self.conflicts = conflicts
        self.lock: Lock = durability.lock
        self.merge_operator = merge_operator
        self.last_wal_id: WalId = last_wal_id
        self._clock = clock
        self._tick_ms = last_tick_ms
        self._freeze_bytes = freeze_bytes
        self._max_unflushed_bytes = max_unflushed_bytes
        self._default_ttl_ms = default_ttl_ms
        self._on_first_unlogged = on_first_unlogged
        self._on_freeze = on_freeze
        self._publish = publish
        self._gate = gate
        self._room = Condition(self.lock)
        self._refusal: FlagstoneError | None = None
        self._crowded = False
        self._held = False
        self._armed = False
        self._next_point_ms = 0
        self._rows_in_frozen = 0
        # Rows that replay found are not writes of this process.
        self._rows_counted = len(memtables.active)
        self._write_ops = metrics.counter("slatedb.db.write_ops")
        self._batches = metrics.counter("slatedb.db.write_batch_count")
        self._pauses = metrics.counter("slatedb.db.backpressure_count")

    # -- writing ------------------------------------------------------------------------------------------

    def commit_one(
        self, key: bytes, kind: int, value: bytes, expiry: Expiry, *, synchronous: bool
    ) -> WriteHandle:
        """Write one row whose arguments were checked. This is the hot path: everything it needs stands here."""
        durability = self.durability
        first = False
        with self.lock:
            if self._crowded or self._refusal is not None:
                self._wait_for_room()
            now_ms = self._clock.now_ms()
            if now_ms < self._tick_ms:
                now_ms = self._wait_for_clock(now_ms)
            if self._gate is not None:
                self._gate.admit((key,))
            self._tick_ms = now_ms
            seq = durability.last_seq + 1
            expires_ms = (
                None
                if expiry is BY_DEFAULT and self._default_ttl_ms is None
                else expiry.resolve(now_ms, self._default_ttl_ms)
            )
            # The row first: once the number counts as committed, a reader at that number must find the row.
            size = self.memtables.active.insert(key, seq, kind, value, now_ms, expires_ms)
            durability.record(seq, synchronous=synchronous)
            if self.conflicts.transactions or durability.committed_seq != seq:
                self.conflicts.record_commit(seq, (key,), committed_seq=durability.committed_seq)
            if now_ms >= self._next_point_ms:
                self._record_point(seq, now_ms)
            if not self._armed:
                self._armed = first = True
            full = size >= self._freeze_bytes and self._freeze() is not None
        if first:
            self._on_first_unlogged()
        if full:
            self._on_freeze()
        return WriteHandle(durability, Seq(seq), now_ms)

    def commit_batch(
        self,
        batch: WriteBatch,
        *,
        synchronous: bool,
        transaction: TransactionState | None = None,
    ) -> WriteHandle:
        """Write all rows of a batch under one sequence number, or none.

        A `transaction` is checked first, in the same step: nothing can come between. What the check raises stops
        the write.
        """
        if not len(batch):
            raise InvalidRequest("an empty batch writes nothing; add an operation to it")
        durability = self.durability
        default_ttl_ms = self._default_ttl_ms
        # Before the lock: it sorts, and the merge operator is somebody else's code.
        operations = batch.settled(default_ttl_ms=default_ttl_ms, operator=self.merge_operator)
        first = False
        with self.lock:
            if self._crowded or self._refusal is not None:
                self._wait_for_room()
            now_ms = self._clock.now_ms()
            if now_ms < self._tick_ms:
                now_ms = self._wait_for_clock(now_ms)
            seq = durability.last_seq + 1
            if transaction is not None:
                self.conflicts.check(transaction)
            if self._gate is not None:
                self._gate.admit(operation.key for operation in operations)
            self._tick_ms = now_ms
            insert = self.memtables.active.insert
            size = 0
            for key, kind, value, expiry in operations:
                expires_ms = (
                    None
                    if expiry is BY_DEFAULT and default_ttl_ms is None
                    else expiry.resolve(now_ms, default_ttl_ms)
                )
                size = insert(key, seq, kind, value, now_ms, expires_ms)
            durability.record(seq, synchronous=synchronous)
            if self.conflicts.transactions or durability.committed_seq != seq:
                written = {row.key for row in operations} if transaction is None else transaction.write_keys
                self.conflicts.record_commit(seq, written, committed_seq=durability.committed_seq)
            if now_ms >= self._next_point_ms:
                self._record_point(seq, now_ms)
            if not self._armed:
                self._armed = first = True
            full = size >= self._freeze_bytes and self._freeze() is not None
        self._batches.add()
        if first:
            self._on_first_unlogged()
        if full:
            self._on_freeze()
        return WriteHandle(durability, Seq(seq), now_ms)

    # -- handing on ---------------------------------------------------------------------------------------

    def report(self) -> None:
        """Bring the write counters up to date. Rows are counted in the memtables, where counting costs nothing."""
        with self.lock:
            written = self._rows_in_frozen + len(self.memtables.active)
            counted, self._rows_counted = self._rows_counted, written
        self._write_ops.add(written - counted)

    def seal_log(self) -> tuple[list[LogSpan], int]:
        """What the next log file must hold, and the last sequence number in it. Batches are never cut."""
        with self.lock:
            self._armed = False
            return self.memtables.take_unlogged(), self.durability.last_seq

    def freeze(self) -> FrozenMemtable | None:
        """Begin a new memtable now; None when the active one is empty."""
        with self.lock:
            return self._freeze()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let writers wait while the block runs, as they wait for room. Those that were let in are through."""
        with self.lock:
            self._held = self._crowded = True
        try:
            yield
        finally:
            with self.lock:
                self._held = False
                self._make_room()

    def take_load(self, seq: int, ranges: Sequence[KeyRange]) -> None:
        """Rows of these ranges were written under `seq`, in tables: what is written from now on comes after them.

        For the holder of the writers (`held`), when all they wrote is durable.
        """
        with self.lock:
            self.durability.skip_to(seq)
            self.conflicts.record_load(seq, ranges)

    def note_logged(self, wal_id: WalId) -> None:
        """The log has one more file."""
        with self.lock:
            self.last_wal_id = max(self.last_wal_id, wal_id)

    def drop_flushed(self, frozen: FrozenMemtable) -> None:
        """A memtable's rows are in L0: forget it, and let writers in that waited for room.

        The caller holds the lock, and publishes.
        """
        self.memtables.drop(frozen)
        self._make_room()

    def refuse(self, reason: FlagstoneError) -> None:
        """Take no more writes; those that wait for room are told as well."""
        with self.lock:
            if self._refusal is None:
                self._refusal = reason
            self._room.notify_all()

    @property
    def last_tick_ms(self) -> int:
        return self._tick_ms

    @property
    def paused(self) -> bool:
        """Whether writers wait for room."""
        return self._crowded

    # -- under the lock -----------------------------------------------------------------------------------

    def _freeze(self) -> FrozenMemtable | None:
        frozen = self.memtables.freeze(
            last_seq=Seq(self.durability.last_seq), last_tick_ms=self._tick_ms, replay_after=self.last_wal_id
        )
        if frozen is not None:
            self._rows_in_frozen += len(frozen.table)
            self._crowded = self._is_crowded()
            self._publish()
        return frozen

    def _make_room(self) -> None:
        self._crowded = self._is_crowded()
        if not self._crowded:
            self._room.notify_all()

    def _is_crowded(self) -> bool:
        if self._held:
            return True
        pause = plan_write_pause(
            unflushed_bytes=self.memtables.unflushed_bytes, max_unflushed_bytes=self._max_unflushed_bytes
        )
        # An active memtable alone never holds writers up: freezing it is what would make room.
        return pause is not None and bool(self.memtables.frozen)

    def _wait_for_room(self) -> None:
        if self._crowded:
            self._pauses.add()
        self._room.wait_for(lambda: not self._crowded or self._refusal is not None)
        if self._refusal is not None:
            self.durability.raise_failure()
            raise copy(self._refusal)  # threads may not share a traceback

    def _wait_for_clock(self, now_ms: int) -> int:
        """Times never go back. A clock that did is given a moment to catch up, as SlateDB does.

        The lock is not held meanwhile: readers, flushes and the log go on, and so do writers who come later.
        """
        behind_s = (self._tick_ms - now_ms) / 1000
        self.lock.release()
        try:
            self._clock.sleep(min(_LONGEST_CLOCK_SLEEP_S, 2 * behind_s))
        finally:
            self.lock.acquire()
        if self._crowded or self._refusal is not None:
            self._wait_for_room()
        now_ms = self._clock.now_ms()
        if now_ms < self._tick_ms:
            raise InvalidRequest(
                f"invalid clock tick, must be monotonic: this machine's clock says {now_ms} ms, but rows were written "
                f"at {self._tick_ms} ms; set the clock right (NTP) and write again"
            )
        return now_ms

    def _record_point(self, seq: int, now_ms: int) -> None:
        self.memtables.points = self.memtables.points.record(seq, now_ms // 1000)
        self._next_point_ms = now_ms + _POINT_EVERY_MS
