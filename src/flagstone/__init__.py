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
    import flagstone.aio as aio  # noqa: PLR0402 - in this file mypy sees no submodule by `from`
    from flagstone.config import ReaderSettings, Settings
    from flagstone.db.admin import Admin
    from flagstone.db.database import Db
    from flagstone.db.open import open_database as open  # noqa: A004 - the name users expect
    from flagstone.db.reader import DbReader, open_reader
    from flagstone.lsm.merge_operator import MergeOperator
    from flagstone.wal.tail import WalReader
    from flagstone.write.batch import WriteBatch

__all__ = [
    "Admin",
    "Closed",
    "CorruptData",
    "Db",
    "DbReader",
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
    "aio",
    "open",
    "open_reader",
]


_LAZY: dict[str, tuple[str, str | None]] = {
    "Admin": ("flagstone.db.admin", "Admin"),
    "Db": ("flagstone.db.database", "Db"),
    "DbReader": ("flagstone.db.reader", "DbReader"),
    "MergeOperator": ("flagstone.lsm.merge_operator", "MergeOperator"),
    "ReaderSettings": ("flagstone.config", "ReaderSettings"),
    "Settings": ("flagstone.config", "Settings"),
    "WalReader": ("flagstone.wal.tail", "WalReader"),
    "WriteBatch": ("flagstone.write.batch", "WriteBatch"),
    "aio": ("flagstone.aio", None),
    "open": ("flagstone.db.open", "open_database"),
    "open_reader": ("flagstone.db.reader", "open_reader"),
}


def __getattr__(name: str) -> object:
    # The engine is imported when it is first used: a program that only catches our errors starts fast.
    if name not in _LAZY:
        raise AttributeError(f"module 'flagstone' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    imported = importlib.import_module(module)
    found = imported if attribute is None else getattr(imported, attribute)
    globals()[name] = found
    return found
