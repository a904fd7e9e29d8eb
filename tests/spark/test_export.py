"""An export writes a consistent state of a database to files, from which an equal database can be loaded."""

from __future__ import annotations

import csv
import json
import logging
import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone import spark as fs
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.jobs.export import (
    check_apart,
    check_choice,
    check_mapped,
    plan_encodings,
    plan_schema,
)
from flagstone.spark.row_mapping import read_schema
from kit.databases import QUIET
from kit.spark_loads import on_spark, shown


@pytest.fixture
def shop(tmp_path: Path) -> dict[bytes, bytes]:
    """At tmp_path/shop: keys and values of all bytes, empty values, SSTs and a WAL; returns its rows."""
    chance, model = random.Random(5), dict[bytes, bytes]()
    with flagstone.open(tmp_path / "shop", settings=QUIET) as db:
        for number in range(600):
            key = chance.randbytes(1 + chance.randrange(12))
            model[key] = b"" if number % 7 == 0 else chance.randbytes(chance.randrange(200))
            db.put(key, model[key])
            if number % 200 == 199:
                db.flush()
        gone = sorted(model)[:50]
        for key in gone:
            db.delete(key)
            del model[key]
    return model


@on_spark
@pytest.mark.parametrize(
    ("form", "encoding"),
    [("orc", None), ("json", "hex"), ("csv", "base64")],
)
def test_an_export_loads_into_an_equal_database(
    spark: Any, tmp_path: Path, shop: dict[bytes, bytes], form: str, encoding: Any
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    from flagstone.spark import bulk_load, export

    target = tmp_path / "files"
    report = export(
        spark, tmp_path / "shop", target, format=form, key_as=encoding, value_as=encoding, partitions=3
    )

    assert report.rows == len(shop)
    assert report.bytes == sum(len(key) + len(value) for key, value in shop.items())
    assert report.seconds > 0
    assert not Admin(tmp_path / "shop").manifest().value.checkpoints, "its checkpoint is released"
    if encoding is None:
        assert report.encodings == {"key": "binary", "value": "binary"}
        rows = spark.read.format(form).load(str(target))
    else:
        assert report.encodings == {"key": encoding, "value": encoding}
        decode = F.unhex if encoding == "hex" else F.unbase64
        texts = spark.read.format(form).schema("key string, value string").option("header", "true")
        # An empty text is null to Spark's reader of CSV.
        rows = (
            texts.load(str(target))
            .fillna("")
            .select(decode("key").alias("key"), decode("value").alias("value"))
        )
    loaded = bulk_load(rows, tmp_path / "again")
    assert loaded is not None
    assert loaded.rows == len(shop)
    assert shown(tmp_path / "again") == shop


@on_spark
def test_utf8_is_exported_as_text_and_invalid_utf8_is_refused(spark: Any, tmp_path: Path) -> None:
    from flagstone.spark import export

    with flagstone.open(tmp_path / "shop", settings=QUIET) as db:
        db.put(b"user/1", 'größer, "q"'.encode())
        db.put(b"user/2", b"")
    report = export(
        spark,
        tmp_path / "shop",
        tmp_path / "files",
        format="json",
        key_as="utf8",
        value_as="utf8",
        columns=("seq", "key", "value"),
    )
    lines = [line for file in (tmp_path / "files").glob("*.json") for line in file.read_text().splitlines()]
    assert [json.loads(line) for line in lines] == [
        {"seq": 1, "key": "user/1", "value": 'größer, "q"'},
        {"seq": 2, "key": "user/2", "value": ""},
    ]
    assert report.encodings == {"key": "utf8", "value": "utf8"}
    nasty = {"a": " both ", "b": 'a "q", c', "c": "line\nand\r\nline", "d": "back\\", "e": '\\"', "f": "x"}
    with flagstone.open(tmp_path / "nasty", settings=QUIET) as db:
        for key, value in nasty.items():
            db.put(key.encode(), value.encode())
    export(spark, tmp_path / "nasty", tmp_path / "csv", format="csv", key_as="utf8", value_as="utf8")
    [file] = (tmp_path / "csv").glob("*.csv")
    with file.open(newline="", encoding="utf-8") as stream:
        assert {row["key"]: row["value"] for row in csv.DictReader(stream)} == nasty
    with flagstone.open(tmp_path / "shop", settings=QUIET) as db:
        db.put(b"user/3", b"\xff")
    with pytest.raises(InvalidRequest, match="does not fit"):
        export(spark, tmp_path / "shop", tmp_path / "more", format="csv", key_as="utf8", value_as="utf8")


@on_spark
def test_exported_columns_are_read_back_with_their_types(spark: Any, tmp_path: Path) -> None:
    from flagstone.spark import bulk_load, export

    orders = spark.createDataFrame(
        [
            ("eu", 1, date(2026, 1, 2), b"\x00\xff", 1.5),
            ("eu", 2, None, None, 2.5),
            ("us", -3, None, b"", None),
        ],
        "region string, id long, day date, seal binary, amount double",
    )
    bulk_load(orders, tmp_path / "orders", key_columns=["region", "id"])
    mapping = {"key_columns": ["region", "id"], "schema": orders.schema}
    report = export(spark, tmp_path / "orders", tmp_path / "parquet", **mapping)
    assert (report.rows, report.bytes, report.encodings) == (3, 0, {})
    again = spark.read.parquet(str(tmp_path / "parquet"))
    assert sorted(again.collect(), key=str) == sorted(orders.collect(), key=str)

    text = export(spark, tmp_path / "orders", tmp_path / "csv", format="csv", **mapping)
    assert text.encodings == {"seal": "base64"}
    assert {row.seal for row in spark.read.csv(str(tmp_path / "csv"), header=True).collect()} == {
        "AP8=",
        None,
    }
    typed = export(spark, tmp_path / "orders", tmp_path / "typed", columns=["amount", "id"])
    assert typed.rows == 3
    assert sorted(spark.read.parquet(str(tmp_path / "typed")).collect(), key=str) == sorted(
        orders.select("amount", "id").collect(), key=str
    )
    plain = export(spark, tmp_path / "orders", tmp_path / "plain", raw=True)
    assert plain.bytes > 0
    with pytest.raises(InvalidRequest, match="the read names region: leave"):
        export(spark, tmp_path / "orders", tmp_path / "x", key_columns=["region"])


@on_spark
def test_an_export_contains_the_requested_state_and_keys(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from flagstone.spark import export

    folder = tmp_path / "shop"
    with flagstone.open(folder, settings=QUIET) as db:
        for number in range(100):
            db.put(b"%03d" % number, b"old")
        db.flush()
        before = db.status()["committed_seq"]
        held = Admin(folder).create_checkpoint(timedelta(hours=1))
        db.put(b"000", b"new", await_durable=True)

    def exported(name: str, **wanted: Any) -> dict[bytes, bytes]:
        export(spark, folder, tmp_path / name, **wanted)
        return {
            bytes(row.key): bytes(row.value) for row in spark.read.parquet(str(tmp_path / name)).collect()
        }

    caplog.set_level(logging.INFO, "flagstone.spark")
    assert exported("now")[b"000"] == b"new"
    assert any("exported database=shop format=parquet rows=100" in line for line in caplog.messages)
    assert exported("held", checkpoint=held.id)[b"000"] == b"old"
    assert exported("then", as_of=before)[b"000"] == b"old"
    assert sorted(exported("range", start=b"010", stop=b"020")) == [b"%03d" % n for n in range(10, 20)]
    assert sorted(exported("prefix", prefix=b"09")) == [b"%03d" % n for n in range(90, 100)]
    assert exported("none", prefix=b"x") == {}
    assert [kept.id for kept in Admin(folder).checkpoints()] == [held.id], "only the given one is left"


@on_spark
def test_an_existing_target_is_kept_unless_overwrite_is_given(
    spark: Any, tmp_path: Path, shop: dict[bytes, bytes]
) -> None:
    from flagstone.spark import export

    target = tmp_path / "files"
    export(spark, tmp_path / "shop", target)
    with pytest.raises(InvalidRequest, match=r"(?i)already exists"):
        export(spark, tmp_path / "shop", target)
    export(spark, "shop", target, store=str(tmp_path), store_options={"fsync": False}, mode="append")
    assert spark.read.parquet(str(target)).count() == 2 * len(shop)
    export(spark, tmp_path / "shop", target, mode="overwrite")
    assert spark.read.parquet(str(target)).count() == len(shop)
    with pytest.raises(InvalidRequest, match="avro"):
        export(spark, tmp_path / "shop", tmp_path / "avro", format="avro")
    assert not Admin(tmp_path / "shop").manifest().value.checkpoints, "after a failure, too"
    with pytest.raises(InvalidRequest, match="no database"):
        export(spark, tmp_path / "nothing", tmp_path / "x")


@pytest.mark.parametrize(
    ("target", "apart"),
    [
        ("{}/shop", False),
        ("{}", False),
        ("file://{}/shop/files", False),
        ("{}/shop/../shop", False),
        ("{}/shop-files", True),
        ("s3a://bucket/files", True),
    ],
)
def test_the_target_of_an_export_must_be_outside_of_the_database(
    tmp_path: Path, target: str, apart: bool
) -> None:
    address = DatabaseAddress(str(tmp_path / "shop"))
    if apart:
        check_apart(address, target.format(tmp_path))
        return
    with pytest.raises(InvalidRequest, match="overlaps the database"):
        check_apart(address, target.format(tmp_path))


def test_bucket_urls_of_spark_address_the_same_bucket() -> None:
    address = DatabaseAddress("s3://bucket/shop", store_options={"region": "eu-central-1"})
    check_apart(address, "s3a://bucket/shop-files")
    check_apart(address, "s3a://other/shop")
    check_apart(address, "hdfs://bucket/shop")
    for target in ("s3a://bucket/shop", "s3://bucket/shop/files", "s3a://bucket"):
        with pytest.raises(InvalidRequest, match="overlaps the database"):
            check_apart(address, target)


def test_an_unsupported_format_is_refused_with_the_nearest_supported_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'parquet'"):
        check_choice("format", "parkett", ("parquet", "orc"))
    with pytest.raises(InvalidRequest, match="it has orc, parquet"):
        check_choice("format", "zzz", ("parquet", "orc"))
    with pytest.raises(InvalidRequest, match="did you mean 'overwrite'"):
        check_choice("mode", "overwrit", ("error", "append", "overwrite"))
    with pytest.raises(InvalidRequest, match="did you mean 'value'"):
        plan_encodings("csv", ("key", "valu"), key_as=None, value_as=None)
    with pytest.raises(InvalidRequest, match="did you mean 'base64'"):
        plan_encodings("csv", ("key",), key_as="base46", value_as=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="csv has no bytes"):
        plan_encodings("csv", ("key",), key_as="binary", value_as=None)
    with pytest.raises(InvalidRequest, match="leave out key_as"):
        check_mapped(None, ("hex", None))
    with pytest.raises(InvalidRequest, match="columns are those of the schema"):
        check_mapped(("key",), (None, None))


def test_bytes_are_exported_as_bytes_if_the_format_supports_them() -> None:
    assert plan_encodings("orc", ("key", "seq"), key_as=None, value_as=None) == {"key": "binary"}
    assert plan_encodings("csv", ("value",), key_as=None, value_as=None) == {"value": "base64"}
    mixed = plan_encodings("csv", ("key", "value"), key_as="utf8", value_as="hex")
    assert plan_schema(("seq", "key", "value"), mixed) == StructType(
        [
            StructField("seq", LongType(), nullable=False),
            StructField("key", StringType(), nullable=False),
            StructField("value", BinaryType(), nullable=False),
        ]
    )
    assert plan_schema(("key",), {"key": "binary"}) == read_schema(("key",))


@on_spark
def test_times_in_json_and_csv_keep_their_microseconds(spark: Any, tmp_path: Path) -> None:
    types = "id long, at timestamp, local timestamp_ntz"
    moment = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    rows = spark.createDataFrame([(1, moment, moment.replace(tzinfo=None))], types)
    fs.bulk_load(rows, tmp_path / "db", key_columns=["id"])

    for form in ("json", "csv"):
        fs.export(spark, tmp_path / "db", tmp_path / form, format=form)
        found = spark.read.format(form).options(header="true").schema(types).load(str(tmp_path / form))
        assert found.exceptAll(rows).count() == 0
        assert found.count() == 1
