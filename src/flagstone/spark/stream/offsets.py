"""The offsets of a change stream, and where a micro-batch ends. Pure.

An offset is the position of a query: `wal_id` is the next WAL file, `seq` the last sequence number before it, and
`checkpoint` the checkpoint that a copy of the whole database was read from. A query without the option `consumer` has
its name in every offset as well: Spark stores offsets with the query, so the name stays the same over restarts.

Where the database stores a schema, an offset also has the version that was the newest when the query began, or copied
the database after an overwrite. It names the schema of the changes that come next: an overwrite or a restore, which
replace the schema, end with another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes, ReadMaxFiles, ReadMaxRows

from flagstone.changes.change import WalFile
from flagstone.metadata.annotations import Position
from flagstone.types import WalId

Offset = dict[str, Any]

CONSUMER: Final = "consumer"
OVERWRITTEN: Final = "overwritten"
"""In the offset after a marker row: a copy of the whole database comes next."""

REPLACES: Final = "replaces"
"""In the offset after a copy that replaces everything before: deletes of what went come with it."""

VERSION: Final = "version"
"""In the offset of a query of a database with a schema; 0 if the last copy had none."""

BEGIN: Final[Offset] = {"wal_id": 0, "seq": 0, "checkpoint": ""}
"""The offset of a query that has not read anything."""


def is_begin(offset: Offset) -> bool:
    """Whether a query with that offset has not read anything."""
    return all(offset.get(name) == value for name, value in BEGIN.items())


def position_of(offset: Offset) -> Position:
    """The position among the changes."""
    return Position(WalId(int(offset["wal_id"])), int(offset["seq"]))


def is_past(held: Position | None, position: Position) -> bool:
    """Whether a retention checkpoint at `held` does not keep the changes after `position`."""
    return held is not None and held.after_seq > position.after_seq


def version_of(offset: Offset) -> int | None:
    """The version that names the schema of the changes after the offset; None if it is not known."""
    found = offset.get(VERSION)
    return None if found is None else int(found)


def with_version(offset: Offset, version: int | None, *, of: Offset) -> Offset:
    """The offset after a copy of a state with that newest version, None without a schema; `of` is the one before."""
    left = {name: each for name, each in offset.items() if name != VERSION}
    number = version or (0 if VERSION in of else None)
    return left if number is None else left | {VERSION: number}


def offset_at(position: Position, *, checkpoint: str = "", of: Offset) -> Offset:
    """The offset for a position, of the same query as the offset `of`."""
    made: Offset = {"wal_id": position.next_id, "seq": position.after_seq, "checkpoint": checkpoint}
    return made | {name: of[name] for name in (CONSUMER, VERSION) if name in of}


def until_fence(files: Sequence[WalFile]) -> list[WalFile]:
    """The files up to the next fence after rows. A new writer or a restored state begins with a fence."""
    for at, file in enumerate(files):
        if not file.size and at and files[at - 1].size:
            return list(files[:at])
    return list(files)


def plan_end(
    files: Sequence[WalFile],
    first: int,
    limit: ReadLimit,
    until: int | None,
    *,
    rows_of: Callable[[WalId], int] | None = None,
) -> int:
    """The end, exclusive, of the WAL files that a micro-batch beginning at `first` may read.

    Only files without a hole between them count; at least one is taken, however large. `until` is the end of the query.
    `rows_of` counts the rows of a file, for a limit of rows.
    """
    end, size, rows = first, 0, 0
    for file in files:
        if file.wal_id != end or (until is not None and end >= until):
            break
        size += file.size
        if isinstance(limit, ReadMaxFiles) and end - first >= limit.max_files:
            break
        if isinstance(limit, ReadMaxBytes) and end > first and size > limit.max_bytes:
            break
        if isinstance(limit, ReadMaxRows) and rows_of is not None:
            rows += rows_of(file.wal_id) if file.size else 0
            if end > first and rows > limit.max_rows:
                break
        end += 1
    return end
