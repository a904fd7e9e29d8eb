"""`map_arrow`: run a function on Arrow batches in the tasks that decode them, before rows pass to the Java process.

A DataFrame moves every row over a socket into the Java process, which costs several times as much as decoding it. A
function that returns fewer or smaller rows saves most of that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import pyarrow as pa

from flagstone.errors import InvalidRequest
from flagstone.spark.frames.checkpoints import keep_while_used
from flagstone.spark.frames.plan import ReadArguments, ReadPlan, plan_read
from flagstone.spark.held_state import CheckpointRead
from flagstone.spark.scan import FlagstoneReader
from flagstone.spark.selection import Wanted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Batches = Iterator[pa.RecordBatch]


def map_arrow(
    spark: SparkSession,
    url: str | os.PathLike[str],
    function: Callable[[Batches], Iterable[pa.RecordBatch]],
    returns: StructType | str,
    **arguments: Unpack[ReadArguments],
) -> DataFrame:
    """The batches that `function` makes of the rows of each task. `returns` has the columns of these batches.

    Rows are those of `read` with the same arguments, in key order within a task. The function is called once in each
    task, and must pickle. The frame evaluates it again in every action, with the same rows; cache the frame to avoid
    that. Its checkpoint is kept as that of `read`.

    Raises:
        InvalidRequest: an argument is wrong, or `where` has a condition that only Spark can apply.
        Unavailable: the store did not answer.

    """
    plan = plan_read(url, arguments, spark=spark)
    require_complete_where(plan)
    held = plan.hold()
    frame = mapped(spark, plan, held, function, returns)
    if arguments.get("checkpoint") is None:
        keep_while_used(spark, frame, held)
    return frame


def mapped(
    spark: SparkSession,
    plan: ReadPlan,
    held: CheckpointRead,
    function: Callable[[Batches], Iterable[pa.RecordBatch]],
    returns: StructType | str,
) -> DataFrame:
    """`map_arrow` for a state that the caller keeps."""
    reader = FlagstoneReader(held, plan.schema)
    parts = tuple(part.wanted for part in reader.plan())
    work: Any = MapTask(reader, parts, function)
    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(work, returns)


def require_complete_where(plan: ReadPlan) -> None:
    """Raise `InvalidRequest` if the condition is not one that tasks can apply."""
    if not plan.complete:
        raise InvalidRequest(
            f"where {plan.where!r} has a condition that only Spark can apply: use comparisons of a column with a "
            "literal of its type, between, in, like 'x%' and is null, joined by `and`"
        )


@dataclass(frozen=True)
class MapTask:
    """The work of a task: it gets the numbers of its parts, reads them, and calls the function once."""

    reader: FlagstoneReader
    parts: tuple[Wanted, ...]
    function: Callable[[Batches], Iterable[pa.RecordBatch]]

    def __call__(self, numbers: Batches) -> Batches:
        yield from self.function(self._rows(numbers))

    def _rows(self, numbers: Batches) -> Batches:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.reader.read_wanted(self.parts[number])
