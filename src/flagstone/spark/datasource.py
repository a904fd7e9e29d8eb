"""The data source "flagstone": the classes that Spark calls.

Spark calls `schema`, `reader`, `partitions`, `writer`, `commit` and `abort` in Python processes on the driver's
machine, and `read` and `write` in those of the executors. These processes share only what pickles.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    WriterCommitMessage,
)

from flagstone.errors import InvalidRequest
from flagstone.spark.error_translation import in_task
from flagstone.spark.filters import SCANS_ARE_APART
from flagstone.spark.held_state import CheckpointRead, hold_checkpoint
from flagstone.spark.load.commit import abort_load, begin_load, commit_load
from flagstone.spark.load.plan import LoadPlan, MadeSst, write_report
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions, parse_read_options, parse_write_options
from flagstone.spark.row_mapping import check_write_schema, read_schema
from flagstone.spark.scan import FlagstoneReader, PushingReader
from flagstone.spark.stream.options import is_stream, parse_stream_options
from flagstone.spark.stream.sink import StreamSink, parse_sink_options
from flagstone.spark.stream.source import CHANGE_SCHEMA, ChangeStreamReader

if TYPE_CHECKING:
    import pyarrow as pa
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
            parse_stream_options(self.options)
            return CHANGE_SCHEMA
        if "key.columns" in self.options:
            raise InvalidRequest(
                "a read with 'key.columns' needs the types of all columns: add .schema('region string, id long')"
            )
        return read_schema(self._hold().options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        if is_stream(self.options):
            raise InvalidRequest("option 'consumer' is for streams: use spark.readStream, or leave it out")
        # Spark refuses a reader that accepts filters if its configuration does not allow them, and a data source
        # cannot see the configuration. Only one worker of Spark passes filters, so only that worker gets such a reader.
        passes_filters, held = _calling_worker() == _PUSHDOWN_WORKER, self._hold()
        requested = held.options.pushdown
        if requested and not SCANS_ARE_APART:
            raise InvalidRequest(
                "this Spark applies pushed filters to every use of a DataFrame, which gives wrong rows; use "
                "flagstone.spark.read(spark, url, where=...), or the option 'where', and leave out 'pushdown'"
            )
        pushing = passes_filters and SCANS_ARE_APART and requested is not False
        return (PushingReader if pushing else FlagstoneReader)(held, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        options = parse_stream_options(self.options)
        if schema != CHANGE_SCHEMA:
            raise InvalidRequest(
                f"a stream of changes has the columns {CHANGE_SCHEMA.simpleString()}; give it no other schema"
            )
        return ChangeStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        options = _for_schema(parse_write_options(self.options), schema)
        return FlagstoneWriter(begin_load(options.address), options, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        options = parse_sink_options(self.options)
        if overwrite:
            raise InvalidRequest(
                "output mode 'complete' would replace the whole database with every micro-batch. Use foreachBatch with "
                "flagstone.spark.foreach_batch and output mode 'update': each row then replaces the row with its key"
            )
        options = replace(options, write=_for_schema(options.write, schema))
        # Spark creates a second writer for the commit. It must not claim the database from the first one.
        commits = _calling_worker() == _COMMIT_WORKER
        return StreamSink(
            None if commits else begin_load(options.write.address, owner=options.owner), options
        )

    def _hold(self) -> CheckpointRead:
        if self._held is None:
            self._held = hold_checkpoint(parse_read_options(self.options))
        return self._held


def _for_schema(options: WriteOptions, schema: StructType) -> WriteOptions:
    """The options for rows of that schema. Raises `InvalidRequest` if such rows cannot be written."""
    if options.row_mapping is not None:
        return replace(options, row_mapping=options.row_mapping.for_writing(schema))
    check_write_schema(schema, key=options.key_column, value=options.value_column)
    return options


def _calling_worker() -> str:
    """The name of the Spark worker that called the data source."""
    caller = sys._getframe(2).f_code.co_filename  # noqa: SLF001 - Spark has no interface for this
    return Path(caller).stem


@dataclass
class TaskSsts(WriterCommitMessage):
    """The SSTs that one task uploaded."""

    made: list[MadeSst]


class FlagstoneWriter(DataSourceArrowWriter):
    """A bulk load: tasks build SSTs, the driver commits all of them with one manifest."""

    def __init__(self, plan: LoadPlan, options: WriteOptions, *, overwrite: bool) -> None:
        self._plan = plan
        self._options = options
        self._overwrite = overwrite

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskSsts:
        with in_task():
            return TaskSsts(write_ssts(iterator, self._plan, self._options))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        report = commit_load(self._plan, self._options, _made(messages), replaces_all=self._overwrite)
        if self._options.receipt is not None:
            write_report(self._options.receipt, report)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        abort_load(self._plan, _made(messages))


def _made(messages: list[WriterCommitMessage | None]) -> list[MadeSst]:
    return [made for message in messages if isinstance(message, TaskSsts) for made in message.made]
