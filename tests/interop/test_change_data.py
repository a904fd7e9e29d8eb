"""Changes, retention checkpoints and earlier states of databases that the official wheel writes and collects."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

import flagstone
from flagstone import Admin, InvalidRequest, WalReader
from flagstone.changes.change import Change
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.stores import ManifestStore
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from golden.corpus import GoldenDatabase, databases
from kit.databases import apply_change

if TYPE_CHECKING:
    from kit.fixtures import Wheel

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path, wheel: Wheel) -> Iterator[str]:
    """A store in which the wheel holds the database `db` open for writing."""
    wheel.hold(str(tmp_path), "db", compactor_options=None)
    yield str(tmp_path)
    wheel.release("db")


def test_a_wal_reader_follows_the_wal_while_the_wheel_writes_it(folder: str, wheel: Wheel) -> None:
    seen: list[Change] = []
    enough, stop = Event(), Event()

    def consume() -> None:
        for batch in WalReader("db", store=folder).follow(poll_interval_s=0.02, stop=stop):
            seen.extend(batch.changes)
            if seen[-1].key == b"last":
                enough.set()

    consumer = Thread(target=consume)
    consumer.start()
    for number in range(30):
        wheel.held_apply("db", [("put", b"k%d" % number, b"v%d" % number), ("flush", "wal")])
    wheel.held_apply("db", [("batch", [("put", b"x", b"1"), ("delete", b"k3"), ("merge", b"y", b"+")])])
    wheel.held_apply("db", [("put", b"last", b"", 3_600_000), ("flush", "memtable")])
    arrived = enough.wait(20)
    stop.set()
    consumer.join(20)

    assert arrived
    assert [change.seq for change in seen] == [*range(1, 31), 31, 31, 31, 32]
    assert [(c.op, c.key, c.value) for c in seen[30:33]] == [
        ("delete", b"k3", None),
        ("put", b"x", b"1"),
        ("merge", b"y", b"+"),
    ]
    assert seen[-1].expires_ms == (seen[-1].created_ms or 0) + 3_600_000
    rows: dict[bytes, bytes] = {}
    for change in seen:
        apply_change(rows, change)
    assert rows == wheel.held_scan("db")


@pytest.mark.slow
def test_a_replica_of_a_wheels_database_survives_its_collector(folder: str, wheel: Wheel) -> None:
    replica: dict[bytes, bytes] = {}
    seqs: list[int] = []

    def consume(limit: int | None = None) -> None:
        with flagstone.open_feed("db", "replica", store=folder, merge_operator=Concatenate()) as feed:
            if feed.snapshot is not None:
                replica.update(feed.snapshot.scan())
                seqs.append(feed.seq)
                feed.copied()
            for number, batch in enumerate(feed.follow(timeout_s=0), 1):
                for change in batch.changes:
                    apply_change(replica, change)
                seqs.extend(sorted({change.seq for change in batch.changes}))
                feed.commit(batch)
                if number == limit:
                    return

    def work(round_number: int) -> None:
        for number in range(4):
            key = b"%d" % (number + round_number)
            wheel.held_apply("db", [("put", key, b"round %d" % round_number), ("merge", b"m", b"+")])
            wheel.held_apply("db", [("flush", "wal")])
        wheel.held_apply("db", [("delete", b"%d" % round_number), ("flush", "memtable")])

    work(0)
    consume(limit=0)
    for round_number in range(1, 6):
        work(round_number)
        wheel.run_gc_once(folder, "db")
        consume(limit=3)
    wheel.run_gc_once(folder, "db")
    left = [file.wal_id for file in WalReader("db", store=folder).files()]
    consume()

    assert replica == wheel.held_scan("db") == wheel.scan(folder, "db")
    assert seqs == list(range(seqs[0], seqs[-1] + 1))
    assert left[0] > 1, "the wheel's collector has removed what was read"
    assert Admin("db", store=folder).verify().ok
    flagstone.open_feed("db", "replica", store=folder).release()
    wheel.held_apply("db", [("put", b"z", b"z"), ("flush", "memtable")])
    wheel.run_gc_once(folder, "db")
    assert len(WalReader("db", store=folder).files()) < len(left)
    assert wheel.list_checkpoints(folder, "db") == []


def test_without_a_retention_checkpoint_the_wheels_collector_deletes_the_wal_files(
    folder: str, wheel: Wheel
) -> None:
    for number in range(4):
        wheel.held_apply("db", [("put", b"%d" % number, b"x"), ("flush", "memtable")])
    wheel.run_gc_once(folder, "db")

    with pytest.raises(InvalidRequest, match="was removed by garbage collection"):
        list(WalReader("db", store=folder).batches(2))


def test_after_manifest_zero_is_lost_the_wheels_collector_stops_until_the_next_commit_restores_it(
    folder: str, wheel: Wheel
) -> None:
    for number in range(3):
        wheel.held_apply("db", [("put", b"%d" % number, b"x"), ("flush", "memtable")])
    reader = WalReader("db", store=folder, pin="p")
    batches = reader.follow(timeout_s=0)
    reader.commit(next(batches))
    reader.close()
    lost = Path(folder, "db", "manifest", "00000000000000000000.manifest")
    lost.unlink()
    files = WalReader("db", store=folder).files()
    wheel.run_gc_once(folder, "db")

    assert WalReader("db", store=folder).files() == files
    reader.commit(next(batches))
    reader.close()
    assert lost.exists()
    wheel.run_gc_once(folder, "db")
    left = [file.wal_id for file in WalReader("db", store=folder).files()]
    assert reader.position is not None
    assert reader.position in left
    assert len(left) < len(files)


def test_the_wheel_opens_compacts_and_closes_a_database_with_a_retention_checkpoint(
    tmp_path: Path, wheel: Wheel
) -> None:
    folder = str(tmp_path)
    operations: list[tuple[Any, ...]] = [("put", b"%d" % number, b"x") for number in range(10)]
    before = wheel.apply(folder, "db", [*operations, ("flush", "memtable")])
    reader = WalReader("db", store=folder, pin="p")
    list(reader.follow(timeout_s=0))

    assert wheel.scan(folder, "db") == before
    assert wheel.compact_everything(folder, "db") == before
    assert [
        (number, name.partition("?")[0]) for _, number, name in wheel.list_checkpoints(folder, "db") if name
    ] == [(0, "flagstone.log-pin/p")]
    assert wheel.apply(folder, "db", [("put", b"new", b"y")]) == {**before, b"new": b"y"}
    assert Admin("db", store=folder).verify().ok


@pytest.mark.slow
def test_as_of_reads_earlier_states_of_a_wheels_database(folder: str, wheel: Wheel) -> None:
    wheel.held_apply("db", [("put", b"a", b"0"), ("merge", b"m", b"0"), ("flush", "memtable")])
    checkpoint, _ = wheel.create_checkpoint(folder, "db")
    consumer = WalReader("db", store=folder, pin="keeps the WAL")
    list(consumer.follow(timeout_s=0))
    states: dict[int, dict[bytes, bytes]] = {}
    for number in range(2, 20):
        kind = ("put", b"%d" % (number % 5), b"%d" % number)
        wheel.held_apply("db", [kind if number % 3 else ("merge", b"m", b"%d" % number), ("flush", "wal")])
        states[number + 1] = wheel.held_scan("db")
        if number % 6 == 0:
            wheel.held_apply("db", [("flush", "memtable")])
    wheel.held_apply("db", [("flush", "memtable")])
    wheel.run_gc_once(folder, "db")

    for seq, expected in states.items():
        with flagstone.open_reader("db", store=folder, as_of=seq, merge_operator=Concatenate()) as reader:
            assert dict(reader.scan()) == expected
    with pytest.raises(InvalidRequest, match="cannot be shown"):
        flagstone.open_reader("db", store=folder, as_of=1)
    changed = {
        entry.key: entry.after and entry.after.value
        for entry in Admin("db", store=folder).diff(
            checkpoint, wheel.create_checkpoint(folder, "db")[0], merge_operator=Concatenate()
        )
    }
    first, last = wheel.scan(folder, "db", checkpoint=checkpoint), wheel.scan(folder, "db")
    assert changed == {key: value for key, value in last.items() if first.get(key) != value}


GOLDEN = [database for database in databases() if database.expected.get("checkpoint_kv")]


def _copy(database: GoldenDatabase, to: Path) -> Path:
    return Path(shutil.copytree(database.store, to / "store"))


@pytest.mark.parametrize("database", GOLDEN, ids=lambda database: database.name)
def test_golden_checkpoints_are_read_at_their_sequence_numbers(
    database: GoldenDatabase, tmp_path: Path
) -> None:
    store = _copy(database, tmp_path)
    manifests = ManifestStore(LocalStore(store), DbPaths(database.path))
    compared = 0
    for entry in manifests.require_latest().value.checkpoints:
        wanted = database.expected["checkpoint_kv"].get(str(entry.id))
        if wanted is None:
            continue
        expected = {bytes.fromhex(key): bytes.fromhex(value) for key, value in wanted.items()}
        shown = flagstone.open_reader(database.path, store=str(store), checkpoint=entry.id)
        seq = shown.status()["last_seq"]
        shown.close()
        with flagstone.open_reader(
            database.path, store=str(store), checkpoint=entry.id, as_of=seq, merge_operator=Concatenate()
        ) as reader:
            assert dict(reader.scan(include_expired=True)) == expected
            compared += 1
    assert compared


@pytest.mark.slow
def test_sequence_at_and_time_of_return_what_the_wheel_returns(tmp_path: Path, wheel: Wheel) -> None:
    compared = 0
    for database in databases():
        manifests = ManifestStore(LocalStore(database.store), DbPaths(database.path))
        tracker = manifests.require_latest().value.sequence_tracker
        if not len(tracker) or compared > 300:
            continue
        admin = Admin(database.path, store=str(database.store))
        for second in {time + step for time in tracker.seconds[:3] for step in (-1, 0, 1)}:
            for up in (False, True):
                ours = admin.sequence_at(EPOCH + timedelta(seconds=second), rounding="up" if up else "down")
                assert ours == wheel.sequence_at(str(database.store), database.path, second, up=up)
                compared += 1
        for sequence in {number + step for number in tracker.sequences[:3] for step in (-1, 0, 1)}:
            for up in (False, True):
                ours_at = admin.time_of(sequence, rounding="up" if up else "down")
                theirs = wheel.time_of(str(database.store), database.path, sequence, up=up)
                assert ours_at == (None if theirs is None else EPOCH + timedelta(seconds=theirs))
                compared += 1
    assert compared > 100
