"""The rows that are not in SSTs yet: one memtable that takes writes, and frozen ones on their way to L0.

`Memtables` is a value: what changes it returns another one. The writer swaps the old one for the new one with a single
assignment (`flagstone.write.state`), so that an exception can never leave half of a change behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from flagstone.kernels import memtable as kernel
from flagstone.lsm.sequence import SequenceTracker
from flagstone.types import Seq, WalId

LogPosition = tuple[int, int]

START: Final[LogPosition] = (0, 0)


@dataclass(frozen=True, slots=True)
class FrozenMemtable:
    """A memtable that takes no more rows, with what the manifest must know once its rows are in L0.

    `replay_after` is the last WAL file that was on the store when it was frozen: later files may hold rows that
    are not in it.
    """

    table: kernel.Memtable
    last_seq: Seq
    last_tick_ms: int
    replay_after: WalId
    points: SequenceTracker


@dataclass(frozen=True, slots=True)
class LogSpan:
    """Rows of one memtable that are to be written to the WAL, in commit order."""

    table: kernel.Memtable
    start: LogPosition
    stop: LogPosition


@dataclass(frozen=True, slots=True)
class Memtables:
    """The active memtable, the frozen ones (newest first, as reads want them), and how far each is in the WAL.

    `unlogged` has every memtable with rows that are not in the WAL, oldest first, with the position from which on;
    the active one is always its last. `rows_before` and `bytes_before` count what was in all former active memtables,
    `bytes_logged` what is in the WAL, `freezes` the former memtables, and `lookups_before` the reads of dropped ones.
    """

    active: kernel.Memtable = field(default_factory=kernel.Memtable)
    frozen: tuple[FrozenMemtable, ...] = ()
    points: SequenceTracker = field(default_factory=SequenceTracker)
    unlogged: tuple[tuple[kernel.Memtable, LogPosition], ...] = ()
    rows_before: int = 0
    bytes_before: int = 0
    bytes_logged: int = 0
    freezes: int = 0
    lookups_before: int = 0

    @property
    def unflushed_bytes(self) -> int:
        """What is in memory and not yet in SSTs."""
        return self.active.size() + sum(frozen.table.size() for frozen in self.frozen)

    @property
    def rows(self) -> int:
        """All rows that were ever written to the active memtables."""
        return self.rows_before + len(self.active)

    @property
    def written_bytes(self) -> int:
        """What those rows occupied."""
        return self.bytes_before + self.active.size()

    @property
    def lookups(self) -> int:
        """How many point reads asked a memtable first. Reads of an old view may ask a dropped one, uncounted."""
        held: int = sum(table.asked() for table in self.tables())
        return self.lookups_before + held

    def tables(self) -> tuple[Any, ...]:
        """All memtables, newest first."""
        return (self.active, *(frozen.table for frozen in self.frozen))

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
        )

    def without(self, flushed: FrozenMemtable) -> Memtables:
        """The rows of the oldest frozen memtable are in L0 now."""
        assert self.frozen[-1] is flushed, "memtables are flushed in the order they were frozen"
        lookups = self.lookups_before + flushed.table.asked()
        return replace(self, frozen=self.frozen[:-1], lookups_before=lookups)

    def logged(self) -> Memtables:
        """All rows so far are in the WAL, or on their way into it."""
        logged = ((self.active, self.active.position()),)
        return replace(self, unlogged=logged, bytes_logged=self.written_bytes)

    def spans(self) -> list[LogSpan]:
        """The rows that the next WAL file must hold."""
        return [
            LogSpan(table, start, table.position())
            for table, start in self._unlogged()
            if table.position() != start
        ]

    def through(self, last_seq: int) -> Memtables:
        """The same rows without those above `last_seq`, which a write that was cut off has left in the active one."""
        active = self.active.copy_through(last_seq)
        *older, (_, start) = self._unlogged()
        lookups = self.lookups_before + self.active.asked()
        return replace(self, active=active, unlogged=(*older, (active, start)), lookups_before=lookups)

    def _unlogged(self) -> tuple[tuple[kernel.Memtable, LogPosition], ...]:
        return self.unlogged or ((self.active, START),)
