"""Where the log ends, found by asking whether single files exist.

WAL ids are contiguous above `replay_after`, so "does file n exist" is true up to the end and false behind it,
and the end is found like a word in a dictionary: leap forward until a miss, then narrow down. A listing would
have to walk over all the files that garbage collection has not removed yet.

The price is that a hole hides what is behind it: the search may stop at any id that exists and has no successor.
Files are created in order by one writer at a time and removed only at or below `replay_after`, so nothing
but damage makes a hole, and `verify` reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import WalId

_WIDTH: Final = 4
"""Probes made at once. More would save round trips only for logs of thousands of files, and cost requests for all."""


@dataclass(frozen=True, slots=True)
class FrontierSearch:
    """What is known about the end of the log: `present` exists (or is where the log begins), `absent` does not.

    `expected` is an id that probably exists; `leap` is how far the next guess goes while no end is in sight.
    """

    present: int
    absent: int | None = None
    expected: int | None = None
    leap: int = 1

    @property
    def done(self) -> bool:
        """Whether `present` is the last file."""
        return self.absent == self.present + 1


def plan_probes(search: FrontierSearch, *, width: int = _WIDTH) -> list[int]:
    """The ids to ask for next, ascending: `width` of them, two where the end is expected, none when the search is done.

    With an expected id that is right, one round settles it: that id exists, the next one does not.
    """
    low, high = search.present, search.absent
    if high is None:
        if search.expected is not None:
            first = search.expected
            return [first, first + 1] if first > low else [low + 1]
        return [low + (search.leap << power) for power in range(width)]
    unknown = high - low - 1
    if unknown <= width:
        return list(range(low + 1, high))
    return [low + (high - low) * step // (width + 1) for step in range(1, width + 1)]


def apply_answers(search: FrontierSearch, answers: Mapping[int, bool]) -> FrontierSearch:
    """The search after some ids were found to exist or not. Ids that exist behind a missing one do not count."""
    missing = [wal_id for wal_id, exists in answers.items() if not exists]
    if search.absent is not None:
        missing.append(search.absent)
    absent = min(missing, default=None)
    found = [wal_id for wal_id, exists in answers.items() if exists and (absent is None or wal_id < absent)]
    present = max([search.present, *found])
    # Only a round that was a leap says how far the next leap may go.
    leaped = search.absent is None and search.expected is None
    leap = 2 * (present - search.present) if leaped and present > search.present else search.leap
    return replace(search, present=present, absent=absent, expected=None, leap=leap)


def find_frontier(
    store: ObjectStore,
    paths: DbPaths,
    replay_after: WalId,
    *,
    expected: WalId | None = None,
    pool: IoPool | None = None,
) -> WalId:
    """The last file of the log, or `replay_after` when there is none above it.

    `expected` is where the end probably is: the manifest's `wal_id_last_seen`. When it is right, two requests do
    (one when it equals `replay_after`). Without it, or when it lags, the number of requests grows with the
    logarithm of what lies between. With a `pool`, the probes of a round overlap; without, they are made one after
    the other and stop at the first miss. Another writer may create the next file at any time: the answer is
    a lower bound that only a fence makes final.
    """
    search = FrontierSearch(replay_after, expected=replay_after if expected is None else expected)
    while not search.done:
        wal_ids = plan_probes(search, width=1 if pool is None else _WIDTH)
        search = apply_answers(search, _fetch_answers(store, paths, wal_ids, pool))
    return WalId(search.present)


def _fetch_answers(
    store: ObjectStore, paths: DbPaths, wal_ids: list[int], pool: IoPool | None
) -> dict[int, bool]:
    def exists(wal_id: int) -> bool:
        try:
            store.head(paths.wal(WalId(wal_id)))
        except ObjectMissing:
            return False
        return True

    if pool is not None:
        return dict(zip(wal_ids, pool.map_ordered(exists, wal_ids), strict=True))
    answers: dict[int, bool] = {}
    for wal_id in wal_ids:
        answers[wal_id] = exists(wal_id)
        if not answers[wal_id]:
            break
    return answers
