"""The rows that are not in tables yet: one memtable that takes writes, and frozen ones on their way to L0.

All of it is guarded by the lock that orders writes. Readers need no lock: they take `tables()`, which never
changes a tuple it gave out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
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
    """Rows of one memtable that are to be written to the log, in commit order."""

    table: kernel.Memtable
    start: LogPosition
    stop: LogPosition


class Memtables:
    """The active memtable, the frozen ones, and how far each has been logged."""

    def __init__(self) -> None:
        self.active: kernel.Memtable = kernel.Memtable()
        self.frozen: tuple[FrozenMemtable, ...] = ()
        """Newest first, as reads want them."""
        self.points: SequenceTracker = SequenceTracker()
        self._unlogged: deque[tuple[kernel.Memtable, LogPosition]] = deque([(self.active, START)])
        self._frozen_bytes = 0

    @property
    def unflushed_bytes(self) -> int:
        """What is in memory and not yet in tables."""
        return self._frozen_bytes + self.active.size()

    def tables(self) -> tuple[Any, ...]:
        """All memtables, newest first."""
        return (self.active, *(frozen.table for frozen in self.frozen))

    def freeze(self, *, last_seq: Seq, last_tick_ms: int, replay_after: WalId) -> FrozenMemtable | None:
        """Begin a new memtable; None when the active one is empty and stays."""
        if not len(self.active):
            return None
        frozen = FrozenMemtable(self.active, last_seq, last_tick_ms, replay_after, self.points)
        self.frozen = (frozen, *self.frozen)
        self._frozen_bytes += self.active.size()
        self.active = kernel.Memtable()
        self.points = SequenceTracker()
        self._unlogged.append((self.active, START))
        return frozen

    def drop(self, flushed: FrozenMemtable) -> None:
        """The rows of the oldest frozen memtable are in L0 now."""
        assert self.frozen[-1] is flushed, "memtables are flushed in the order they were frozen"
        self.frozen = self.frozen[:-1]
        self._frozen_bytes -= flushed.table.size()

    def mark_logged(self) -> None:
        """All rows so far are in the log already: they came from there."""
        self._unlogged = deque([(self.active, self.active.position())])

    def has_unlogged(self) -> bool:
        """Whether any row is not in the log yet."""
        return len(self._unlogged) > 1 or self._unlogged[0][1] != self.active.position()

    def take_unlogged(self) -> list[LogSpan]:
        """The rows the next log file must hold; they count as logged from now on."""
        spans = [
            LogSpan(table, start, table.position())
            for table, start in self._unlogged
            if table.position() != start
        ]
        self.mark_logged()
        return spans
