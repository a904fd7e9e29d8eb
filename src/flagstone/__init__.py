"""SlateDB for Python and Spark: an embedded, ordered key-value store on object storage."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Not `sys.platform`: on Windows, type checkers would take the rest of this file for unreachable.
if os.name == "nt":
    raise ImportError(
        "Flagstone does not run on Windows. It locks folders by flock, replaces files that other processes have open, "
        "and syncs folders to disk, and Windows has none of these. Use the Windows Subsystem for Linux (WSL 2) or "
        "a Linux container."
    )

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
    import flagstone.cost as cost  # noqa: PLR0402
    import flagstone.keys as keys  # noqa: PLR0402
    import flagstone.operators as operators  # noqa: PLR0402
    import flagstone.telemetry as telemetry  # noqa: PLR0402
    import flagstone.values as values  # noqa: PLR0402
    from flagstone.changes.reader import WalReader
    from flagstone.clones.origin import CloneSource
    from flagstone.config import ReaderSettings, Settings
    from flagstone.db.admin.admin import Admin
    from flagstone.db.collections.collection import Collection
    from flagstone.db.open import open_database as open  # noqa: A004 - the name users expect
    from flagstone.db.reader.feed import ChangeFeed, open_feed
    from flagstone.db.reader.reader import DbReader, open_reader
    from flagstone.db.writer.database import Db
    from flagstone.db.writer.transaction import Snapshot, Transaction
    from flagstone.lsm.compaction_filter import CompactionFilter, CompactionJob, Decision, Replace
    from flagstone.lsm.merge_operator import MergeOperator
    from flagstone.query.dataset import open_dataset as dataset
    from flagstone.query.polars_scan import scan_polars
    from flagstone.write.batch import WriteBatch

    __version__: str

__all__ = [
    "Admin",
    "ChangeFeed",
    "CloneSource",
    "Closed",
    "Collection",
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
    "Snapshot",
    "Transaction",
    "TransactionConflict",
    "Unavailable",
    "WalReader",
    "WriteBatch",
    "__version__",
    "aio",
    "compaction",
    "cost",
    "dataset",
    "keys",
    "open",
    "open_feed",
    "open_reader",
    "operators",
    "scan_polars",
    "telemetry",
    "values",
]


_LAZY: dict[str, tuple[str, str | None]] = {
    "Admin": ("flagstone.db.admin.admin", "Admin"),
    "ChangeFeed": ("flagstone.db.reader.feed", "ChangeFeed"),
    "CloneSource": ("flagstone.clones.origin", "CloneSource"),
    "Collection": ("flagstone.db.collections.collection", "Collection"),
    "CompactionFilter": ("flagstone.lsm.compaction_filter", "CompactionFilter"),
    "CompactionJob": ("flagstone.lsm.compaction_filter", "CompactionJob"),
    "Decision": ("flagstone.lsm.compaction_filter", "Decision"),
    "Replace": ("flagstone.lsm.compaction_filter", "Replace"),
    "Db": ("flagstone.db.writer.database", "Db"),
    "DbReader": ("flagstone.db.reader.reader", "DbReader"),
    "MergeOperator": ("flagstone.lsm.merge_operator", "MergeOperator"),
    "ReaderSettings": ("flagstone.config", "ReaderSettings"),
    "Settings": ("flagstone.config", "Settings"),
    "Snapshot": ("flagstone.db.writer.transaction", "Snapshot"),
    "Transaction": ("flagstone.db.writer.transaction", "Transaction"),
    "WalReader": ("flagstone.changes.reader", "WalReader"),
    "WriteBatch": ("flagstone.write.batch", "WriteBatch"),
    "aio": ("flagstone.aio", None),
    "compaction": ("flagstone.compaction", None),
    "cost": ("flagstone.cost", None),
    "dataset": ("flagstone.query.dataset", "open_dataset"),
    "keys": ("flagstone.keys", None),
    "open": ("flagstone.db.open", "open_database"),
    "open_feed": ("flagstone.db.reader.feed", "open_feed"),
    "open_reader": ("flagstone.db.reader.reader", "open_reader"),
    "operators": ("flagstone.operators", None),
    "scan_polars": ("flagstone.query.polars_scan", "scan_polars"),
    "telemetry": ("flagstone.telemetry", None),
    "values": ("flagstone.values", None),
}


def __getattr__(name: str) -> object:
    # The engine is imported at its first use: a program that only catches the errors starts fast.
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        globals()[name] = version("flagstone")
        return globals()[name]
    if name not in _LAZY:
        raise AttributeError(f"module 'flagstone' has no attribute {name!r}{_suggestion(name)}")
    module, attribute = _LAZY[name]
    imported = importlib.import_module(module)
    found = imported if attribute is None else getattr(imported, attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _suggestion(name: str) -> str:
    if name.startswith("_"):
        return ""
    from flagstone.config.fields import suggestion  # noqa: PLC0415

    return suggestion(name, __all__)
