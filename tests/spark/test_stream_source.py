"""Change streams: offsets and rows as Spark requests them, and a real query that is stopped and started again."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.changes.change import WalFile
from flagstone.metadata.annotations import Position
from flagstone.metadata.manifest import SEQ_GAP, Manifest
from flagstone.spark import foreach_batch
from flagstone.spark.stream.lag import Lag, measure_lag
from flagstone.spark.stream.offsets import BEGIN, plan_end, until_fence
from flagstone.spark.stream.options import parse_stream_options
from flagstone.spark.stream.source import ChangeStreamReader
from flagstone.types import WalId
from kit.databases import QUIET
from kit.spark_loads import load, pairs, shown

NOW = timedelta()


class Clock:
    """A clock that advances by five seconds with every reading."""

    def __init__(self) -> None:
        self.at = 1_000.0

    def now_ms(self) -> int:
        return 1_800_000_000_000 + int(self.at * 1000)

    def monotonic(self) -> float:
        self.at += 5
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def stream_of(folder: Path, **options: str) -> ChangeStreamReader:
    return ChangeStreamReader(
        parse_stream_options({"path": str(folder), "consumer": "test", **options}), clock=Clock()
    )


def rows_between(reader: ChangeStreamReader, start: Any, end: Any) -> list[dict[str, Any]]:
    task = pickle.loads(pickle.dumps(reader))
    partitions = pickle.loads(pickle.dumps(list(reader.partitions(start, end))))
    return [row for partition in partitions for batch in task.read(partition) for row in batch.to_pylist()]


def follow(reader: ChangeStreamReader, start: Any = None) -> tuple[list[dict[str, Any]], Any]:
    """Read all batches as a query does; returns the rows and the last offset."""
    rows: list[dict[str, Any]] = []
    at = start or reader.initialOffset()
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        rows += rows_between(reader, at, end)
        reader.commit(end)
        at = end
    return rows, at


def applied(rows: list[dict[str, Any]], model: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    result = dict(model or {})
    for row in rows:
        if row["op"] == "put":
            result[row["key"]] = row["value"]
        else:
            result.pop(row["key"], None)
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def test_a_stream_delivers_a_copy_and_then_every_change_once_in_order(folder: Path) -> None:
    load(folder, [pairs({b"k%03d" % number: b"loaded" for number in range(100)})])
    db = flagstone.open(folder, settings=QUIET)
    db.put(b"k001", b"in the WAL before", await_durable=True)
    reader = stream_of(folder)

    copy, at = follow(reader)
    assert len(copy) == 100
    assert {row["op"] for row in copy} == {"put"}
    assert {row["wal_id"] for row in copy} == {None}
    assert reader.partitions(at, at) == []
    db.put(b"k001", b"1")
    db.delete(b"k002")
    db.flush("wal")
    with db.batch() as batch:
        batch.put(b"a", b"2")
        batch.put(b"b", b"2")
    db.flush("wal")
    changes, _ = follow(reader, at)

    assert [(row["op"], row["key"], row["value"], row["seq"]) for row in changes] == [
        ("put", b"k001", b"1", SEQ_GAP + 2),
        ("delete", b"k002", None, SEQ_GAP + 3),
        ("put", b"a", b"2", SEQ_GAP + 4),
        ("put", b"b", b"2", SEQ_GAP + 4),
    ]
    assert all(row["created_ms"] and row["wal_id"] for row in changes)
    db.close()
    assert applied(changes, applied(copy)) == shown(folder)


def test_a_repeated_batch_has_the_same_rows(folder: Path) -> None:
    db = flagstone.open(folder, settings=QUIET)
    db.put(b"a", b"1", await_durable=True)
    reader = stream_of(folder, starting="earliest")
    end = reader.latestOffset(dict(BEGIN), ReadAllAvailable())
    assert rows_between(reader, dict(BEGIN), end) == []
    more = reader.latestOffset(end, ReadAllAvailable())
    once = rows_between(reader, end, more)
    db.put(b"b", b"2", await_durable=True)
    db.close()

    again = rows_between(stream_of(folder, starting="earliest"), end, more)

    assert once == again
    assert [row["key"] for row in once] == [b"a"]


def test_wal_files_are_kept_until_the_query_has_read_them(folder: Path) -> None:
    reader = None
    for turn in range(3):
        with flagstone.open(folder, settings=QUIET) as db:
            if reader is None:
                reader = stream_of(folder)
                _, at = follow(reader)
            db.put(b"turn %d" % turn, b"x")
        Admin(folder).collect_garbage(min_age=NOW)
    assert reader is not None

    rows, _ = follow(reader, at)
    reader.stop()

    assert [row["key"] for row in rows] == [b"turn 0", b"turn 1", b"turn 2"]
    held = len(list((folder / "wal").iterdir()))
    Admin(folder).collect_garbage(min_age=NOW)
    assert len(list((folder / "wal").iterdir())) < held


def test_rows_that_bypassed_the_wal_raise_unless_gaps_are_allowed(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
    reader, tolerant = stream_of(folder), stream_of(folder, consumer="other", allow_gaps="true")
    (_, at), (_, other) = follow(reader), follow(tolerant)
    with flagstone.open(folder, settings=replace(QUIET, wal_enabled=False)) as db:
        db.put(b"not in the WAL", b"x")

    with pytest.raises(InvalidRequest, match="sequence numbers 2 to 2 are not in the WAL"):
        follow(reader, at)
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"b", b"2")
    with pytest.raises(InvalidRequest, match="sequence numbers 2 to 2 are not in the WAL"):
        follow(reader, at)
    rows, _ = follow(tolerant, other)
    assert [row["key"] for row in rows] == [b"b"]


def test_deleted_wal_files_raise(folder: Path) -> None:
    for turn in range(4):
        with flagstone.open(folder, settings=QUIET) as db:
            db.put(b"%d" % turn, b"x")
    Admin(folder).collect_garbage(min_age=NOW)

    with pytest.raises(InvalidRequest, match="removed by garbage collection"):
        follow(stream_of(folder, starting="1"))


def test_a_stream_from_latest_delivers_only_later_changes(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"before", b"x", await_durable=True)
        reader = stream_of(folder, starting="latest")
        nothing, at = follow(reader)
        db.put(b"after", b"x", await_durable=True)
        rows, _ = follow(reader, at)

    assert nothing == []
    assert [row["key"] for row in rows] == [b"after"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"max_files_per_trigger": "1"}, {"max_bytes_per_trigger": "1"}, {"partitions": "3"}]
)
def test_a_copy_made_from_changes_equals_the_database_through_restarts(
    folder: Path, options: dict[str, str]
) -> None:
    chance, model = random.Random(5), dict[bytes, bytes]()
    reader, at = stream_of(folder, **options) if folder.exists() else None, None
    for _ in range(6):
        with flagstone.open(folder, settings=QUIET) as db:
            for _ in range(20):
                key = b"%d" % chance.randrange(30)
                if chance.random() < 0.3:
                    db.delete(key)
                else:
                    db.put(key, b"%d" % chance.randrange(1000))
                if chance.random() < 0.2:
                    db.flush("wal")
        if reader is None or chance.random() < 0.5:
            reader = stream_of(folder, **options)
        rows, at = follow(reader, at)
        model = applied(rows, model)
        assert model == shown(folder)


def test_a_micro_batch_uses_its_limit_and_has_at_least_one_file() -> None:
    files = [WalFile(WalId(number), 100, 0) for number in (3, 4, 5, 7)]

    assert plan_end(files, 3, ReadAllAvailable(), None) == 6
    assert plan_end(files, 3, ReadAllAvailable(), 5) == 5
    assert plan_end(files, 3, ReadMaxFiles(2), None) == 5
    assert plan_end(files, 3, ReadMaxBytes(250), None) == 5
    assert plan_end(files, 3, ReadMaxBytes(1), None) == 4
    assert plan_end(files, 2, ReadAllAvailable(), None) == 2
    assert plan_end([], 1, ReadAllAvailable(), None) == 1


def test_a_micro_batch_may_end_before_the_next_fence() -> None:
    sizes = [0, 0, 100, 50, 0, 100]
    files = [WalFile(WalId(3 + at), size, 0) for at, size in enumerate(sizes)]

    assert [file.wal_id for file in until_fence(files)] == [3, 4, 5, 6]
    assert [file.wal_id for file in until_fence(files[4:])] == [7, 8]
    assert until_fence([]) == []


def test_the_lag_counts_files_with_rows_from_the_position_on() -> None:
    files = [WalFile(WalId(3), 100, 5_000), WalFile(WalId(4), 0, 6_000), WalFile(WalId(5), 70, 7_000)]

    lag = measure_lag(files, Manifest(), Position(WalId(4), 10))

    assert lag == Lag(end=6, files=1, bytes=70, loads=0, oldest_ms=7_000)
    assert lag.seconds(9_500) == 2.5
    assert measure_lag([], Manifest(), Position(WalId(9), 10)).seconds(9_500) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consumer": ""}, "option .consumer. is empty"),
        ({"starting": "tomorrow"}, "snapshot, earliest, latest"),
        ({"startign": "latest"}, "did you mean 'starting'"),
        ({"max_files_per_trigger": "1", "max_bytes_per_trigger": "1"}, "keep one of them"),
    ],
)
def test_invalid_stream_options_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        stream_of(folder, **options)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_a_restarted_query_continues_where_it_stopped(spark: Any, tmp_path: Path) -> None:
    folder, state, out = tmp_path / "db", tmp_path / "state", tmp_path / "out"

    def run() -> None:
        source = (
            spark.readStream.format("flagstone").option("consumer", "lake").option("max_files_per_trigger", 4)
        )
        query = (
            source.load(str(folder))
            .writeStream.format("parquet")
            .option("checkpointLocation", str(state))
            .trigger(availableNow=True)
            .start(str(out))
        )
        query.awaitTermination(120)
        assert query.exception() is None

    expected: list[tuple[str, bytes]] = []
    for turn in range(2):
        with flagstone.open(folder, settings=QUIET) as db:
            for number in range(6):
                db.put(b"%d/%d" % (turn, number), b"x", await_durable=True)
                expected.append(("put", b"%d/%d" % (turn, number)))
            if turn:
                db.delete(b"0/0")
                expected.append(("delete", b"0/0"))
        run()
    run()

    found = spark.read.parquet(str(out)).orderBy("seq").collect()
    assert [(row.op, bytes(row.key)) for row in found] == expected
    nameless = spark.readStream.format("flagstone").load(str(folder)).writeStream.format("noop").start()
    with pytest.raises(Exception, match="set changes=true"):
        nameless.awaitTermination(60)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_foreach_batch_keeps_a_copy_up_to_date(spark: Any, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    for turn in range(2):
        with flagstone.open(source, settings=QUIET) as db:
            db.put(b"k%d" % turn, b"v")
            db.put(b"same", b"%d" % turn)
            db.delete(b"k0") if turn else None
        with flagstone.open(copy, settings=QUIET) as target:
            changes = spark.readStream.format("flagstone").option("consumer", "copy").load(str(source))
            query = (
                changes.select("op", "key", "value")
                .writeStream.foreachBatch(foreach_batch(target, "copy"))
                .option("checkpointLocation", str(tmp_path / "state"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination(120)
            assert query.exception() is None
        with flagstone.open_reader(copy, mode="latest") as reader:
            assert dict(reader.scan(b"a")) == shown(source)
