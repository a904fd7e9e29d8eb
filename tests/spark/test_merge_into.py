"""`merge_into` and `delete`: loads that depend on the rows that the database has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin, InvalidRequest, keys
from flagstone.spark import bulk_load, delete, merge_into
from kit.databases import QUIET
from kit.spark_loads import ON_SPARK, shown

pytestmark = ON_SPARK

TYPED = "region string, id long, name string, price double"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def write(folder: Path, rows: dict[bytes, bytes]) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for key, value in rows.items():
            db.put(key, value)


def frame(spark: Any, rows: dict[str, str]) -> Any:
    return spark.createDataFrame(sorted(rows.items()), "key string, value string")


def typed_rows(spark: Any, folder: Path) -> list[tuple[Any, ...]]:
    reader = spark.read.format("flagstone").schema(TYPED).option("key.columns", "region,id")
    return sorted(tuple(row) for row in reader.load(str(folder)).collect())


def test_matched_rows_are_updated_and_others_inserted_with_one_commit(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"1", b"b": b"1", b"untouched": b"1"})
    checkpoints = len(Admin(folder).checkpoints())

    report = merge_into(frame(spark, {"a": "2", "b": "2", "new": "2"}), folder)

    assert (report.inserted, report.updated, report.deleted) == (1, 2, 0)
    assert report.load is not None
    assert report.load.rows == 3
    assert report.changes is None
    assert shown(folder) == {b"a": b"2", b"b": b"2", b"new": b"2", b"untouched": b"1"}
    held = [entry for entry in Admin(folder).checkpoints() if entry.name == "spark read"]
    assert len(held) == 0, f"{checkpoints} checkpoints before"


def test_conditions_see_the_row_and_what_it_replaces(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"5", b"b": b"5", b"c": b"5", b"d": b"5"})
    rows = frame(spark, {"a": "7", "b": "3", "c": "0", "new": "1"})

    report = merge_into(
        rows,
        folder,
        condition="cast(value as string) > cast(before as string)",
        delete_when="value = '0'",
        when_not_matched=None,
        before_images=True,
    )

    assert shown(folder) == {b"a": b"7", b"b": b"5", b"d": b"5"}
    assert (report.inserted, report.updated, report.deleted) == (0, 1, 1)
    assert report.changes is not None
    assert sorted((row.op, row.key, row.value, bytes(row.before)) for row in report.changes.collect()) == [
        ("delete", "c", "0", b"5"),
        ("put", "a", "7", b"5"),
    ]
    report.changes.unpersist()


def test_rows_of_ordinary_columns_are_merged_by_their_key_columns(spark: Any, folder: Path) -> None:
    first = spark.createDataFrame([("eu", 1, "flag", 1.5), ("us", 2, "pole", 2.0)], TYPED)
    bulk_load(first, folder, key_columns=["region", "id"])
    rows = spark.createDataFrame(
        [("eu", 1, "flag", 9.5), ("us", 2, None, 0.5), ("us", 3, "new", None)], TYPED
    )

    report = merge_into(
        rows,
        folder,
        key_columns=["region", "id"],
        condition="price > before_price",
        delete_when="name is null and before_name = 'pole'",
        before_images=True,
    )

    assert typed_rows(spark, folder) == [("eu", 1, "flag", 9.5), ("us", 3, "new", None)]
    assert (report.inserted, report.updated, report.deleted) == (1, 1, 1)
    assert report.changes is not None
    former = {row.id: (row.op, row.before_name, row.before_price) for row in report.changes.collect()}
    assert former == {1: ("put", "flag", 1.5), 2: ("delete", "pole", 2.0), 3: ("put", None, None)}
    report.changes.unpersist()


def test_a_structured_database_knows_its_key_columns_and_takes_new_ones(spark: Any, folder: Path) -> None:
    first = spark.createDataFrame([("eu", 1, "flag", 1.5), ("us", 2, "pole", 2.0)], TYPED)
    bulk_load(first, folder, key_columns=["region", "id"])
    rows = spark.createDataFrame(
        [("eu", 1, "flag", 9.5, "red"), ("us", 3, "new", None, None)], f"{TYPED}, colour string"
    )

    report = merge_into(rows, folder, delete_when="before_colour is not null", before_images=True)

    found = spark.read.format("flagstone").load(str(folder))
    assert sorted(tuple(row) for row in found.select("id", "price", "colour").collect()) == [
        (1, 9.5, "red"),
        (2, 2.0, None),
        (3, None, None),
    ]
    assert report.changes is not None
    assert {(row.id, row.before_price, row.before_colour) for row in report.changes.collect()} == {
        (1, 1.5, None),
        (3, None, None),
    }
    report.changes.unpersist()


def test_a_merge_that_writes_nothing_changes_nothing(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"1"})
    before = Admin(folder).manifest().value.last_l0_seq

    report = merge_into(frame(spark, {"a": "2"}), folder, when_matched=None)

    assert (report.load, report.inserted, report.updated, report.deleted) == (None, 0, 0, 0)
    assert Admin(folder).manifest().value.last_l0_seq == before
    assert shown(folder) == {b"a": b"1"}


def test_the_last_write_wins_over_rows_that_came_during_the_merge(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"1", b"b": b"1"})

    def with_a_writer_beside(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not (folder / "written").exists():
            (folder / "written").touch()
            with flagstone.open(folder) as db:  # after the rows were compared, before the load
                db.put(b"a", b"of the other")
                db.put(b"new", b"of the other")
                db.put(b"c", b"of the other")
        yield from batches

    rows = frame(spark, {"a": "2", "new": "2"}).coalesce(1)
    report = merge_into(rows.mapInArrow(with_a_writer_beside, rows.schema), folder)
    write(folder, {b"b": b"later"})

    assert (report.inserted, report.updated) == (1, 1)
    assert shown(folder) == {b"a": b"2", b"b": b"later", b"c": b"of the other", b"new": b"2"}


def test_what_a_merge_cannot_mean_is_refused_and_changes_nothing(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"1"})
    rows = frame(spark, {"a": "2"})
    with pytest.raises(InvalidRequest, match="the key b'a' occurs more than once"):
        merge_into(rows.union(rows), folder)
    with pytest.raises(InvalidRequest, match="there is no column 'kee'"):
        merge_into(rows, folder, key="kee")
    with pytest.raises(InvalidRequest, match="has a column 'op'"):
        merge_into(rows.selectExpr("*", "'put' as op"), folder)
    with pytest.raises(InvalidRequest, match="column 'before' has a name"):
        merge_into(rows.selectExpr("*", "1 as before"), folder)
    with pytest.raises(InvalidRequest, match="when_matched is"):
        merge_into(rows, folder, when_matched="replace")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="1 rows have no key"):
        merge_into(spark.createDataFrame([(None, "1")], "key string, value string"), folder)

    assert shown(folder) == {b"a": b"1"}
    assert not [entry for entry in Admin(folder).checkpoints() if entry.name == "spark read"]


def test_delete_takes_the_keys_of_a_frame_or_a_condition(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"})

    delete(frame(spark, {"a": "", "absent": ""}).drop("value"), folder)
    assert set(shown(folder)) == {b"b", b"c", b"d"}
    delete("cast(value as string) >= '3' and key < X'64'", folder)

    assert shown(folder) == {b"b": b"2", b"d": b"4"}
    with pytest.raises(InvalidRequest, match="there is no column 'key'"):
        delete(spark.createDataFrame([(1,)], "id long"), folder)


def test_delete_finds_rows_by_their_columns(spark: Any, folder: Path) -> None:
    rows = [("eu", 1, "flag", 1.5), ("eu", 2, "pole", 2.0), ("us", 3, "flag", 3.0)]
    bulk_load(spark.createDataFrame(rows, TYPED), folder, key_columns=["region", "id"])

    delete("region = 'eu' and price > 1.7", folder)
    delete(spark.createDataFrame([("us", 3)], "region string, id int"), folder)

    assert typed_rows(spark, folder) == rows[:1]
    assert {key for key in shown(folder) if key[:1] != b"\0"} == {keys.encode("eu", 1)}
    with pytest.raises(InvalidRequest, match="there is no column 'region'"):
        delete(spark.createDataFrame([(3,)], "id long"), folder)


def test_a_merge_and_a_delete_leave_the_checkpoints_of_other_frames_alone(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"1", b"b": b"2"})
    before = spark.read.format("flagstone").load(str(folder))
    assert before.count() == 2

    merge_into(frame(spark, {"a": "9"}), folder)
    assert before.where("key = X'61'").first().value == b"1"
    after = spark.read.format("flagstone").load(str(folder))
    delete("key = X'61'", folder)

    assert after.where("key = X'61'").first().value == b"9"
    assert not Admin(folder).checkpoints("spark frame")


def test_a_table_under_a_prefix_is_merged_into_and_deleted_from(spark: Any, folder: Path) -> None:
    rows = [("eu", 1, "flag", 1.5), ("eu", 2, "pole", 2.0)]
    under: dict[str, Any] = {"key.prefix": "shop/"}
    bulk_load(spark.createDataFrame(rows, TYPED), folder, key_columns=["region", "id"], **under)
    better = [("eu", 1, "flag", 9.5), ("eu", 2, "pole", 0.5), ("us", 3, "new", 1.0)]

    report = merge_into(
        spark.createDataFrame(better, TYPED), folder, condition="price > before_price", **under
    )
    assert (report.inserted, report.updated) == (1, 1)
    delete("region = 'eu' and price = 2", folder, **under)
    delete(spark.createDataFrame([("us", 3)], "region string, id int"), folder, **under)

    found = spark.read.format("flagstone").option("prefix", "shop/").load(str(folder))
    assert [tuple(row) for row in found.collect()] == [("eu", 1, "flag", 9.5)]
    with pytest.raises(InvalidRequest, match="no schema is stored for the prefix b'else/'"):
        delete("id = 1", folder, **{"key.prefix": "else/"})


def test_rows_of_one_key_count_once_if_any_of_them_may_be_kept(spark: Any, folder: Path) -> None:
    write(folder, {b"a": b"1"})
    rows = frame(spark, {"a": "2", "new": "2"})

    report = merge_into(rows.union(rows).union(rows), folder, duplicates="last", before_images=True)

    assert (report.inserted, report.updated) == (1, 1)
    assert report.changes is not None
    assert report.changes.count() == 2
    report.changes.unpersist()


def test_a_condition_deletes_no_row_by_columns_that_do_not_decode(spark: Any, folder: Path) -> None:
    rows = [(None, None, "kept", 5.0), ("eu", 2, None, 2.0), ("eu", 3, None, None)]
    bulk_load(spark.createDataFrame(rows, TYPED), folder, key_columns=["region", "id"])
    with flagstone.open(folder) as db:
        db.put(b"not a key", db[keys.encode("eu", 3)])  # a read shows it with nulls for its key
        db.put(keys.encode("eu", 4), b"not a row")

    delete("price is null", folder)

    left = {key for key in shown(folder) if key[:1] != b"\0"}
    assert left == {keys.encode(None, None), keys.encode("eu", 2), keys.encode("eu", 4), b"not a key"}
