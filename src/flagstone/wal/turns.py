"""Following the log: one turn brings the next batch, or says how long to wait for it.

Files are asked for by their number, so waiting costs one small request per turn and no listing. Whoever is behind
gets files fetched ahead, several at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import Clock
from flagstone.types import WalId
from flagstone.wal.changes import ChangeBatch
from flagstone.wal.pins import Position

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


def check_gapless(seen_seq: int, first_seq: int) -> None:
    """Refuse a step in sequence numbers: what happened there is not in the log, and a copy would lack it."""
    if 0 < seen_seq < first_seq - 1:
        raise InvalidRequest(
            f"sequence numbers {seen_seq + 1} to {first_seq - 1} are not in the log: rows came by a bulk load or from "
            "a writer without a log, or an older state was restored; copy the database once more (where writers choose "
            "their numbers themselves, follow with allow_gaps=True)"
        )


class Turns:
    """One consumer following the log. Not for several threads at once.

    `begin` says where, `load` gives one file if it exists, `ahead` all there are from one on, `check` raises when
    waiting for a file is in vain, and `tend` keeps a pin alive.
    """

    def __init__(
        self,
        *,
        begin: Callable[[], Position],
        load: Callable[[WalId], ChangeBatch | None],
        ahead: Callable[[int], Iterator[ChangeBatch]],
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
        self._check = check
        self._tend = tend
        self._clock = clock
        self._pace = pace
        self._wait_s = pace.poll_s
        self._next: WalId | None = None
        self._seen_seq = 0
        self._fetched: Iterator[ChangeBatch] | None = None
        self._hits = 0
        self._heard_at = self._checked_at = clock.monotonic()

    def take(self) -> tuple[ChangeBatch | None, float | None]:
        """The next batch; or None and how many seconds to wait before the next turn, None for the end."""
        if self._next is None:
            self._next, self._seen_seq = (position := self._begin()).next_id, position.after_seq
            self._fetched = self._ahead(self._next)
        if self._fetched is not None:
            batch = next(self._fetched, None)
            if batch is not None:
                return self._found(batch)
            self._fetched = None
        batch = self._load(self._next)
        if batch is not None:
            self._hits += 1
            if self._hits >= _HITS_UNTIL_AHEAD:
                self._hits, self._fetched = 0, self._ahead(batch.next_id)
            return self._found(batch)
        return None, self._missed(self._next)

    def _found(self, batch: ChangeBatch) -> tuple[ChangeBatch | None, float]:
        self._wait_s = self._pace.poll_s
        self._heard_at = self._checked_at = self._clock.monotonic()
        changes = batch.changes
        self._next = batch.next_id
        if changes and changes[0].seq <= self._seen_seq:
            # The consumer has these from the copy of the database it began with.
            changes = [change for change in changes if change.seq > self._seen_seq]
        if not changes:
            return None, 0
        if not self._allow_gaps:
            check_gapless(self._seen_seq, changes[0].seq)
        self._seen_seq = changes[-1].seq
        return ChangeBatch(batch.wal_id, changes), 0

    def _missed(self, wal_id: WalId) -> float | None:
        self._hits = 0
        now, timeout_s = self._clock.monotonic(), self._pace.timeout_s
        if now - self._checked_at >= _RECHECK_S:
            self._check(wal_id, 0 if self._allow_gaps else self._seen_seq)
            self._checked_at = now
        self._tend()
        longest_s = max(self._pace.poll_s, self._pace.max_poll_s)
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * _BACK_OFF, longest_s)
        if timeout_s is None:
            return wait_s
        left_s = self._heard_at + timeout_s - now
        # Not 0: a remainder below what a clock can tell apart would never end.
        return None if left_s < _SHORTEST_WAIT_S else min(wait_s, left_s)
