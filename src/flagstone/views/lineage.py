"""Who borrows which tables from whom, and the checkpoints that make lenders keep them. Pure.

A database names every other one it borrows from, with the checkpoint it has placed there. Whoever clones it borrows
from the same lenders, and needs a checkpoint of its own in each: the other's may be released at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import UUID

from flagstone.lsm.tree import Tree
from flagstone.metadata.manifest import ExternalDb, Manifest
from flagstone.types import Ulid


class Lender(NamedTuple):
    """A database that a clone borrows from: the entry for it, its source checkpoint one that is there now.

    `pinned_by` is the checkpoint that one was taken from. Two lenders with the same one are the same manifest of the
    same database, whatever became of that checkpoint.
    """

    entry: ExternalDb
    pinned_by: UUID


@dataclass(frozen=True, slots=True)
class PinnedSource:
    """One database to be cloned: where it is, the checkpoint that keeps it, and what that one pins.

    `copied` are tables that nobody lends: the clone has its own copy of them.
    """

    path: str
    checkpoint_id: UUID
    manifest: Manifest
    copied: frozenset[Ulid] = frozenset()

    @property
    def lent(self) -> ExternalDb:
        """What it lends of its own: the tables it does not borrow itself."""
        others = {sst_id for db in self.manifest.external_dbs for sst_id in db.sst_ids} | self.copied
        owned = tuple(sst_id for sst_id in self.manifest.ssts if sst_id not in others)
        return ExternalDb(self.path, self.checkpoint_id, None, owned)

    @property
    def lenders(self) -> Iterator[Lender]:
        """Everybody a clone of it borrows from: the databases it borrows from itself, then this one.

        What a lender keeps for this database, it keeps because of the checkpoint this database placed; a clone's
        own checkpoint is taken from that one.
        """
        for db in self.manifest.external_dbs:
            if db.sst_ids:
                placed = db.final_checkpoint_id or db.source_checkpoint_id
                yield Lender(replace(db, source_checkpoint_id=placed), db.source_checkpoint_id)
        yield Lender(self.lent, self.checkpoint_id)

    def owner_of(self, sst_id: Ulid) -> str:
        """The database in whose folder the table is."""
        return self.manifest.path_of_owner(sst_id) or self.path


def merge_lenders(lenders: Iterable[Lender]) -> tuple[ExternalDb, ...]:
    """The same tables in as few entries as possible: one per pinned manifest, each table of a database once.

    Parts of one database that are put together again would otherwise name it once per part, and the next round
    would multiply that. Any one of the checkpoints keeps a table, so the first is enough. Databases that lend
    nothing are left out.
    """
    merged: dict[tuple[str, UUID], tuple[ExternalDb, list[Ulid]]] = {}
    seen: set[tuple[str, Ulid]] = set()
    for db, pinned_by in lenders:
        for sst_id in db.sst_ids:
            if (db.path, sst_id) not in seen:
                seen.add((db.path, sst_id))
                merged.setdefault((db.path, pinned_by), (db, []))[1].append(sst_id)
    return tuple(
        replace(db, final_checkpoint_id=None, sst_ids=tuple(sorted(ids))) for db, ids in merged.values()
    )


def sign(entries: Iterable[ExternalDb], new_id: Callable[[], UUID]) -> tuple[ExternalDb, ...]:
    """The entries, each with the id of a checkpoint that the borrower is going to place there."""
    return tuple(replace(db, final_checkpoint_id=new_id()) for db in entries)


def is_same_clone(unborn: Manifest, planned: Manifest) -> bool:
    """Whether an unfinished clone is what a call plans now: the same SSTs, shown in the same way, of the same owners.

    The ids of final checkpoints and views do not count: each plan makes new ones.
    """
    return _essence(unborn) == _essence(planned)


def _essence(manifest: Manifest) -> object:
    def shown(tree: Tree) -> object:
        runs = [(run.id, [(view.sst_id, view.visible_range) for view in run.views]) for run in tree.runs]
        return [(view.sst_id, view.visible_range) for view in tree.l0], runs

    owners = sorted((sst_id, db.path) for db in manifest.external_dbs for sst_id in db.sst_ids)
    segments = [(segment.prefix, shown(segment.tree)) for segment in manifest.segments]
    wal = (manifest.wal_id_last_seen, manifest.last_l0_seq, manifest.last_l0_clock_tick)
    return manifest.initialized, manifest.ssts, shown(manifest.tree), segments, owners, wal
