"""Brings the rows of a load to the tasks that build its tables: by ranges of keys, sorted, in as few parts as do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART_BYTES: Final = 64 * 1024 * 1024
"""What Spark aims at when it puts parts of a shuffle together."""

_SMALLEST_PART: Final = 1024 * 1024
_KEEP_SIZE: Final = frozenset(
    {
        "InMemoryRelation", "LocalRelation", "LogicalRelation", "Project", "Range", "Repartition",
        "RepartitionByExpression", "Sort", "Union",
    }
)  # fmt: skip
"""Steps of a plan that know how much they give. What filters, joins or groups can only guess."""


def sort_by_key(rows: DataFrame, key: str, order_by: Sequence[str], partitions: int | None) -> DataFrame:
    """The rows in ranges of keys, each sorted by key and then by the columns `order_by`.

    Spark cuts a shuffle into 200 parts as long as it does not know its size, and puts them together afterwards. For a
    load that needs but a few that is a fifth of the work: where the size is known before, so is the number.
    """
    wanted = partitions or known_partitions(rows)
    ranged = rows.repartitionByRange(wanted, key) if wanted else rows.repartitionByRange(key)
    return ranged.sortWithinPartitions(key, *order_by)


def known_partitions(rows: DataFrame) -> int | None:
    """How many parts of the usual size the rows make; None when that is not known, or no fewer than Spark's own."""
    frame: Any = getattr(rows, "_jdf", None)  # there is none behind Spark Connect: the plan is elsewhere
    if frame is None:
        return None
    plan = frame.queryExecution().optimizedPlan()
    if not _keeps_size(plan):
        return None
    spark = rows.sparkSession
    return plan_parts(
        int(str(plan.stats().sizeInBytes())),
        cores=spark.sparkContext.defaultParallelism,
        most=int(spark.conf.get("spark.sql.shuffle.partitions") or 0),
    )


def plan_parts(size: int, *, cores: int, most: int) -> int | None:
    """As many parts as make each about `PART_BYTES`, or more where cores would idle; None from `most` on. Pure."""
    parts = max(-(-size // PART_BYTES), min(cores, -(-size // _SMALLEST_PART)), 1)
    return parts if parts < most else None


def _keeps_size(plan: Any) -> bool:
    if plan.nodeName() not in _KEEP_SIZE:
        return False
    children = plan.children()
    return all(_keeps_size(children.apply(at)) for at in range(children.size()))
