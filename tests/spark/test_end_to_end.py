"""End to end on a real Spark: load a DataFrame, read it back, and compare with the official wheel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.metadata.manifest import SEQ_GAP
from flagstone.spark import bulk_load
from kit.databases import QUIET
from kit.spark_loads import shown

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

COUNT = 4000
ROWS = {b"k%06d" % number: b"value of %d" % number for number in range(COUNT)}


@pytest.fixture
def rows(spark: Any) -> Any:
    """All rows, in no order."""
    return spark.range(COUNT).selectExpr(
        f"concat('k', lpad(cast((id * 7919) % {COUNT} as string), 6, '0')) as key",
        f"cast(concat('value of ', (id * 7919) % {COUNT}) as binary) as value",
    )


@pytest.fixture(scope="module")
def loaded(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded") / "db"
    frame = spark.createDataFrame(list(ROWS.items()), "key binary, value binary")
    report = bulk_load(frame, folder, partitions=3, max_sst_size=40_000)
    assert report is not None
    assert report.rows == COUNT
    assert report.tables > 3
    return folder


def test_the_wheel_opens_a_loaded_database_and_random_gets_agree(loaded: Path, wheel: Any) -> None:
    keys = random.Random(7).sample(sorted(ROWS), 500)

    assert wheel.get_many(str(loaded.parent), loaded.name, [*keys, b"absent"]) == [
        *(ROWS[key] for key in keys),
        None,
    ]
    assert wheel.scan(str(loaded.parent), loaded.name) == ROWS
    assert not Admin(loaded).verify().findings


def test_a_write_of_unsorted_rows_is_one_commit(rows: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"

    rows.write.format("flagstone").mode("append").save(str(folder))

    manifest = Admin(folder).manifest().value
    assert shown(folder) == ROWS
    assert manifest.last_l0_seq == SEQ_GAP
    assert len(manifest.tree.runs) == 1


def test_loads_append_and_overwrite_an_existing_database(rows: Any, tmp_path: Path, wheel: Any) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"k000001", b"old")
        db.put(b"mine", b"here")

    report = bulk_load(rows, folder)

    assert report is not None
    assert report.seq == SEQ_GAP + 2
    assert shown(folder) == ROWS | {b"mine": b"here"} == wheel.scan(str(tmp_path), "db")
    bulk_load(rows.limit(0), folder)
    assert shown(folder) == ROWS | {b"mine": b"here"}
    bulk_load(rows.where("key < 'k000010'"), folder, mode="overwrite")
    assert shown(folder) == {key: value for key, value in ROWS.items() if key < b"k000010"}


def test_a_frame_reads_back_with_conditions_applied_by_tasks(spark: Any, loaded: Path) -> None:
    frame = spark.read.format("flagstone").option("partitions", 3).load(str(loaded))

    def where(condition: str) -> Any:
        return spark.read.format("flagstone").option("where", condition).load(str(loaded))

    assert frame.schema.simpleString() == "struct<key:binary,value:binary>"
    assert {bytes(row.key): bytes(row.value) for row in frame.collect()} == ROWS
    few = where("key between X'6b303030303130' and cast('k000012' as binary)")
    assert sorted(bytes(row.key) for row in few.collect()) == [b"k000010", b"k000011", b"k000012"]
    plan = few._jdf.queryExecution().executedPlan().toString()
    assert "Filter" not in plan.replace("RuntimeFilters", "")
    assert where("key in ('k000001', 'k003999', 'none')").count() == 2


def test_one_frame_shows_one_state_and_a_view_has_all_columns(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
        db.flush("wal")
        frame = spark.read.format("flagstone").load(str(folder))
        db.put(b"b", b"2")
        db.flush("wal")
        assert frame.count() == 1
        assert frame.join(frame.withColumnRenamed("value", "again"), "key").count() == 1
        spark.sql(
            f"create or replace temporary view shop using flagstone options (path '{folder}', columns 'key,seq')"
        )
        found = spark.sql("select cast(key as string) as key, seq from shop order by key").collect()
    assert [(row.key, row.seq) for row in found] == [("a", 1), ("b", 2)]


def test_a_new_session_finds_the_data_source_without_registration(spark: Any, loaded: Path) -> None:
    other = spark.newSession()
    other.conf.set("spark.sql.python.filterPushdown.enabled", "false")

    frame = other.read.format("flagstone").load(str(loaded))

    assert frame.where("key < cast('k000010' as binary)").count() == 10


def test_a_failing_task_fails_the_load_and_nothing_is_visible(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"before", b"here")
    frame = spark.createDataFrame(
        [(b"k%d" % n, b"v") for n in range(50)] + [(b"n", None)], "key binary, value binary"
    )

    with pytest.raises(InvalidRequest, match="column 'value' has 1 nulls"):
        bulk_load(frame, folder, partitions=2)

    assert shown(folder) == {b"before": b"here"}

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise RuntimeError("the input broke")

    broken = spark.range(100).selectExpr(
        "cast(cast(id as string) as binary) as key", "cast('v' as binary) as value"
    )
    with pytest.raises(Exception, match="the input broke"):
        broken.mapInArrow(fail, broken.schema).write.format("flagstone").mode("append").save(str(folder))
    assert shown(folder) == {b"before": b"here"}
    # Spark stops the other tasks, which may have uploaded SSTs. After the next flush these are garbage.
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"after", b"here")
    Admin(folder).collect_garbage(min_age=timedelta())
    assert len(list((folder / "compacted").iterdir())) == 2


def test_invalid_input_is_refused_before_any_task_runs(spark: Any, loaded: Path, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(b"k", b"v", 1)], "key binary, value binary, n int")
    new = tmp_path / "new"
    with pytest.raises(InvalidRequest, match="unexpected columns 'n'"):
        bulk_load(frame, new)
    with pytest.raises(InvalidRequest, match="rows need a column 'id'"):
        bulk_load(frame.drop("n"), new, key="id")
    with pytest.raises(InvalidRequest, match="'n' is int; it must be binary or string"):
        bulk_load(frame.drop("value"), new, value="n")
    with pytest.raises(InvalidRequest, match="did you mean 'max_sst_size'"):
        bulk_load(frame.drop("n"), new, max_sst_sise=17)
    with pytest.raises(InvalidRequest, match="order_by names 'm'"):
        bulk_load(frame, new, order_by="m")
    assert not new.exists()
    with pytest.raises(Exception, match="no option 'prefx'; did you mean 'prefix'"):
        spark.read.format("flagstone").option("prefx", "k").load(str(loaded))
    with pytest.raises(Exception, match="no database"):
        spark.read.format("flagstone").load(str(new))
    unsorted = spark.createDataFrame([(b"b", b"1"), (b"a", b"2")], "key binary, value binary").coalesce(1)
    with pytest.raises(InvalidRequest, match="not sorted by key"):
        bulk_load(unsorted, new, presorted=True)


def test_order_by_decides_which_of_several_rows_is_loaded(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    frame = spark.createDataFrame(
        [("a", "new", 3), ("a", "old", 1), ("b", "only", 0), ("a", "older", 2)],
        "key string, value string, at int",
    )

    report = bulk_load(frame, folder, order_by="at")

    assert report is not None
    assert report.rows == 2
    assert shown(folder) == {b"a": b"new", b"b": b"only"}


def test_a_writer_that_opens_during_a_load_and_the_load_both_succeed(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    path = str(folder)

    def take_over(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with flagstone.open(path) as db:
                db.put(b"mine", b"here")
            yield batch

    frame = spark.createDataFrame([(b"k", b"v")], "key binary, value binary").coalesce(1)
    bulk_load(frame.mapInArrow(take_over, frame.schema), folder, presorted=True)

    assert shown(folder) == {b"k": b"v", b"mine": b"here"}
