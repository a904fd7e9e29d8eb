"""Three tables of one pipeline: a database as a view, its changes as a table, and a second database kept up to date."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

spark = SparkSession.active()
SHOP = spark.conf.get("shop.url")


@dp.materialized_view
def revenue() -> DataFrame:
    """The database as it is now: orders and cents by customer."""
    orders = spark.read.format("flagstone").option("prefix", "order/").load(SHOP)
    fields = orders.selectExpr("from_json(cast(value as string), 'customer long, cents long') as o")
    return fields.selectExpr("o.customer", "o.cents").groupBy("customer").agg(F.sum("cents").alias("cents"))


@dp.table
def changes() -> DataFrame:
    """A copy of all rows at the first run, then every change since."""
    return spark.readStream.format("flagstone").option("consumer", "pipeline").load(SHOP)


dp.create_sink("by_customer", "flagstone", {"path": spark.conf.get("shop.by_customer")})


@dp.append_flow(target="by_customer")
def index() -> DataFrame:
    """The same orders under another key, in a database of their own: every micro-batch exactly once."""
    orders = spark.readStream.table("changes").where("op = 'put'")
    return orders.selectExpr(
        "concat(get_json_object(cast(value as string), '$.customer'), '/', cast(key as string)) as key",
        "value",
    )
