"""What happened to which key: the rows of the log as its consumers see them."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, WalId

Operation = Literal["put", "delete", "merge"]

_OPERATIONS: Final[dict[int, Operation]] = {VALUE: "put", TOMBSTONE: "delete", MERGE: "merge"}


class Change(NamedTuple):
    """One changed row. `value` is the operand of a merge and None for a delete; times are milliseconds."""

    op: Operation
    key: bytes
    value: bytes | None
    seq: int
    created_ms: int | None
    expires_ms: int | None
    wal_id: WalId


class ChangeBatch(NamedTuple):
    """The changes of one WAL file, in commit order. All or nothing of it was committed."""

    wal_id: WalId
    changes: list[Change]

    @property
    def next_id(self) -> WalId:
        """Where to go on after these changes were used: what a consumer stores."""
        return WalId(self.wal_id + 1)


def change_of(row: EntryTuple, wal_id: WalId) -> Change:
    """The change that a stored row is."""
    key, seq, kind, value, created_ms, expires_ms = row
    return Change(
        _OPERATIONS[kind], key, None if kind == TOMBSTONE else value, seq, created_ms, expires_ms, wal_id
    )
