"""A program on Spark Connect: a server on the loopback address and its client, which has no SparkContext.

Run as `connect_client.py FOLDER`. It fails with an error, or prints its results as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812

import flagstone
import flagstone.spark as fs
from flagstone import InvalidRequest
from flagstone.spark.frames.checkpoints import FRAME_CHECKPOINTS


def main(home: Path) -> dict[str, Any]:
    spark = fs.session(
        remote="local[2]",
        spark_sql_shuffle_partitions=2,
        **{
            "spark.log.level": "OFF",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
    )
    seen: dict[str, Any] = {"session": type(spark).__module__}
    frame = spark.range(1000).selectExpr("cast(id + 1000 as string) as key", "cast(id as string) as value")
    shop = str(home / "shop")

    report = fs.bulk_load(frame, shop, partitions=2)
    seen["loaded"] = None if report is None else report.rows
    frame.where("key < '1010'").write.format("flagstone").mode("append").save(shop)
    fs.register(spark)  # a second time
    rows = spark.read.format("flagstone").load(shop)
    seen["read"] = rows.count()
    later = fs.read(spark, shop, where=[F.col("key") >= F.lit(bytearray(b"1980")), "length(value) = 3"])
    seen["pushed"] = later.where("key >= cast('1990' as binary)").count()
    derived = later.select("key")
    del later
    gc.collect()
    FRAME_CHECKPOINTS.run_once()
    seen["held"] = (len(flagstone.Admin(shop).checkpoints("spark frame")), derived.count())
    del derived
    gc.collect()
    FRAME_CHECKPOINTS.run_once()
    seen["released"] = len(flagstone.Admin(shop).checkpoints("spark frame"))
    seen["counted"] = fs.count(spark, shop)
    found = fs.lookup(frame.where("key < '1003'").select("key"), shop, on="key", how="inner")
    seen["looked_up"] = sorted(row.value.decode() for row in found.collect())
    view = fs.view(spark, "shop_rows", shop, where="key < '1005'")
    seen["viewed"] = spark.sql("select count(*) as n from shop_rows").collect()[0].n
    view.drop()
    seen["compacted"] = len(fs.compact(spark, shop, full=True))
    fs.bulk_load(frame.selectExpr("key", "length(value) as n"), home / "ordinary", key_columns=["key"])
    ordinary = spark.read.format("flagstone").schema("key string, n int").option("key.columns", "key")
    seen["ordinary"] = ordinary.load(str(home / "ordinary")).selectExpr("sum(n) as total").collect()[0].total

    with flagstone.open(home / "live") as db:
        for number in range(10):
            db.put(b"%d" % number, b"v")
    changes = spark.readStream.format("flagstone").option("consumer", "lake").load(str(home / "live"))
    copying = changes.select("key", "value").writeStream.format("flagstone").trigger(availableNow=True)
    copying.option("checkpointLocation", str(home / "state")).start(str(home / "copy")).awaitTermination(120)
    without_progress_row = spark.read.format("flagstone").option("start", "0")
    seen["streamed"] = without_progress_row.load(str(home / "copy")).count()

    try:
        fs.bulk_load(frame.selectExpr("key", "cast(null as string) as value"), shop)
    except InvalidRequest as refused:
        seen["refused"] = str(refused)
    seen["after"] = spark.read.format("flagstone").load(shop).count()
    spark.stop()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
