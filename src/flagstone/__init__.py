"""SlateDB for Python and Spark: an embedded, ordered key-value store on object storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flagstone.errors import (
    Closed,
    CorruptData,
    FlagstoneError,
    InternalError,
    InvalidRequest,
    TransactionConflict,
    Unavailable,
)
from flagstone.types import KeyRange, Row

if TYPE_CHECKING:
    from flagstone.db.admin import Admin

__all__ = [
    "Admin",
    "Closed",
    "CorruptData",
    "FlagstoneError",
    "InternalError",
    "InvalidRequest",
    "KeyRange",
    "Row",
    "TransactionConflict",
    "Unavailable",
]


def __getattr__(name: str) -> object:
    # The engine is imported when it is first used: a program that only catches our errors starts fast.
    if name == "Admin":
        from flagstone.db.admin import Admin  # noqa: PLC0415

        return Admin
    raise AttributeError(f"module 'flagstone' has no attribute {name!r}")
