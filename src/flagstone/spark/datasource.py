"""The data source "flagstone": the class that Spark calls.

Spark calls `schema`, `reader`, `partitions`, `writer`, `commit` and `abort` in Python processes on the driver's
machine, and `read` and `write` in those of the executors. These processes share only what pickles. Each imports this
module, and many of them live for one call: so a read does not import what loads and streams need.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)

from flagstone.errors import InvalidRequest
from flagstone.spark.filters import SCANS_ARE_APART
from flagstone.spark.held_state import CheckpointRead, hold_checkpoint
from flagstone.spark.options import parse_read_options, parse_write_options
from flagstone.spark.scan import FlagstoneReader, PushingReader
from flagstone.spark.stored_schema import plan_types, plan_write
from flagstone.spark.stream.options import is_stream, parse_stream_options
from flagstone.spark.worker_process import settle

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_PUSHDOWN_WORKER = "data_source_pushdown_filters"
_COMMIT_WORKER = "python_streaming_sink_runner"


class FlagstoneDataSource(DataSource):
    """Reads a database as a DataFrame, and loads a DataFrame into a database. See docs/spark.md for the options."""

    _held: CheckpointRead | None = None

    @classmethod
    def name(cls) -> str:
        return "flagstone"

    def schema(self) -> StructType:
        """The columns of rows, or of changes for a stream. A read creates the checkpoint that all its uses share."""
        if is_stream(self.options):
            from flagstone.spark.stream.shape import default_schema, fetch_table  # noqa: PLC0415

            options = parse_stream_options(self.options)
            return default_schema(options, fetch_table(options))
        held = self._hold()
        settle()
        return plan_types(held.options, held.table)

    def reader(self, schema: StructType) -> DataSourceReader:
        if is_stream(self.options):
            raise InvalidRequest(
                "the options are those of a stream of changes: use spark.readStream, or leave them out (changes, "
                "consumer, starting, …)"
            )
        # Spark refuses a reader that accepts filters if its configuration does not allow them, and a data source
        # cannot see the configuration. Only one worker of Spark passes filters, so only that worker gets such a reader.
        passes_filters, held = _calling_worker() == _PUSHDOWN_WORKER, self._hold()
        settle()
        requested = held.options.pushdown
        if requested and not SCANS_ARE_APART:
            raise InvalidRequest(
                "this Spark applies pushed filters to every use of a DataFrame, which gives wrong rows; use "
                "flagstone.spark.read(spark, url, where=...), or the option 'where', and leave out 'pushdown'"
            )
        pushing = passes_filters and SCANS_ARE_APART and requested is not False
        return (PushingReader if pushing else FlagstoneReader)(held, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        if not is_stream(self.options) and "op" not in schema.names:
            # Spark asked for the columns, and a data source cannot see that they are for a stream.
            raise InvalidRequest(
                "a stream of changes needs an option that no read has: name the query with the option 'consumer', or "
                "set changes=true and the query gets a name, which Spark stores in its checkpoint"
            )
        from flagstone.spark.stream.shape import fetch_table  # noqa: PLC0415
        from flagstone.spark.stream.source import ChangeStreamReader  # noqa: PLC0415

        options = parse_stream_options(self.options)
        return ChangeStreamReader(options, schema, stored=fetch_table(options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from flagstone.spark.load.writer import FlagstoneWriter, begin  # noqa: PLC0415

        options = plan_write(parse_write_options(self.options), schema, replaces_all=overwrite)
        return FlagstoneWriter(begin(options), options, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        from flagstone.spark.load.writer import begin  # noqa: PLC0415
        from flagstone.spark.stream.sink import StreamSink, parse_sink_options  # noqa: PLC0415

        options = parse_sink_options(self.options)
        if overwrite:
            raise InvalidRequest(
                "output mode 'complete' would replace the whole database with every micro-batch. Use foreachBatch with "
                "flagstone.spark.foreach_batch and output mode 'update': each row then replaces the row with its key"
            )
        # Spark creates a second writer for the commit. It must not claim the database from the first one, and it gets
        # the schema from the tasks.
        if _calling_worker() == _COMMIT_WORKER:
            return StreamSink(None, options)
        options = replace(options, write=plan_write(options.write, schema))
        return StreamSink(begin(options.write, owner=options.owner), options)

    def _hold(self) -> CheckpointRead:
        if self._held is None:
            self._held = hold_checkpoint(parse_read_options(self.options))
        return self._held


def _calling_worker() -> str:
    """The name of the Spark worker that called the data source."""
    caller = sys._getframe(2).f_code.co_filename  # noqa: SLF001 - Spark has no interface for this
    return Path(caller).stem
