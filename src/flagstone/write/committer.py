"""Where writes become rows: each gets the next sequence number, a time, and its place in the memtable.

One lock orders all writes; nothing under it waits for the store. A write is in memory when `commit` returns, in
the WAL when its handle says so, and in an SST some time later. A crash in between loses what was not in the WAL.

An exception can strike between any two steps (Ctrl-C, a full memory). Under the lock the order of the steps makes
every prefix of them harmless:

1. What others must know of the write if it happens: its keys for transactions, a timer for the WAL. Too much is fine.
2. The rows, in one kernel call, under the next number. The number does not count yet, so no read sees them.
3. The number counts (`DurabilityTracker.record`). This one assignment is the write.

A write that was cut off between 2 and 3 has left rows under a number that is not given out. The next one to use the
memtable finds them there, and takes them out before it does anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Final

from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.runtime.clock import Clock
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock
from flagstone.types import KeyRange, Seq, WalId
from flagstone.write.batch import BY_DEFAULT, Expiry, WriteBatch
from flagstone.write.conflicts import ConflictTracker, TransactionState
from flagstone.write.durability import DurabilityTracker, WriteHandle
from flagstone.write.memtables import LogSpan, Memtables
from flagstone.write.segment_gate import KeyGate
from flagstone.write.state import State, WriterState
from flagstone.write.write_counts import WriteCounts

_LONGEST_CLOCK_SLEEP_S: Final = 10.0
_POINT_EVERY_MS: Final = 60_000


class Committer:
    """Takes writes from any number of threads.

    `on_unlogged` is called before the first row comes that is not in the WAL, `on_wal_full` when rows of
    `max_wal_bytes` are not in it, `on_freeze` when a memtable is about to be frozen; all with the lock held, and they
    must not block. `gate` refuses keys that this database does not take.
    """

    def __init__(
        self,
        state: WriterState,
        durability: DurabilityTracker,
        conflicts: ConflictTracker,
        *,
        clock: Clock,
        last_tick_ms: int,
        last_wal_id: WalId,
        freeze_bytes: int,
        max_wal_bytes: int | None,
        default_ttl_ms: int | None,
        merge_operator: MergeOperator | None,
        metrics: Metrics,
        on_unlogged: Callable[[], None],
        on_wal_full: Callable[[], None],
        on_freeze: Callable[[], None],
        gate: KeyGate | None = None,
    ) -> None:
        self.state = state
        self.durability = durability
        self.conflicts = conflicts
        self.lock: Lock = durability.lock
        self.merge_operator = merge_operator
        self.last_wal_id: WalId = last_wal_id
        self._clock = clock
        self._tick_ms = last_tick_ms
        self._freeze_bytes = freeze_bytes
        self._max_wal_bytes = max_wal_bytes
        self._default_ttl_ms = default_ttl_ms
        self._on_unlogged = on_unlogged
        self._on_wal_full = on_wal_full
        self._on_freeze = on_freeze
        self._gate = gate
        self._armed = False
        self._next_point_ms = 0
        # The size of the active memtable at which there is something to do besides taking the row.
        self._act_at_bytes = 0
        self._plan_next_act()
        self._counts = WriteCounts(metrics, state.now.memtables, last_seq=durability.last_seq)
        self._pauses = metrics.counter("slatedb.db.backpressure_count")

    @property
    def memtables(self) -> Memtables:
        return self.state.now.memtables

    # -- writing ------------------------------------------------------------------------------------------

    def commit_one(
        self, key: bytes, kind: int, value: bytes, expiry: Expiry, *, synchronous: bool
    ) -> WriteHandle:
        """Write one row whose arguments were checked. This is the hot path: everything it needs stands here."""
        durability = self.durability
        while True:
            with self.lock:
                now = self.state.now
                now_ms = self._clock.now_ms()
                if now.writable and now_ms >= self._tick_ms:
                    if self._gate is not None:
                        self._gate.admit((key,))
                    seq = durability.last_seq + 1
                    expires_ms = (
                        None
                        if expiry is BY_DEFAULT and self._default_ttl_ms is None
                        else expiry.resolve(now_ms, self._default_ttl_ms)
                    )
                    self._tick_ms = now_ms
                    if self.conflicts.running or durability.synchronous_commit:
                        self._record_conflicts(seq, (key,), synchronous)
                    if not self._armed:
                        self._arm()
                    size = now.memtables.active.insert(key, seq, kind, value, now_ms, expires_ms)
                    if size < 0:
                        active = self._without_cut_off_rows().memtables.active
                        size = active.insert(key, seq, kind, value, now_ms, expires_ms)
                    if durability.synchronous_commit:
                        durability.record(seq, synchronous=synchronous)
                    else:  # what `record` does then, without the cost of a call
                        durability.last_seq = durability.committed_seq = seq
                    if now_ms >= self._next_point_ms:
                        self._record_point(seq, now_ms)
                    if size >= self._act_at_bytes:
                        self._act(size)
                    break
            self._wait_until_writable()
        if durability.committed_seq < seq and not synchronous:
            durability.wait_committed(seq)
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
        # Before the lock: it sorts, and the merge operator is code of the user.
        operations = batch.settled(default_ttl_ms=default_ttl_ms, operator=self.merge_operator)
        written = {row.key for row in operations} if transaction is None else transaction.write_keys
        while True:
            with self.lock:
                now = self.state.now
                now_ms = self._clock.now_ms()
                if now.writable and now_ms >= self._tick_ms:
                    if transaction is not None:
                        self.conflicts.check(transaction)
                    if self._gate is not None:
                        self._gate.admit(operation.key for operation in operations)
                    seq = durability.last_seq + 1
                    rows = [
                        (
                            key,
                            kind,
                            value,
                            None
                            if expiry is BY_DEFAULT and default_ttl_ms is None
                            else expiry.resolve(now_ms, default_ttl_ms),
                        )
                        for key, kind, value, expiry in operations
                    ]
                    self._tick_ms = now_ms
                    if self.conflicts.running or durability.synchronous_commit:
                        self._record_conflicts(seq, written, synchronous)
                    if not self._armed:
                        self._arm()
                    size = now.memtables.active.insert_batch(rows, seq, now_ms)
                    if size < 0:
                        active = self._without_cut_off_rows().memtables.active
                        size = active.insert_batch(rows, seq, now_ms)
                    durability.record(seq, synchronous=synchronous)
                    if now_ms >= self._next_point_ms:
                        self._record_point(seq, now_ms)
                    if size >= self._act_at_bytes:
                        self._act(size)
                    break
            self._wait_until_writable()
        if durability.committed_seq < seq and not synchronous:
            durability.wait_committed(seq)
        return WriteHandle(durability, Seq(seq), now_ms)

    # -- handing on ---------------------------------------------------------------------------------------

    def report(self) -> None:
        """Bring the write counters up to date. Rows are counted in the memtables, where counting costs nothing."""
        with self.lock:
            self._counts.report(self._without_cut_off_rows().memtables, self.durability.last_seq)

    def seal_log(self) -> tuple[list[LogSpan], int]:
        """What the next WAL file must hold, and the last sequence number in it. Batches are never cut."""
        with self.lock:
            now = self._without_cut_off_rows()
            spans = now.memtables.spans()
            self._armed = False
            self.state.now = replace(now, memtables=now.memtables.logged())
            self._plan_next_act()
            return spans, self.durability.last_seq

    def freeze(self) -> bool:
        """Begin a new memtable now; False when the active one is empty."""
        with self.lock:
            return self._freeze()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let writers wait while the block runs, as they wait for room. A write that has begun is through."""
        self.state.update(lambda now: replace(now, held=True))
        try:
            yield
        finally:
            self.state.update(lambda now: replace(now, held=False))

    def take_load(self, seq: int, ranges: Sequence[KeyRange]) -> None:
        """Rows of these ranges were written under `seq`, in SSTs: what is written from now on comes after them.

        For the holder of the writers (`held`), when all they wrote is durable.
        """
        with self.lock:
            self.conflicts.record_load(seq, ranges)
            before = self.durability.last_seq
            self.durability.skip_to(seq)
            self._counts.skipped(self.durability.last_seq - before)

    def note_logged(self, wal_id: WalId) -> None:
        """The WAL has one more file."""
        with self.lock:
            self.last_wal_id = max(self.last_wal_id, wal_id)

    def refuse(self, reason: FlagstoneError) -> None:
        """Take no more writes; those that wait for room get the same answer."""
        self.state.update(lambda now: now if now.refusal is not None else replace(now, refusal=reason))

    @property
    def last_tick_ms(self) -> int:
        return self._tick_ms

    @property
    def paused(self) -> bool:
        """Whether writers wait for room."""
        now = self.state.now
        return not now.writable and now.refusal is None

    @property
    def may_wait(self) -> bool:
        """Whether a write may have to wait: for room, or for those before it to be committed."""
        return self.paused or self.durability.synchronous_commit

    # -- under the lock -----------------------------------------------------------------------------------

    def _without_cut_off_rows(self) -> State:
        """The state, after the rows of a write that an exception cut off were taken out of it."""
        now, last_seq = self.state.now, self.durability.last_seq
        if now.memtables.active.newest_seq() > last_seq:
            now = self.state.now = now.with_memtables(now.memtables.through(last_seq))
        return now

    def _record_conflicts(self, seq: int, keys: Sequence[bytes] | set[bytes], synchronous: bool) -> None:
        # Before the rows: a write that transactions hear of and that does not happen costs them a retry.
        durability = self.durability
        visible = durability.committed_seq if durability.defers(synchronous) else seq
        self.conflicts.record_commit(seq, keys, committed_seq=visible)

    def _arm(self) -> None:
        # The timer first: one that runs for nothing does no harm, a row without one would never be written.
        self._on_unlogged()
        self._armed = True

    def _act(self, size: int) -> None:
        """The active memtable has grown to where the WAL or L0 shall have its rows."""
        if size >= self._freeze_bytes:
            self._freeze()
        else:
            self._on_wal_full()
            self._act_at_bytes = self._freeze_bytes

    def _freeze(self) -> bool:
        before = self._without_cut_off_rows()
        after = before.freeze(
            last_seq=self.durability.last_seq, last_tick_ms=self._tick_ms, replay_after=self.last_wal_id
        )
        if after is before:
            return False
        # The flusher looks under the lock: it sees the frozen memtable, or that there is none.
        self._on_freeze()
        self.state.now = after
        self._plan_next_act()
        return True

    def _plan_next_act(self) -> None:
        """After the WAL took all rows, or a new memtable began."""
        logged = self.memtables.active.size()
        self._act_at_bytes = (
            self._freeze_bytes
            if self._max_wal_bytes is None
            else min(self._freeze_bytes, logged + self._max_wal_bytes)
        )

    def _record_point(self, seq: int, now_ms: int) -> None:
        now = self.state.now
        points = now.memtables.points.record(seq, now_ms // 1000)
        self.state.now = replace(now, memtables=replace(now.memtables, points=points))
        self._next_point_ms = now_ms + _POINT_EVERY_MS

    # -- without the lock ---------------------------------------------------------------------------------

    def _wait_until_writable(self) -> None:
        """Return when a write may try again; raise when it may not."""
        state = self.state
        if not state.now.writable:
            if state.now.refusal is None:
                self._pauses.add()
            state.changed.wait_for(lambda: state.now.writable or state.now.refusal is not None)
        if state.now.refusal is not None:
            self.durability.raise_failure()
            raise copy(state.now.refusal)  # threads may not share a traceback
        if self._clock.now_ms() < self._tick_ms:
            self._wait_for_clock()

    def _wait_for_clock(self) -> None:
        """Times never go back. A clock that did is given a moment to catch up, as SlateDB does.

        Readers, flushes and the WAL go on meanwhile, and so do writers who come later.
        """
        behind_s = (self._tick_ms - self._clock.now_ms()) / 1000
        self._clock.sleep(max(0.0, min(_LONGEST_CLOCK_SLEEP_S, 2 * behind_s)))
        now_ms = self._clock.now_ms()
        if now_ms < self._tick_ms:
            raise InvalidRequest(
                f"invalid clock tick, must be monotonic: this machine's clock says {now_ms} ms, but rows were written "
                f"at {self._tick_ms} ms; set the clock right (NTP) and write again. If that time is wrong, "
                "Settings(on_clock_regression='hold') writes on, and `flagstone repair` resets it"
            )
