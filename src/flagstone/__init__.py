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
    import flagstone.compaction as compaction  # noqa: PLR0402
    import flagstone.keys as keys  # noqa: PLR0402
    import flagstone.values as values  # noqa: PLR0402
    from flagstone.changes.reader import WalReader
    from flagstone.clones.origin import CloneSource
    from flagstone.config import ReaderSettings, Settings
    from flagstone.db.admin.admin import Admin
    from flagstone.db.open import open_database as open  # noqa: A004 - the name users expect
    from flagstone.db.reader.feed import ChangeFeed, open_feed
    from flagstone.db.reader.reader import DbReader, open_reader
    from flagstone.db.writer.database import Db
    from flagstone.lsm.compaction_filter import CompactionFilter, CompactionJob, Decision, Replace
    from flagstone.lsm.merge_operator import MergeOperator
    from flagstone.query.dataset import open_dataset as dataset
    from flagstone.query.polars_scan import scan_polars
    from flagstone.write.batch import WriteBatch

__all__ = [
    "Admin",
    "ChangeFeed",
    "CloneSource",
    "Closed",
    "CompactionFilter",
    "CompactionJob",
    "CorruptData",
    "Db",
    "DbReader",
    "Decision",
    "FlagstoneError",
    "InternalError",
    "InvalidRequest",
    "KeyRange",
    "MergeOperator",
    "ReaderSettings",
    "Replace",
    "Row",
    "Settings",
    "TransactionConflict",
    "Unavailable",
    "WalReader",
    "WriteBatch",
    "aio",
    "compaction",
    "dataset",
    "keys",
    "open",
    "open_feed",
    "open_reader",
    "scan_polars",
    "values",
]


_LAZY: dict[str, tuple[str, str | None]] = {
    "Admin": ("flagstone.db.admin.admin", "Admin"),
    "ChangeFeed": ("flagstone.db.reader.feed", "ChangeFeed"),
    "CloneSource": ("flagstone.clones.origin", "CloneSource"),
    "CompactionFilter": ("flagstone.lsm.compaction_filter", "CompactionFilter"),
    "CompactionJob": ("flagstone.lsm.compaction_filter", "CompactionJob"),
    "Decision": ("flagstone.lsm.compaction_filter", "Decision"),
    "Replace": ("flagstone.lsm.compaction_filter", "Replace"),
    "Db": ("flagstone.db.writer.database", "Db"),
    "DbReader": ("flagstone.db.reader.reader", "DbReader"),
    "MergeOperator": ("flagstone.lsm.merge_operator", "MergeOperator"),
    "ReaderSettings": ("flagstone.config", "ReaderSettings"),
    "Settings": ("flagstone.config", "Settings"),
    "WalReader": ("flagstone.changes.reader", "WalReader"),
    "WriteBatch": ("flagstone.write.batch", "WriteBatch"),
    "aio": ("flagstone.aio", None),
    "compaction": ("flagstone.compaction", None),
    "dataset": ("flagstone.query.dataset", "open_dataset"),
    "keys": ("flagstone.keys", None),
    "open": ("flagstone.db.open", "open_database"),
    "open_feed": ("flagstone.db.reader.feed", "open_feed"),
    "open_reader": ("flagstone.db.reader.reader", "open_reader"),
    "scan_polars": ("flagstone.query.polars_scan", "scan_polars"),
    "values": ("flagstone.values", None),
}


def __getattr__(name: str) -> object:
    # The engine is imported at its first use: a program that only catches the errors starts fast.
    if name not in _LAZY:
        raise AttributeError(f"module 'flagstone' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    imported = importlib.import_module(module)
    found = imported if attribute is None else getattr(imported, attribute)
    globals()[name] = found
    return found
