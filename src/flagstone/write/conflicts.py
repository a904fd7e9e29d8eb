"""Which transactions may commit, and when they expire.

A transaction reads at the sequence number it started at. At commit its keys are compared with the keys of all writes
with larger sequence numbers:

    snapshot        its writes must not overlap theirs (no lost update)
    serializable    its reads, single keys and whole ranges, must not overlap their writes either

`ConflictTracker` takes no lock: its caller holds the write lock, because check and commit are one step. Everything
lives in memory only: a crash ends all transactions, none of them half committed.

The deadline of a snapshot or transaction is checked at every use, and by the manifest follower for unused ones. It
counts elapsed time: a wall clock that is set forward ends no transaction early, and one that is set back keeps none
alive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from heapq import heappop, heappush
from typing import Final, Literal

from flagstone.config.durations import as_duration
from flagstone.errors import InternalError, TransactionConflict
from flagstone.runtime.clock import Clock
from flagstone.types import KeyRange

Isolation = Literal["snapshot", "serializable"]

MAX_TRACKED_KEYS: Final = 1_000_000

Timeout = timedelta | str
"""A timedelta, or text such as "30s"; `timedelta.max` stands for no limit."""

DEFAULT_TIMEOUT: Final = timedelta(hours=1)
"""Old versions are kept while a snapshot or a transaction is open: a forgotten one must not keep them forever."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_DEFAULT_MS: Final = DEFAULT_TIMEOUT // _MILLISECOND


def elapsed_ms(clock: Clock) -> int:
    """The time that deadlines are compared with."""
    return int(clock.monotonic() * 1000)


def deadline_ms(clock: Clock, timeout: Timeout | None) -> int | None:
    """When a snapshot or transaction that begins now expires; None for never. Raises `InvalidRequest`."""
    if timeout is None:
        return elapsed_ms(clock) + _DEFAULT_MS
    lifetime = as_duration(timeout, "timeout", minimum=_MILLISECOND)
    return None if lifetime == timedelta.max else elapsed_ms(clock) + lifetime // _MILLISECOND


class TransactionExpired(TransactionConflict):
    """The transaction ran for longer than it may, or too much was written meanwhile: run it again."""

    @classmethod
    def of_time(cls) -> TransactionExpired:
        return cls(
            "the transaction was left open past its time to live; run it again, with a longer timeout if it needs one"
        )


class ReadPoint:
    """A sequence number that a snapshot or a transaction reads at. Its row versions must be kept.

    `ended` is set by its owner, `expired` when its deadline passed. `dropped` is set by a finalizer, which must not
    take the lock: no code can read at this point any more.
    """

    __slots__ = ("deadline_ms", "dropped", "ended", "expired", "seq", "ticket")

    def __init__(self, seq: int, ticket: int, deadline_ms: int | None) -> None:
        self.seq: int = seq
        self.ticket: int = ticket
        self.deadline_ms: int | None = deadline_ms
        self.ended: bool = False
        self.expired: bool = False
        self.dropped: bool = False

    def is_late(self, now_ms: int) -> bool:
        """Whether it has expired, or must now."""
        return self.expired or (self.deadline_ms is not None and self.deadline_ms <= now_ms)


class TransactionState(ReadPoint):
    """What one transaction has read and written so far."""

    __slots__ = ("_unmarked", "_written", "isolation", "read_keys", "read_ranges")

    def __init__(self, seq: int, ticket: int, deadline_ms: int | None, isolation: Isolation) -> None:
        super().__init__(seq, ticket, deadline_ms)
        self.isolation: Isolation = isolation
        self.read_keys: set[bytes] = set()
        self.read_ranges: list[KeyRange] = []
        self._written: set[bytes] = set()
        self._unmarked: set[bytes] = set()

    def track_read(self, key: bytes) -> None:
        """The transaction read `key`, with or without a value. Only serializable isolation records it."""
        if self.isolation == "serializable":
            self.read_keys.add(key)

    def track_range(self, keys: KeyRange) -> None:
        """The transaction scanned `keys`. A row that another write adds there conflicts as well."""
        if self.isolation == "serializable" and not keys.empty:
            self.read_ranges.append(keys)

    def track_write(self, key: bytes) -> None:
        """The transaction will write `key`."""
        self._written.add(key)

    def mark_read(self, keys: Iterable[bytes]) -> None:
        """Let the commit depend on `keys` as if the transaction had read them, under either isolation."""
        self.read_keys.update(keys)

    def unmark_write(self, keys: Iterable[bytes]) -> None:
        """Exclude the writes of `keys` from conflict detection, also those that follow."""
        self._unmarked.update(keys)

    @property
    def write_keys(self) -> set[bytes]:
        """The keys whose writes count for conflicts: of this transaction, and of others with it."""
        return self._written - self._unmarked


