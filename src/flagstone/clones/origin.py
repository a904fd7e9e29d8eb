"""The origin of a clone: its sources, its lenders, and its writable range. Also refuses destroyed databases.

`flagstone/origin` is an object beside the database, for what the manifest has no field for. It is written before the
first manifest of a clone, and holds the sources of the clone, so that the same call can finish it, and its writable
range. It is JSON, with keys in hexadecimal. The mark of a destroyed database is in its manifest
(`metadata/destruction.py`). SlateDB reads neither.

A row written outside of a projection's range would be missing from the next projection or union. So writers of
Flagstone accept only the writable range; SlateDB's writers accept every key.

A database lists every lender, with the final checkpoint it has placed there. A clone of that database borrows from the
same lenders, and needs its own final checkpoint in each, because the database may release its own at any time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple
from uuid import UUID

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.lsm.tree import Tree
from flagstone.metadata.annotations import Destroyed
from flagstone.metadata.destruction import find_mark
from flagstone.metadata.manifest import ExternalDb, Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectMissing, ObjectStore
from flagstone.types import KeyRange, Ulid

ORIGIN: Final = "origin"


@dataclass(frozen=True, slots=True)
class CloneSource:
    """What to clone: the database at `path` of the same store, now or at `checkpoint`, all of it or one range."""

    path: str
    checkpoint: UUID | None = None
    range: KeyRange | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """The sources of a clone, as its maker passed them, and its writable range (None: all keys)."""

    sources: tuple[CloneSource, ...]
    writable: tuple[KeyRange, ...] | None = None


def load_origin(store: ObjectStore, paths: DbPaths) -> Origin | None:
    """The origin of the database at `paths`; None if it is no clone, or SlateDB made it."""
    found = _load(store, paths.own(ORIGIN))
    if found is None:
        return None
    try:
        sources = [
            CloneSource(
                source["path"],
                None if source["checkpoint"] is None else UUID(source["checkpoint"]),
                None if source["range"] is None else _parse_range(source["range"]),
            )
            for source in found["sources"]
        ]
        writable = found["writable"]
        return Origin(tuple(sources), None if writable is None else tuple(map(_parse_range, writable)))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"not the origin of a clone: {error}", object=paths.own(ORIGIN)) from None


def save_origin(store: ObjectStore, paths: DbPaths, origin: Origin) -> Origin:
    """Write the origin unless there is one; returns the stored one."""
    stored = {
        "sources": [
            {
                "path": source.path,
                "checkpoint": None if source.checkpoint is None else str(source.checkpoint),
                "range": None if source.range is None else _range_text(source.range),
            }
            for source in origin.sources
        ],
        "writable": None if origin.writable is None else [_range_text(keys) for keys in origin.writable],
    }
    try:
        store.put_if_absent(paths.own(ORIGIN), json.dumps(stored, indent=1).encode())
    except ObjectExists:
        return load_origin(store, paths) or origin
    return origin


def load_destroyed(store: ObjectStore, paths: DbPaths) -> Destroyed | None:
    """The mark of a database that is destroyed and not deleted yet; None if it has none, or does not exist."""
    latest = ManifestStore(store, paths).latest()
    entry = None if latest is None else find_mark(latest.value)
    return None if entry is None else entry.mark


def require_alive(store: ObjectStore, paths: DbPaths) -> None:
    """Refuse a database that was destroyed, with `InvalidRequest`."""
    if load_destroyed(store, paths) is not None:
        raise destroyed_database(store, paths)


def refuse_destroyed(manifest: Manifest, store: ObjectStore, paths: DbPaths) -> None:
    """Refuse a database whose manifest has the mark of a destroyed one, with `InvalidRequest`."""
    if find_mark(manifest) is not None:
        raise destroyed_database(store, paths)


def destroyed_database(store: ObjectStore, paths: DbPaths) -> InvalidRequest:
    """The error for a caller that opens or clones a destroyed database."""
    return InvalidRequest(
        f"the database at {paths.root!r} in {store.url} was destroyed and is going to be deleted; "
        "use another path, or wait until it is gone"
    )


def _load(store: ObjectStore, path: str) -> Any | None:
    try:
        data = store.get(path).data
    except ObjectMissing:
        return None
    try:
        return json.loads(data)
    except ValueError as error:
        raise CorruptData(f"not JSON: {error}", object=path) from None


def _range_text(keys: KeyRange) -> list[str | None]:
    return [None if key is None else key.hex() for key in (keys.start, keys.stop)]


def _parse_range(stored: list[str | None]) -> KeyRange:
    start, stop = (None if key is None else bytes.fromhex(key) for key in stored)
    return KeyRange(start, stop)


Writable = tuple[KeyRange, ...] | None
"""Ranges in ascending order that do not touch; None when every key may be written."""

_ALL: KeyRange = KeyRange()


def unite_writable(sources: Sequence[tuple[Origin | None, KeyRange | None]]) -> Writable:
    """The writable range of a clone of these sources, each restricted to the given range."""
    ranges = []
    for origin, keys in sources:
        own = (_ALL,) if origin is None or origin.writable is None else origin.writable
        ranges += [one.intersect(keys or _ALL) for one in own]
    merged = _merge(keys for keys in ranges if not keys.empty)
    return None if merged == (_ALL,) else merged


def _merge(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    merged: list[KeyRange] = []
    for keys in sorted(ranges, key=lambda one: one.start or b""):
        last = merged[-1] if merged else None
        if last is None or (last.stop is not None and (keys.start or b"") > last.stop):
            merged.append(keys)
        elif last.stop is not None:
            merged[-1] = KeyRange(last.start, None if keys.stop is None else max(last.stop, keys.stop))
    return tuple(merged)


class Lender(NamedTuple):
    """A database that a clone borrows from: its entry, whose source checkpoint exists now.

    `taken_from` is the checkpoint that the source checkpoint was taken from. Two lenders with the same `taken_from` are
    the same manifest of the same database, also if that checkpoint is gone.
    """

    entry: ExternalDb
    taken_from: UUID


@dataclass(frozen=True, slots=True)
class CheckpointedSource:
    """One database to clone: its path, the checkpoint that keeps it, and the manifest of that checkpoint.

    `copied` are SSTs that no database lends: the clone has its own copies.
    """

    path: str
    checkpoint_id: UUID
    manifest: Manifest
    copied: frozenset[Ulid] = frozenset()

    @property
    def lent(self) -> ExternalDb:
        """The entry for its own SSTs: those that it does not borrow itself."""
        others = {sst_id for db in self.manifest.external_dbs for sst_id in db.sst_ids} | self.copied
        owned = tuple(sst_id for sst_id in self.manifest.ssts if sst_id not in others)
        return ExternalDb(self.path, self.checkpoint_id, None, owned)

    @property
    def lenders(self) -> Iterator[Lender]:
        """All lenders of a clone of it: the lenders of this database, then this database.

        A lender keeps its SSTs for this database by the final checkpoint that this database placed there; the clone's
        own final checkpoint is taken from that one.
        """
        for db in self.manifest.external_dbs:
            if db.sst_ids:
                placed = db.final_checkpoint_id or db.source_checkpoint_id
                yield Lender(replace(db, source_checkpoint_id=placed), db.source_checkpoint_id)
        yield Lender(self.lent, self.checkpoint_id)

    def owner_of(self, sst_id: Ulid) -> str:
        """The path of the database whose folder holds the SST."""
        return self.manifest.path_of_owner(sst_id) or self.path


def merge_lenders(lenders: Iterable[Lender]) -> tuple[ExternalDb, ...]:
    """The same SSTs in as few entries as possible: one per manifest of a checkpoint, each SST of a database once.

    Without this a union of several parts of one database would list it once per part, and each further split and union
    would multiply that. Any one of the checkpoints keeps an SST, so the first is enough. Databases that lend nothing
    are left out.
    """
    merged: dict[tuple[str, UUID], tuple[ExternalDb, list[Ulid]]] = {}
    seen: set[tuple[str, Ulid]] = set()
    for db, taken_from in lenders:
        for sst_id in db.sst_ids:
            if (db.path, sst_id) not in seen:
                seen.add((db.path, sst_id))
                merged.setdefault((db.path, taken_from), (db, []))[1].append(sst_id)
    return tuple(
        replace(db, final_checkpoint_id=None, sst_ids=tuple(sorted(ids))) for db, ids in merged.values()
    )


def add_final_checkpoints(
    entries: Iterable[ExternalDb], new_id: Callable[[], UUID]
) -> tuple[ExternalDb, ...]:
    """The entries, each with the id of the final checkpoint that the borrower will place there."""
    return tuple(replace(db, final_checkpoint_id=new_id()) for db in entries)


def is_same_clone(unfinished: Manifest, planned: Manifest) -> bool:
    """Whether an unfinished clone is what a call plans now: the same SSTs, visible ranges and owners.

    The ids of final checkpoints and views do not count: each plan makes new ones.
    """
    return _essence(unfinished) == _essence(planned)


def _essence(manifest: Manifest) -> object:
    def shown(tree: Tree) -> object:
        runs = [(run.id, [(view.sst_id, view.visible_range) for view in run.views]) for run in tree.runs]
        return [(view.sst_id, view.visible_range) for view in tree.l0], runs

    owners = sorted((sst_id, db.path) for db in manifest.external_dbs for sst_id in db.sst_ids)
    segments = [(segment.prefix, shown(segment.tree)) for segment in manifest.segments]
    wal = (manifest.wal_id_last_seen, manifest.last_l0_seq, manifest.last_l0_clock_tick)
    return manifest.initialized, manifest.ssts, shown(manifest.tree), segments, owners, wal
