"""The stored schema through Spark itself; `test_stored_schema.py` has the cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, InvalidRequest, WalReader
from flagstone.lsm.system_rows import is_system
from flagstone.spark import bulk_load, export, foreach_batch
from kit.databases import QUIET
from kit.spark_loads import ON_SPARK

pytestmark = ON_SPARK

ROWS = [("eu", 1, 5, "a"), ("us", 2, None, None), ("eu", 3, 7, "c")]
DDL = "region string, id long, qty int, `no.te` string"


def test_a_structured_sink_is_followed_by_structured_reads_exports_counts_differences_and_feeds(
    spark: Any, tmp_path: Path
) -> None:
    """Before, the progress row of the sink made every structured read fail, and counted as a row."""
    source, folder = tmp_path / "source", tmp_path / "db"
    spark.createDataFrame(ROWS, DDL).coalesce(1).write.parquet(str(source))
    before = Admin(folder)
    flagstone.open(folder, settings=QUIET).close()
    first = before.create_checkpoint()
    stream = spark.readStream.schema(DDL).parquet(str(source))
    sink = stream.writeStream.format("flagstone").option("key.columns", "region,id")
    sink = sink.option("checkpointLocation", str(tmp_path / "state")).trigger(availableNow=True)
    query = sink.start(str(folder))
    query.awaitTermination(120)
    assert query.exception() is None

    reader = spark.read.format("flagstone")
    typed = reader.load(str(folder))
    assert [(field.name, field.dataType.simpleString()) for field in typed.schema] == [
        ("region", "string"), ("id", "bigint"), ("qty", "int"), ("no.te", "string"),
    ]  # fmt: skip
    assert sorted(tuple(row) for row in typed.collect()) == sorted(ROWS)
    assert (typed.count(), reader.option("raw", True).load(str(folder)).count()) == (3, 3)
    assert (
        spark.read.format("flagstone").options(raw=True, include_system=True).load(str(folder)).count() == 5
    )
    assert export(spark, folder, tmp_path / "parquet").rows == 3
    again = spark.read.parquet(str(tmp_path / "parquet"))
    assert sorted(tuple(row) for row in again.collect()) == sorted(ROWS)
    second = before.create_checkpoint()
    assert len(list(before.diff(first.id, second.id))) == 3
    assert len(list(before.diff(first.id, second.id, include_system=True))) == 5
    changes = [change for batch in WalReader(folder).follow(timeout_s=0) for change in batch.changes]
    assert len(changes) == 3
    assert not any(is_system(change.key) for change in changes)
    spark.sql(f"create or replace temporary view orders using flagstone options (path '{folder}')")
    try:
        found = spark.sql("select sum(qty) as total, max(`no.te`) as last from orders where region = 'eu'")
        assert [tuple(row) for row in found.collect()] == [(12, "c")]
    finally:
        spark.catalog.dropTempView("orders")


def test_frames_are_loaded_by_name_streamed_into_an_open_database_and_refused_if_they_do_not_fit(
    spark: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "db"
    bulk_load(spark.createDataFrame(ROWS, DDL), folder, key_columns=["region", "id"])
    turned = spark.createDataFrame(
        [("x", 2**40, 4, "eu")], "`no.te` string, qty long, id long, region string"
    )
    bulk_load(turned, folder)
    with flagstone.open(folder, settings=QUIET) as db:
        write = foreach_batch(db, "orders")
        five = [(5, "eu", None, None, 1)]
        write(spark.createDataFrame(five, "id long, region string, qty long, `no.te` string, more int"), 0)
        version = db.schema()
        assert version is not None
        assert version.current.names == ("qty", "no.te", "more")
    shown = spark.read.format("flagstone").schema("id long, qty long, more int").load(str(folder))
    assert sorted((tuple(row) for row in shown.collect()), key=str) == sorted(
        [(1, 5, None), (2, None, None), (3, 7, None), (4, 2**40, None), (5, None, 1)], key=str
    )
    with pytest.raises(InvalidRequest, match="'qty' is stored as int64, and the rows have string"):
        bulk_load(spark.createDataFrame([("eu", 1, "5")], "region string, id long, qty string"), folder)
    with pytest.raises(InvalidRequest, match="give rows with the columns of the schema"):
        bulk_load(spark.createDataFrame([(b"k", b"v")], "key binary, value binary"), folder)
    bulk_load(spark.createDataFrame([(b"k", b"v")], "key binary, value binary"), folder, raw=True)
    read = spark.read.format("flagstone").option("columnNameOfCorruptRecord", "bad").load(str(folder))
    assert [bytes(row.bad) for row in read.where("bad is not null").collect()] == [b"k"]
    kept = spark.read.format("flagstone").option("mode", "DROPMALFORMED").load(str(folder))
    assert kept.count() == 5
    with pytest.raises(Exception, match="CorruptData"):
        spark.read.format("flagstone").option("mode", "FAILFAST").load(str(folder)).collect()
