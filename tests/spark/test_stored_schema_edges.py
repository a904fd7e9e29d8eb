"""Loads without rows, which store their schema all the same, and reads of dropped columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.spark import aggregate, bulk_load, foreach_batch, lookup, map_arrow
from flagstone.spark import read as fs_read
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.spark.frames.lookup import lookup_batches
from flagstone.spark.frames.plan import plan_read
from flagstone.spark.row_mapping import arrow_schema
from flagstone.spark.scan import FlagstoneReader
from flagstone.spark.stream.sink import StreamSink, parse_sink_options
from kit.databases import QUIET
from kit.spark_loads import on_spark
from spark.test_stored_schema import PROGRESS, Frame, by_load, read, types_of

pytestmark = pytest.mark.slow

DDL = "id long, name string, size int"
KEY = {"key.columns": "id"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def empty_load(folder: Path, ddl: str, *, overwrite: bool = False, tasks: int = 1, **options: str) -> None:
    writer = FlagstoneDataSource({"path": str(folder), **options}).writer(types_of(ddl), overwrite)
    writer.commit([writer.write(iter([])) for _ in range(tasks)])


def columns(folder: Path) -> list[str]:
    table = Admin(folder).schema()
    assert table is not None
    return [str(column) for column in table.columns]


STORED = ["id int64 not null", "name string", "size int32"]


@pytest.mark.parametrize("tasks", [0, 2])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"only_if_new": "true"}])
def test_a_first_load_without_rows_stores_its_schema(
    folder: Path, tasks: int, options: dict[str, Any]
) -> None:
    empty_load(folder, DDL, tasks=tasks, **KEY, **options)

    stored = columns(folder)
    assert [each.split(" ")[0] for each in stored] == ["id", "name", "size"]
    assert read(folder) == []
    assert [each.state for each in Admin(folder).loads()] == ["done"]
    with pytest.raises(InvalidRequest, match="'size' is stored as int32, and the rows have string"):
        by_load(folder, "id long, name string, size string", [{"id": 1, "name": "a", "size": "b"}])
    by_load(folder, DDL, [{"id": 1, "name": "a", "size": 2}])
    assert read(folder) == [{"id": 1, "name": "a", "size": 2}]
    assert columns(folder) == stored


def test_a_load_without_rows_and_without_another_schema_changes_nothing(folder: Path) -> None:
    by_load(folder, DDL, [{"id": 1, "name": "a", "size": 2}], **KEY)
    before = Admin(folder).manifest().value

    empty_load(folder, DDL)

    after = Admin(folder).manifest().value
    assert (after.tree, after.last_l0_seq, after.checkpoints) == (
        before.tree,
        before.last_l0_seq,
        before.checkpoints,
    )


def test_of_two_first_loads_without_rows_the_second_keeps_the_schema_of_the_first(folder: Path) -> None:
    source = FlagstoneDataSource({"path": str(folder), **KEY})
    one, two = source.writer(types_of(DDL), False), source.writer(types_of("id long, name string"), False)
    made = two.write(iter([]))
    one.commit([one.write(iter([]))])

    with pytest.raises(flagstone.TransactionConflict):
        two.commit([made])
    assert len(columns(folder)) == 3


def test_a_first_micro_batch_without_rows_stores_its_schema(folder: Path) -> None:
    given = {"path": str(folder), "query": "orders", **KEY}
    for batch_id in range(2):
        sink = FlagstoneDataSource(given).streamWriter(types_of(DDL), False)
        StreamSink(None, parse_sink_options(given)).commit([sink.write(iter([]))], batch_id)

    assert len(columns(folder)) == 3
    with flagstone.open_reader(folder, mode="latest") as reader:
        assert (reader.get(PROGRESS) or b"").split()[0] == b"0"
        assert list(reader.scan()) == []


def test_foreach_batch_stores_the_schema_of_a_first_batch_without_rows(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        frame: Any = Frame(DDL, [{"id": 1, "name": "a", "size": 2}])
        frame._batch = frame._batch.slice(0, 0)
        foreach_batch(db, "orders", key_columns=["id"])(frame, 0)

        table = db.schema()
        assert table is not None
        assert [column.name for column in table.columns] == ["id", "name", "size"]
        assert (db.get(PROGRESS) or b"").split()[0] == b"0"
        seq = db.status()["committed_seq"]
        foreach_batch(db, "orders", key_columns=["id"])(frame, 1)
        assert db.status()["committed_seq"] == seq


@pytest.fixture
def dropped(folder: Path) -> Path:
    """A database whose column `size` was dropped, with an old row that has it."""
    by_load(folder, DDL, [{"id": 1, "name": "a", "size": 11}], **KEY)
    by_load(folder, "id long, name string", [{"id": 2, "name": "b"}])
    return folder


def rows_of(folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """What `flagstone.spark.read` shows, without a session."""
    plan = plan_read(folder, arguments)  # type: ignore[arg-type]
    assert plan.complete
    reader = FlagstoneReader(plan.hold(), plan.schema)
    return [row for part in reader.plan() for batch in reader.read(part) for row in batch.to_pylist()]


def test_a_read_shows_a_dropped_column_if_it_names_it(dropped: Path) -> None:
    assert rows_of(dropped) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    named = [{"size": 11, "id": 1}, {"size": None, "id": 2}]
    assert rows_of(dropped, columns=["size", "id"]) == named
    assert read(dropped, columns="size,id") == named
    assert read(dropped, "size int, id long") == named
    with pytest.raises(InvalidRequest, match="colour"):
        rows_of(dropped, columns=["colour"])


def test_a_lookup_adds_a_dropped_column_if_it_names_it(dropped: Path) -> None:
    keys = types_of("n long")
    batch = pa.RecordBatch.from_pylist([{"n": 1}, {"n": 2}], schema=arrow_schema(keys))

    def found(**arguments: Any) -> list[dict[str, Any]]:
        work = lookup_batches(dropped, keys, on="n", **arguments)
        return [row for each in work(iter([batch])) for row in each.to_pylist()]

    assert found() == [{"n": 1, "name": "a"}, {"n": 2, "name": "b"}]
    assert found(columns=["size"]) == [{"n": 1, "size": 11}, {"n": 2, "size": None}]


@on_spark
def test_all_reads_agree_about_dropped_columns(spark: Any, dropped: Path) -> None:
    named = [(11,), (None,)]
    frame = fs_read(spark, dropped, columns=["size"])
    assert sorted((tuple(row) for row in frame.collect()), key=str) == named
    assert [tuple(row) for row in fs_read(spark, dropped, columns=["id"], where="size = 11").collect()] == [
        (1,)
    ]
    assert [tuple(row) for row in fs_read(spark, dropped, where="size + id > 3").collect()] == [(1, "a")]
    source = spark.read.format("flagstone")
    assert [
        tuple(row) for row in source.schema("size int").load(str(dropped)).where("size > 1").collect()
    ] == [(11,)]
    total = aggregate(spark, dropped, {"total": "sum(size)", "rows": "count(*)"})
    assert [(int(row.total), row.rows) for row in total.collect()] == [(11, 2)]
    mapped = map_arrow(spark, dropped, lambda batches: batches, "size int", columns=["size"])
    assert sorted((tuple(row) for row in mapped.collect()), key=str) == named
    keys = spark.createDataFrame([(1,)], "n bigint")
    assert [tuple(row) for row in lookup(keys, dropped, on="n", columns=["size"]).collect()] == [(1, 11)]
    assert lookup(keys, dropped, on="n").columns == ["n", "name"]


@on_spark
def test_bulk_load_of_an_empty_frame_creates_the_table_in_every_mode(spark: Any, tmp_path: Path) -> None:
    empty = spark.createDataFrame([], "id bigint, name string")
    for mode in ("append", "overwrite", "error", "ignore"):
        folder = tmp_path / mode
        report = bulk_load(empty, folder, key_columns=["id"], mode=mode)
        assert report is not None
        shown = spark.read.format("flagstone").load(str(folder))
        assert (shown.columns, shown.count()) == (["id", "name"], 0)
        with pytest.raises(InvalidRequest, match="'name' is stored as string"):
            bulk_load(spark.createDataFrame([(1, 2)], "id bigint, name int"), folder)
    with pytest.raises(InvalidRequest, match="written to before"):
        bulk_load(empty, tmp_path / "error", key_columns=["id"], mode="error")
    assert bulk_load(empty, tmp_path / "ignore", key_columns=["id"], mode="ignore") is None


@on_spark
def test_a_stream_whose_first_batch_is_empty_creates_the_table(spark: Any, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "db"
    spark.createDataFrame([(1, "a")], "id bigint, name string").write.parquet(str(source))
    stream = spark.readStream.schema("id bigint, name string").parquet(str(source)).where("id < 0")
    sink = stream.writeStream.format("flagstone").option("key.columns", "id").trigger(availableNow=True)
    query = sink.option("checkpointLocation", str(tmp_path / "state")).start(str(folder))
    query.awaitTermination(120)

    assert query.exception() is None
    assert spark.read.format("flagstone").load(str(folder)).columns == ["id", "name"]
