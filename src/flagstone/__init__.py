"""SlateDB for Python and Spark: an embedded, ordered key-value store on object storage."""

from __future__ import annotations

import importlib
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
    from flagstone.config import ReaderSettings, Settings
    from flagstone.db.admin import Admin
    from flagstone.db.database import Db
    from flagstone.db.open import open_database as open  # noqa: A004 - the name users expect
    from flagstone.lsm.merge_operator import MergeOperator
    from flagstone.wal.tail import WalReader
    from flagstone.write.batch import WriteBatch

__all__ = [
    "Admin",
    "Closed",
    "CorruptData",
    "Db",
    "FlagstoneError",
    "InternalError",
    "InvalidRequest",
    "KeyRange",
    "MergeOperator",
    "ReaderSettings",
    "Row",
    "Settings",
    "TransactionConflict",
    "Unavailable",
    "WalReader",
    "WriteBatch",
    "open",
]


_LAZY = {
    "Admin": ("flagstone.db.admin", "Admin"),
    "Db": ("flagstone.db.database", "Db"),
    "MergeOperator": ("flagstone.lsm.merge_operator", "MergeOperator"),
    "ReaderSettings": ("flagstone.config", "ReaderSettings"),
    "Settings": ("flagstone.config", "Settings"),
    "WalReader": ("flagstone.wal.tail", "WalReader"),
    "WriteBatch": ("flagstone.write.batch", "WriteBatch"),
    "open": ("flagstone.db.open", "open_database"),
}


def __getattr__(name: str) -> object:
    # The engine is imported when it is first used: a program that only catches our errors starts fast.
    if name not in _LAZY:
        raise AttributeError(f"module 'flagstone' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = getattr(importlib.import_module(module), attribute)
    globals()[name] = found
    return found
