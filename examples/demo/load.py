"""Act 1: Spark loads the shop. Tasks build finished SSTs on the store; the driver commits them with one manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import flagstone.spark as fs
from shop import Shop
from stage import Lap, Stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def load(stage: Stage, spark: SparkSession, shop: Shop, url: Path) -> None:
    stage.act("1 Load", "unordered rows; Spark's tasks build SSTs, one commit shows all rows or none")
    changed, deleted = shop.changes()

    def bulk_load(df: DataFrame, lap: Lap, *, order_by: str = "") -> fs.LoadReport:
        partitions = max(2 * spark.sparkContext.defaultParallelism, shop.orders // 500_000)
        report = fs.bulk_load(df, url, partitions=partitions, order_by=order_by or ())
        assert report is not None  # None only with a remote driver
        lap.rows, lap.bytes = report.rows, report.bytes
        return report

    first = stage.spark_step(
        "orders and customers",
        spark,
        url.parent,
        lambda lap: bulk_load(shop.history(spark), lap),
    )
    second = stage.spark_step(
        "a day of updates and deletes",
        spark,
        url.parent,
        lambda lap: bulk_load(shop.day(spark), lap, order_by="version"),
    )
    stage.check("rows of the first load", first.rows, shop.loaded_rows)
    stage.check("rows of the second load", second.rows, changed)
    stage.tell(
        f"{changed:,} orders changed, {deleted:,} of them deleted. Each load is one sequence number: "
        f"{first.seq} and {second.seq}."
    )
