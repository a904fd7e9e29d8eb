"""Change streams of databases with a stored schema: typed without a word, through changes of the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import InvalidRequest
from flagstone.schema import TableReader, TableWriter, given_columns
from flagstone.spark.stream.options import parse_stream_options
from flagstone.spark.stream.shape import default_schema, fetch_table
from flagstone.spark.stream.source import ChangeStreamReader
from kit.databases import QUIET
from kit.spark_loads import load, pairs
from spark.test_stream_loads import Present
from spark.test_stream_options import schema_of
from spark.test_stream_source import follow

pytestmark = pytest.mark.slow

FIRST = pa.schema([("region", pa.string()), ("id", pa.int64()), ("name", pa.string()), ("size", pa.int32())])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def write(folder: Path, types: pa.Schema, *rows: dict[str, Any], delete: tuple[Any, ...] = ()) -> None:
    """Write structured rows as Python does: the schema changes in the same database as need be."""
    with flagstone.open(folder, settings=QUIET) as db:
        evolution = db.ensure_schema(given_columns(types, ["region", "id"], nullable=True))
        writer = TableWriter(evolution.schema, evolution.version)
        for row in rows:
            db.put(*writer.encode(row))
        for row in delete:
            db.delete(writer.encode(row)[0])


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"region": "eu", "id": number, "name": f"n{number}", "size": number, **more}


def stream_of(folder: Path, ddl: str | None = None, **options: str) -> ChangeStreamReader:
    parsed = parse_stream_options({"path": str(folder), "consumer": "test", **options})
    stored = fetch_table(parsed)
    schema = default_schema(parsed, stored) if ddl is None else schema_of(ddl)
    return ChangeStreamReader(parsed, schema, stored=stored, clock=Present())


def test_a_stream_has_the_columns_of_the_stored_schema(folder: Path) -> None:
    write(folder, FIRST, row(1))
    reader = stream_of(folder)
    copy, at = follow(reader)
    write(folder, FIRST, row(2, name=None), delete=(row(1),))

    changes, _ = follow(reader, at)

    names = ["op", "region", "id", "name", "size", "seq", "created_ms", "expires_ms", "wal_id"]
    assert list(copy[0]) == names
    assert [(each["op"], each["id"], each["name"], each["size"]) for each in copy + changes] == [
        ("put", 1, "n1", 1),
        ("put", 2, None, 2),
        ("delete", 1, None, None),
    ]


def test_rows_of_a_newer_version_are_decoded_to_the_columns_of_the_running_stream(folder: Path) -> None:
    write(folder, FIRST, row(1))
    reader = stream_of(folder)
    _, at = follow(reader)
    added = FIRST.append(pa.field("colour", pa.string()))
    write(folder, added, row(2, colour="red"))
    more, at = follow(reader, at)
    dropped = pa.schema([field for field in added if field.name != "name"])
    write(folder, dropped, {"region": "eu", "id": 3, "size": 3, "colour": None})
    less, at = follow(reader, at)

    assert [(each["id"], each["name"], each["size"]) for each in more] == [(2, "n2", 2)]
    assert [(each["id"], each["name"], each["size"]) for each in less] == [(3, None, 3)]
    assert "colour" in stream_of(folder)._shape.schema.names


def test_rows_that_the_columns_of_the_stream_cannot_hold_fail_with_a_sentence(folder: Path) -> None:
    write(folder, FIRST, row(1))
    reader = stream_of(folder)
    _, at = follow(reader)
    wider = pa.schema([field if field.name != "size" else pa.field("size", pa.int64()) for field in FIRST])
    write(folder, wider, row(2, size=2**40))

    with pytest.raises(InvalidRequest, match="size"):
        follow(reader, at)
    rows, _ = follow(stream_of(folder), at)
    assert [(each["id"], each["size"]) for each in rows] == [(2, 2**40)]


def test_columns_and_former_values_of_a_stored_schema_can_be_chosen(folder: Path) -> None:
    write(folder, FIRST, row(1))
    reader = stream_of(folder, "op string, size int, id long, before_size int", before="true")
    _, at = follow(reader)
    write(folder, FIRST, row(1, size=5), delete=(row(1),))

    rows, _ = follow(reader, at)

    assert rows == [
        {"op": "put", "size": 5, "id": 1, "before_size": 1},
        {"op": "delete", "size": None, "id": 1, "before_size": 5},
    ]
    assert stream_of(folder, before="true")._shape.former == ("before_name", "before_size")
    with pytest.raises(InvalidRequest, match="no column 'colour'"):
        stream_of(folder, "op string, colour string")


def test_a_stream_of_bytes_shows_stored_rows_and_no_system_rows(folder: Path) -> None:
    write(folder, FIRST, row(1))
    with flagstone.open_reader(folder, mode="latest") as reader:
        table = reader.schema()
    assert table is not None

    raw, _ = follow(stream_of(folder, raw="true"))
    everything, _ = follow(stream_of(folder, raw="true", include_system="true", consumer="other"))

    assert [TableReader(table).decode(each["key"], each["value"]) for each in raw] == [row(1)]
    assert [each["key"][:11] for each in everything] == [b"\x00flagstone/", raw[0]["key"][:11]]


def test_system_rows_are_not_delivered_by_wal_files_loads_or_replacing_copies(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
    reader = stream_of(folder, on_overwrite="delete_and_put", before="true")
    _, at = follow(reader)
    write(folder, FIRST)
    load(folder, [pairs({b"b": b"1"})], raw="true")
    load(folder, [pairs({b"c": b"1"})], raw="true", replaces_all=True)

    rows, _ = follow(reader, at)

    assert sorted((each["op"], each["key"]) for each in rows) == [
        ("delete", b"a"),
        ("delete", b"b"),
        ("put", b"b"),
        ("put", b"c"),
    ]
