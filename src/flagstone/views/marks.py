"""The origin of a clone, and whether a database may be used at all.

`flagstone/origin` is an object of our own beside the database, for what its manifest has no field for. It is written
before the first manifest of a clone: what the clone is made of, so that the same call can finish it, and which keys may
be written to it. It is JSON, with keys in hexadecimal. That a database is destroyed stands in its manifest
(`metadata/destruction.py`). SlateDB sees neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.metadata.destruction import Destroyed, find_mark
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectMissing, ObjectStore
from flagstone.types import KeyRange

ORIGIN: Final = "origin"


@dataclass(frozen=True, slots=True)
class CloneSource:
    """What to clone: the database at `path` of the same store, now or as `checkpoint` has it, all or one range."""

    path: str
    checkpoint: UUID | None = None
    range: KeyRange | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """What a clone is made of, as its maker said it, and the keys it takes (None: all)."""

    sources: tuple[CloneSource, ...]
    writable: tuple[KeyRange, ...] | None = None


def load_origin(store: ObjectStore, paths: DbPaths) -> Origin | None:
    """What the database at `paths` was cloned from by us; None when it is no clone, or SlateDB made it."""
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
    """Write it unless there is one; returns the one that is there then."""
    said = {
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
        store.put_if_absent(paths.own(ORIGIN), json.dumps(said, indent=1).encode())
    except ObjectExists:
        return load_origin(store, paths) or origin
    return origin


def load_destroyed(store: ObjectStore, paths: DbPaths) -> Destroyed | None:
    """The mark of a database that is destroyed and not deleted yet; None when it lives, or there is none."""
    latest = ManifestStore(store, paths).latest()
    entry = None if latest is None else find_mark(latest.value)
    return None if entry is None else entry.mark


def require_alive(store: ObjectStore, paths: DbPaths) -> None:
    """Refuse a database that was destroyed, with `InvalidRequest`."""
    if load_destroyed(store, paths) is not None:
        raise destroyed_database(store, paths)


def refuse_destroyed(manifest: Manifest, store: ObjectStore, paths: DbPaths) -> None:
    """Refuse a database whose manifest says that it was destroyed, with `InvalidRequest`."""
    if find_mark(manifest) is not None:
        raise destroyed_database(store, paths)


def destroyed_database(store: ObjectStore, paths: DbPaths) -> InvalidRequest:
    """What a caller hears who wants to open a destroyed database, or to make something of it."""
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


def _parse_range(said: list[str | None]) -> KeyRange:
    start, stop = (None if key is None else bytes.fromhex(key) for key in said)
    return KeyRange(start, stop)
