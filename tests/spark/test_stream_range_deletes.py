"""Range deletes in change streams: a row where the stream can show them, a refusal or a new copy where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.changes.step import ChangesMissing
from flagstone.lsm.system_rows import SYSTEM_PREFIX, SYSTEM_START, SYSTEM_STOP
from flagstone.write.batch import WriteBatch
from kit.databases import QUIET
from spark.test_stream_options import KEY, stream_of, structured
from spark.test_stream_source import applied, follow, rows_between

pytestmark = pytest.mark.slow

COUNT = 200
"""More rows than become tombstones."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def fill(folder: Path) -> None:
    batch = WriteBatch()
    for number in range(COUNT):
        batch.put(b"k%03d" % number, b"old")
    batch.put(b"stays", b"old")
    batch.put_system(SYSTEM_PREFIX + b"schema/", b"columns")
    with flagstone.open(folder, settings=QUIET) as db:
        db.write(batch)


def delete(folder: Path, start: bytes | None, stop: bytes | None) -> int:
    with flagstone.open(folder, settings=QUIET) as db:
        handle = db.delete_range(start, stop)
        db.put(b"last", b"new")
    return handle.seq


def raw(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["op"], row["key"], row["value"]) for row in rows]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"raw": "true"}, [(b"k000", b"k900")]),
        ({"raw": "true", "start": "k050", "stop": "k060"}, [(b"k050", b"k060")]),
        ({"raw": "true", "prefix": "s"}, []),
    ],
    ids=["all keys", "a part of the range", "another range"],
)
def test_a_row_shows_the_part_of_the_deleted_range_that_the_stream_has(
    folder: Path, options: dict[str, str], wanted: list[tuple[bytes, bytes]]
) -> None:
    fill(folder)
    reader = stream_of(folder, **options)
    _, at = follow(reader)
    seq = delete(folder, b"k000", b"k900")
    rows, _ = follow(reader, at)
    deletes = [row for row in rows if row["op"] == "delete_range"]
    assert [(row["key"], row["value"]) for row in deletes] == wanted
    assert {(row["seq"], row["wal_id"], row["expires_ms"]) for row in deletes} <= {(seq, None, None)}


def test_a_delete_of_the_whole_database_is_two_rows_around_the_keys_of_system_rows(folder: Path) -> None:
    fill(folder)
    reader = stream_of(folder, raw="true")
    _, at = follow(reader)
    delete(folder, None, None)
    rows, _ = follow(reader, at)
    assert raw(rows) == [
        ("delete_range", b"", SYSTEM_START),
        ("delete_range", SYSTEM_STOP, None),
        ("put", b"last", b"new"),
    ]


def test_a_stream_with_former_values_fails_at_a_range_delete(folder: Path) -> None:
    fill(folder)
    reader = stream_of(folder, raw="true", before="true")
    _, at = follow(reader)
    seq = delete(folder, b"k000", b"k900")
    with pytest.raises(
        InvalidRequest, match=f"the range delete with the sequence number {seq} cannot be delivered"
    ):
        follow(reader, at)


def test_a_stream_with_former_values_refuses_a_delete_of_keys_outside_its_range(folder: Path) -> None:
    """The query may continue with a wider range, and would then show former values that were deleted."""
    fill(folder)
    reader = stream_of(folder, raw="true", before="true", prefix="s")
    _, at = follow(reader)
    delete(folder, b"k000", b"k900")
    with pytest.raises(ChangesMissing, match="cannot be delivered"):
        follow(reader, at)


@pytest.mark.parametrize("before", [{}, {"before": "true"}], ids=["plain", "with former values"])
def test_a_stream_of_deletes_and_puts_names_every_key_of_a_deleted_range(
    folder: Path, before: dict[str, str]
) -> None:
    fill(folder)
    reader = stream_of(folder, raw="true", on_overwrite="delete_and_put", **before)
    copy, at = follow(reader)
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"k001", b"newer")
    delete(folder, b"k000", b"k900")
    rows, at = follow(reader, at)
    deletes = {row["key"]: row.get("before") for row in rows if row["op"] == "delete"}
    assert set(deletes) == {b"k%03d" % number for number in range(COUNT)}
    if before:
        assert (deletes[b"k000"], deletes[b"k001"]) == (b"old", b"newer")
    assert applied(rows, applied(copy)) == {b"last": b"new", b"stays": b"old"}
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"k001", b"again")
    more, _ = follow(reader, at)
    assert raw(more) == [("put", b"k001", b"again")]
    assert more[0].get("before") is None


def fill_typed(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for number in range(COUNT):
            db.put(*structured("eu", number, "flag", "1.20"))
        db.put(*structured("us", 1, "flag", "1.20"))


TYPED = "op string, region string, id long, name string, price decimal(10,2)"


def test_a_typed_stream_fails_at_a_range_delete(folder: Path) -> None:
    fill_typed(folder)
    reader = stream_of(folder, TYPED, **KEY)
    _, at = follow(reader)
    with flagstone.open(folder, settings=QUIET) as db:
        db.delete_range(None, structured("us", 0, None, "0")[0])
    with pytest.raises(InvalidRequest, match="cannot hold the ends of a range"):
        follow(reader, at)


def test_a_typed_stream_with_markers_goes_on_with_a_copy(folder: Path) -> None:
    fill_typed(folder)
    reader = stream_of(folder, TYPED, on_overwrite="marker", **KEY)
    _, at = follow(reader)
    with flagstone.open(folder, settings=QUIET) as db:
        db.delete_range(None, structured("us", 0, None, "0")[0])
    rows, _ = follow(reader, at)
    assert [(row["op"], row["region"]) for row in rows] == [("overwrite", None), ("put", "us")]


def test_a_micro_batch_that_a_stream_of_bytes_planned_fails_in_a_typed_stream(folder: Path) -> None:
    fill_typed(folder)
    reader = stream_of(folder, raw="true")
    _, at = follow(reader)
    with flagstone.open(folder, settings=QUIET) as db:
        db.delete_range(None, structured("us", 0, None, "0")[0])
    found: list[str] = []
    while not found:
        begin, at = at, reader.latestOffset(at, ReadAllAvailable())
        assert begin != at
        found = [row["op"] for row in rows_between(reader, begin, at)]
    assert set(found) == {"delete_range"}
    with pytest.raises(InvalidRequest, match="cannot hold the ends of a range"):
        stream_of(folder, TYPED, **KEY).partitions(begin, at)


def test_garbage_collection_keeps_what_a_stream_needs_for_a_later_range_delete(folder: Path) -> None:
    fill(folder)
    reader = stream_of(folder, raw="true")
    _, at = follow(reader)
    delete(folder, b"k000", b"k900")
    Admin(folder).compact(full=True)
    Admin(folder).collect_garbage(min_age="0s")
    rows, _ = follow(reader, at)
    assert [row["op"] for row in rows] == ["delete_range", "put"]
