"""Readers: golden databases, checkpoints over a reader's life, following the WAL, outages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

import flagstone
from flagstone import Closed, CorruptData, DbReader, InvalidRequest, ReaderSettings, Unavailable
from flagstone.db.reader.follower import WalTail
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.manifest import Manifest, new_manifest, remove_checkpoint, replace_trees
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.pool import IoPool
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.types import MAX_SEQ, VALUE, Ulid, WalId
from golden.corpus import GoldenDatabase, databases, every_database, unhex
from kit.databases import MANUAL, encode_wal, eventually

PATIENT = ReaderSettings(
    manifest_poll_interval=timedelta(seconds=100), checkpoint_lifetime=timedelta(seconds=600)
)
"""Polls so rarely that a test decides when."""

IMPATIENT = replace(PATIENT, object_store_max_retries=0)


def golden_reader(database: GoldenDatabase, **options: object) -> DbReader:
    return flagstone.open_reader(
        database.path,
        store=str(database.store),
        wal_store=None if database.wal_store is None else str(database.wal_store),
        merge_operator=Concatenate(),
        settings=PATIENT,
        # The moment of its last flush: rows that live for a while were alive when the wheel read them.
        clock=VirtualClock(max(0, database.expected["last_l0_clock_tick"])),
        **options,  # type: ignore[arg-type]
    )


def files_of(database: GoldenDatabase) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in database.store.rglob("*") if path.is_file()}


def manifests_of(store: ObjectStore, path: str = "db") -> ManifestStore:
    return ManifestStore(store, DbPaths(path))


def checkpoints_of(store: ObjectStore, path: str = "db") -> list[UUID]:
    return [entry.id for entry in manifests_of(store, path).require_latest().value.checkpoints]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# -- golden databases -------------------------------------------------------------------------------------


@pytest.mark.slow
@every_database
def test_latest_mode_returns_what_the_wheel_read_and_writes_nothing(database: GoldenDatabase) -> None:
    before = files_of(database)
    with golden_reader(database, mode="latest") as reader:
        expected = unhex(database.expected["kv"])
        assert dict(reader.scan()) == expected
        assert dict(reader.scan(reverse=True)) == expected
        assert reader.multi_get(list(expected)) == list(expected.values())
        assert all(reader.get(key) == value for key, value in expected.items())
        assert reader.get(b"no such key") is None
    assert files_of(database) == before


@every_database
def test_a_reader_at_a_checkpoint_returns_what_the_wheel_read(database: GoldenDatabase) -> None:
    before = files_of(database)
    for checkpoint_id, contents in database.expected.get("checkpoint_kv", {}).items():
        with golden_reader(database, checkpoint=checkpoint_id) as reader:
            assert dict(reader.scan()) == unhex(contents)
            reader.refresh()
            assert dict(reader.scan()) == unhex(contents)
    assert files_of(database) == before


@pytest.mark.slow
@every_database
def test_managed_mode_returns_what_the_wheel_read_and_leaves_no_checkpoint(
    database: GoldenDatabase, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(database.store, tmp_path / "store"))
    with golden_reader(replace(database, store=folder)) as reader:
        assert dict(reader.scan()) == unhex(database.expected["kv"])
        held = UUID(reader.status()["checkpoint"])
        assert checkpoints_of(LocalStore(folder), database.path).count(held) == 1
    left = map(str, checkpoints_of(LocalStore(folder), database.path))
    assert sorted(left) == sorted(entry["id"] for entry in database.expected["checkpoints"])


def test_arrow_batches_contain_the_rows_of_the_wal() -> None:
    database = next(database for database in databases() if database.name == "basic")
    with golden_reader(database, mode="latest") as reader:
        table = reader.scan_arrow().read_all()
    pairs = zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
    assert dict(pairs) == unhex(database.expected["kv"])


# -- the managed checkpoint -------------------------------------------------------------------------------


def test_the_checkpoint_is_created_on_open_replaced_after_a_flush_and_deleted_on_close(
    store: MemoryStore,
) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        db.flush()
        reader = flagstone.open_reader("db", store=store, settings=PATIENT)
        first = checkpoints_of(store)
        assert first == [UUID(reader.status()["checkpoint"])]
        reader.refresh()
        assert checkpoints_of(store) == first

        db.put(b"b", b"2")
        db.flush()
        assert reader.get(b"b") is None
        before = manifests_of(store).require_latest().id
        reader.refresh()
        assert reader.get(b"b") == b"2"
        second = checkpoints_of(store)
        assert len(second) == 1
        assert second != first
        assert manifests_of(store).require_latest().id == before + 1

        reader.close()
        assert checkpoints_of(store) == []
        reader.close()


def test_the_reader_checkpoint_is_refreshed_at_half_its_lifetime(store: MemoryStore) -> None:
    clock = VirtualClock()
    flagstone.open("db", store=store, clock=clock).close()
    with flagstone.open_reader("db", store=store, settings=PATIENT, clock=clock) as reader:
        [held] = checkpoints_of(store)
        expires_s = reader.status()["checkpoint_expires_s"]
        clock.advance(299_000)
        reader.refresh()
        assert reader.status()["checkpoint_expires_s"] == expires_s
        clock.advance(2_000)
        reader.refresh()
        assert reader.status()["checkpoint_expires_s"] == expires_s + 301
        assert checkpoints_of(store) == [held]


def test_a_checkpoint_that_was_collected_is_created_again(store: MemoryStore) -> None:
    flagstone.open("db", store=store).close()
    with flagstone.open_reader("db", store=store, settings=PATIENT) as reader:
        [held] = checkpoints_of(store)
        manifests_of(store).update(lambda now: remove_checkpoint(now.value, held))
        reader.refresh()
        [anew] = checkpoints_of(store)
        assert anew != held
        assert reader.status()["checkpoint"] == str(anew)
    assert checkpoints_of(store) == []


def test_a_running_scan_keeps_its_checkpoint_until_it_ends(store: MemoryStore) -> None:
    clock = VirtualClock()
    with flagstone.open("db", store=store, settings=MANUAL, clock=clock) as db:
        for number in range(3000):
            db.put(b"%04d" % number, b"old" * 10)
        db.flush()
        with flagstone.open_reader("db", store=store, settings=PATIENT, clock=clock) as reader:
            [first] = checkpoints_of(store)
            rows = iter(reader.scan())
            assert next(rows) == (b"0000", b"old" * 10)
            for _ in range(3):
                db.put(b"0001", b"new")
                db.flush()
                reader.refresh()
                assert checkpoints_of(store) == [first, UUID(reader.status()["checkpoint"])]
            clock.advance(400_000)
            reader.refresh()
            expiries = [entry.expires_s for entry in manifests_of(store).require_latest().value.checkpoints]
            assert expiries == [clock.now_ms() // 1000 + 600] * 2
            assert sum(1 for _ in rows) == 2999
            del rows
            reader.refresh()
            assert checkpoints_of(store) == [UUID(reader.status()["checkpoint"])]
            unfinished = iter(reader.scan())
            next(unfinished)
            db.put(b"0001", b"newer")
            db.flush()
            reader.refresh()
            assert len(checkpoints_of(store)) == 2
        assert checkpoints_of(store) == []


def test_readers_in_latest_mode_and_at_a_checkpoint_write_nothing(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        pinned = db.checkpoint(name="pinned")
        before = manifests_of(store).require_latest().id
        with (
            flagstone.open_reader("db", store=store, mode="latest", settings=PATIENT) as latest,
            flagstone.open_reader("db", store=store, checkpoint=pinned.id, settings=PATIENT) as fixed,
        ):
            db.put(b"a", b"2", await_durable=True)
            latest.refresh()
            fixed.refresh()
            assert (latest[b"a"], fixed[b"a"]) == (b"2", b"1")
        assert manifests_of(store).require_latest().id == before


# -- following the WAL ------------------------------------------------------------------------------------


def test_a_reader_polls_and_shows_the_rows_of_a_live_writer(store: MemoryStore) -> None:
    quick = ReaderSettings(
        manifest_poll_interval=timedelta(milliseconds=2), checkpoint_lifetime=timedelta(seconds=60)
    )
    with (
        flagstone.open("db", store=store, settings=MANUAL) as db,
        flagstone.open_reader("db", store=store, settings=quick) as reader,
    ):
        for number in range(20):
            key = b"%03d" % number
            db.put(key, key, await_durable=True)
            if number % 5 == 4:
                db.flush()
            eventually(lambda key=key: reader.get(key) == key)  # type: ignore[misc]
        assert dict(reader.scan()) == {b"%03d" % number: b"%03d" % number for number in range(20)}


@pytest.mark.slow
def test_reads_during_polls_and_flushes_see_whole_batches(store: MemoryStore) -> None:
    operator = Concatenate()
    quick = ReaderSettings(
        manifest_poll_interval=timedelta(milliseconds=1),
        checkpoint_lifetime=timedelta(seconds=60),
        max_memtable_bytes=300,
    )
    torn: list[object] = []
    done = threading.Event()

    def look(reader: DbReader) -> None:
        longest = 0
        while not done.is_set():
            one, other = reader.multi_get([b"one", b"other"])
            scanned = dict(reader.scan())
            if one != other or scanned.get(b"one") != scanned.get(b"other") or len(one or b"") < longest:
                torn.append((one, other, scanned))
            longest = len(one or b"")

    with (
        flagstone.open("db", store=store, settings=MANUAL, merge_operator=operator) as db,
        flagstone.open_reader("db", store=store, settings=quick, merge_operator=operator) as reader,
    ):
        threads = [threading.Thread(target=look, args=[reader]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(150):
            with db.batch(await_durable=True) as batch:
                batch.merge(b"one", b"%d," % number)
                batch.merge(b"other", b"%d," % number)
            if number % 20 == 19:
                db.flush()
        expected = b"".join(b"%d," % number for number in range(150))
        eventually(lambda: reader.get(b"one") == expected or bool(torn))
        done.set()
        for thread in threads:
            thread.join()
        assert torn == []
        assert dict(reader.scan()) == {b"one": expected, b"other": expected}


def test_each_wal_file_is_read_once(store: MemoryStore) -> None:
    counted = FaultyStore(store)
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        for number in range(5):
            db.put(b"%d" % number, b"v", await_durable=True)
        with flagstone.open_reader("db", store=counted, mode="latest", settings=PATIENT) as reader:
            for number in range(5, 8):
                db.put(b"%d" % number, b"v", await_durable=True)
                reader.refresh()
            reader.refresh()
            assert len(dict(reader.scan())) == 8
    fetched = [path for op, path in counted.calls if op == "get" and "/wal/" in path]
    assert len(fetched) == len(set(fetched)) == 9  # the fence and eight files


def test_a_poll_that_finds_nothing_new_costs_three_small_requests(store: MemoryStore) -> None:
    counted = FaultyStore(store)
    flagstone.open("db", store=store).close()
    with flagstone.open_reader("db", store=counted, settings=PATIENT) as reader:
        reader.refresh()
        counted.calls.clear()
        reader.refresh()
        assert len(counted.calls) <= 3, counted.calls


def test_merge_operands_that_moved_from_the_wal_to_ssts_count_once(store: MemoryStore) -> None:
    operator = Concatenate()
    with (
        flagstone.open("db", store=store, settings=MANUAL, merge_operator=operator) as db,
        flagstone.open_reader("db", store=store, settings=PATIENT, merge_operator=operator) as reader,
    ):
        for part in (b"a", b"b", b"c"):
            db.merge(b"key", part, await_durable=True)
        reader.refresh()
        assert reader.get(b"key") == b"abc"
        db.flush()
        db.merge(b"key", b"d", await_durable=True)
        held = reader.scan()
        reader.refresh()
        assert reader.get(b"key") == b"abcd"
        assert dict(reader.scan()) == {b"key": b"abcd"}
        assert list(held) == [(b"key", b"abc")]


def test_a_memtable_whose_rows_are_partly_in_ssts_keeps_only_the_rest(store: MemoryStore) -> None:
    operator = Concatenate()
    with flagstone.open("db", store=store, settings=MANUAL, merge_operator=operator) as db:
        # Open before the flush, refreshed after it and after newer rows of the same keys.
        db.merge(b"x", b"1", await_durable=True)
        with flagstone.open_reader(
            "db", store=store, mode="latest", settings=PATIENT, merge_operator=operator
        ) as reader:
            db.merge(b"x", b"2")
            db.put(b"y", b"old")
            db.flush()
            db.merge(b"x", b"3")
            db.put(b"y", b"new", await_durable=True)
            reader.refresh()
            assert dict(reader.scan()) == {b"x": b"123", b"y": b"new"}
            db.merge(b"x", b"4", await_durable=True)
            reader.refresh()
            assert dict(reader.scan()) == {b"x": b"1234", b"y": b"new"}


def test_a_large_wal_is_replayed_into_several_memtables(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        for number in range(50):
            db.put(b"%02d" % (number % 40), b"v%d" % number, await_durable=True)
        small = replace(PATIENT, max_memtable_bytes=300)
        with flagstone.open_reader("db", store=store, mode="latest", settings=small) as reader:
            view, _ = reader._read_point(durable_only=False, dirty=False)
            assert len(view.memtables) > 3
            assert dict(reader.scan()) == dict(db.scan())
            db.flush()
            reader.refresh()
            view, _ = reader._read_point(durable_only=False, dirty=False)
            assert len(view.memtables) == 1
            assert dict(reader.scan()) == dict(db.scan())


def test_a_reader_that_skips_replay_shows_only_ssts(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        db.flush()
        db.put(b"b", b"2", await_durable=True)
        tables_only = replace(PATIENT, skip_wal_replay=True)
        with flagstone.open_reader("db", store=store, settings=tables_only) as reader:
            assert dict(reader.scan()) == {b"a": b"1"}
            db.flush()
            reader.refresh()
            assert dict(reader.scan()) == {b"a": b"1", b"b": b"2"}


def test_a_scan_that_began_before_a_refresh_shows_the_former_state(store: MemoryStore) -> None:
    with (
        flagstone.open("db", store=store, settings=MANUAL) as db,
        flagstone.open_reader("db", store=store, settings=PATIENT) as reader,
    ):
        db.put(b"k", b"1", await_durable=True)
        reader.refresh()
        scan = reader.scan()
        db.put(b"k", b"2", await_durable=True)
        db.put(b"l", b"2", await_durable=True)
        reader.refresh()
        assert list(scan) == [(b"k", b"1")]
        row = reader.get_row(b"k")
        assert row is not None
        assert (row.value, row.seq) == (b"2", 2)
        assert (b"k" in reader, b"z" in reader) == (True, False)


# -- refusals ---------------------------------------------------------------------------------------------


def test_opening_a_missing_database_or_an_incomplete_clone_is_refused(store: MemoryStore) -> None:
    with pytest.raises(InvalidRequest, match="no database"):
        flagstone.open_reader("db", store=store)
    manifests_of(store).create_next(Manifest(initialized=False), None)
    before = manifests_of(store).require_latest().id
    for mode in ("managed", "latest"):
        with pytest.raises(InvalidRequest, match="clone"):
            flagstone.open_reader("db", store=store, mode=mode)
    assert manifests_of(store).require_latest().id == before


def test_wrong_arguments_are_refused_by_name(store: MemoryStore) -> None:
    flagstone.open("db", store=store).close()
    with pytest.raises(InvalidRequest, match="mode"):
        flagstone.open_reader("db", store=store, mode="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no checkpoint has the id or name"):
        flagstone.open_reader("db", store=store, checkpoint="yesterday")
    with pytest.raises(InvalidRequest, match="no checkpoint"):
        flagstone.open_reader("db", store=store, checkpoint=uuid4())


def test_calls_of_a_closed_reader_raise_closed(store: MemoryStore) -> None:
    flagstone.open("db", store=store).close()
    reader = flagstone.open_reader("db", store=store, settings=PATIENT)
    reader.close()
    assert reader.closed
    assert reader.status()["state"] == "closed"
    for call in (
        lambda: reader.get(b"k"),
        lambda: reader.multi_get([b"k"]),
        reader.scan,
        reader.scan_arrow,
        reader.refresh,
        reader.manifest,
    ):
        with pytest.raises(Closed):
            call()


@pytest.mark.slow
def test_a_reader_in_a_forked_child_raises_closed_and_keeps_the_parents_checkpoint(tmp_path: Path) -> None:
    code = """
