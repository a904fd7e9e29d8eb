"""The state of a database that is open for writing, at one moment.

`Memtables` and `State` are immutable. Every change builds the next value aside, and the writer then replaces the old
one by a single assignment (`flagstone.write.writer_state`). So an exception between any two steps (Ctrl-C, out of
memory) never leaves half of a change behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from flagstone.errors import Closed, FlagstoneError
from flagstone.kernels import memtable as kernel
from flagstone.lsm.sequence import SequenceTracker
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime import metric_names as names
from flagstone.runtime.metrics import Metrics
from flagstone.types import Seq, WalId
from flagstone.write.backpressure import WriteLimits, plan_write_pause

WalPosition = tuple[int, int]

START: Final[WalPosition] = (0, 0)


@dataclass(frozen=True, slots=True)
class FrozenMemtable:
    """A memtable that takes no more rows, with what the manifest must know once its rows are in L0.

    `replay_after` is the last WAL file that was on the store when it was frozen: later files may hold rows that
    are not in it.
    """

    memtable: kernel.Memtable
    last_seq: Seq
    last_tick_ms: int
    replay_after: WalId
    points: SequenceTracker


@dataclass(frozen=True, slots=True)
class WalSpan:
    """Rows of one memtable that are to be written to the WAL, in commit order."""

    memtable: kernel.Memtable
    start: WalPosition
    stop: WalPosition


@dataclass(frozen=True, slots=True)
class SealedWal:
    """The content of one WAL file that may not be on the store yet: its rows, and the last sequence number among them.

    Every attempt to write the file uses the same id and token, so that a later one recognises the file of an earlier
    one that was interrupted.
    """

    wal_id: WalId
    spans: tuple[WalSpan, ...]
    last_seq: int
    token: str


@dataclass(frozen=True, slots=True)
class Memtables:
    """The active memtable, the frozen ones (newest first, as reads want them), and how far each is in the WAL.

    `unlogged` has every memtable with rows that are not in the WAL, oldest first, with the position from which on;
    the active one is always its last. `rows_before`, `bytes_before` and `headers_before` count what was in all former
    active memtables, `bytes_logged` what is in the WAL, `freezes` the former memtables, and `lookups_before` the reads
    of dropped ones.
    """

    active: kernel.Memtable = field(default_factory=kernel.Memtable)
    frozen: tuple[FrozenMemtable, ...] = ()
    points: SequenceTracker = field(default_factory=SequenceTracker)
    unlogged: tuple[tuple[kernel.Memtable, WalPosition], ...] = ()
    rows_before: int = 0
    bytes_before: int = 0
    bytes_logged: int = 0
    freezes: int = 0
    lookups_before: int = 0
    headers_before: int = 0

    @property
    def unflushed_bytes(self) -> int:
        """What is in memory and not yet in SSTs."""
        return self.active.size() + sum(frozen.memtable.size() for frozen in self.frozen)

    @property
    def rows(self) -> int:
        """All rows that were ever written to the active memtables."""
        return self.rows_before + len(self.active)

    @property
    def written_bytes(self) -> int:
        """What those rows occupied."""
        return self.bytes_before + self.active.size()

    @property
    def header_bytes(self) -> int:
        """How many of them were headers."""
        return self.headers_before + self.active.headers()

    @property
    def lookups(self) -> int:
        """The number of point reads of memtables. Reads of memtables that were dropped meanwhile are not counted."""
        held: int = sum(memtable.asked() for memtable in self.newest_first())
        return self.lookups_before + held

    def newest_first(self) -> tuple[Any, ...]:
        """All memtables, newest first."""
        return (self.active, *(frozen.memtable for frozen in self.frozen))

    def freeze(self, *, last_seq: Seq, last_tick_ms: int, replay_after: WalId) -> Memtables:
        """Begin a new memtable; unchanged when the active one is empty."""
        if not len(self.active):
            return self
        frozen = FrozenMemtable(self.active, last_seq, last_tick_ms, replay_after, self.points)
        active = kernel.Memtable()
        return Memtables(
            active,
            (frozen, *self.frozen),
            SequenceTracker(),
            (*self._unlogged(), (active, START)),
            self.rows_before + len(self.active),
            self.written_bytes,
            self.bytes_logged,
            self.freezes + 1,
            self.lookups_before,
            self.header_bytes,
        )

    def without(self, flushed: FrozenMemtable) -> Memtables:
        """The rows of the oldest frozen memtable are in L0 now. So the WAL need not have them, and without a WAL it
        never does.
        """
        assert self.frozen[-1] is flushed, "memtables are flushed in the order they were frozen"
        lookups = self.lookups_before + flushed.memtable.asked()
        unlogged = tuple(part for part in self.unlogged if part[0] is not flushed.memtable)
        return replace(self, frozen=self.frozen[:-1], unlogged=unlogged, lookups_before=lookups)

    def logged(self) -> Memtables:
        """All rows so far are in the WAL, or on their way into it."""
        return Memtables(  # not `replace`, which takes longer than all else a small WAL file needs here
            self.active,
            self.frozen,
            self.points,
            ((self.active, self.active.position()),),
            self.rows_before,
            self.bytes_before,
            self.written_bytes,
            self.freezes,
            self.lookups_before,
            self.headers_before,
        )

    def spans(self) -> tuple[WalSpan, ...]:
        """The rows that the next WAL file must hold."""
        return tuple(
            WalSpan(memtable, start, memtable.position())
            for memtable, start in self._unlogged()
            if memtable.position() != start
        )

    def through(self, last_seq: int) -> Memtables:
        """The same without the rows above `last_seq`, which a write that was cut off left in the active memtable."""
        active = self.active.copy_through(last_seq)
        *older, (_, start) = self._unlogged()
        lookups = self.lookups_before + self.active.asked()
        return replace(self, active=active, unlogged=(*older, (active, start)), lookups_before=lookups)

    def _unlogged(self) -> tuple[tuple[kernel.Memtable, WalPosition], ...]:
        return self.unlogged or ((self.active, START),)


@dataclass(frozen=True, slots=True)
class State:
    """One moment of an open database.

    `view` is what reads see: the memtables above the SSTs of the manifest. `sealed` are the WAL files that may not be
    on the store yet, oldest first. `held` makes writers wait, and so does `starved`: the memory budget has no room for
    more rows. So do memtables that are many and not yet in SSTs, until `hurried`: the writers have waited long enough
    since the last freeze. `refusal` makes writes raise. After `failure` nothing
    becomes durable any more. `closed` makes reads raise as well. `writable` says whether a write may go ahead; every
    write reads it.
    """

    manifest: Versioned[Manifest]
    memtables: Memtables
    view: Any
    limits: WriteLimits
    sealed: tuple[SealedWal, ...] = ()
    held: bool = False
    starved: bool = False
    hurried: bool = False
    refusal: FlagstoneError | None = None
    failure: FlagstoneError | None = None
    closed: Closed | None = None
    writable: bool = field(init=False)

    def __post_init__(self) -> None:
        paused = self._stopped or (self.ahead and not self.hurried)
        object.__setattr__(self, "writable", not paused and self.refusal is None)

    @property
    def crowded(self) -> bool:
        """Whether writers wait until a frozen memtable is in an SST.

        An active memtable alone never holds writers up: freezing it is what would make room.
        """
        pause = plan_write_pause(
            unflushed_bytes=self.memtables.unflushed_bytes, max_unflushed_bytes=self.limits.stop_at_bytes
        )
        return pause is not None and bool(self.memtables.frozen)

    @property
    def _stopped(self) -> bool:
        return self.held or self.starved or self.crowded

    @property
    def slowed(self) -> bool:
        """Whether writers wait for a flush, but only for a moment."""
        return self.ahead and not self.hurried and not self._stopped

    @property
    def ahead(self) -> bool:
        """Whether writers are so far ahead of the flushes that they slow down."""
        return bool(self.memtables.frozen) and self.memtables.unflushed_bytes >= self.limits.slow_from_bytes

    @property
    def status(self) -> Literal["open", "failed", "closed"]:
        """Open, failed (reads continue, no write becomes durable), or closed."""
        return "closed" if self.closed is not None else "open" if self.failure is None else "failed"

    def is_flushed(self, seq: int) -> bool:
        """Whether every row up to `seq` is in an SST, provided that no active memtable holds one."""
        pending = self.memtables.frozen
        return not pending or pending[-1].last_seq > seq or self.manifest.value.last_l0_seq >= seq

    def failed(self, error: FlagstoneError, closed_view: Callable[[Closed], Any]) -> State:
        """No write becomes durable any more, and after `Closed` no read succeeds. The first failure counts."""
        ended = replace(self, refusal=self.refusal or error, failure=self.failure or error)
        if self.closed is None and isinstance(error, Closed):
            return replace(ended, closed=error, view=closed_view(error))
        return ended

    def with_memtables(self, memtables: Memtables) -> State:
        """The same SSTs below other memtables."""
        return replace(self, memtables=memtables, view=self._view(self.manifest, memtables, self.view))

    def with_sealed(self, memtables: Memtables, sealed: tuple[SealedWal, ...]) -> State:
        """The same with other unfinished WAL files. `memtables` are the present ones, up to how far they are logged."""
        return State(
            self.manifest,
            memtables,
            self.view,
            self.limits,
            sealed,
            self.held,
            self.starved,
            self.hurried,
            self.refusal,
            self.failure,
            self.closed,
        )

    def freeze(self, *, last_seq: int, last_tick_ms: int, replay_after: WalId) -> State:
        """Begin a new memtable; unchanged when the active one is empty."""
        memtables = self.memtables.freeze(
            last_seq=Seq(last_seq), last_tick_ms=last_tick_ms, replay_after=replay_after
        )
        if memtables is self.memtables:
            return self
        return replace(
            self, memtables=memtables, view=self._view(self.manifest, memtables, self.view), hurried=False
        )

    def adopt(
        self, latest: Versioned[Manifest], prepared: Any, flushed: FrozenMemtable | None = None
    ) -> State:
        """Use a newer manifest, whose SSTs `prepared` shows, and drop the memtable whose rows it holds.

        A manifest that is not newer changes nothing; the memtable is dropped all the same.
        """
        manifest, base = (latest, prepared) if latest.id > self.manifest.id else (self.manifest, self.view)
        memtables = self.memtables if flushed is None else self.memtables.without(flushed)
        return replace(
            self, manifest=manifest, memtables=memtables, view=self._view(manifest, memtables, base)
        )

    def _view(self, manifest: Versioned[Manifest], memtables: Memtables, base: Any) -> Any:
        """What reads see. A memtable that the manifest holds already is left out: its merges would count twice."""
        if self.closed is not None:
            return self.view
        in_ssts = manifest.value.last_l0_seq
        waiting = (frozen.memtable for frozen in memtables.frozen if frozen.last_seq > in_ssts)
        return base.with_memtables((memtables.active, *waiting))


class WriteCounts:
    """The write counters of one database, under SlateDB's names. Replayed rows are not writes of this process.

    Nothing is counted per write. Rows and bytes come from the memtables, batches from the sequence numbers: every batch
    takes one. The caller holds the write lock.
    """

    def __init__(self, metrics: Metrics, memtables: Memtables, *, last_seq: int) -> None:
        self._rows, self._data = memtables.rows, memtables.written_bytes - memtables.header_bytes
        self._freezes = memtables.freezes
        self._seq = last_seq
        self._write_ops = metrics.counter(names.DB_WRITE_OPS)
        self._batches = metrics.counter(names.DB_WRITE_BATCH_COUNT)
        self._write_bytes = metrics.counter(names.DB_MEMTABLE_WRITE_BYTES)
        self._unflushed = metrics.gauge(names.DB_TOTAL_MEM_SIZE_BYTES)
        self._unlogged = metrics.gauge(names.WAL_BUFFER_ESTIMATED_BYTES)
        self._freeze_count = metrics.counter(names.MEMTABLE_FLUSH_MEMTABLE_FREEZE_COUNT)

    def skipped(self, numbers: int) -> None:
        """A bulk load used this many sequence numbers, which are not batches."""
        self._seq += numbers

    def report(self, memtables: Memtables, last_seq: int) -> None:
        """Bring the counters up to date."""
        rows, data = memtables.rows, memtables.written_bytes - memtables.header_bytes
        self._write_ops.add(rows - self._rows)
        self._write_bytes.add(data - self._data)
        self._batches.add(last_seq - self._seq)
        self._freeze_count.add(memtables.freezes - self._freezes)
        self._rows, self._data = rows, data
        self._freezes, self._seq = memtables.freezes, last_seq
        self._unflushed.set(memtables.unflushed_bytes)
        self._unlogged.set(memtables.written_bytes - memtables.bytes_logged)
