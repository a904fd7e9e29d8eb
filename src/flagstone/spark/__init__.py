"""Flagstone on Apache Spark: `session`, `configure`, `register`, `bulk_load`, and the data source "flagstone".

Needs the extra `flagstone[spark]`. The first use of one of these names imports PySpark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagstone.spark.datasource import FlagstoneDataSource
    from flagstone.spark.jobs.compaction import compact, run_worker
    from flagstone.spark.jobs.export import ExportReport, export
    from flagstone.spark.jobs.verification import verify
    from flagstone.spark.load.bulk_load import bulk_load
    from flagstone.spark.load.delete import delete
    from flagstone.spark.load.merge_into import MergeReport, merge_into
    from flagstone.spark.load.plan import LoadReport
    from flagstone.spark.sessions import configure, register, session
    from flagstone.spark.stream.foreach_batch import foreach_batch
    from flagstone.spark.stream.lag import StreamStatus, stream_status

__all__ = [
    "ExportReport",
    "FlagstoneDataSource",
    "LoadReport",
    "MergeReport",
    "StreamStatus",
    "bulk_load",
    "compact",
    "configure",
    "delete",
    "export",
    "foreach_batch",
    "merge_into",
    "register",
    "run_worker",
    "session",
    "stream_status",
    "verify",
]

_HOME = {
    "ExportReport": "flagstone.spark.jobs.export",
    "FlagstoneDataSource": "flagstone.spark.datasource",
    "LoadReport": "flagstone.spark.load.plan",
    "MergeReport": "flagstone.spark.load.merge_into",
    "StreamStatus": "flagstone.spark.stream.lag",
    "bulk_load": "flagstone.spark.load.bulk_load",
    "compact": "flagstone.spark.jobs.compaction",
    "configure": "flagstone.spark.sessions",
    "delete": "flagstone.spark.load.delete",
    "export": "flagstone.spark.jobs.export",
    "foreach_batch": "flagstone.spark.stream.foreach_batch",
    "merge_into": "flagstone.spark.load.merge_into",
    "register": "flagstone.spark.sessions",
    "run_worker": "flagstone.spark.jobs.compaction",
    "session": "flagstone.spark.sessions",
    "stream_status": "flagstone.spark.stream.lag",
    "verify": "flagstone.spark.jobs.verification",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'flagstone.spark' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found
