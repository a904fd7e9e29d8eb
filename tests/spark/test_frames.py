"""`read`: frames that show one moment in every use, read only what they need, and release their checkpoint."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone import spark as fs
from flagstone.runtime.clock import VirtualClock
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.frames.checkpoints import FRAME_CHECKPOINTS, FrameCheckpoints
from flagstone.spark.frames.plan import plan_read
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.options import ReadOptions
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET
from kit.spark_loads import load, on_spark, pairs

ROWS = {b"k%04d" % number: b"%d" % (number % 7) for number in range(1000)}
SCHEMA = "region string, id long, price double, note string"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "db"
    load(folder, [pairs(ROWS)])
    return folder


def frames_of(folder: Path) -> list[Any]:
    return Admin(folder).checkpoints("spark frame")


def collected(spark: Any, folder: Path) -> int:
    """The checkpoints that are left after both garbage collectors have run."""
    for _ in range(20):
        gc.collect()
        spark._jvm.System.gc()
        FRAME_CHECKPOINTS.run_once()
        if not frames_of(folder):
            break
    return len(frames_of(folder))


@on_spark
def test_every_use_of_a_frame_shows_the_same_rows(spark: Any, folder: Path) -> None:
    frame = fs.read(spark, folder, where="key < 'k0100'")
    assert frame.count() == 100
    load(folder, [pairs({b"k0001": b"new", b"k00": b"new"})])

    few = frame.where("key >= cast('k0090' as binary)")
    assert (few.count(), frame.count(), few.union(frame).count()) == (10, 100, 110)
    assert frame.join(few, "key").count() == 10
    assert frame.join(few, "key", "left_anti").count() == 90
    assert frame.alias("a").join(frame.alias("b"), "key").count() == 100
    cached = frame.cache()
    assert (cached.count(), cached.where("value = cast('3' as binary)").count()) == (100, 14)
    cached.unpersist()
    [held] = frames_of(folder)
    assert held.expires_s - held.created_s == 300
    assert fs.read(spark, folder).count() == 1001


@on_spark
def test_a_checkpoint_is_deleted_when_no_frame_or_view_can_use_it(spark: Any, folder: Path) -> None:
    frame = fs.read(spark, folder)
    derived = frame.where("key < cast('k0100' as binary)")
    del frame
    assert collected(spark, folder) == 1
    derived.createOrReplaceTempView("derived_rows")
    del derived
    assert collected(spark, folder) == 1
    assert spark.sql("select count(*) from derived_rows").first()[0] == 100
    spark.catalog.dropTempView("derived_rows")
    assert collected(spark, folder) == 0


@on_spark
def test_conditions_give_the_same_rows_wherever_they_are_applied(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    folder = tmp_path / "orders"
    rows = [
        (region, number, number / 4, None if number % 3 else f"n{number}'")
        for region in ("asia", "eu", "us")
        for number in range(50)
    ]
    orders = spark.createDataFrame(rows, SCHEMA)
    fs.bulk_load(orders, folder, key_columns=["region", "id"])
    conditions: list[Any] = [
        "region = 'eu' and id between 3 and 5",
        "region in ('eu', 'us') and price > 11D",
        "region like 'a%' and (id = 1 or id = 2)",
        "upper(region) = 'US' and id < 3",
        "note = 'n3\\''",
        (F.col("region") == "eu") & (F.col("id") >= 48),
        F.col("region").isin("eu", "asia") & F.col("note").isNull() & (F.col("id") < 3),
        F.col("region").startswith("u") & (F.length("note") > 2) & (F.lit(40) <= F.col("id")),
        ["id = 7", F.col("region") != "us"],
    ]
    for where in conditions:
        expected = orders
        for each in where if isinstance(where, list) else [where]:
            expected = expected.where(each)
        frame = fs.read(
            spark, folder, where=where, key_columns=["region", "id"], schema=SCHEMA, columns=["price", "id"]
        )
        assert frame.columns == ["price", "id"]
        found = sorted((row.price, row.id) for row in frame.collect())
        assert found == sorted((row.price, row.id) for row in expected.collect()), where
        assert found, where
    three = fs.read(spark, folder, limit=3, where="id > 5", key_columns=["region", "id"], schema=SCHEMA)
    assert [row.id > 5 for row in three.collect()] == [True] * 3


@on_spark
def test_a_frame_without_a_checkpoint_shows_one_moment(spark: Any, folder: Path) -> None:
    frame = fs.read(spark, folder, snapshot="latest", columns=["key"], start=b"k0900")
    load(folder, [pairs({b"k1": b"new"})])

    assert frame.alias("a").join(frame.alias("b"), "key").count() == 100
    assert not frames_of(folder)


def test_the_understood_conditions_leave_nothing_to_spark(folder: Path) -> None:
    plan = plan_read(folder, {"where": "key >= 'a' and value = X'31'", "columns": ["key"]})

    assert plan.complete
    assert plan.schema.fieldNames() == ["key"]
    plan = plan_read(folder, {"where": "length(value) = 1 and key >= 'a'", "columns": ["key"]})
    assert not plan.complete
    assert plan.schema.fieldNames() == ["key", "value"]
    assert len(plan.options.where) == 1
    # To this parser the name `seq` is in a text, between the quotes that Spark takes in pairs.
    plan = plan_read(folder, {"where": "value != 'a''b' and seq > 1 and key != 'c'", "columns": ["key"]})
    assert "seq" in plan.schema.fieldNames()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wher": "a = 1"}, "did you mean 'where'"),
        ({"columns": ["nothing"], "raw": True}, "choose from key, value"),
        ({"columns": "key"}, "lists of names"),
        ({"columns": [], "raw": True}, "not available"),
        ({"key_columns": ["id"]}, "need schema="),
        ({"schema": 17}, "StructType or a text"),
        ({"snapshot": "fast"}, "checkpoint or latest"),
        ({"where": 17}, "SQL text or a Column"),
        ({"lifetime": "0s"}, "lifetime"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_opened(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plan_read("/no/such/database", arguments)


def test_checkpoints_of_frames_are_renewed_while_in_use_and_then_deleted() -> None:
    clock, store = VirtualClock(), MemoryStore()
    with flagstone.open("db", store=store, settings=QUIET, clock=clock) as db:
        db.put(b"a", b"1")
    address = DatabaseAddress("db", store, clock=clock)
    held = hold_checkpoint(ReadOptions(address, lifetime=timedelta(minutes=5)), owned=True)
    used, frames = [True], FrameCheckpoints()
    frames.keep(held, lambda: bool(used))

    for _ in range(10):
        clock.advance(75_000)
        frames.run_once()
    [kept] = address.admin().checkpoints("spark frame")
    assert kept.expires_s is not None
    assert kept.expires_s > clock.now_ms() / 1000 + 200
    used.clear()
    frames.run_once()
    assert address.admin().checkpoints("spark frame") == ()
    frames.release_all()


def test_the_end_of_the_process_deletes_the_checkpoints_of_its_frames() -> None:
    clock, store = VirtualClock(), MemoryStore()
    with flagstone.open("db", store=store, settings=QUIET, clock=clock) as db:
        db.put(b"a", b"1")
    address, frames = DatabaseAddress("db", store, clock=clock), FrameCheckpoints()
    for _ in range(3):
        frames.keep(hold_checkpoint(ReadOptions(address), owned=True), lambda: True)

    assert len(address.admin().checkpoints("spark frame")) == 3
    frames.release_all()
    assert address.admin().checkpoints("spark frame") == ()
