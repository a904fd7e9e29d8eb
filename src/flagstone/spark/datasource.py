"""The data source "flagstone": what Spark calls, and where.

`schema`, `reader`, `partitions`, `writer`, `commit` and `abort` run in Python processes on the driver's machine, `read`
and `write` in those of the executors. Nothing is shared between them but what pickles.
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
from flagstone.spark.load.commit import abort_load, begin_load, commit_load
from flagstone.spark.load.plan import LoadPlan, MadeSst, write_receipt
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions, parse_read_options, parse_write_options
from flagstone.spark.row_mapping import check_write_schema, read_schema
from flagstone.spark.scan import CheckpointRead, FlagstoneReader, PushingReader, hold_checkpoint
from flagstone.spark.stream.options import is_stream, parse_stream_options
from flagstone.spark.stream.sink import StreamSink, parse_sink_options
from flagstone.spark.stream.source import CHANGE_SCHEMA, ChangeStreamReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_PUSHDOWN_WORKER = "data_source_pushdown_filters"
_COMMIT_WORKER = "python_streaming_sink_runner"


class FlagstoneDataSource(DataSource):
    """Reads a database as a DataFrame, and loads a DataFrame into one. See docs/spark.md for the options."""

    _pinned: CheckpointRead | None = None

    @classmethod
    def name(cls) -> str:
        return "flagstone"

    def schema(self) -> StructType:
        """The columns; pins the moment that every use of this DataFrame shows. A stream has those of changes."""
        if is_stream(self.options):
            parse_stream_options(self.options)
            return CHANGE_SCHEMA
        if "key.columns" in self.options:
            raise InvalidRequest(
                "the columns of keys and values need types to be read: name all with .schema('region string, id long')"
            )
        return read_schema(self._pin().options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        if is_stream(self.options):
            raise InvalidRequest("option 'consumer' is for streams: use spark.readStream, or leave it out")
        # Spark fails where a reader takes filters and its configuration does not allow that, and does not tell the
        # source which it is. Only one of its workers ever hands filters over: who else asks needs no such reader.
        hands_over, pinned = _asked_by() == _PUSHDOWN_WORKER, self._pin()
        wished = pinned.options.pushdown
        pushing = hands_over and (SCANS_ARE_APART if wished is None else wished)
        return (PushingReader if pushing else FlagstoneReader)(pinned, schema)

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
                "flagstone.spark.foreach_batch and output mode 'update': the key of a row says which one it replaces"
            )
        options = replace(options, write=_for_schema(options.write, schema))
        # Spark makes a second writer to commit, which must not claim the database from the first.
        commits = _asked_by() == _COMMIT_WORKER
        return StreamSink(
            None if commits else begin_load(options.write.address, owner=options.owner), options
        )

    def _pin(self) -> CheckpointRead:
        if self._pinned is None:
            self._pinned = hold_checkpoint(parse_read_options(self.options))
        return self._pinned


def _for_schema(options: WriteOptions, schema: StructType) -> WriteOptions:
    """The options for rows of that schema. Raises `InvalidRequest` unless they can be written."""
    if options.row_mapping is not None:
        return replace(options, row_mapping=options.row_mapping.for_writing(schema))
    check_write_schema(schema, key=options.key_column, value=options.value_column)
    return options


def _asked_by() -> str:
    """Which of Spark's workers called the data source."""
    asked_by = sys._getframe(2).f_code.co_filename  # noqa: SLF001 - there is no other way to know
    return Path(asked_by).stem


@dataclass
class TaskSsts(WriterCommitMessage):
    """What one task made."""

    made: list[MadeSst]


class FlagstoneWriter(DataSourceArrowWriter):
    """A load: tasks make tables, the driver commits them all at once."""

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
            write_receipt(self._options.receipt, report)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        abort_load(self._plan, _made(messages))


def _made(messages: list[WriterCommitMessage | None]) -> list[MadeSst]:
    return [made for message in messages if isinstance(message, TaskSsts) for made in message.made]
