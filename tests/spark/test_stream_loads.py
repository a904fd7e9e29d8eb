"""Change streams of databases with bulk loads: offsets and rows as Spark requests them, and one real query."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.spark.stream.offsets import BEGIN
from flagstone.spark.stream.options import parse_stream_options
from flagstone.spark.stream.partitions import LoadPartition
from flagstone.spark.stream.source import ChangeStreamReader
from kit.databases import QUIET
from kit.spark_loads import load, pairs, shown
from spark.test_stream_source import Clock, applied, follow, rows_between

pytestmark = pytest.mark.slow

NOW = timedelta()


class Present(Clock):
    """Its time of day is the real one, as for the loads: with another one their records would have expired."""

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms()


def stream_of(folder: Path, **options: str) -> ChangeStreamReader:
    return ChangeStreamReader(
        parse_stream_options({"path": str(folder), "consumer": "test", **options}), clock=Present()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def write(folder: Path, *keys: bytes) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for key in keys:
            db.put(key, b"written", await_durable=True)


def test_a_load_is_a_separate_micro_batch_with_a_task_per_sst(folder: Path) -> None:
    write(folder, b"a")
    reader = stream_of(folder)
    _, at = follow(reader)
    write(folder, b"b")
    report = load(folder, [pairs({b"l1": b"x"})], [pairs({b"l2": b"x"})], [pairs({b"l3": b"x"})])
    write(folder, b"c")

    before = reader.latestOffset(at, ReadAllAvailable())
    loaded = reader.latestOffset(before, ReadMaxBytes(1))
    after = reader.latestOffset(loaded, ReadAllAvailable())

    assert [row["key"] for row in rows_between(reader, at, before)] == [b"b"]
    assert loaded == {"wal_id": before["wal_id"], "seq": report.seq, "checkpoint": ""}
    tasks = reader.partitions(before, loaded)
    assert [type(task) for task in tasks] == [LoadPartition] * 3
    rows = rows_between(reader, before, loaded)
    assert [(row["op"], row["key"], row["value"], row["seq"], row["wal_id"]) for row in rows] == [
        ("put", b"l%d" % number, b"x", report.seq, None) for number in (1, 2, 3)
    ]
    assert all(row["created_ms"] for row in rows)
    assert [row["key"] for row in rows_between(reader, loaded, after)] == [b"c"]
    assert reader.latestOffset(after, ReadAllAvailable()) == after


def test_a_load_after_the_last_wal_file_is_delivered_at_once(folder: Path) -> None:
    write(folder, b"a")
    reader = stream_of(folder)
    _, at = follow(reader)
    load(folder, [pairs({b"one": b"x"})])
    rows, at = follow(reader, at)
    assert [row["key"] for row in rows] == [b"one"]
    load(folder, [pairs({b"two": b"x"})])
    load(folder, [pairs({b"three": b"x"})])
    rows, _ = follow(reader, at)
    assert [row["key"] for row in rows] == [b"two", b"three"]


def test_a_load_is_kept_until_its_batch_is_committed_and_a_repeated_batch_has_the_same_rows(
    folder: Path,
) -> None:
    write(folder, b"a")
    reader = stream_of(folder)
    _, at = follow(reader)
    reader.stop()
    load(folder, [pairs({b"k%03d" % number: b"x" for number in range(300)})])
    write(folder, b"b")
    end = reader.latestOffset(reader.latestOffset(at, ReadAllAvailable()), ReadAllAvailable())
    start = {**end, "seq": end["seq"] - 1}
    once = rows_between(reader, start, end)
    Admin(folder).compact(full=True)
    for entry in Admin(folder).checkpoints():
        if entry.manifest_id and not (entry.name or "").startswith("flagstone.load/"):
            Admin(folder).delete_checkpoint(entry.id)
    Admin(folder).collect_garbage(min_age=NOW)

    again = stream_of(folder)

    assert rows_between(again, start, end) == once
    assert len(once) == 300
    rows, _ = follow(again, end)
    assert [row["key"] for row in rows] == [b"b"]
    again.stop()
    (record,) = [entry for entry in Admin(folder).checkpoints() if entry.manifest_id]
    assert record.expires_s is not None


def test_an_available_now_query_delivers_only_the_loads_before_its_start(folder: Path) -> None:
    write(folder, b"a")
    reader = stream_of(folder)
    _, at = follow(reader)
    load(folder, [pairs({b"in time": b"x"})])
    reader.prepareForTriggerAvailableNow()
    load(folder, [pairs({b"too late": b"x"})])
    write(folder, b"as well")

    rows, at = follow(reader, at)

    assert [row["key"] for row in rows] == [b"in time"]
    rows, _ = follow(stream_of(folder), at)
    assert [row["key"] for row in rows] == [b"too late", b"as well"]


@pytest.mark.parametrize("starting", ["earliest", "1", "latest"])
def test_a_stream_without_a_copy_begins_with_the_loads_after_its_start_position(
    folder: Path, starting: str
) -> None:
    load(folder, [pairs({b"first": b"x"})])
    reader = stream_of(folder, starting=starting)
    begin = reader.latestOffset(dict(BEGIN), ReadAllAvailable())
    write(folder, b"a")
    load(folder, [pairs({b"second": b"x"})])

    rows, _ = follow(reader, begin)

    expected = [b"a", b"second"] if starting == "latest" else [b"first", b"a", b"second"]
    assert [row["key"] for row in rows] == expected


def test_an_overwriting_load_ends_the_stream_unless_gaps_are_allowed(folder: Path) -> None:
    write(folder, b"a")
    reader, tolerant = stream_of(folder), stream_of(folder, consumer="other", allow_gaps="true")
    (_, at), (_, other) = follow(reader), follow(tolerant)
    load(folder, [pairs({b"l": b"x"})], replaces_all=True)
    write(folder, b"b")

    with pytest.raises(InvalidRequest, match=r"replaced everything .* start over with a copy"):
        follow(reader, at)
    rows, _ = follow(tolerant, other)
    assert [row["key"] for row in rows] == [b"b"]


@pytest.mark.parametrize("options", [{}, {"max_bytes_per_trigger": "1"}, {"partitions": "3"}])
def test_a_copy_made_from_changes_and_loads_equals_the_database_through_restarts(
    folder: Path, options: dict[str, str]
) -> None:
    chance, model, at = random.Random(7), dict[bytes, bytes](), None
    write(folder, b"0")
    reader = stream_of(folder, **options)
    for _ in range(10):
        keys = {b"%d" % chance.randrange(30): b"%d" % chance.randrange(1000) for _ in range(6)}
        match chance.randrange(4):
            case 0:
                load(folder, [pairs(keys)])
            case 1:
                load(folder, [{**pairs(keys), "op": ["delete"] * len(keys)}])
            case _:
                write(folder, *keys)
        if chance.random() < 0.3:
            Admin(folder).compact(full=True)
            Admin(folder).collect_garbage(min_age=NOW)
        if chance.random() < 0.4:
            rows, at = follow(reader, at)
            reader = stream_of(folder, **options)
            model = applied(rows, model)
            assert model == shown(folder)
    rows, _ = follow(reader, at)
    assert applied(rows, model) == shown(folder)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_a_query_delivers_each_load_once_in_commit_order(spark: Any, tmp_path: Path) -> None:
    folder, state, out = tmp_path / "db", tmp_path / "state", tmp_path / "out"

    def run() -> None:
        source = spark.readStream.format("flagstone").option("consumer", "lake").load(str(folder))
        query = (
            source.writeStream.format("parquet")
            .option("checkpointLocation", str(state))
            .trigger(availableNow=True)
            .start(str(out))
        )
        query.awaitTermination(120)
        assert query.exception() is None

    write(folder, b"a")
    run()
    report = load(folder, [pairs({b"l%02d" % number: b"x" for number in range(20)})], [pairs({b"m": b"x"})])
    Admin(folder).collect_garbage(min_age=NOW)
    run()
    write(folder, b"b")
    run()

    found = [(row.seq, bytes(row.key), row.wal_id is None) for row in spark.read.parquet(str(out)).collect()]
    loaded = [(report.seq, b"l%02d" % number, True) for number in range(20)] + [(report.seq, b"m", True)]
    assert sorted(found) == [(1, b"a", True), *loaded, (report.seq + 1, b"b", False)]


def test_a_range_delete_is_a_separate_micro_batch_of_one_change(folder: Path) -> None:
    write(folder, *(b"k%03d" % number for number in range(3)))
    reader = stream_of(folder)
    _, at = follow(reader)
    with flagstone.open(folder, settings=QUIET) as db:
        for number in range(200):
            db.put(b"x%03d" % number, b"v")
        db.delete_range(b"k001", b"x150")
        db.put(b"k001", b"later", await_durable=True)

    changes: list[dict[str, Any]] = []
    batches = 0
    while (end := reader.latestOffset(at, ReadAllAvailable())) != at:
        rows = rows_between(reader, at, end)
        batches += 1
        changes += rows
        at = end
    assert [change["op"] for change in changes] == ["put"] * 200 + ["delete_range", "put"]
    assert (changes[200]["key"], changes[200]["value"]) == (b"k001", b"x150")
    assert batches >= 2