class ConflictTracker:
    """The running transactions and snapshots, and the writes that they can conflict with.

    A write is remembered while a transaction runs that cannot see it, and until it is visible, because a transaction
    could still begin before it. At most `max_tracked_keys` keys are kept. Beyond that the oldest writes are forgotten,
    and transactions that started before them can no longer commit.
    """

    __slots__ = (
        "_commits",
        "_committed_seq",
        "_forgotten_seq",
        "_latest",
        "_loads",
        "_max_keys",
        "_oldest",
        "_points",
        "_sorted",
        "_ticket",
        "_tracked",
        "_unsorted",
        "running",
    )

    def __init__(self, *, max_tracked_keys: int = MAX_TRACKED_KEYS) -> None:
        self._max_keys = max_tracked_keys
        self._points: dict[int, ReadPoint] = {}
        # By ticket. While it is empty, a write that is visible at once is not recorded.
        self.running: dict[int, TransactionState] = {}
        # A heap of (seq, ticket) of every point; points that have ended stay until they are on top.
        self._oldest: list[tuple[int, int]] = []
        self._ticket = 0
        self._commits: deque[tuple[int, Collection[bytes]]] = deque()
        self._tracked = 0
        # The newest sequence number of each remembered key; then its keys, sorted and not sorted yet.
        self._latest: dict[bytes, int] = {}
        self._sorted: list[bytes] = []
        self._unsorted: list[bytes] = []
        self._forgotten_seq = 0
        self._committed_seq = 0
        self._loads: list[tuple[int, Sequence[KeyRange]]] = []

    @property
    def tracked_keys(self) -> int:
        """How many written keys are remembered, counted once per commit. Memory is bounded by it."""
        return self._tracked

    def begin(self, seq: int, isolation: Isolation, *, deadline_ms: int | None = None) -> TransactionState:
        """A transaction that reads at `seq`, which must be the newest visible sequence number."""
        self._ticket += 1
        state = TransactionState(seq, self._ticket, deadline_ms, isolation)
        self._committed_seq = max(self._committed_seq, seq)
        self._add(state)
        self.running[state.ticket] = state
        return state

    def begin_snapshot(self, seq: int, *, deadline_ms: int | None = None) -> ReadPoint:
        """A snapshot that reads at `seq`."""
        self._ticket += 1
        point = ReadPoint(seq, self._ticket, deadline_ms)
        self._add(point)
        return point

    def end(self, point: ReadPoint) -> None:
        """End a transaction or snapshot. Ending it again is fine: it completes a call that an exception cut off."""
        point.ended = True
        self._points.pop(point.ticket, None)
        if self.running.pop(point.ticket, None) is not None and not self.running:
            self._forget_through(self._committed_seq)

    def expire(self, now_ms: int) -> list[ReadPoint]:
        """End the points whose deadline has passed, and those that were dropped. Returns the former."""
        points = list(self._points.values())
        late = [point for point in points if point.is_late(now_ms)]
        for point in late:
            self.expire_point(point)
        for point in points:
            if point.dropped:
                self.end(point)
        return late

    def expire_point(self, point: ReadPoint) -> None:
        """End a transaction or snapshot whose deadline has passed."""
        point.expired = True
        self.end(point)

    def min_active_seq(self) -> int | None:
        """The smallest sequence number that a transaction or snapshot reads at, or None."""
        oldest = self._oldest
        while oldest and oldest[0][1] not in self._points:
            heappop(oldest)
        return oldest[0][0] if oldest else None

    def check(self, state: TransactionState) -> None:
        """Return if the transaction may commit now.

        Raises:
            TransactionConflict: a later write changed what it depends on; the message contains one key.
            TransactionExpired: its deadline has passed, or the writes since it began are no longer all remembered.

        """
        if state.expired:
            raise TransactionExpired.of_time()
        if state.ended:
            raise InternalError("a transaction was checked after it had ended")
        if state.seq < self._forgotten_seq:
            raise TransactionExpired(
                f"more than {self._max_keys} keys were written since the transaction began; run it again, shorter"
            )
        if self._meets_load(state):
            raise TransactionConflict(
                f"rows were loaded into what the transaction depends on, or a range of it was deleted, after it began "
                f"at {state.seq}; run it again"
            )
        key = self._conflicting_key(state)
        if key is not None:
            raise TransactionConflict(
                f"another write changed {key!r} (sequence number {self._latest[key]}) after the transaction "
                f"began at {state.seq}; run it again"
            )

    def record_commit(self, seq: int, keys: Collection[bytes], *, committed_seq: int) -> None:
        """A write of `keys` takes sequence number `seq`; after it `committed_seq` is visible. `keys` are not copied.

        A synchronous write is recorded when it gets its sequence number, before it is visible. A transaction that
        begins before it is visible starts below it, and must find it here.
        """
        self._committed_seq = max(self._committed_seq, committed_seq)
        self._forget_through(self._needed_above())
        if not keys or (not self.running and committed_seq >= seq):
            return
        self._commits.append((seq, keys))
        self._tracked += len(keys)
        latest = self._latest
        for key in keys:
            if key not in latest:
                # In this order: every key in `latest` must also be found by range.
                self._unsorted.append(key)
            latest[key] = seq
        while self._tracked > self._max_keys:
            self._forgotten_seq = self._commits[0][0]
            self._forget_through(self._forgotten_seq)

    def record_load(self, seq: int, ranges: Sequence[KeyRange]) -> None:
        """A bulk load wrote rows in `ranges` under `seq`, or they were deleted. That is visible from now on."""
        self._committed_seq = max(self._committed_seq, seq)
        self._loads = [load for load in self._loads if load[0] > self._needed_above()]
        if self.running:
            self._loads.append((seq, ranges))

    def _add(self, point: ReadPoint) -> None:
        # In this order: a heap entry without its point is skipped.
        heappush(self._oldest, (point.seq, point.ticket))
        self._points[point.ticket] = point

    def _needed_above(self) -> int:
        """Writes up to this sequence number conflict with no transaction that runs or may still begin.

        Snapshots count as well: they are few, and only make the tracker remember more.
        """
        oldest = self.min_active_seq() if self.running else None
        return self._committed_seq if oldest is None else oldest

    def _forget_through(self, seq: int) -> None:
        commits, latest = self._commits, self._latest
        if not commits or commits[0][0] > seq:
            return
        while commits and commits[0][0] <= seq:
            written, keys = commits.popleft()
            self._tracked -= len(keys)
            for key in keys:
                if latest.get(key) == written:
                    del latest[key]
        # An exception may strike between any two of these: a sorted key that is not in `latest` is harmless.
        if not commits:
            latest.clear()
            self._sorted = []
            self._unsorted = []
        elif len(self._sorted) + len(self._unsorted) > 2 * len(latest):
            self._unsorted = list(latest)
            self._sorted = []

    def _meets_load(self, state: TransactionState) -> bool:
        """Whether a later bulk load overlaps what it depends on. Only the key ranges of loads are remembered."""
        ranges = [keys for seq, loaded in self._loads if seq > state.seq for keys in loaded]
        return any(
            any(key in keys for key in state.write_keys)
            or any(key in keys for key in state.read_keys)
            or any(not keys.intersect(read).empty for read in state.read_ranges)
            for keys in ranges
        )

    def _conflicting_key(self, state: TransactionState) -> bytes | None:
        latest, started = self._latest, state.seq
        for keys in (state.write_keys, state.read_keys):
            # Iterate over the smaller side.
            if len(keys) <= len(latest):
                found = next((key for key in keys if latest.get(key, 0) > started), None)
            else:
                found = next((key for key, seq in latest.items() if seq > started and key in keys), None)
            if found is not None:
                return found
        if not state.read_ranges:
            return None
        ordered = self._ordered_keys()
        for keys_read in state.read_ranges:
            at = 0 if keys_read.start is None else bisect_left(ordered, keys_read.start)
            end = len(ordered) if keys_read.stop is None else bisect_left(ordered, keys_read.stop)
            for position in range(at, end):
                if latest.get(ordered[position], 0) > started:
                    return ordered[position]
        return None

    def _ordered_keys(self) -> list[bytes]:
        if self._unsorted:
            self._sorted = sorted(self._sorted + self._unsorted)
            self._unsorted = []
        return self._sorted
