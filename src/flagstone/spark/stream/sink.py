"""The sink of `writeStream.format("flagstone")`: every micro-batch is a bulk load that includes the progress row.

For every micro-batch Spark creates two writers, each in a Python process on the driver's machine: one for the tasks,
and one for the commit. The first begins the load and cancels those of earlier runs (`flagstone.spark.load.request`).
The second gets the plan from the messages of the tasks. The load is added on condition that the progress row has not
changed since the commit read it. So two runs of one query cannot write one batch twice, even if the first does not
know yet that it was replaced.

A failure before the commit leaves the database unchanged, and Spark repeats the batch. After the commit the progress
row shows that the batch was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from flagstone.db.reader.reader import open_reader
from flagstone.errors import InternalError, InvalidRequest
from flagstone.schema import SchemaCommit
from flagstone.spark.error_translation import in_task
from flagstone.spark.load.adoption import ConditionFailed
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.overlaps import order_ssts
from flagstone.spark.load.plan import LoadPlan, LoadReport, MadeSst
from flagstone.spark.load.request import abort_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WRITE_OPTIONS, WriteOptions, check_known, key_bytes, parse_write_options
from flagstone.spark.stream.stream_progress import (
    PROGRESS_PREFIX,
    QUERY_ID,
    StreamProgress,
    is_written,
    progress_key,
)

_OWN: Final = frozenset({"query", "mark_prefix"})
_OF_BULK_LOAD: Final = frozenset({"load_id", "only_if_new", "receipt"})
_SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of Spark itself, which it also passes to the sink."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How micro-batches become SSTs, and the key of the progress row: `mark_prefix` and the name of the query.

    `owner` distinguishes runs of this query from other loads before its first task, when Spark's query id is unknown.
    """

    write: WriteOptions
    query: str | None = None
    mark_prefix: bytes = PROGRESS_PREFIX
    owner: str = ""


def parse_sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Raises `InvalidRequest` for options that are unknown or have an invalid value."""
    lowered = {name.lower(): value for name, value in options.items()}
    given = {name: value for name, value in lowered.items() if name not in _SPARKS}
    check_known(given, (WRITE_OPTIONS - _OF_BULK_LOAD) | _OWN, "a stream into a database")
    query = given.pop("query", None)
    if query is not None and not query:
        raise InvalidRequest(
            "option 'query' is empty; name the query, or leave the option out to use Spark's query id"
        )
    prefix = given.pop("mark_prefix", None)
    return SinkOptions(
        replace(parse_write_options(given), in_order=True),
        query,
        PROGRESS_PREFIX if prefix is None else key_bytes(prefix),
        query or lowered.get("checkpointlocation") or lowered.get("queryname") or "",
    )


@dataclass
class BatchSsts(WriterCommitMessage):
    """The SSTs that one task made of a micro-batch, with the plan, the query id and the schema for the commit."""

    plan: LoadPlan
    query_id: str | None
    made: list[MadeSst]
    schema: SchemaCommit | None = None


class StreamSink(DataSourceStreamArrowWriter):
    """One micro-batch. `plan` is None for a writer that only commits or aborts."""

    def __init__(self, plan: LoadPlan | None, options: SinkOptions) -> None:
        self._plan = plan
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> BatchSsts:
        if self._plan is None:
            raise InternalError("a task got a writer that has begun no load; nothing was written")
        query_id = _query_id()
        self._progress_key(query_id)  # raises for a missing name before rows are written
        with in_task():
            made = write_ssts(iterator, self._plan, self._options.write)
        return BatchSsts(self._plan, query_id, made, self._options.write.planned_schema)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        done = [message for message in messages if isinstance(message, BatchSsts)]
        if len(done) < len(messages):
            raise InternalError(
                f"cannot commit batch {batchId}: {len(messages) - len(done)} of {len(messages)} tasks missing"
            )
        made, schema = _made(done), done[0].schema if done else None
        if made or (schema is not None and schema.changed):
            query_id = done[0].query_id
            progress = StreamProgress(batchId, query_id)
            # The schema that the tasks have used; this process did not plan one.
            options = replace(self._options.write, row_mapping=None, schema_commit=schema)
            commit_batch(done[0].plan, options, made, self._progress_key(query_id), progress)
        elif done:
            # A repeated batch without rows has no effect, so it needs no progress row.
            abort_load(done[0].plan)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        done = [message for message in messages if isinstance(message, BatchSsts)]
        if done:
            abort_load(done[0].plan)

    def _progress_key(self, query_id: str | None) -> bytes:
        name = self._options.query or query_id
        if name is None:
            raise InvalidRequest(
                "Spark gave no id for this query; name it with the option 'query', so that the database can store its "
                "progress"
            )
        return progress_key(name, self._options.mark_prefix)


def commit_batch(
    plan: LoadPlan, options: WriteOptions, made: Sequence[MadeSst], key: bytes, progress: StreamProgress
) -> LoadReport | None:
    """Add a micro-batch and its progress row with one manifest; None if the batch was written before.

    The load is added only if the progress row is still the one that this function read. A crash leaves all of the
    batch or nothing. Garbage collection deletes the SSTs of a batch that was written before.

    Raises:
        Closed: another run of the query has begun a load, or has written its own batches.
        InvalidRequest: another query has the same name, or rows of two tasks cannot be in one load.

    """
    stored = _stored_progress(plan, key)
    if is_written(stored, progress, key):
        abort_load(plan)
        return None
    if options.presorted:
        order_ssts([each.sst for each in made])  # refuses overlaps of rows that were declared as sorted
    row = pa.RecordBatch.from_pydict({"key": [key], "value": [progress.encode()]})
    # Last, so that a row of the stream with the same key, from a copy of another database, does not replace it.
    own = WriteOptions(
        plan.address, sst_options=options.sst_options, segment_extractor=options.segment_extractor
    )
    last = write_ssts([row], plan, own)
    try:
        return commit_load(plan, replace(options, presorted=False), [*made, *last], expects=[(key, stored)])
    except ConditionFailed:
        # Another run of the query has written this batch in the meantime, or others.
        written = is_written(_stored_progress(plan, key), progress, key)
        abort_load(plan)
        if written:
            return None
        raise


def _stored_progress(plan: LoadPlan, key: bytes) -> bytes | None:
    address = plan.address
    with open_reader(address.path, **address.arguments, mode="latest") as reader:
        return reader._get_recent(key)  # noqa: SLF001 - every batch writes this row


def _query_id() -> str | None:
    context = TaskContext.get()
    found: str | None = None if context is None else context.getLocalProperty(QUERY_ID)
    return found


def _made(done: Sequence[BatchSsts]) -> list[MadeSst]:
    return [made for message in done for made in message.made]
