"""SlateDB for Python and Spark: an embedded, ordered key-value store on object storage."""

from __future__ import annotations

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

__all__ = [
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
