"""Former values of changes, and streams that go on across an overwrite or a restored state."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import flagstone
from flagstone import Admin, InvalidRequest, keys
from flagstone.lsm.operators import Counter
from flagstone.spark.stream import bases
from kit.databases import QUIET
from kit.spark_loads import load, pairs, shown
from spark.test_stream_loads import Present
from spark.test_stream_options import KEY, put, stream_of, structured
from spark.test_stream_source import applied, follow, rows_between

pytestmark = pytest.mark.slow

NOW = timedelta()
FORMER = {"before": "true"}
BASE = "spark stream base test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def write(folder: Path, *changes: tuple[bytes, bytes | None]) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for key, value in changes:
            db.delete(key) if value is None else db.put(key, value)


def triples(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["op"], row["key"], row["value"], row["before"]) for row in rows]


def bases_of(folder: Path, name: str = BASE) -> list[Any]:
    return [entry for entry in Admin(folder).checkpoints() if entry.name == name]


# -- former values --------------------------------------------------------------------------------------------


def test_each_change_has_the_former_value_of_its_key(folder: Path) -> None:
    write(folder, (b"a", b"1"), (b"b", b"1"), (b"gone", b"1"))
    reader = stream_of(folder, **FORMER)
    copy, at = follow(reader)
    write(
        folder, (b"a", b"2"), (b"new", b"1"), (b"gone", None), (b"a", b"3"), (b"gone", None), (b"gone", b"2")
    )
    changes, at = follow(reader, at)
    write(folder, (b"b", b"2"), (b"a", None))

    more, _ = follow(reader, at)

    assert {row["before"] for row in copy} == {None}
    assert triples(changes) == [
        ("put", b"a", b"2", b"1"),
        ("put", b"new", b"1", None),
        ("delete", b"gone", None, b"1"),
        ("put", b"a", b"3", b"2"),
        ("delete", b"gone", None, None),
        ("put", b"gone", b"2", None),
    ]
    assert triples(more) == [("put", b"b", b"2", b"1"), ("delete", b"a", None, b"3")]


def test_former_values_are_found_across_loads_compactions_and_collectors(folder: Path) -> None:
    write(folder, (b"a", b"1"))
    reader = stream_of(folder, **FORMER)
    _, at = follow(reader)
    write(folder, (b"b", b"1"))
    load(folder, [pairs({b"a": b"loaded", b"b": b"loaded", b"c": b"loaded"})])
    write(folder, (b"a", b"2"), (b"c", None))
    load(folder, [{"key": [b"a"], "value": [b""], "op": ["delete"]}])
    Admin(folder).compact(full=True)
    Admin(folder).collect_garbage(min_age=NOW)

    rows, _ = follow(reader, at)

    assert triples(rows) == [
        ("put", b"b", b"1", None),
        ("put", b"a", b"loaded", b"1"),
        ("put", b"b", b"loaded", b"1"),
        ("put", b"c", b"loaded", None),
        ("put", b"a", b"2", b"loaded"),
        ("delete", b"c", None, b"loaded"),
        ("delete", b"a", None, b"2"),
    ]


def test_a_repeated_micro_batch_has_the_same_former_values(folder: Path) -> None:
    write(folder, (b"a", b"1"))
    reader = stream_of(folder, **FORMER)
    _, at = follow(reader)
    write(folder, (b"a", b"2"))
    end = reader.latestOffset(at, ReadAllAvailable())
    once = rows_between(reader, at, end)
    write(folder, (b"a", b"3"))
    Admin(folder).compact(full=True)
    Admin(folder).collect_garbage(min_age=NOW)

    again = rows_between(stream_of(folder, **FORMER), at, end)

    assert once == again
    assert triples(once) == [("put", b"a", b"2", b"1")]


def test_a_former_value_that_had_expired_when_the_change_was_made_is_null(folder: Path) -> None:
    at_ms = Present().now_ms()
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"lives", b"1", expire_at=at_ms + 3_600_000)
        db.put(b"expires", b"1", expire_at=at_ms + 1)
        db.put(b"waits", b"1", ttl=timedelta(milliseconds=1))
    reader = stream_of(folder, **FORMER)
    _, at = follow(reader)
    write(folder, (b"lives", b"2"), (b"expires", b"2"), (b"waits", None))

    rows, _ = follow(reader, at)

    assert triples(rows) == [
        ("put", b"lives", b"2", b"1"),
        ("put", b"expires", b"2", None),
        ("delete", b"waits", None, None),
    ]


def test_merges_are_folded_with_the_named_operator(folder: Path) -> None:
    def count(*steps: int) -> None:
        with flagstone.open(folder, settings=QUIET, merge_operator=Counter()) as db:
            for step in steps:
                db.merge(b"n", Counter.encode(step))

    count(1, 2)
    options = {**FORMER, "merge_operator": "flagstone.lsm.operators:Counter"}
    reader = stream_of(folder, **options)
    _, at = follow(reader)
    count(4, 8)
    write(folder, (b"n", Counter.encode(100)))
    count(1)

    rows, _ = follow(reader, at)

    befores = [(row["op"], Counter.decode(row["before"])) for row in rows]
    assert befores == [("merge", 3), ("merge", 7), ("put", 15), ("merge", 100)]


def test_typed_streams_show_former_values_in_columns_of_their_own(folder: Path) -> None:
    key, first = structured("eu", 1, "flag", "1.20")
    _, second = structured("eu", 1, None, "2.00")
    write(folder, (key, first))
    ddl = "op string, region string, id long, name string, price decimal(10,2), before_name string"
    reader = stream_of(folder, ddl, **KEY, **FORMER)
    _, at = follow(reader)
    write(folder, (key, second), (key, None), (keys.encode("us", 2), first))

    rows, _ = follow(reader, at)

    assert [(row["op"], row["region"], row["name"], row["before_name"]) for row in rows] == [
        ("put", "eu", None, "flag"),
        ("delete", "eu", None, None),
        ("put", "us", "flag", None),
    ]
    with pytest.raises(InvalidRequest, match="'before_name' must have the type of a column 'name'"):
        stream_of(folder, ddl.replace("before_name string", "before_name long"), **KEY, **FORMER)


def test_former_values_equal_a_model_through_loads_limits_restarts_and_moving_bases(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "_FILES_SINCE", 3)
    chance, model = random.Random(11), dict[bytes, bytes]()
    put(folder, b"0")
    model[b"0"] = b"v0"
    options = {**FORMER, "max_files_per_trigger": "2", "partitions": "2"}
    reader = stream_of(folder, **options)
    _, at = follow(reader)
    seen_bases: set[Any] = set()
    for _ in range(12):
        changes = [
            (b"%d" % chance.randrange(12), None if chance.random() < 0.3 else b"%d" % chance.randrange(1000))
            for _ in range(8)
        ]
        if chance.random() < 0.3:
            load(folder, [pairs({key: value or b"x" for key, value in changes})])
        else:
            with flagstone.open(folder, settings=QUIET) as db:
                for key, value in changes:
                    db.delete(key) if value is None else db.put(key, value)
                    db.flush("wal")
        if chance.random() < 0.3:
            Admin(folder).compact(full=True)
        if chance.random() < 0.5:
            Admin(folder).collect_garbage(min_age=NOW)
        if chance.random() < 0.3:
            reader = stream_of(folder, **options)
        rows, at = follow(reader, at)
        for row in rows:
            assert row["before"] == model.get(row["key"]), row
            model = applied([row], model)
        held = bases_of(folder)
        seen_bases |= {entry.id for entry in held}
        assert len(held) <= 2
    assert model == shown(folder)
    assert len(seen_bases) > 4, "the bases moved with the stream"


def test_the_state_before_the_stream_must_be_kept(folder: Path) -> None:
    put(folder, b"a")
    with pytest.raises(
        InvalidRequest, match=r"before=true needs the state .* use starting=snapshot or starting=latest"
    ):
        stream_of(folder, starting="earliest", **FORMER)
    with pytest.raises(InvalidRequest, match="allow_gaps skips changes"):
        stream_of(folder, allow_gaps="true", **FORMER)
    _, at = follow(stream_of(folder))
    with pytest.raises(InvalidRequest, match=r"is not kept for the consumer 'test': .* starting=snapshot"):
        follow(stream_of(folder, **FORMER), at)


def test_a_stream_from_latest_knows_what_was_there(folder: Path) -> None:
    write(folder, (b"a", b"1"))
    reader = stream_of(folder, starting="latest", **FORMER)
    nothing, at = follow(reader)
    write(folder, (b"a", b"2"))

    rows, _ = follow(reader, at)

    assert nothing == []
    assert triples(rows) == [("put", b"a", b"2", b"1")]


# -- overwrites and restored states ---------------------------------------------------------------------------


def overwrite(folder: Path) -> None:
    load(folder, [pairs({b"stays": b"new", b"came": b"new"})], replaces_all=True)


def restore(folder: Path) -> None:
    (entry,) = [entry for entry in Admin(folder).checkpoints() if entry.name == "before"]
    Admin(folder).restore(entry.id)


def without_wal(folder: Path) -> None:
    with flagstone.open(folder, settings=replace(QUIET, wal_enabled=False)) as db:
        db.delete(b"went")
        db.put(b"came", b"new")


@pytest.mark.parametrize("break_changes", [overwrite, restore, without_wal])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["delete_and_put", "marker"])
def test_a_stream_goes_on_across_what_cannot_be_delivered_as_changes(
    folder: Path, break_changes: Any, mode: str, *, late: bool
) -> None:
    write(folder, (b"came", b"old"), (b"stays", b"old"))
    Admin(folder).create_checkpoint(name="before")
    write(folder, (b"came", None), (b"went", b"old"))
    reader = stream_of(folder, on_overwrite=mode)
    copy, at = follow(reader)
    write(folder, (b"went too", b"old"))
    if not late:
        rows, at = follow(reader, at)
        copy += rows
    break_changes(folder)
    if late:
        write(folder, (b"later", b"1"))
    Admin(folder).collect_garbage(min_age=NOW)

    rows, at = follow(reader, at)
    write(folder, (b"last", b"1"))
    more, _ = follow(reader, at)

    ops = [row["op"] for row in rows]
    model = applied(copy)
    for row in rows:
        if row["op"] == "overwrite":
            assert (row["key"], row["value"], row["wal_id"]) == (b"", None, None)
            model = {}
        else:
            model = applied([row], model)
    assert ops.count("overwrite") == (mode == "marker")
    assert ("delete" in ops) == (mode == "delete_and_put")
    assert applied(more, model) == shown(folder)
    assert [row["key"] for row in more] == [b"last"]


def test_deletes_and_puts_of_an_overwrite_have_former_values(folder: Path) -> None:
    write(folder, (b"stays", b"0"), (b"went", b"old"))
    reader = stream_of(folder, on_overwrite="delete_and_put", **FORMER)
    _, at = follow(reader)
    write(folder, (b"stays", b"old"), (b"went too", b"old"))
    overwrite(folder)

    rows, at = follow(reader, at)
    write(folder, (b"came", b"newer"))
    more, _ = follow(reader, at)

    assert triples(rows[:2]) == [("put", b"stays", b"old", b"0"), ("put", b"went too", b"old", None)]
    assert sorted(triples(rows[2:])) == [
        ("delete", b"went", None, b"old"),
        ("delete", b"went too", None, b"old"),
        ("put", b"came", b"new", None),
        ("put", b"stays", b"new", b"old"),
    ]
    assert triples(more) == [("put", b"came", b"newer", b"new")]


def test_a_repeated_micro_batch_of_an_overwrite_has_the_same_rows(folder: Path) -> None:
    write(folder, (b"stays", b"0"), (b"went", b"old"))
    options = {"on_overwrite": "delete_and_put"}
    reader = stream_of(folder, **options)
    _, at = follow(reader)
    overwrite(folder)
    end = at
    while "replaces" not in end:
        at, end = end, reader.latestOffset(end, ReadAllAvailable())
    once = rows_between(reader, at, end)
    write(folder, (b"later", b"1"))
    Admin(folder).compact(full=True)
    Admin(folder).collect_garbage(min_age=NOW)

    again = stream_of(folder, **options)

    assert rows_between(again, at, end) == once
    assert len(once) == 3
    rows, _ = follow(again, end)
    assert [row["key"] for row in rows] == [b"later"]


def test_typed_streams_show_a_marker_without_key_and_value(folder: Path) -> None:
    key, value = structured("eu", 1, "flag", "1.20")
    write(folder, (key, value))
    ddl = "op string, region string, id long, name string, price decimal(10,2)"
    reader = stream_of(folder, ddl, on_overwrite="marker", **KEY)
    _, at = follow(reader)
    load(folder, [{"key": [key], "value": [value]}], replaces_all=True)

    rows, _ = follow(reader, at)

    assert [(row["op"], row["region"], row["name"]) for row in rows] == [
        ("overwrite", None, None),
        ("put", "eu", "flag"),
    ]
    with pytest.raises(InvalidRequest, match="column 'id' must be nullable"):
        stream_of(folder, ddl.replace("id long", "id long not null"), on_overwrite="marker", **KEY)


def test_without_the_option_the_stream_fails_as_before(folder: Path) -> None:
    put(folder, b"a")
    reader = stream_of(folder)
    _, at = follow(reader)
    overwrite(folder)

    with pytest.raises(InvalidRequest, match="has replaced everything"):
        follow(reader, at)
    with pytest.raises(InvalidRequest, match="use fail, delete_and_put or marker"):
        stream_of(folder, on_overwrite="ignore")
