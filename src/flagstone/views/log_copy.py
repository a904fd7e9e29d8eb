"""The part of a log that belongs to a pinned state: whether it says anything new, and a copy of it.

A pinned state is its tables and the log files above its `replay_after_wal_id` up to its `wal_id_last_seen`. Only
rows behind `last_l0_seq` are news; the others are in the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.metadata.destruction import wal_shift
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectMissing, ObjectStore
from flagstone.types import EntryTuple, KeyRange, WalId
from flagstone.wal.replay import replay

_COPIED_AT_ONCE: Final = 64


def unflushed_rows(
    wal_store: ObjectStore, paths: DbPaths, manifest: Manifest, *, pool: IoPool | None = None
) -> Iterator[EntryTuple]:
    """The rows of a pinned state that only the log holds, in commit order."""
    files = replay(
        wal_store,
        paths,
        manifest.replay_after_wal_id,
        manifest.wal_id_last_seen,
        skip_through_seq=manifest.last_l0_seq,
        writers=manifest.writer_epoch,
        pool=pool or shared_pool(),
    )
    for file in files:
        yield from file.rows


def require_flushed(
    wal_store: ObjectStore, paths: DbPaths, manifest: Manifest, keys: KeyRange | None = None
) -> None:
    """Raise `InvalidRequest` if the log holds rows, in the range, that are not in tables."""
    row = next(
        (row for row in unflushed_rows(wal_store, paths, manifest) if keys is None or row[0] in keys), None
    )
    if row is not None:
        raise InvalidRequest(
            f"the log of {paths.root!r} holds rows that are not in tables yet, the first for the key {row[0][:40]!r}; "
            "a projection or union takes tables only: call flush() on the open database, or open and close "
            "it once, and try again"
        )


def copy_log(wal_store: ObjectStore, source: DbPaths, to: DbPaths, manifest: Manifest) -> None:
    """Copy the WAL of a pinned state under the same ids; at a path where a database was destroyed, under higher ones.

    A crash leaves some of the files; copying again adds the others. A file that is there already must be the same:
    one that differs means that somebody has opened the unfinished clone for writing.
    """
    shift = wal_shift(manifest)

    def copy(wal_id: int) -> None:
        origin = source.wal(WalId(wal_id - shift))
        try:
            data = wal_store.get(origin).data
        except ObjectMissing:
            raise InvalidRequest(
                f"{origin} is gone, so the checkpoint this clone is made from has expired and was "
                f"collected; destroy the unfinished clone at {to.root!r} and make it again"
            ) from None
        path = to.wal(WalId(wal_id))
        try:
            wal_store.put_if_absent(path, data)
        except ObjectExists:
            if wal_store.get(path).data != data:
                raise InvalidRequest(
                    f"{path} differs from {origin}: the unfinished clone was opened for writing; "
                    f"destroy {to.root!r} and clone again"
                ) from None

    first, end = manifest.replay_after_wal_id + 1, manifest.wal_id_last_seen + 1
    # A few at a time: the first that is missing ends it, however many a damaged manifest asks for.
    for start in range(first, end, _COPIED_AT_ONCE):
        shared_pool().map_ordered(copy, range(start, min(start + _COPIED_AT_ONCE, end)))
