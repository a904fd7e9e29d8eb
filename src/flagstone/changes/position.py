"""Positions among the changes, as callers give them."""

from __future__ import annotations

from collections.abc import Sequence

from flagstone.errors import InvalidRequest
from flagstone.metadata.annotations import Position
from flagstone.types import WalId


def as_position(given: int | Sequence[int]) -> Position:
    """The position that a caller has stored, perhaps as a list, or the start of a WAL file.

    Raises `InvalidRequest` for anything else.
    """
    try:
        position = Position(WalId(given)) if isinstance(given, int) else Position(*given)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(f"{given!r} is not a position: use that of a batch, or a WAL id") from None
    checked_id(position.next_id)
    return position


def checked_id(wal_id: int) -> WalId:
    """The id of a WAL file. Raises `InvalidRequest` for one that no file has."""
    if wal_id < 1:
        raise InvalidRequest(f"WAL ids start at 1; {wal_id} is not a WAL id")
    return WalId(wal_id)
