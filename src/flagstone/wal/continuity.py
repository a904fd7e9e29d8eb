"""Whether the WAL is complete: no file is missing, and no sequence number is, without a reason.

Numbers ascend by one, but not always. A bulk load, a restored state and a writer without a WAL take numbers that are
never in it; those are in tables, at or below the manifest's `last_l0_seq`. SlateDB skips a number with every
transaction that conflicts, and lets callers choose larger ones. Such steps are inside of a file or between
neighbouring files, where nothing can have been lost, or, with chosen numbers, behind the fence of a new writer.

An empty file between the two sides of a step is either such a fence or a file that lost its content. Every writer
claims one epoch and leaves one fence, so counting tells the two apart: as many empty files as writers are fences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flagstone.errors import CorruptData
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import WalId

FIRST_FENCE: Final = WalId(1)
"""The first file of every WAL is the fence of its first writer."""


class WalDamaged(CorruptData):
    """A file of the WAL, or what it held, is missing. A manifest that is out of date looks the same: read it again."""


def is_loss(*, empty_files: int, writers: int) -> bool:
    """Whether a step in sequence numbers across empty files says that rows were lost. Pure.

    The newest writer may not have made its fence yet. Where fences were collected, or came to a clone without the files
    before them, counting proves nothing, and the step is taken for what it is in every database but SlateDB's.
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
    """Raise `WalDamaged` if the numbers between two are missing because one of the `empty` files lost its rows.

    `writers` is how many have claimed the database before file `end`. Costs a listing, if there is a step at all.
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
            f"sequence numbers {seen_seq + 1} to {first_seq - 1} are missing, and this file of the WAL between them is "
            f"empty; {empty_files} files are empty and {writers} writers made a fence, so rows were lost",
            object=paths.wal(suspects[-1]),
            offset=0,
        )


def check_no_hole(wal_store: ObjectStore, paths: DbPaths, frontier: WalId) -> None:
    """Raise `WalDamaged` if there are files behind the one that seems to be the last. Costs a listing of those."""
    for meta in wal_store.list(paths.wal_folder, after=paths.wal(frontier)):
        behind = paths.parse_wal(meta.path)
        if behind is None:
            continue
        missing = paths.wal(WalId(frontier + 1))
        # Files are created in order: one that is listed behind the next one came after it.
        if behind > frontier + 1 and not _exists(wal_store, missing):
            raise WalDamaged(
                f"missing, but file {behind} of the WAL is there: what follows the hole cannot be replayed",
                object=missing,
            )
        return


def _exists(store: ObjectStore, path: str) -> bool:
    try:
        store.head(path)
    except ObjectMissing:
        return False
    return True
