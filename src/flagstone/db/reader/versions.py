"""The stored versions of one key: what every read of an older sequence number would find in one view."""

from __future__ import annotations

from flagstone.db.reader.reader import DbReader
from flagstone.read import drivers
from flagstone.read.view import ReadView
from flagstone.types import EntryTuple


def read_versions(reader: DbReader, key: bytes, *, limit: int) -> list[EntryTuple]:
    """The rows of `key` that are still stored, newest first, at most `limit`: values, operands and tombstones.

    Flushes and compactions drop versions that no snapshot needs, so older ones may be missing. Writes nothing.

    Raises:
        InvalidRequest: the key is not one, or the database is a clone of a key range that does not contain it.

    """
    checked = reader._check_key(key)  # noqa: SLF001 - a part of the reader, kept out of its file
    ssts = reader._context.ssts  # noqa: SLF001

    def follow(view: ReadView, seq: int) -> list[EntryTuple]:
        rows: list[EntryTuple] = []
        while seq >= 0 and len(rows) < limit:
            found = drivers.get(ssts, view, checked, seq)
            if found is None:
                break
            rows += found if isinstance(found, list) else [found]
            seq = rows[-1][1] - 1
        return rows[:limit]

    return reader._read(follow, durable_only=False, dirty=False)[0]  # noqa: SLF001
