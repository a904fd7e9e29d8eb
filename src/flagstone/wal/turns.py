"""Following the changes: one turn brings the next batch, or says how long to wait for it.

Files are asked for by their number. Whoever is behind gets them fetched ahead, several at a time. Bulk loads are
looked for where sequence numbers are missing, and at the end of the log; so waiting costs two small requests per turn,
for the next file and the next manifest, and no listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from flagstone.runtime.clock import Clock
from flagstone.types import WalId
from flagstone.wal.changes import ChangeBatch, Position
from flagstone.wal.load_marks import ToldLoad, check_gapless, check_told

_SHORTEST_WAIT_S: Final = 0.001
_BACK_OFF: Final = 1.5
_RECHECK_S: Final = 30.0
"""How often a consumer that waits for a file looks whether that file came and went while it slept."""

_HITS_UNTIL_AHEAD: Final = 8
"""After so many files without a wait the consumer is behind."""


class Pace(NamedTuple):
    """How long to wait for a file at first and at most, and after how long without one to give up."""

    poll_s: float
    max_poll_s: float
    timeout_s: float | None


class Turns:
    """One consumer following the changes. Not for several threads at once.

    `begin` says where, `load` gives one file if it exists, `ahead` all there are from one on, `loads` the first bulk
    load that a position has yet to pass, up to a number if one is given, `rows` its changes, `check` raises when
    waiting for a file is in vain, and `tend` keeps a pin alive.
    """

    def __init__(
        self,
        *,
        begin: Callable[[], Position],
        load: Callable[[WalId], ChangeBatch | None],
        ahead: Callable[[int], Iterator[ChangeBatch]],
        loads: Callable[[Position, int | None], ToldLoad | None],
        rows: Callable[[ToldLoad, Position], Iterator[ChangeBatch]],
        check: Callable[[WalId, int], None],
        tend: Callable[[], None],
        clock: Clock,
        pace: Pace,
        allow_gaps: bool,
    ) -> None:
        self._allow_gaps = allow_gaps
        self._begin = begin
        self._load = load
        self._ahead = ahead
        self._loads = loads
        self._rows = rows
        self._check = check
        self._tend = tend
        self._clock = clock
        self._pace = pace
        self._wait_s = pace.poll_s
        self._at: Position | None = None
        self._began_id = WalId(0)
        self._fetched: Iterator[ChangeBatch] | None = None
        self._loaded: tuple[ToldLoad, Iterator[ChangeBatch]] | None = None
        self._held: ChangeBatch | None = None
        self._hits = 0
        self._heard_at = self._checked_at = clock.monotonic()

    def take(self) -> tuple[ChangeBatch | None, float | None]:
        """The next batch; or None and how many seconds to wait before the next turn, None for the end."""
        if self._at is None:
            self._at = self._begin()
            self._began_id = self._at.next_id
            self._fetched = self._ahead(self._at.next_id)
        if self._loaded is not None:
            return self._loading(self._at, *self._loaded)
        batch, self._held = self._held, None
        if batch is None and self._fetched is not None:
            batch = next(self._fetched, None)
            if batch is None:
                self._fetched = None
        if batch is None:
            batch = self._load(self._at.next_id)
            if batch is None:
                return self._missed(self._at)
            self._hits += 1
            if self._hits >= _HITS_UNTIL_AHEAD:
                self._hits, self._fetched = 0, self._ahead(batch.next_id)
        return self._found(self._at, batch)

    def _found(self, at: Position, batch: ChangeBatch) -> tuple[ChangeBatch | None, float]:
        self._hear()
        changes = batch.changes
        if changes and changes[0].seq <= at.after_seq:
            # The consumer has these from the copy of the database it began with.
            changes = [change for change in changes if change.seq > at.after_seq]
        if not changes:
            self._at = at._replace(next_id=batch.next_id)
            return None, 0
        first_seq = changes[0].seq
        if first_seq > at.after_seq + 1:
            # Looked for now that the file is there: a load that came before it is in the manifest.
            if self._begin_load(at, first_seq):
                self._held = batch
                return None, 0
            if not self._allow_gaps:
                check_gapless(at.after_seq, first_seq)
        self._at = Position(batch.next_id, changes[-1].seq)
        return ChangeBatch(batch.wal_id, changes, self._at), 0

    def _begin_load(self, at: Position, below: int | None = None) -> bool:
        """Whether a load is what comes next."""
        # As long as there was nothing but empty files, the consumer has passed nothing since it began.
        load = self._loads(at if at.after_seq >= 0 else at._replace(next_id=self._began_id), below)
        if load is None or (below is None and at.next_id <= load.place.wal_id):
            return False  # in the second case a file comes before it
        if not self._allow_gaps:
            check_told(load, at.after_seq)
        self._loaded = (load, iter(()) if load.replaces else self._rows(load, at))
        return True

    def _loading(
        self, at: Position, load: ToldLoad, rows: Iterator[ChangeBatch]
    ) -> tuple[ChangeBatch | None, float]:
        self._hear()
        batch = next(rows, None)
        if batch is None:
            self._loaded = None
            self._at = Position(at.next_id, load.seq)
        return batch, 0

    def _missed(self, at: Position) -> tuple[None, float | None]:
        if self._begin_load(at):
            return None, 0
        self._hits = 0
        now, timeout_s = self._clock.monotonic(), self._pace.timeout_s
        left_s = None if timeout_s is None else self._heard_at + timeout_s - now
        ends = left_s is not None and left_s < _SHORTEST_WAIT_S
        if now - self._checked_at >= _RECHECK_S:
            self._check(at.next_id, 0 if self._allow_gaps else at.after_seq)
            self._checked_at = now
        elif ends:
            # A file that is missing while others follow must not look like the end of the WAL.
            self._check(at.next_id, 0)
        self._tend()
        longest_s = max(self._pace.poll_s, self._pace.max_poll_s)
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * _BACK_OFF, longest_s)
        if left_s is None:
            return None, wait_s
        # Not 0: a remainder below what a clock can tell apart would never end.
        return None, None if ends else min(wait_s, left_s)

    def _hear(self) -> None:
        self._wait_s = self._pace.poll_s
        self._heard_at = self._checked_at = self._clock.monotonic()
