"""The state of a database that is open for writing: the one lock, what it guards, and every change to it.

`WriterState` owns the manifest, the memtables, the read view, the sequence numbers and the status. It is the only class
that takes the write lock. Nothing under the lock waits for the store. Reads use `now` and the sequence numbers without
the lock.

Three sequence numbers describe all writes:

    durable_seq   every write up to here is on the store
    committed_seq every write up to here is visible to ordinary reads
    last_seq      every write up to here is in memory

A write is visible when its call returns, so `committed_seq` is `last_seq`. With `synchronous_commit` a synchronous
write (`await_durable`) is committed only when it is durable, and commits are strictly ordered: later writes wait with
it. `committed_seq` is then the number before the first synchronous write that is not durable. A crash loses
everything above `durable_seq`; no caller was ever informed that it is durable.

An exception (Ctrl-C, out of memory) can strike between any two steps of a write. Under the lock the order of the steps
makes every prefix of them harmless:

1. Record what others must know if the write happens: its keys for transactions, a timer for the WAL. Too much is fine.
2. Insert the rows with one kernel call, under the next sequence number or numbers. No read sees them yet.
3. Assign the last of them to `last_seq`. This one assignment is the write.

A write that is cut off between 2 and 3 leaves rows under a sequence number that is not given out. The next operation
on the memtable removes these rows before it does anything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Protocol

from flagstone.config import Settings
from flagstone.errors import Closed, FlagstoneError, InternalError, InvalidRequest, Unavailable
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.read.view import ClosedView, ReadView
from flagstone.runtime import metric_names as names
from flagstone.runtime.budget import MemoryBudget, RowAccount
from flagstone.runtime.clock import Clock, HeldClock
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.operations import Operation
from flagstone.runtime.sync import Lock, Waiters, wait_aside
from flagstone.types import KeyRange, Seq, WalId
from flagstone.write.backpressure import plan_write_limits
from flagstone.write.batch import BY_DEFAULT, Expiry, WriteBatch, check_batch, pending_rows
from flagstone.write.conflicts import ConflictTracker, Isolation, ReadPoint, TransactionState, elapsed_ms
from flagstone.write.durability import DurabilityTimeout, WriteHandle, wake_waiters
from flagstone.write.key_check import KeyCheck
from flagstone.write.state import FrozenMemtable, Memtables, SealedWal, State, WriteCounts

if TYPE_CHECKING:
    from asyncio import Future

    from flagstone.write.columns import RowGroup
    from flagstone.write.durability import Waiter

_LONGEST_CLOCK_SLEEP_S: Final = 10.0
_POINT_EVERY_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Recovered:
    """What opening a database found: its manifest, and the rows that are only in the WAL.

    `last_wal_id` is the id of the writer's own fence. `key_check` refuses keys that this database does not take.
    """

    manifest: Versioned[Manifest]
    memtables: Memtables
    last_seq: int
    last_tick_ms: int
    last_wal_id: WalId
    key_check: KeyCheck | None = None


class MustWait(Exception):
    """The write has to wait, and its caller must not block a thread. Nothing was written."""


class Wake(Protocol):
    """How the state starts the background services. It may hold the write lock, so only `write_wal` may block."""

    def wal_soon(self) -> None:
        """Rows wait for the WAL. The flush interval decides when they are written."""
        ...

    def wal_now(self) -> None:
        """Rows must be in the WAL as soon as possible."""
        ...

    def write_wal(self) -> None:
        """Write the rows to the WAL in this thread, if no other thread does; otherwise as `wal_now`.

        The state calls it without its lock.
        """
        ...

    def flusher(self) -> None:
        """A memtable was frozen, the WAL grew, or L0 has more room."""
        ...

    def follower(self) -> None:
        """The writer waits for a manifest that another process writes."""
        ...


class WriterState:
    """See the module. `wake` is set once, before the first write."""

    __slots__ = (
        "_act_at_bytes",
        "_armed",
        "_clock",
        "_counts",
        "_default_ttl_ms",
        "_freeze_bytes",
        "_key_check",
        "_max_wal_bytes",
        "_max_wal_files",
        "_memory",
        "_next_point_ms",
        "_pauses",
        "_pending",
        "_tick_ms",
        "_ticket",
        "_waiters",
        "_waits",
        "_wal_at_bytes",
        "_wal_at_freeze",
        "_wal_enabled",
        "changed",
        "committed_seq",
        "conflicts",
        "durable_seq",
        "last_seq",
        "last_wal_id",
        "lock",
        "merge_operator",
        "now",
        "synchronous_commit",
        "wake",
    )

    def __init__(
        self,
        recovered: Recovered,
        view: ReadView,
        *,
        settings: Settings,
        clock: Clock,
        merge_operator: MergeOperator | None,
        metrics: Metrics,
    ) -> None:
        limits = plan_write_limits(
            l0_sst_size_bytes=settings.l0_sst_size_bytes, max_unflushed_bytes=settings.max_unflushed_bytes
        )
        self.lock: Lock = Lock()
        self.changed: Waiters = Waiters(self.lock)
        self.now: State = State(recovered.manifest, recovered.memtables, view, limits)
        self.wake: Wake
        self.last_seq: int = recovered.last_seq
        self.durable_seq: int = recovered.last_seq
        self.committed_seq: int = recovered.last_seq
        self.last_wal_id: WalId = recovered.last_wal_id
        self.synchronous_commit: bool = settings.synchronous_commit
        self.merge_operator: MergeOperator | None = merge_operator
        self.conflicts: ConflictTracker = ConflictTracker()
        self._pending: deque[int] = deque()
        self._waiters: list[Waiter] = []
        self._ticket = 0
        self._key_check = recovered.key_check
        self._clock = (
            clock
            if settings.on_clock_regression == "refuse"
            else HeldClock(clock, floor_ms=recovered.last_tick_ms)
        )
        self._tick_ms = recovered.last_tick_ms
        self._wal_enabled = settings.wal_enabled
        self._freeze_bytes = settings.l0_sst_size_bytes
        self._max_wal_bytes = settings.max_wal_bytes if settings.wal_enabled else None
        self._max_wal_files = settings.max_wal_flushes_before_l0_flush
        self._default_ttl_ms = settings.default_ttl_millis
        self._wal_at_freeze = recovered.last_wal_id
        self._armed = False
        self._next_point_ms = 0
        # The sizes of the active memtable at which the WAL is due, and at which a write has anything more to do than
        # to insert its rows.
        self._wal_at_bytes = self._act_at_bytes = 0
        self._memory: RowAccount | None = None
        self._plan_next_act()
        self._counts = WriteCounts(metrics, recovered.memtables, last_seq=recovered.last_seq)
        self._pauses = metrics.counter(names.DB_BACKPRESSURE_COUNT)
        self._waits = Operation(metrics.histogram(names.DB_OPERATION_SECONDS, op="put"), "put")

    # -- writing ------------------------------------------------------------------------------------------

    def commit_one(
        self, key: bytes, kind: int, value: bytes, expiry: Expiry, *, synchronous: bool, wait: bool = True
    ) -> WriteHandle:
        """Write one row with checked arguments. This is the hot path: it makes as few calls as possible.

        Without `wait` it raises `MustWait` where it would wait for room, and returns before the row is committed.
        """
        lock = self.lock
        while True:
            if lock.locked():
                wait_aside(lock)
            with lock:
                now = self.now
                now_ms = self._clock.now_ms()
                if now.writable and now_ms >= self._tick_ms:
                    if self._key_check is not None:
                        self._key_check.admit((key,))
                    seq = self.last_seq + 1
                    expires_ms = (
                        None
                        if expiry is BY_DEFAULT and self._default_ttl_ms is None
                        else expiry.resolve(now_ms, self._default_ttl_ms)
                    )
                    self._tick_ms = now_ms
                    if self.conflicts.running or self.synchronous_commit:
                        self._record_conflicts(seq, (key,), synchronous)
                    if not self._armed:
                        self._arm()
                    size = now.memtables.active.insert(key, seq, kind, value, now_ms, expires_ms)
                    if size < 0:
                        active = self._without_cut_off_rows().memtables.active
                        size = active.insert(key, seq, kind, value, now_ms, expires_ms)
                    if self.synchronous_commit:
                        self._record(seq, seq, synchronous)
                    else:  # what `_record` does then, without the cost of a call
                        self.last_seq = self.committed_seq = seq
                    if now_ms >= self._next_point_ms:
                        self._record_point(seq, now_ms)
                    if size >= self._act_at_bytes:
                        self._act(size)
                    break
            if not wait:
                raise MustWait
            self._wait_until_writable()
        if self.committed_seq < seq and wait and not synchronous:
            self.wait_committed(seq)
        return WriteHandle(self, Seq(seq), now_ms)

    def commit_batch(
        self,
        batch: WriteBatch,
        *,
        synchronous: bool,
        transaction: TransactionState | None = None,
        wait: bool = True,
    ) -> WriteHandle:
        """Write all rows of a batch under one sequence number, or none. `wait` is that of `commit_one`.

        A `transaction` is checked first, under the same lock, so no other write comes between. An error of the check
        stops the write.
        """
        check_batch(batch)
        default_ttl_ms = self._default_ttl_ms
        # Before the lock: this sorts, and calls the merge operator of the user.
        operations = batch.settled(default_ttl_ms=default_ttl_ms, operator=self.merge_operator)

        def insert(active: Any, seq: int, now_ms: int) -> int:
            rows = pending_rows(operations, now_ms, default_ttl_ms)
            size: int = active.insert_batch(rows, seq, now_ms)
            return size

        return self._commit(
            insert,
            lambda: [operation.key for operation in operations],
            synchronous=synchronous,
            transaction=transaction,
            wait=wait,
        )

    def commit_columns(self, group: RowGroup, *, synchronous: bool) -> WriteHandle:
        """Write all rows of a group, or none. They take one sequence number or more, and become visible at once.

        A WAL file and a memtable have all of them, so that a crash keeps all of them or none, too.
        """
        group.check_operands(self.merge_operator)
        return self._commit(
            lambda active, seq, now_ms: group.insert(active, seq, now_ms, self._default_ttl_ms),
            group.keys,
            synchronous=synchronous,
        )

    def _commit(
        self,
        insert: Callable[[Any, int, int], int],
        keys: Callable[[], list[bytes]],
        *,
        synchronous: bool,
        transaction: TransactionState | None = None,
        wait: bool = True,
    ) -> WriteHandle:
        """Write what `insert` adds to a memtable, given the first sequence number and the time; `keys` are its keys."""
        lock = self.lock
        while True:
            if lock.locked():
                wait_aside(lock)
            with lock:
                now = self.now
                now_ms = self._clock.now_ms()
                if now.writable and now_ms >= self._tick_ms:
                    if transaction is not None:
                        self.conflicts.check(transaction)
                    if self._key_check is not None:
                        self._key_check.admit(keys())
                    first = self.last_seq + 1
                    self._tick_ms = now_ms
                    if self.conflicts.running or self.synchronous_commit:
                        written = set(keys()) if transaction is None else transaction.write_keys
                        self._record_conflicts(first, written, synchronous)
                    if not self._armed:
                        self._arm()
                    active = now.memtables.active
                    size = insert(active, first, now_ms)
                    if size < 0:
                        active = self._without_cut_off_rows().memtables.active
                        size = insert(active, first, now_ms)
                    last = active.newest_seq()
                    self._record(first, last, synchronous)
                    if now_ms >= self._next_point_ms:
                        self._record_point(last, now_ms)
                    if size >= self._act_at_bytes:
                        self._act(size)
                    break
            if not wait:
                raise MustWait
            self._wait_until_writable()
        if self.committed_seq < last and wait and not synchronous:
            self.wait_committed(last)
        return WriteHandle(self, Seq(last), now_ms)

    def freeze(self) -> bool:
        """Begin a new memtable now; return False if the active one is empty."""
        with self.lock:
            return self._freeze()

    def hold(self) -> None:
        """Make writers wait until `release`. Writes that have begun are finished before this returns."""
        self.update(lambda now: replace(now, held=True))

    def release(self) -> None:
        """Let writers go on."""
        self.update(lambda now: replace(now, held=False))

    def skip_to(self, seq: int, ranges: Sequence[KeyRange]) -> None:
        """A bulk load wrote rows of these ranges under `seq`, into SSTs, or they were deleted. Later writes get larger
        sequence numbers.

        The caller holds the writers (`hold`), and every write is durable. A `seq` below `last_seq` changes nothing.
        """
        with self.lock:
            if self.durable_seq != self.last_seq:
                raise InternalError(
                    f"sequence number {self.last_seq} is not durable, only {self.durable_seq}: cannot skip to {seq}"
                )
            self.conflicts.record_load(seq, ranges)
            if seq > self.last_seq:
                self._counts.skipped(seq - self.last_seq)
                self.last_seq = self.durable_seq = self.committed_seq = seq

    # -- WAL and manifest ---------------------------------------------------------------------------------

    def seal_wal(self, new_token: Callable[[], str]) -> SealedWal | None:
        """The next WAL file, with all rows that no other file has; None without such rows. Batches are never split.

        The rows and their file are recorded by one assignment. A thread that is interrupted while it writes the file
        leaves it in `State.sealed`, and the next one writes it.
        """
        with self.lock:
            now = self._without_cut_off_rows()
            spans = now.memtables.spans()
            self._armed = False
            if not spans:
                return None
            last_id = now.sealed[-1].wal_id if now.sealed else self.last_wal_id
            file = SealedWal(WalId(last_id + 1), spans, self.last_seq, new_token())
            self.now = now.with_sealed(now.memtables.logged(), (*now.sealed, file))
            self._plan_next_act()
            return file

    def note_logged(self, file: SealedWal) -> None:
        """The oldest sealed WAL file is on the store, and so is every row up to its last sequence number.

        The file stays in `State.sealed` until all else is recorded. After an exception in between it is written again,
        which finds the file there.
        """
        wal_id = file.wal_id
        with self.lock:
            self.last_wal_id = max(self.last_wal_id, wal_id)
        self.advance_durable(file.last_seq)
        self._forget_sealed(file)
        # Many small WAL files make the next opening slow. After a flush, replay starts behind them.
        if wal_id - self._wal_at_freeze >= self._max_wal_files:
            self._wal_at_freeze = wal_id
            self.freeze()
        if self.now.memtables.frozen:
            self.wake.flusher()

    def unfinished_wal(self) -> SealedWal | None:
        """The oldest WAL file that was sealed and may not be on the store."""
        sealed = self.now.sealed
        return sealed[0] if sealed else None

    def _forget_sealed(self, file: SealedWal) -> None:
        with self.lock:
            now = self.now
            self.now = now.with_sealed(
                now.memtables, tuple(other for other in now.sealed if other is not file)
            )

    def adopt(
        self, latest: Versioned[Manifest], prepared: Any, flushed: FrozenMemtable | None = None
    ) -> None:
        """Continue with a newer manifest, and drop the memtable whose rows it holds; see `State.adopt`."""
        self.update(lambda now: now.adopt(latest, prepared, flushed))
        if self._memory is not None and flushed is not None:
            self.retry()
            self._memory.settle()
        self.wake.flusher()

    def update(self, change: Callable[[State], State]) -> None:
        """Replace the state by `change(now)`, and wake every thread that waits for a change."""
        with self.lock:
            self.changed.notify_all()
            self.now = change(self.now)

    def notify(self) -> None:
        """Make waiting threads test their conditions again."""
        with self.lock:
            self.changed.notify_all()

    def memtable_bytes(self) -> tuple[int, int]:
        """The bytes in the active memtable and in the frozen ones."""
        memtables = self.now.memtables
        active: int = memtables.active.size()
        return active, memtables.unflushed_bytes - active

    def retry(self) -> None:
        """Memory was released: writers that wait for it continue, if there is enough."""
        with self.lock:
            self.changed.notify_all()
            self._reserve()

    def draw_from(self, budget: MemoryBudget) -> None:
        """Ask this budget for the memory of rows from now on. `wake` must be set: the budget may freeze a memtable."""
        self._memory = budget.open_account(self)
        self.retry()

    def release_memory(self) -> None:
        """The database is closed: its part of the memory budget is for the others."""
        if self._memory is not None:
            self._memory.close()

    def frozen_memtables(self) -> tuple[FrozenMemtable, ...]:
        """The frozen memtables, newest first.

        Under the lock: `wake.flusher` is called just before a memtable is frozen.
        """
        with self.lock:
            return self.now.memtables.frozen

    def report(self) -> None:
        """Update the write counters. Rows are counted in the memtables, where counting is free."""
        with self.lock:
            self._counts.report(self._without_cut_off_rows().memtables, self.last_seq)

    # -- status -------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether writers wait for room."""
        now = self.now
        return not now.writable and now.refusal is None

    @property
    def may_wait(self) -> bool:
        """Whether a write may have to wait: for room, or for earlier synchronous writes."""
        return self.paused or self.synchronous_commit

    def check_open(self) -> None:
        """Raise `Closed` if the database was closed or a newer writer took it over."""
        closed = self.now.closed
        if closed is not None:
            raise Closed(str(closed), reason=closed.reason)

    def refuse(self, reason: FlagstoneError) -> None:
        """Refuse all further writes, also those that wait for room. Rows that were taken can still become durable."""
        self.update(lambda now: now if now.refusal is not None else replace(now, refusal=reason))

    def fail(self, error: FlagstoneError) -> None:
        """No further write becomes durable: every present and later wait for one raises `error`.

        After `Closed` reads raise as well; after any other error they continue with what is known. Synchronous writes
        under way, and all later ones, stay invisible. The first failure counts.
        """
        with self.lock:
            self.changed.notify_all()
            # One assignment: a waiter that sees the failure must find writes refused and the database closed.
            self.now = self.now.failed(error, ClosedView)
            woken, self._waiters = self._waiters, []
        wake_waiters(woken)

    def raise_failure(self) -> None:
        """Raise the failure if there is one. Each caller gets an exception of its own: threads may not share one."""
        failure = self.now.failure
        if failure is not None:
            fresh = copy(failure)
            fresh.__notes__ = list(getattr(failure, "__notes__", ()))
            raise fresh from failure

    # -- durability ---------------------------------------------------------------------------------------

    def request_durable(self) -> None:
        """Make every write so far durable soon: through the WAL, or without a WAL through L0."""
        if self._wal_enabled:
            self.wake.wal_now()
        else:
            self.freeze()

    def advance_durable(self, seq: int) -> None:
        """Every write up to `seq` is on the store: commit the writes that waited for it, and wake their callers.

        A smaller number than before changes nothing. Neither does any number after a failure: a write that was
        reported as failed must not succeed for another caller.
        """
        with self.lock:
            if seq > self.last_seq:
                raise InternalError(
                    f"sequence number {seq} is durable, but only {self.last_seq} were given out"
                )
            if seq <= self.durable_seq or self.now.failure is not None:
                return
            self.changed.notify_all()
            self.durable_seq = seq
            pending = self._pending
            while pending and pending[0] <= seq:
                pending.popleft()
            self.committed_seq = pending[0] - 1 if pending else self.last_seq
            woken: list[Waiter] = []
            while self._waiters and self._waiters[0][0] <= seq:
                woken.append(heappop(self._waiters))
        wake_waiters(woken)

    def is_durable(self, seq: int) -> bool:
        """Whether that write is on the store. Raises the failure if it never will be."""
        if self.durable_seq >= seq:
            return True
        self.raise_failure()
        return False

    def wait_durable(self, seq: int, timeout: float | None = None) -> None:
        """Request a flush, and block until every write up to `seq` is on the store.

        Raises:
            DurabilityTimeout: it is not there after `timeout` seconds; it may still get there.
            FlagstoneError: it will never get there; the error given to `fail`.

        """
        if not self.is_durable(seq):
            with self._waits.measure():
                self._wait_durable(seq, timeout)

    def _wait_durable(self, seq: int, timeout: float | None) -> None:
        if timeout is None and self._wal_enabled:
            # No other thread has to wake up if this one writes the file. A store may take longer than a timeout allows.
            self.wake.write_wal()
            if self.is_durable(seq):
                return
        else:
            self.request_durable()
        self.changed.wait_for(
            lambda: self.durable_seq >= seq or self.now.failure is not None, timeout=timeout
        )
        if not self.is_durable(seq):
            raise DurabilityTimeout(
                f"write {seq} is not durable after {timeout} s; the store has everything up to {self.durable_seq}"
            )

    def wait_committed(self, seq: int) -> None:
        """Block until the write is visible, that is until every earlier synchronous write is on the store.

        Raises:
            FlagstoneError: it never will be; the error given to `fail`.

        """
        self.request_durable()
        self.changed.wait_for(lambda: self.committed_seq >= seq or self.now.failure is not None)
        if self.committed_seq < seq:
            self.raise_failure()

    async def wait_committed_async(self, seq: int) -> None:
        """`wait_committed` for a coroutine. It occupies no thread."""
        if self.committed_seq < seq:
            self.request_durable()
            await self.changed.wait_for_async(
                lambda: self.committed_seq >= seq or self.now.failure is not None
            )
            if self.committed_seq < seq:
                self.raise_failure()

    def wait_durable_async(self, seq: int) -> Generator[Future[None], None, None]:
        """`wait_durable` for a coroutine of any event loop: `yield from` it in `__await__`. It occupies no thread."""
        if self.is_durable(seq):
            return
        # A caller that awaits has imported asyncio already; the others need not.
        from asyncio import get_running_loop  # noqa: PLC0415

        loop = get_running_loop()
        future = loop.create_future()
        with self.lock:
            # Under the lock: an advance in between would never reach this future.
            settled = self.durable_seq >= seq or self.now.failure is not None
            if not settled:
                self._ticket += 1
                heappush(self._waiters, (seq, self._ticket, loop, future))
        if not settled:
            with self._waits.measure():
                self.request_durable()
                yield from future
        if self.durable_seq < seq:
            self.raise_failure()

    def flush_memtables(
        self, unless: Callable[[], bool] = lambda: False, *, timeout_s: float | None = None
    ) -> None:
        """Freeze the active memtable, and wait until every write so far is in SSTs or `unless` returns True."""
        self.freeze()
        last_seq = self.last_seq
        done = self.changed.wait_for(
            lambda: self.now.is_flushed(last_seq) or self.now.failure is not None or unless(),
            timeout=timeout_s,
        )
        if not done:
            raise Unavailable(f"not every write is in an SST after {timeout_s} s")
        if not self.now.is_flushed(last_seq):
            self.raise_failure()
            self.check_open()

    # -- snapshots and transactions -----------------------------------------------------------------------

    def begin_snapshot(
        self, deadline_ms: int | None, choose: Callable[[int, State], int]
    ) -> tuple[ReadPoint, ReadView]:
        """A read point at the sequence number that `choose` selects, and its read view."""
        with self.lock:
            seq = choose(self.committed_seq, self.now)
            return self.conflicts.begin_snapshot(seq, deadline_ms=deadline_ms), self.now.view

    def begin_transaction(
        self, isolation: Isolation, deadline_ms: int | None
    ) -> tuple[TransactionState, ReadView]:
        """A transaction that reads at the newest committed sequence number, and its read view."""
        with self.lock:
            state = self.conflicts.begin(self.committed_seq, isolation, deadline_ms=deadline_ms)
            return state, self.now.view

    def check_conflicts(self, transaction: TransactionState) -> None:
        """Raise `TransactionConflict` if a later write changed what the transaction read or wrote."""
        with self.lock:
            self.conflicts.check(transaction)

    def end_read(self, point: ReadPoint) -> None:
        """End a snapshot or transaction. Ending it twice is fine."""
        with self.lock:
            self.conflicts.end(point)

    def has_expired(self, point: ReadPoint) -> bool:
        """Whether its deadline has passed. A point that is found late is ended here."""
        if not point.is_late(elapsed_ms(self._clock)):
            return False
        with self.lock:
            self.conflicts.expire_point(point)
        return True

    def expire_reads(self) -> None:
        """End the snapshots and transactions whose deadline has passed."""
        with self.lock:
            self.conflicts.expire(elapsed_ms(self._clock))

    def min_active_seq(self) -> int | None:
        """The smallest sequence number that a snapshot or transaction reads at; None if there is none."""
        with self.lock:
            return self.conflicts.min_active_seq()

    # -- under the lock -----------------------------------------------------------------------------------

    def _record(self, first: int, last: int, synchronous: bool) -> None:
        """The write takes its sequence numbers: from here on it has happened.

        An exception in here leaves a write that has happened, and is visible with the next one at the latest.
        """
        if self._defers(synchronous):
            if synchronous:
                # The first number: `committed_seq` stays below all of them until all of them are durable.
                self._pending.append(first)
            self.last_seq = last
        else:
            self.last_seq = last
            self.committed_seq = last

    def _defers(self, synchronous: bool) -> bool:
        """Whether the next write becomes visible only when it is durable."""
        return self.synchronous_commit and (synchronous or bool(self._pending))

    def _without_cut_off_rows(self) -> State:
        """Remove the rows of a write that an exception cut off, and return the state."""
        now = self.now
        if now.memtables.active.newest_seq() > self.last_seq:
            now = self.now = now.with_memtables(now.memtables.through(self.last_seq))
        return now

    def _record_conflicts(self, seq: int, keys: Sequence[bytes] | set[bytes], synchronous: bool) -> None:
        # Before the rows: if the write is recorded here and does not happen, some transaction retries.
        visible = self.committed_seq if self._defers(synchronous) else seq
        self.conflicts.record_commit(seq, keys, committed_seq=visible)

    def _arm(self) -> None:
        # The timer first: a timer without rows is harmless, rows without a timer would never be written.
        if self._wal_enabled:
            self.wake.wal_soon()
        self._armed = True

    def _act(self, size: int) -> None:
        """The active memtable is large enough for a WAL file or for L0."""
        if size >= self._freeze_bytes:
            self._freeze()
            return
        if size >= self._wal_at_bytes:
            self.wake.wal_now()
            self._wal_at_bytes = self._freeze_bytes
        self._reserve()

    def _freeze(self) -> bool:
        before = self._without_cut_off_rows()
        after = before.freeze(
            last_seq=self.last_seq, last_tick_ms=self._tick_ms, replay_after=self.last_wal_id
        )
        if after is before:
            return False
        # The flusher reads under the lock: it sees the frozen memtable, or none.
        self._wal_at_freeze = self.last_wal_id
        self.wake.flusher()
        self.now = after
        self._plan_next_act()
        return True

    def _plan_next_act(self) -> None:
        """Call it when the WAL has taken all rows, or a new memtable begins."""
        logged = self.now.memtables.active.size()
        self._wal_at_bytes = (
            self._freeze_bytes
            if self._max_wal_bytes is None
            else min(self._freeze_bytes, logged + self._max_wal_bytes)
        )
        self._reserve()

    def _reserve(self) -> None:
        """Ask the memory budget for what the next rows need. While it refuses, writers wait."""
        self._act_at_bytes = self._wal_at_bytes
        if self._memory is None:
            return
        now = self.now
        granted, more = self._memory.ask(now.memtables.unflushed_bytes)
        self._act_at_bytes = min(self._wal_at_bytes, now.memtables.active.size() + more)
        if now.starved is granted:
            self.now = replace(now, starved=not granted)

    def _record_point(self, seq: int, now_ms: int) -> None:
        now = self.now
        points = now.memtables.points.record(seq, now_ms // 1000)
        self.now = replace(now, memtables=replace(now.memtables, points=points))
        self._next_point_ms = now_ms + _POINT_EVERY_MS

    # -- without the lock ---------------------------------------------------------------------------------

    def _wait_until_writable(self) -> None:
        """Return when a write may try again; raise if it may not."""
        if not self.now.writable:
            timeout = self._begin_wait()
            if not self.changed.wait_for(lambda: self._may_try(timeout), timeout):
                self._hurry()
        self._check_accepting()
        if self._clock.now_ms() < self._tick_ms:
            self._wait_for_clock()

    async def wait_until_writable(self) -> None:
        """After `MustWait`: the same for a coroutine. It occupies no thread, so all threads of a loop stay free."""
        if not self.now.writable:
            timeout = self._begin_wait()
            if not await self.changed.wait_for_async(lambda: self._may_try(timeout), timeout):
                self._hurry()
        self._check_accepting()
        if self._clock.now_ms() < self._tick_ms:
            from asyncio import to_thread  # noqa: PLC0415

            await to_thread(self._wait_for_clock)

    def _begin_wait(self) -> float | None:
        """How long a writer waits at most: for a moment if writers are only slowed down, otherwise without a limit."""
        now = self.now
        if now.refusal is None:
            self._pauses.add()
        if now.starved and self._memory is not None:
            self._memory.relieve()
        return now.limits.slow_s if now.slowed else None

    def _may_try(self, timeout: float | None) -> bool:
        """Whether a writer that waits for `timeout` seconds wakes up. If writers that were stopped are only slowed down
        now, it does so as well, to wait for a moment then.
        """
        now = self.now
        return now.writable or now.refusal is not None or (timeout is None and now.slowed)

    def _hurry(self) -> None:
        self.update(lambda now: replace(now, hurried=True))

    def _check_accepting(self) -> None:
        if self.now.refusal is not None:
            self.raise_failure()
            raise copy(self.now.refusal)  # threads may not share a traceback

    def _wait_for_clock(self) -> None:
        """Row times never decrease. Wait a moment for a clock that was set back, as SlateDB does.

        Readers, flushes, the WAL and later writers continue meanwhile.
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
