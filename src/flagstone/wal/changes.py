"""What happened to which key, as consumers of changes see it, and where a consumer stands among all that happened."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, WalId

Operation = Literal["put", "delete", "merge"]

_OPERATIONS: Final[dict[int, Operation]] = {VALUE: "put", TOMBSTONE: "delete", MERGE: "merge"}

UNKNOWN_SEQ: Final = -1
"""Of a consumer that began at a file of the log: what came before it is not known."""


class Position(NamedTuple):
    """Where a consumer goes on. A plain tuple, fit to be stored beside what the consumer made of the changes.

    It needs the files of the log from `next_id` on, and all changes above `after_seq`. Of the first bulk load above
    `after_seq` it has used `loaded` rows. Without `copied` it has yet to copy the database, and starts over if it is
    interrupted.
    """

    next_id: WalId
    after_seq: int = UNKNOWN_SEQ
    loaded: int = 0
    copied: bool = True


def further(one: Position, other: Position) -> Position:
    """The position of a consumer that has used what both say."""
    after_seq = max(one.after_seq, other.after_seq)
    # What was used of a load counts only as long as the load is the next thing.
    loaded = max(place.loaded for place in (one, other) if place.after_seq == after_seq)
    return Position(max(one.next_id, other.next_id), after_seq, loaded)


class Change(NamedTuple):
    """One changed row. `value` is the operand of a merge and None for a delete; times are milliseconds.

    `wal_id` is the file of the log it is in; None for a row that came with a bulk load.
    """

    op: Operation
    key: bytes
    value: bytes | None
    seq: int
    created_ms: int | None
    expires_ms: int | None
    wal_id: WalId | None


class ChangeBatch(NamedTuple):
    """The changes of one WAL file, in commit order: all or nothing of it was committed. Or, without a `wal_id`, rows
    of a bulk load in the order of their keys, of which there may be more in the next batch.

    `position` is where to go on after these changes were used: what a consumer stores.
    """

    wal_id: WalId | None
    changes: list[Change]
    position: Position

    @property
    def next_id(self) -> WalId:
        """The file of the log that comes next."""
        return self.position.next_id


def change_of(row: EntryTuple, wal_id: WalId | None) -> Change:
    """The change that a stored row is."""
    key, seq, kind, value, created_ms, expires_ms = row
    return Change(
        _OPERATIONS[kind], key, None if kind == TOMBSTONE else value, seq, created_ms, expires_ms, wal_id
    )
