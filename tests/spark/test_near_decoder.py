"""Work in the tasks that decode: `map_arrow`, `aggregate` and `count` give the answers of Spark."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import DecimalType, DoubleType, LongType, StringType, StructField, StructType

import flagstone
from flagstone import Admin, FlagstoneError, InvalidRequest
from flagstone import spark as fs
from flagstone.spark.frames.aggregate import Measure, Partial, check_measure, summable
from flagstone.spark.frames.count import FACTS
from kit.databases import QUIET
from kit.spark_loads import load, on_spark, pairs

SCHEMA = "region string, id long, price double, cents decimal(10,2), note string"
ARGUMENTS: dict[str, Any] = {"key_columns": ["region", "id"], "schema": SCHEMA}


@on_spark
def test_aggregates_equal_those_of_spark(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    folder = tmp_path / "db"
    big = 2**62
    rows = [
        (
            region,
            number,
            price,
            None if number == 2 else Decimal(number) / 4,
            None if number % 2 else f"n{number}",
        )
        for region in ("asia", "eu", "us")
        for number, price in enumerate([1.5, math.nan, None, -0.0, 7.25, math.inf])
        if region != "us" or price is None or math.isnan(price)
    ]
    rows.append(("big", big, 1.0, None, None))
    orders = spark.createDataFrame(rows, SCHEMA)
    fs.bulk_load(orders, folder, key_columns=["region", "id"])
    texts = {
        "rows": "count(*)",
        "notes": "COUNT(note)",
        "ids": "sum(id)",
        "money": "sum(cents)",
        "low": "min(price)",
        "high": "max(price)",
        "last": "max(note)",
        "mean": "avg(id)",
    }
    expected = [F.expr(text).alias(name) for name, text in texts.items()]

    def same(ours: Any, theirs: Any) -> None:
        assert ours.schema.simpleString() == theirs.schema.simpleString()
        assert sorted(map(repr, ours.collect())) == sorted(map(repr, theirs.collect()))

    same(
        fs.aggregate(spark, folder, texts, group_by=["region"], **ARGUMENTS),
        orders.groupBy("region").agg(*expected),
    )
    same(fs.aggregate(spark, folder, texts, **ARGUMENTS), orders.agg(*expected))
    where = "price > 1D and region <> 'us'"
    same(
        fs.aggregate(spark, folder, texts, where=where, partitions=3, **ARGUMENTS),
        orders.where(where).agg(*expected),
    )
    same(
        fs.aggregate(spark, folder, texts, where="region = 'nowhere'", **ARGUMENTS),
        orders.where("region = 'nowhere'").agg(*expected),
    )

    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"twice": pc.multiply(batch["id"], 2)})

    twice = fs.map_arrow(
        spark, folder, doubled, "twice long", where="region = 'eu'", columns=["id"], **ARGUMENTS
    )
    assert sorted(row.twice for row in twice.collect()) == [0, 2, 4, 6, 8, 10]
    assert fs.count(spark, folder, where="region = 'eu'", **ARGUMENTS) == 6
    assert fs.count(spark, folder, where="upper(region) = 'EU'", **ARGUMENTS) == 6


@on_spark
def test_a_count_is_exact_whatever_hides_rows(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs({b"k%03d" % number: b"v" for number in range(500)})], max_sst_size="4000")
    before = len(Admin(folder).checkpoints())
    assert fs.count(spark, folder) == 500
    assert len(Admin(folder).checkpoints()) == before
    manifest = Admin(folder).manifest().id
    assert fs.count(spark, folder) == 500  # from what is known: not even a checkpoint is made
    assert Admin(folder).manifest().id == manifest
    assert fs.count(spark, folder, prefix=b"k00") == 10
    assert fs.count(spark, folder, keys=[b"k001", b"absent"]) == 1
    with flagstone.open(folder, settings=QUIET) as db:
        held = db.snapshot()
        db.delete(b"k000")
        db.put(b"k001", b"again")
        db.put(b"short", b"", ttl=timedelta(milliseconds=1))
        db.put(b"long", b"", ttl=timedelta(hours=1))
        db.flush("wal")
        assert fs.count(spark, folder) == 500
        db.flush()
        assert fs.count(spark, folder) == 500
        Admin(folder).compact(full=True)  # keeps the old versions that the snapshot shows
        held.close()
    assert fs.count(spark, folder) == 500
    assert fs.count(spark, folder) == 500
    assert fs.count(spark, folder, include_expired=True) >= 500


@on_spark
def test_a_count_leaves_out_the_rows_that_the_read_drops(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    fs.bulk_load(spark.range(9).selectExpr("id", "id * 2 as twice"), folder, key_columns=["id"])
    load(folder, [pairs({b"not a key": b"not a row"})], raw="true")

    assert fs.count(spark, folder) == fs.read(spark, folder).count() == 10
    for every in ({}, {"where": "id >= 0"}):  # the malformed key is in the range of keys
        assert fs.count(spark, folder, mode="DROPMALFORMED", **every) == 9
    assert (
        fs.aggregate(spark, folder, {"n": "count(*)"}, mode="DROPMALFORMED", where="id >= 0").first().n == 9
    )
    with pytest.raises(FlagstoneError, match="key"):
        fs.count(spark, folder, mode="FAILFAST")


SUMS = StructType(
    [
        StructField("g", StringType()),
        StructField("x", LongType()),
        StructField("d", DecimalType(10, 2)),
        StructField("f", DoubleType()),
    ]
)


def test_a_sum_of_decimals_is_exact_or_an_error() -> None:
    rows = StructType([StructField("d", DecimalType(38, 0))])
    partial = Partial((Measure.parse("s", "sum(d)"),), (), rows)
    most = Decimal("9" * 38)
    half = pa.RecordBatch.from_pydict({"d": pa.array([Decimal("4" * 38), Decimal(0)], pa.decimal128(38, 0))})

    [found] = partial(iter([half, half]))
    assert found.column("v0").to_pylist() == [Decimal("8" * 38)]
    for batches in (
        [half, half, half],
        [pa.RecordBatch.from_arrays([pa.array([most, most], pa.decimal128(38, 0))], ["d"])],
    ):
        with pytest.raises(InvalidRequest, match="more than 38 digits"):
            list(partial(iter(batches)))


def test_partial_results_are_combined_and_large_sums_do_not_wrap_around() -> None:
    partial = Partial((Measure.parse("s", "sum(x)"), Measure.parse("m", "max(f)")), ("g",), SUMS)
    batch = pa.RecordBatch.from_pydict(
        {
            "g": ["a", "a", "b"],
            "x": [2**62, 2**62, None],
            "d": pa.nulls(3, pa.decimal128(10, 2)),
            "f": [1.0, math.nan, 2.0],
        }
    )

    [found] = partial(iter([batch, batch, batch.slice(0, 0)]))

    rows = {row["k0"]: row for row in found.to_pylist()}
    assert (rows["a"]["v0"], rows["b"]["v0"]) == (2**64, None)
    assert (rows["a"]["v1"], rows["a"]["c1"], rows["b"]["v1"], rows["b"]["c1"]) == (1.0, 2, 2.0, 0)
    assert list(partial(iter([]))) == []
    assert summable(pa.array([1, None], pa.int32())).type == pa.int64()
    assert summable(pa.array([-(2**63)], pa.int64())).type == pa.decimal128(38, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("median(x)", "write count"),
        ("sum(*)", "write count"),
        ("x", "write count"),
        ("avg(d)", "use sum and count"),
        ("sum(g)", "not available"),
    ],
)
def test_an_unknown_aggregate_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_measure(Measure.parse("m", text), {field.name: field.dataType for field in SUMS.fields})


def test_what_is_known_of_ssts_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flagstone.compaction.inputs import part_of
    from flagstone.spark.frames.count import Fact, Facts
    from flagstone.store.paths import DbPaths

    folder = tmp_path / "db"
    load(folder, [pairs({b"k%03d" % number: b"v" * 50 for number in range(500)})], max_sst_size="4000")
    manifest = Admin(folder).manifest().value
    parts = [part_of(manifest, view, DbPaths("db")) for view in manifest.views]
    monkeypatch.setattr("flagstone.spark.frames.count._MAX_FACTS", 2)
    facts = Facts()
    for number, part in enumerate(parts[:3]):
        facts.learn(part, Fact(number, None))

    assert [facts.find(part) for part in parts[:3]] == [None, Fact(1, None), Fact(2, None)]
    assert FACTS.find(parts[0]) is None
