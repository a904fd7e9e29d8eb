"""Acts 5 to 7: Spark compacts the database beside its writer, an analyst reads it, and every object is verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import flagstone
import flagstone.spark as fs
from serve import new_orders
from shop import Shop, cents_of
from stage import Lap, Stage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BY_STATE = """
    select get_json_object(v, '$.state') as state, count(*) as orders,
           sum(cast(get_json_object(v, '$.cents') as long)) as cents
    from orders group by 1"""


def compact(stage: Stage, spark: SparkSession, db: flagstone.Db, url: Path) -> None:
    stage.act("5 Compact", "Spark's tasks merge, the database stays open")
    db.flush()
    before = db.manifest().tree

    def work(lap: Lap) -> None:
        def remember(progress: Any) -> None:
            lap.bytes = progress.bytes_to_read

        fs.compact(spark, url, full=True, progress=remember)

    stage.spark_step("compaction of everything", spark, url.parent, work)
    after = flagstone.Admin(url).manifest().value.tree
    stage.check("SSTs in L0 afterwards", len(after.l0), 0)
    stage.check("sorted runs afterwards", len(after.runs), 1)
    stage.tell(f"{len(before.l0)} SSTs of L0 and {len(before.runs)} sorted runs became one sorted run.")


def analyse(stage: Stage, spark: SparkSession, shop: Shop, url: Path) -> None:
    stage.act("6 Analyse", "the live database as a consistent DataFrame")
    count, cents = shop.totals()
    fresh = range(shop.orders, shop.orders + new_orders(shop))
    count["new"], cents["new"] = len(fresh), sum(map(cents_of, fresh))

    def totals(lap: Lap) -> list[Any]:
        lap.rows = count.total()
        orders = spark.read.format("flagstone").option("prefix", "order/").load(str(url))
        orders.selectExpr("cast(value as string) as v").createOrReplaceTempView("orders")
        return list(spark.sql(BY_STATE).collect())

    found = stage.spark_step("orders and revenue by state", spark, url.parent, totals)
    stage.check("orders by state", {row.state: row.orders for row in found}, dict(count))
    stage.check("cents by state", {row.state: row.cents for row in found}, dict(cents))
    stage.tell(", ".join(f"{row.orders:,} {row.state}" for row in sorted(found)) + ": equal to the model.")


def verify(stage: Stage, url: Path) -> None:
    stage.act("7 Verify", "every checksum, filter, order and reference of both databases")
    for name in (url.name, "shop-test"):
        with stage.step(f"verify {name}") as (lap, _):
            report = flagstone.Admin(url.with_name(name)).verify()
            lap.bytes = report.bytes
        stage.check(f"damage in {name}", report.damage, [])
