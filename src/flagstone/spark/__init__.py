"""Flagstone on Apache Spark: `session`, `configure`, `register`, `bulk_load`, and the data source "flagstone".

Needs the extra `flagstone[spark]`; PySpark is imported when one of these is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagstone.spark.compaction import compact, run_worker
    from flagstone.spark.datasource import FlagstoneDataSource
    from flagstone.spark.exporting import ExportReport, export
    from flagstone.spark.frames import bulk_load
    from flagstone.spark.receipt import LoadReport
    from flagstone.spark.sessions import configure, register, session
    from flagstone.spark.sink import foreach_batch
    from flagstone.spark.verification import verify

__all__ = [
    "ExportReport",
    "FlagstoneDataSource",
    "LoadReport",
    "bulk_load",
    "compact",
    "configure",
    "export",
    "foreach_batch",
    "register",
    "run_worker",
    "session",
    "verify",
]

_HOME = {
    "ExportReport": "flagstone.spark.exporting",
    "FlagstoneDataSource": "flagstone.spark.datasource",
    "LoadReport": "flagstone.spark.receipt",
    "bulk_load": "flagstone.spark.frames",
    "compact": "flagstone.spark.compaction",
    "configure": "flagstone.spark.sessions",
    "export": "flagstone.spark.exporting",
    "foreach_batch": "flagstone.spark.sink",
    "register": "flagstone.spark.sessions",
    "run_worker": "flagstone.spark.compaction",
    "session": "flagstone.spark.sessions",
    "verify": "flagstone.spark.verification",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'flagstone.spark' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found
