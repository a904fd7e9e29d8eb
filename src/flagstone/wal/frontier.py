"""The end of the WAL: find it, prove that nothing before it is missing, and fence it.

Finding. WAL ids are contiguous above `replay_after`, so "does file n exist" is true up to the end and false after it.
The end is found by probes: leap forward until a miss, then narrow down. A listing would walk over all files that
garbage collection has not removed yet. A hole hides the files after it: the search may stop at any id that exists and
has no successor. Files are removed only at or below `replay_after`. One writer at a time creates them in order, so only
damage makes a hole, and `verify` reports it. A writer with several files under way creates them in any order: the
manifest says how many ids may be missing before a file that exists, and the search ends before the first of them.

Proving. Sequence numbers ascend by one, with exceptions. A bulk load, a restored state and a writer without a WAL take
sequence numbers that are never in the WAL; those are in SSTs, at or below the manifest's `last_l0_seq`. SlateDB skips a
sequence number with every transaction that conflicts, and lets callers choose larger ones. Such steps are inside of a
file or between neighbouring files, where nothing can have been lost, or, with chosen sequence numbers, after the fence
of a new writer. An empty file between the two sides of a step is either such a fence or a file that lost its content.
Every writer claims one epoch and leaves one fence, so counting separates the two: as many empty files as writers are
fences.

Fencing. The epoch in the manifest decides which writer owns the database, but a replaced writer does not read it before
every flush. It does need the next free WAL id. The new writer creates an empty file under that id, which stops the
former writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from flagstone.errors import CorruptData, Unavailable
from flagstone.metadata.manifest import NO_WAL, Manifest
from flagstone.metadata.parallel_wal import allowed_hole
from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectMissing, ObjectStore
from flagstone.types import WalId

_WIDTH: Final = 4
"""Probes made at once. More would save round trips only for WALs of thousands of files, and cost requests for all."""


@dataclass(frozen=True, slots=True)
class FrontierSearch:
    """What is known about the end of the WAL: `present` exists (or is where the WAL begins), `absent` does not.

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
    """The ids to probe next, ascending: `width` of them, two where the end is expected, none when the search is done.

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
    """The search after some ids were found to exist or not. Ids that exist after a missing one do not count."""
    missing = [wal_id for wal_id, exists in answers.items() if not exists]
    if search.absent is not None:
        missing.append(search.absent)
    absent = min(missing, default=None)
    found = [wal_id for wal_id, exists in answers.items() if exists and (absent is None or wal_id < absent)]
    present = max([search.present, *found])
    # Only a round of leaps determines the size of the next leap.
    leaped = search.absent is None and search.expected is None
    leap = 2 * (present - search.present) if leaped and present > search.present else search.leap
    return replace(search, present=present, absent=absent, expected=None, leap=leap)


def find_frontier(
    store: ObjectStore,
    paths: DbPaths,
    manifest: Manifest,
    *,
    after: WalId = NO_WAL,
    pool: IoPool | None = None,
) -> WalId:
    """The last WAL file before any hole, or the manifest's `replay_after_wal_id` if there is none above it.

    Files up to `after` are known to exist. `wal_id_last_seen` is the probable end. If it is right, two requests suffice
    (one if it equals `replay_after_wal_id`). If it lags, the number of requests grows with the logarithm of the
    distance. Holes that the manifest allows cost one request each. With a `pool`, the probes of a round overlap;
    without, they are made one after the other and stop at the first miss. Another writer may create the next file at
    any time: the answer is a lower bound that only a fence makes final.
    """
    after = max(after, manifest.replay_after_wal_id)
    search = FrontierSearch(after, expected=max(after, manifest.wal_id_last_seen))
    while not search.done:
        wal_ids = plan_probes(search, width=1 if pool is None else _WIDTH)
        search = apply_answers(search, _fetch_answers(store, paths, wal_ids, pool))
    return before_hole(store, paths, manifest, WalId(search.present), pool=pool)


def before_hole(
    store: ObjectStore, paths: DbPaths, manifest: Manifest, last: WalId, *, pool: IoPool | None = None
) -> WalId:
    """The last file before the holes that `manifest` allows before file `last`; `last` itself if there is none."""
    # Without the files up to `wal_id_last_seen` the WAL is damaged, which replay reports.
    in_order = max(manifest.replay_after_wal_id, manifest.wal_id_last_seen)
    wal_ids = list(range(max(in_order + 1, last - allowed_hole(manifest)), last))
    answers = _fetch_answers(store, paths, wal_ids, pool)
    return WalId(min((wal_id for wal_id, exists in answers.items() if not exists), default=last + 1) - 1)


def _fetch_answers(
    store: ObjectStore, paths: DbPaths, wal_ids: list[int], pool: IoPool | None
) -> dict[int, bool]:
    def exists(wal_id: int) -> bool:
        return _exists(store, paths.wal(WalId(wal_id)))

    if pool is not None:
        return dict(zip(wal_ids, pool.map_ordered(exists, wal_ids), strict=True))
    answers: dict[int, bool] = {}
    for wal_id in wal_ids:
        answers[wal_id] = exists(wal_id)
        if not answers[wal_id]:
            break
    return answers


FIRST_FENCE: Final = WalId(1)
"""The first file of every WAL is the fence of its first writer."""


class WalDamaged(CorruptData):
    """A WAL file, or its content, is missing. A manifest that is out of date has the same effect: read it again."""


def is_loss(*, empty_files: int, writers: int) -> bool:
    """Whether a step in sequence numbers across empty files means that rows were lost. Pure.

    The newest writer may not have made its fence yet. Where fences were collected, or a clone has them without the
    files before them, counting proves nothing, and the step counts as a loss, which it is in every database that
    SlateDB does not write.
    """
    return not writers - 1 <= empty_files <= writers


def check_step(
    wal_store: ObjectStore,
    paths: DbPaths,
    empty: Iterable[WalId],
    *,
    seen_seq: int,
    first_seq: int,
    end: WalId,
    writers: int,
) -> None:
    """Raise `WalDamaged` if sequence numbers are missing because one of the `empty` files lost its rows.

    `writers` is how many writers have claimed the database before file `end`. A step costs a listing.
    """
    suspects = [wal_id for wal_id in empty if wal_id != FIRST_FENCE]
    if first_seq <= seen_seq + 1 or not suspects:
        return
    empty_files = sum(
        1
        for meta in wal_store.list(paths.wal_folder)
        if meta.size == 0 and (wal_id := paths.parse_wal(meta.path)) is not None and wal_id <= end
    )
    if is_loss(empty_files=empty_files, writers=writers):
        raise WalDamaged(
            f"sequence numbers {seen_seq + 1} to {first_seq - 1} are missing, and this WAL file between them is "
            f"empty; {empty_files} files are empty and {writers} writers made a fence, so rows were lost",
            object=paths.wal(suspects[-1]),
            offset=0,
        )


def check_no_hole(wal_store: ObjectStore, paths: DbPaths, frontier: WalId, *, allowed: int = 0) -> None:
    """Raise `WalDamaged` if there are files after the one that seems to be the last. Costs a listing of those.

    A writer with several files under way creates them in any order: files up to `allowed` after the missing one are
    no sign of damage.
    """
    for meta in wal_store.list(paths.wal_folder, after=paths.wal(frontier)):
        behind = paths.parse_wal(meta.path)
        if behind is None or frontier + 1 < behind <= frontier + 1 + allowed:
            continue
        missing = paths.wal(WalId(frontier + 1))
        # Files are created in order: a listed file was created after the file before it.
        if behind > frontier + 1 and not _exists(wal_store, missing):
            raise WalDamaged(
                f"missing, but WAL file {behind} exists: the files after the hole cannot be replayed",
                object=missing,
            )
        return


def _exists(store: ObjectStore, path: str) -> bool:
    try:
        store.head(path)
    except ObjectMissing:
        return False
    return True


FENCE: Final = b""
VOID: Final = b"flag-fence"
"""A WAL file without rows that is not the fence of a writer: a claim leaves one fence, and these are not counted.