import os, sys, flagstone
flagstone.open(sys.argv[1]).close()
reader = flagstone.open_reader(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        reader.get(b"k")
    except flagstone.Closed as closed:
        reader.close()
        os._exit(0 if "forked" in str(closed) else 3)
    os._exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
reader.refresh()
print(len(reader.manifest().checkpoints), reader.get(b"k"))
reader.close()
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "db")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.split() == ["0", "1", "None"], run.stderr


# -- trouble ----------------------------------------------------------------------------------------------


def test_a_reader_follows_again_after_an_outage_longer_than_its_checkpoints_lifetime(
    store: MemoryStore,
) -> None:
    clock = VirtualClock()
    faulty = FaultyStore(store, clock=clock)
    with flagstone.open("db", store=store, settings=MANUAL, clock=clock) as db:
        db.put(b"a", b"1", await_durable=True)
        quick = replace(IMPATIENT, manifest_poll_interval=timedelta(milliseconds=2))
        with flagstone.open_reader("db", store=faulty, settings=quick, clock=clock) as reader:
            [held] = checkpoints_of(store)
            faulty.faults.append(Fault("error", nth=None))
            eventually(lambda: reader.status()["poll_error"] is not None)
            with pytest.raises(Unavailable):
                reader.refresh()
            assert reader[b"a"] == b"1"

            clock.advance(3_600_000)
            manifests_of(store).update(lambda now: remove_checkpoint(now.value, held))
            db.put(b"a", b"2", await_durable=True)
            db.flush()
            faulty.faults.clear()
            eventually(lambda: reader[b"a"] == b"2")
            [anew] = checkpoints_of(store)
            assert anew != held
            eventually(lambda: reader.status()["poll_error"] is None)
        assert checkpoints_of(store) == []


