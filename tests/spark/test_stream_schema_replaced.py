"""Change streams and readers that are behind an overwrite or a restore, which replace the stored schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.schema import TableReader, given_columns
from flagstone.schema.history import MAX_FORMER
from flagstone.spark import export
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.spark.frames.lookup import lookup_batches
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import begin_load
from flagstone.spark.row_mapping import arrow_schema
from kit.databases import QUIET
from kit.spark_loads import address_of, load, on_spark, pairs, run_task, write_options
from spark.test_stored_schema import batch_of, by_load, by_python, read, types_of
from spark.test_stream_schema import stream_of
from spark.test_stream_source import follow

pytestmark = pytest.mark.slow

FIRST = "id long, name string, size int"
OTHER = "id long, name string, colour string"
KEY = {"key.columns": "id"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "size": number, **more}


def other(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "colour": "red"}


def overwrite(folder: Path, ddl: str, rows: list[dict[str, Any]], key: str = "id") -> None:
    by_load(folder, ddl, rows, overwrite=True, **{"key.columns": key})


def shown(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(each[name] for name in ("op", *names)) for each in rows]


def behind(folder: Path, **options: str) -> Any:
    """The offset of a stream that has read the first row, and has the next one before it when all is overwritten."""
    by_load(folder, FIRST, [row(1)], **KEY)
    _, at = follow(stream_of(folder, **options))
    by_python(folder, FIRST, [row(2)], **KEY)
    return at


def test_changes_before_two_overwrites_are_delivered_and_then_the_stream_fails_with_a_sentence(
    folder: Path,
) -> None:
    at = behind(folder)
    overwrite(folder, OTHER, [other(3)])
    by_python(folder, OTHER, [other(4)], **KEY)
    overwrite(folder, OTHER + ", n int", [other(5) | {"n": 1}])

    reader = stream_of(folder)
    end = reader.latestOffset(at, reader.getDefaultReadLimit())
    rows = [
        each
        for part in reader.partitions(at, end)
        for batch in reader.read(part)
        for each in batch.to_pylist()
    ]

    assert shown(rows, "id", "name", "colour", "n") == [("put", 2, "n2", None, None)]
    with pytest.raises(InvalidRequest, match="start over with a copy"):
        follow(stream_of(folder), end)


def test_a_stream_with_markers_goes_on_with_the_rows_and_columns_of_the_new_schema(folder: Path) -> None:
    at = behind(folder, on_overwrite="marker")
    overwrite(folder, OTHER, [other(3)])
    by_python(folder, OTHER, [other(4)], **KEY)

    rows, at = follow(stream_of(folder, on_overwrite="marker"), at)

    assert shown(rows, "id", "name", "colour") == [
        ("put", 2, "n2", None),
        ("overwrite", None, None, None),
        ("put", 3, "n3", "red"),
        ("put", 4, "n4", "red"),
    ]
    by_python(folder, OTHER, [other(5)], **KEY)
    assert shown(follow(stream_of(folder, on_overwrite="marker"), at)[0], "id") == [("put", 5)]


def test_a_stream_with_deletes_shows_the_former_values_of_the_replaced_schema(folder: Path) -> None:
    options = {"on_overwrite": "delete_and_put", "before": "true"}
    at = behind(folder, **options)
    overwrite(folder, OTHER, [other(2)])

    rows, _ = follow(stream_of(folder, **options), at)

    assert sorted(shown(rows, "id", "colour", "before_name", "before_colour"), key=str) == [
        ("delete", 1, None, "n1", None),
        ("put", 2, "red", "n2", None),
        ("put", 2, None, None, None),
    ]


def test_a_running_stream_ends_with_a_sentence_when_its_columns_do_not_fit_the_new_schema(
    folder: Path,
) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    reader = stream_of(folder, on_overwrite="marker")
    _, at = follow(reader)
    overwrite(folder, OTHER, [other(3)])

    with pytest.raises(InvalidRequest, match=r"start the query with \.schema"):
        follow(reader, at)
    rows, _ = follow(stream_of(folder, on_overwrite="marker"), at)
    assert shown(rows, "id", "colour") == [("overwrite", None, None), ("put", 3, "red")]


def test_a_running_stream_goes_on_with_the_rows_of_a_new_schema_that_has_its_columns(folder: Path) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    reader = stream_of(folder, on_overwrite="marker")
    _, at = follow(reader)
    overwrite(folder, FIRST + ", colour string", [row(3, colour="red")])
    by_python(folder, FIRST + ", colour string, n int", [row(4, colour="red", n=1)], **KEY)

    rows, _ = follow(reader, at)

    assert shown(rows, "id", "name", "size") == [
        ("overwrite", None, None, None),
        ("put", 3, "n3", 3),
        ("put", 4, "n4", 4),
    ]


RETYPED = "id long, name int, size int"


def test_changes_that_do_not_fit_the_new_columns_are_delivered_with_a_schema_of_the_former_ones(
    folder: Path,
) -> None:
    at = behind(folder)
    overwrite(folder, RETYPED, [{"id": 3, "name": 3, "size": 3}])

    with pytest.raises(
        InvalidRequest, match=r"Their columns are id, name, size: start the query with \.schema"
    ):
        follow(stream_of(folder), at)
    reader = stream_of(folder, "op string, id long, name string")
    end = reader.latestOffset(at, reader.getDefaultReadLimit())
    rows = [
        each
        for part in reader.partitions(at, end)
        for batch in reader.read(part)
        for each in batch.to_pylist()
    ]
    assert shown(rows, "id", "name") == [("put", 2, "n2")]


@pytest.mark.parametrize("mode", ["marker", "delete_and_put"])
def test_a_stream_goes_on_with_a_copy_where_the_changes_before_it_do_not_fit(folder: Path, mode: str) -> None:
    at = behind(folder, on_overwrite=mode)
    overwrite(folder, RETYPED, [{"id": 3, "name": 3, "size": 3}])

    rows, _ = follow(stream_of(folder, on_overwrite=mode), at)

    went = [("overwrite", None, None)] if mode == "marker" else [("delete", 1, None)]
    assert sorted(shown(rows, "id", "name"), key=str) == sorted([*went, ("put", 3, 3)], key=str)


def test_deletes_of_former_rows_are_refused_where_the_key_has_other_columns(folder: Path) -> None:
    at = behind(folder, on_overwrite="delete_and_put")
    overwrite(folder, "country string, id long", [{"country": "eu", "id": 1}], key="country")

    with pytest.raises(InvalidRequest, match=r"start over with a new copy"):
        follow(stream_of(folder, on_overwrite="delete_and_put"), at)


def test_rows_are_never_decoded_with_the_key_of_another_schema(folder: Path) -> None:
    """The keys of both schemas have the same bytes, so only the schema tells what they mean."""
    by_load(folder, "a string, b string, n int", [{"a": "1", "b": "2", "n": 1}], **{"key.columns": "a,b"})
    _, at = follow(stream_of(folder))
    with flagstone.open(folder, settings=QUIET) as db:
        db.delete(next(iter(db.scan()))[0])
    overwrite(folder, "b string, a string, n int", [{"b": "3", "a": "4", "n": 1}], key="b,a")

    reader = stream_of(folder, "op string, a string, b string")
    end = reader.latestOffset(at, reader.getDefaultReadLimit())
    rows = [
        each
        for part in reader.partitions(at, end)
        for batch in reader.read(part)
        for each in batch.to_pylist()
    ]

    assert rows == [{"op": "delete", "a": "1", "b": "2"}]


def test_a_copy_of_a_database_with_another_key_follows_a_marker(folder: Path) -> None:
    at = behind(folder, on_overwrite="marker")
    overwrite(folder, "country string, id long", [{"country": "eu", "id": 1}], key="country")

    rows, _ = follow(stream_of(folder, on_overwrite="marker"), at)

    assert shown(rows, "country", "id") == [("overwrite", None, None), ("put", "eu", 1)]


def test_an_overwrite_with_bytes_keeps_the_numbers_of_the_schema(folder: Path) -> None:
    at = behind(folder, on_overwrite="marker")
    load(folder, [pairs({b"k": b"v"})], raw="true", replaces_all=True)
    with flagstone.open_reader(folder, mode="latest") as reader:
        assert reader.schema() is None
        assert dict(reader.scan()) == {b"k": b"v"}
    assert Admin(folder).schemas() == {}
    overwrite(folder, "id long, name int", [{"id": 7, "name": 7}])
    table = Admin(folder).schema()
    assert table is not None
    assert (table.current.number, [each.current.number for each in table.former]) == (2, [1])

    rows, _ = follow(stream_of(folder, "op string, id long", on_overwrite="marker"), at)

    assert shown(rows, "id") == [("put", 2), ("overwrite", None), ("put", 7)]


def test_a_typed_stream_ends_with_a_sentence_where_an_overwrite_has_brought_bytes(folder: Path) -> None:
    ddl = "op string, id long, name string"
    at = behind(folder, on_overwrite="marker")
    load(folder, [pairs({b"k": b"v"})], raw="true", replaces_all=True)

    with pytest.raises(InvalidRequest, match="stores no schema since an overwrite"):
        follow(stream_of(folder, ddl, on_overwrite="marker"), at)
    raw, _ = follow(stream_of(folder, on_overwrite="marker"), at)
    assert shown(raw, "value")[1:] == [("overwrite", None), ("put", b"v")]


def test_an_overwrite_of_the_whole_database_keeps_the_numbers_of_all_prefixes(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        db.ensure_schema(
            given_columns(pa.schema([("k", pa.int64()), ("v", pa.string())]), ["k"]), prefix=b"t/"
        )
    overwrite(folder, FIRST, [row(1)])
    assert list(Admin(folder).schemas()) == [b""]
    with flagstone.open(folder, settings=QUIET) as db:
        columns = given_columns(pa.schema([("k", pa.int64()), ("v", pa.int64())]), ["k"])
        assert db.ensure_schema(columns, prefix=b"t/").version.number == 2


def test_an_overwrite_with_the_same_columns_keeps_the_version(folder: Path) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    for number in range(3):
        overwrite(folder, FIRST, [row(number)])

    table = Admin(folder).schema()

    assert table is not None
    assert (table.current.number, table.former) == (1, ())
    assert [each["id"] for each in read(folder)] == [2]


def test_former_schemas_are_bounded_and_a_stream_that_is_further_behind_says_so(folder: Path) -> None:
    at = behind(folder)
    for number in range(MAX_FORMER + 2):
        overwrite(folder, f"id long, c{number} int", [{"id": 1, f"c{number}": 1}])

    table = Admin(folder).schema()
    assert table is not None
    assert len(table.former) == MAX_FORMER
    with pytest.raises(InvalidRequest, match="is not kept any more: start over with a new copy"):
        follow(stream_of(folder), at)


def test_changes_that_a_restore_has_given_up_keep_their_meaning(folder: Path) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    kept = Admin(folder).create_checkpoint()
    _, at = follow(stream_of(folder, on_overwrite="marker"))
    by_python(folder, FIRST + ", lost int", [row(2, lost=22)], **KEY)
    Admin(folder).restore(kept.id)
    by_python(folder, FIRST + ", new int", [row(3, new=33)], **KEY)

    rows, _ = follow(stream_of(folder, on_overwrite="marker"), at)

    assert shown(rows, "id", "name", "new") == [
        ("put", 2, "n2", None),
        ("overwrite", None, None, None),
        ("put", 1, "n1", None),
        ("put", 3, "n3", 33),
    ]
    table = Admin(folder).schema()
    assert table is not None
    assert [version.number for version in table.versions] == [1, 3]


def test_a_restore_of_a_state_without_a_schema_keeps_the_numbers(folder: Path) -> None:
    load(folder, [pairs({b"k": b"v"})])
    kept = Admin(folder).create_checkpoint()
    with flagstone.open(folder, settings=QUIET) as db:
        db.ensure_schema(given_columns(pa.schema([("k", pa.int64()), ("v", pa.string())]), ["k"]))
    restored = Admin(folder).restore(kept.id)

    with flagstone.open(folder, settings=QUIET) as db:
        assert db.schema() is None
        assert dict(db.scan()) == {b"k": b"v"}
        evolution = db.ensure_schema(given_columns(pa.schema([("k", pa.int64()), ("v", pa.int64())]), ["k"]))
        assert evolution.version.number == 2
        assert db.put(b"x", b"y").seq > restored.value.last_l0_seq


def test_a_python_reader_of_changes_decodes_rows_of_the_replaced_schema(folder: Path) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    with flagstone.open_feed(folder, "copy") as feed:
        feed.copied()
    by_python(folder, FIRST, [row(2)], **KEY)
    overwrite(folder, OTHER, [other(3)])
    overwrite(folder, "name string, id long", [{"name": "n", "id": 1}], key="name")
    newest = Admin(folder).schema()
    assert newest is not None

    with flagstone.open_feed(folder, "copy") as feed:
        changes = [
            change for change in next(iter(feed.follow(timeout_s=0))).changes if change.key[:1] != b"\0"
        ]

    assert [TableReader(newest.at(1)).decode(each.key, each.value) for each in changes] == [row(2)]
    with pytest.raises(InvalidRequest, match=r"key columns id: read it with schema\.at\(1\)"):
        TableReader(newest).decode_value(changes[0].value)


def test_reads_of_a_checkpoint_of_as_of_and_of_clones_have_the_schema_of_their_state(folder: Path) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    kept = Admin(folder).create_checkpoint()
    seq = Admin(folder).manifest().value.last_l0_seq
    Admin(folder).clone(str(folder) + "-clone", checkpoint=kept.id)
    for ddl, rows in ((OTHER, [other(3)]), (RETYPED, [{"id": 4, "name": 4, "size": 4}])):
        overwrite(folder, ddl, rows)

    assert read(folder, checkpoint=str(kept.id)) == [row(1)]
    assert read(folder, as_of=str(seq)) == [row(1)]
    assert read(Path(str(folder) + "-clone")) == [row(1)]
    keys = types_of("n long")
    work = lookup_batches(folder, keys, on="n", checkpoint=kept.id)
    batch = pa.RecordBatch.from_pylist([{"n": 1}], schema=arrow_schema(keys))
    assert [each.to_pylist() for each in work(iter([batch]))] == [[{"n": 1, "name": "n1", "size": 1}]]
    assert read(folder) == [{"id": 4, "name": 4, "size": 4}]
    with flagstone.open_reader(folder, checkpoint=kept.id) as reader:
        table = reader.schema()
        assert table is not None
        assert [TableReader(table).decode(*each) for each in reader.scan()] == [row(1)]


def test_a_clone_of_a_key_range_reads_rows_of_the_schema_that_its_source_has_replaced(folder: Path) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    part = Path(str(folder) + "-part")
    Admin(folder).clone(str(part), range=(b"\x01", None))
    overwrite(folder, FIRST + ", new int", [row(3, new=1)])

    source = FlagstoneDataSource({"path": str(part), "schema.of": str(folder)})
    found = source.reader(types_of("id long, size int, new int"))
    rows = [each for split in found.partitions() for batch in found.read(split) for each in batch.to_pylist()]

    assert rows == [{"id": 1, "size": 1, "new": None}]
    overwrite(folder, "id long, size string", [{"id": 1, "size": "x"}])
    source = FlagstoneDataSource({"path": str(part), "schema.of": str(folder), "mode": "FAILFAST"})
    found = source.reader(types_of("id long, size string"))
    with pytest.raises(InvalidRequest, match="stored as int32"):
        [each for split in found.partitions() for batch in found.read(split) for each in batch.to_pylist()]


def test_a_load_that_was_planned_before_an_overwrite_is_refused(folder: Path) -> None:
    by_load(folder, FIRST, [row(1)], **KEY)
    writer = FlagstoneDataSource({"path": str(folder)}).writer(types_of(FIRST), False)
    made = writer.write(iter([batch_of(FIRST, [row(2)])]))
    load(folder, [pairs({b"k": b"v"})], raw="true", replaces_all=True)

    with pytest.raises(flagstone.TransactionConflict, match="changed the schema"):
        writer.commit([made])
    with flagstone.open_reader(folder, mode="latest") as reader:
        assert dict(reader.scan()) == {b"k": b"v"}


def test_an_overwrite_is_refused_if_a_schema_that_it_retires_changes_in_the_moment_of_its_commit(
    folder: Path,
) -> None:
    def add(*names: str) -> None:
        columns = pa.schema([("k", pa.int64()), *((name, pa.string()) for name in names)])
        with flagstone.open(folder, settings=QUIET) as db:
            db.ensure_schema(given_columns(columns, ["k"], nullable=True), prefix=b"t/")

    add("v")
    plan = begin_load(address_of(folder))
    made = run_task(plan, folder, [pairs({b"k": b"v"})], raw="true")
    options = write_options(folder, raw="true")

    with pytest.raises(flagstone.TransactionConflict, match="changed the schema"):
        commit_load(plan, options, made, replaces_all=True, offered=lambda _: add("v", "w"))
    table = Admin(folder).schema(b"t/")
    assert table is not None
    assert table.current.number == 2


@on_spark
def test_a_query_and_an_export_follow_overwrites_on_spark(spark: Any, folder: Path, tmp_path: Path) -> None:
    def run() -> Any:
        changes = spark.readStream.format("flagstone").options(consumer="copy", on_overwrite="marker")
        frame = changes.load(str(folder))
        writer = frame.selectExpr("op", "id", "to_json(struct(*)) as row").writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "state")).trigger(availableNow=True)
        query = writer.start(str(tmp_path / "out"))
        query.awaitTermination(120)
        return query.exception()

    by_load(folder, FIRST, [row(1)], **KEY)
    kept = Admin(folder).create_checkpoint()
    assert run() is None
    by_python(folder, FIRST, [row(2)], **KEY)
    overwrite(folder, OTHER, [other(3)])
    by_python(folder, OTHER, [other(4)], **KEY)
    overwrite(folder, "id long, name int", [{"id": 5, "name": 5}])
    assert run() is None  # the first changes do not fit these columns
    by_python(folder, "id long, name int", [{"id": 6, "name": 6}], **KEY)
    assert run() is None

    found = spark.read.parquet(str(tmp_path / "out")).select("op", "id").collect()
    assert sorted((tuple(each) for each in found), key=str) == [
        ("overwrite", None),
        ("put", 1),
        ("put", 5),
        ("put", 6),
    ]
    export(spark, folder, tmp_path / "parquet", checkpoint=kept.id)
    assert [each.asDict() for each in spark.read.parquet(str(tmp_path / "parquet")).collect()] == [row(1)]
