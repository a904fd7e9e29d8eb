"""`read`: a database as a DataFrame that shows one moment and reads only what its condition needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Unpack

from flagstone.errors import InvalidRequest
from flagstone.spark.column_conditions import apply_to
from flagstone.spark.frames.checkpoints import keep_while_used
from flagstone.spark.frames.plan import ReadArguments, plan_read
from flagstone.spark.options import option_texts
from flagstone.spark.sessions import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    spark: SparkSession,
    url: str | os.PathLike[str],
    *,
    limit: int | None = None,
    **arguments: Unpack[ReadArguments],
) -> DataFrame:
    """The rows of a database that pass `where`, as they are now, or at `checkpoint` or `as_of`.

    The frame shows the same moment in every use: again, joined with itself, cached, as a view, filtered further.
    `where` becomes key ranges and single keys where it compares the key, or leading key columns, with literals; tasks
    apply other comparisons before rows leave them, and Spark applies the rest. Only `columns` leave the tasks. With
    `limit` no task returns more rows than that. `ReadArguments` lists all arguments.

    A checkpoint named `spark frame` keeps the state. This process renews it while the frame, or one derived from it,
    exists, and deletes it afterwards. After a crash it expires within `lifetime`, five minutes by default.

    Raises:
        InvalidRequest: an argument is wrong, or there is no such database, checkpoint or state.
        Unavailable: the store did not answer.

    """
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit is {limit}; use 1 or more")
    # Spark applies the limit to rows that pass all conditions: tasks may stop early only if they apply all of them.
    plan = plan_read(url, arguments, spark=spark)
    register(spark)
    held = plan.hold()
    options = plan.source_options(held)
    if limit is not None and plan.complete:
        options |= option_texts({"task_limit": limit})
    frame: Any = spark.read.format("flagstone").options(**options).schema(plan.schema).load()
    if arguments.get("checkpoint") is None:
        keep_while_used(spark, frame, held)
    if not plan.complete:
        frame = apply_to(frame, plan.where).select(*(_quoted(name) for name in plan.output))
    result: DataFrame = frame if limit is None else frame.limit(limit)
    return result


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