SlateDB takes up to ten bytes for an empty file.
"""
_ATTEMPTS: Final = 10_000


def write_fence(
    wal_store: ObjectStore,
    paths: DbPaths,
    candidate: WalId,
    claimed: Manifest,
    *,
    refresh: Callable[[], Manifest],
    pool: IoPool | None = None,
) -> WalId:
    """Create the fence and return its id: the WAL ends there for every former writer.

    `candidate` is the first id to try, found before the claim; `claimed` is the manifest that carries the claim.
    Replay skips ids at or below its `replay_after_wal_id`, so a fence there would stop no writer: the end is then
    searched again, and `refresh` is called after the search. If the id is taken, `refresh` reads the manifest again
    and raises `Closed` (reason "fenced") if another writer has claimed the database since; otherwise the file is the
    former writer's last flush or another claimant's fence, and the next id is tried.

    A crash afterwards leaves an empty file that replay reads as no rows. Raises `Unavailable` when a former writer
    creates files faster than they can be fenced.
    """
    manifest = claimed
    for _ in range(_ATTEMPTS):
        if candidate <= manifest.replay_after_wal_id:
            frontier = find_frontier(wal_store, paths, manifest, pool=pool)
            candidate = WalId(frontier + 1)
            # After the search: a writer that claims the database later takes this id with its own fence.
            manifest = refresh()
            continue
        try:
            wal_store.put_if_absent(paths.wal(candidate), FENCE)
        except ObjectExists:
            manifest = refresh()
            candidate = WalId(candidate + 1)
        else:
            return candidate
    raise Unavailable(
        f"the WAL of {paths.root!r} could not be fenced: the next id was taken {_ATTEMPTS} times, the last was "
        f"{candidate - 1}; stop the former writer and try again"
    )
