"""The sink of `writeStream.format("flagstone")`: every micro-batch is a load of its own, and its mark one of the rows.

For every micro-batch Spark asks for a writer twice, each time in a Python process on the driver's machine: once to send
it to the tasks, and again to commit what they made. The first claims the database and fixes the sequence number
(`flagstone.spark.load.commit`); the second learns both from what the tasks hand back. So two runs of one query, one of
which does not know yet that it was replaced, cannot both commit: who claimed later wins.

Whatever fails before the commit leaves the database as it was; Spark repeats the batch. After it the mark is there.
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
from flagstone.spark.error_translation import in_task
from flagstone.spark.load.commit import abort_load, commit_load
from flagstone.spark.load.overlaps import order_ssts
from flagstone.spark.load.plan import LoadPlan, LoadReport, MadeSst
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WRITE_OPTIONS, WriteOptions, check_known, key_bytes, parse_write_options
from flagstone.spark.stream.stream_progress import MARK_PREFIX, QUERY_ID, Mark, is_written, mark_key

_OWN: Final = frozenset({"query", "mark_prefix"})
_SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
"""What Spark keeps for itself, and hands to the sink all the same."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How micro-batches become tables, and where it is marked that they were.

    `owner` tells runs of this query from loads of others before its tasks run, and so before Spark says its id.
    """

    write: WriteOptions
    query: str | None = None
    mark_prefix: bytes = MARK_PREFIX
    owner: str = ""


def parse_sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Raises `InvalidRequest` for what is unknown or has a value that makes no sense."""
    lowered = {name.lower(): value for name, value in options.items()}
    given = {name: value for name, value in lowered.items() if name not in _SPARKS}
    check_known(given, (WRITE_OPTIONS - {"receipt"}) | _OWN, "a stream into a database")
    query = given.pop("query", None)
    if query is not None and not query:
        raise InvalidRequest(
            "option 'query' is empty; name the query, or leave it out to use Spark's own id of it"
        )
    prefix = given.pop("mark_prefix", None)
    return SinkOptions(
        replace(parse_write_options(given), in_order=True),
        query,
        MARK_PREFIX if prefix is None else key_bytes(prefix),
        query or lowered.get("checkpointlocation") or lowered.get("queryname") or "",
    )


@dataclass
class BatchSsts(WriterCommitMessage):
    """What one task made of a micro-batch, and what the commit has to know."""

    plan: LoadPlan
    query_id: str | None
    made: list[MadeSst]


class StreamSink(DataSourceStreamArrowWriter):
    """One micro-batch. `plan` is None for a writer that only commits or aborts."""

    def __init__(self, plan: LoadPlan | None, options: SinkOptions) -> None:
        self._plan = plan
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> BatchSsts:
        if self._plan is None:
            raise InternalError("a task got a writer that has claimed no database; nothing was written")
        query_id = _query_id()
        self._mark_key(query_id)  # says what is missing before rows are written in vain
        with in_task():
            return BatchSsts(self._plan, query_id, write_ssts(iterator, self._plan, self._options.write))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        done = [message for message in messages if isinstance(message, BatchSsts)]
        if len(done) < len(messages):
            raise InternalError(
                f"batch {batchId} was to be committed with {len(messages) - len(done)} of {len(messages)} tasks missing"
            )
        made = _made(done)
        if made:
            query_id = done[0].query_id
            mark = Mark(batchId, query_id)
            commit_batch(done[0].plan, self._options.write, made, self._mark_key(query_id), mark)
        elif done:
            # Without rows there is nothing that could come twice, and nothing to remember.
            abort_load(done[0].plan, [])

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        done = [message for message in messages if isinstance(message, BatchSsts)]
        if done:
            abort_load(done[0].plan, _made(done))

    def _mark_key(self, query_id: str | None) -> bytes:
        name = self._options.query or query_id
        if name is None:
            raise InvalidRequest(
                "Spark did not say which query this is; name it with the option 'query', so that the database can "
                "remember what was written of it"
            )
        return mark_key(name, self._options.mark_prefix)


def commit_batch(
    plan: LoadPlan, options: WriteOptions, made: Sequence[MadeSst], key: bytes, mark: Mark
) -> LoadReport | None:
    """Make a micro-batch and its mark visible with one manifest version; None if it was there already.

    Nobody else can write the mark between the look at it and the commit: that takes a claim of the database, after
    which the commit is refused. A crash leaves all of the batch or nothing, and the tables of what was there already
    to garbage collection.

    Raises:
        Closed: another writer, or another run of the query, has claimed the database since.
        InvalidRequest: another query has the same name, or tasks wrote rows that do not fit together.

    """
    place = plan.address
    with open_reader(place.path, **place.arguments, mode="latest") as reader:
        stored = reader.get(key)
    if is_written(stored, mark, key):
        abort_load(plan, made)
        return None
    if options.presorted:
        order_ssts([each.sst for each in made])  # refuses what overlaps although it was said to be sorted
    row = pa.RecordBatch.from_pydict({"key": [key], "value": [mark.encode()]})
    # The last of all: a row that comes with the key of the mark, from a copy of another database, does not replace it.
    marked = write_ssts([row], plan, WriteOptions(place, sst_options=options.sst_options))
    return commit_load(plan, replace(options, presorted=False), [*made, *marked])


def _query_id() -> str | None:
    context = TaskContext.get()
    found: str | None = None if context is None else context.getLocalProperty(QUERY_ID)
    return found


def _made(done: Sequence[BatchSsts]) -> list[MadeSst]:
    return [made for message in done for made in message.made]
