"""Flagstone on Apache Spark: sessions, loads, reads, lookups, compactions, and the data source "flagstone".

Needs the extra `flagstone[spark]`. The first use of one of these names imports PySpark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagstone.spark.datasource import FlagstoneDataSource
    from flagstone.spark.frames.aggregate import aggregate
    from flagstone.spark.frames.count import count
    from flagstone.spark.frames.lookup import LookupTask, lookup, lookup_batches
    from flagstone.spark.frames.map_arrow import map_arrow
    from flagstone.spark.frames.plan import ReadArguments
    from flagstone.spark.frames.read import read
    from flagstone.spark.frames.report import TableReport, table_report
    from flagstone.spark.frames.view import RefreshableView, view
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
    "LookupTask",
    "MergeReport",
    "ReadArguments",
    "RefreshableView",
    "StreamStatus",
    "TableReport",
    "aggregate",
    "bulk_load",
    "compact",
    "configure",
    "count",
    "delete",
    "export",
    "foreach_batch",
    "lookup",
    "lookup_batches",
    "map_arrow",
    "merge_into",
    "read",
    "register",
    "run_worker",
    "session",
    "stream_status",
    "table_report",
    "verify",
    "view",
]

_HOME = {
    "ExportReport": "flagstone.spark.jobs.export",
    "FlagstoneDataSource": "flagstone.spark.datasource",
    "LoadReport": "flagstone.spark.load.plan",
    "LookupTask": "flagstone.spark.frames.lookup",
    "MergeReport": "flagstone.spark.load.merge_into",
    "ReadArguments": "flagstone.spark.frames.plan",
    "RefreshableView": "flagstone.spark.frames.view",
    "StreamStatus": "flagstone.spark.stream.lag",
    "TableReport": "flagstone.spark.frames.report",
    "aggregate": "flagstone.spark.frames.aggregate",
    "bulk_load": "flagstone.spark.load.bulk_load",
    "compact": "flagstone.spark.jobs.compaction",
    "configure": "flagstone.spark.sessions",
    "count": "flagstone.spark.frames.count",
    "delete": "flagstone.spark.load.delete",
    "export": "flagstone.spark.jobs.export",
    "foreach_batch": "flagstone.spark.stream.foreach_batch",
    "lookup": "flagstone.spark.frames.lookup",
    "lookup_batches": "flagstone.spark.frames.lookup",
    "map_arrow": "flagstone.spark.frames.map_arrow",
    "merge_into": "flagstone.spark.load.merge_into",
    "read": "flagstone.spark.frames.read",
    "register": "flagstone.spark.sessions",
    "run_worker": "flagstone.spark.jobs.compaction",
    "session": "flagstone.spark.sessions",
    "stream_status": "flagstone.spark.stream.lag",
    "table_report": "flagstone.spark.frames.report",
    "verify": "flagstone.spark.jobs.verification",
    "view": "flagstone.spark.frames.view",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'flagstone.spark' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found