def test_closing_during_an_outage_leaves_the_checkpoint_to_expire(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    flagstone.open("db", store=store).close()
    reader = flagstone.open_reader("db", store=faulty, settings=IMPATIENT)
    faulty.faults.append(Fault("error", nth=None))
    reader.close()
    assert len(checkpoints_of(store)) == 1


def test_a_reader_reads_ssts_if_a_wal_file_was_collected_before_it_was_read(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1", await_durable=True)
        with flagstone.open_reader("db", store=store, mode="latest", settings=PATIENT) as reader:
            for number in range(4):
                db.put(b"b%d" % number, b"2", await_durable=True)
            db.flush()
            behind = manifests_of(store).require_latest().value.replay_after_wal_id
            store.delete_many([DbPaths("db").wal(WalId(at)) for at in range(1, behind + 1)])
            db.put(b"c", b"3", await_durable=True)
            reader.refresh()
            assert dict(reader.scan()) == dict(db.scan())


def test_a_read_of_a_deleted_sst_uses_a_newer_manifest(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        db.flush()
        manifest = manifests_of(store).require_latest().value
        [sst] = manifest.ssts
        moved = DbPaths("db").sst(sst)
        with flagstone.open_reader("db", store=store, mode="latest", settings=PATIENT) as reader:
            db.put(b"a", b"2")
            db.flush()
            # As after a compaction of both and the deletion of the old SST: only the newer one is left.
            newest = manifests_of(store).require_latest().value.tree.l0[0]
            manifests_of(store).update(lambda now: _only(now.value, newest.sst_id))
            store.delete(moved)
            assert reader.get(b"a") == b"2"
            assert reader.multi_get([b"a", b"b"]) == [b"2", None]


def test_a_missing_sst_of_the_newest_manifest_raises_corrupt_data(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        db.flush()
        [sst] = manifests_of(store).require_latest().value.ssts
        with flagstone.open_reader("db", store=store, mode="latest", settings=PATIENT) as reader:
            store.delete(DbPaths("db").sst(sst))
            with pytest.raises(CorruptData, match="missing"):
                reader.get(b"a")


def test_a_damaged_wal_file_closes_the_reader_with_the_cause(store: MemoryStore) -> None:
    quick = replace(PATIENT, manifest_poll_interval=timedelta(milliseconds=2))
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1", await_durable=True)
        with flagstone.open_reader("db", store=store, mode="latest", settings=quick) as reader:
            last = reader.status()["last_wal_id"]
            store.put(DbPaths("db").wal(WalId(last + 1)), b"this is no WAL file" * 10)
            eventually(lambda: reader.closed)
            with pytest.raises(Closed) as closed:
                reader.get(b"a")
            assert closed.value.reason == "failed"
            assert reader.status()["state"] == "failed"
        store.delete(DbPaths("db").wal(WalId(last + 1)))


def _only(manifest: Manifest, sst_id: Ulid) -> Manifest:
    l0 = tuple(view for view in manifest.tree.l0 if view.sst_id == sst_id)
    return replace_trees(manifest, tree=replace(manifest.tree, l0=l0))


def test_rows_that_are_not_in_ssts_yet_survive_when_older_rows_of_the_memtable_are_flushed(
    store: MemoryStore,
) -> None:
    """Sequence numbers ascend in the WAL, but not in the order of the keys."""
    tail = WalTail(store, DbPaths("db"), max_memtable_bytes=1 << 20, pool=IoPool(max_workers=0))
    written = [(b"b", 1), (b"c", 2), (b"b", 3), (b"a", 4)]
    store.put_if_absent(
        DbPaths("db").wal(WalId(1)),
        encode_wal([(key, seq, VALUE, b"v%d" % seq, 1, None) for key, seq in written]),
    )
    tail.follow(new_manifest(), WalId(1))
    tail.trim(1)
    (memtable,) = tail.memtables
    found = {key: [row[1] for row in memtable.versions(key, MAX_SEQ)] for key in (b"a", b"b", b"c")}
    assert found == {b"a": [4], b"b": [3], b"c": [2]}
