"""Loads into a database that a writer has open: the writer adopts them, is not fenced, and loses no row."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, Closed, Settings, TransactionConflict
from flagstone.metadata.annotations import held_loads
from flagstone.metadata.manifest import SEQ_GAP
from flagstone.metadata.stores import ManifestStore
from flagstone.spark import bulk_load
from flagstone.spark.address import open_store
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.plan import LoadPlan, LoadReport
from flagstone.spark.load.request import abort_load, begin_load
from kit import spark_loads
from kit.databases import QUIET, eventually
from kit.spark_loads import address_of, pairs, run_task, shown, ssts_of, write_options

pytestmark = pytest.mark.slow  # each test waits for polls of a running writer

POLL_S = 0.2
LIVE = QUIET.replace(manifest_poll_interval=timedelta(seconds=POLL_S))
ROWS = {b"k%05d" % number: b"loaded %d" % number for number in range(2000)}
NOW = timedelta()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def announced(folder: Path) -> bool:
    return (folder / "flagstone" / "writer").exists()


def open_live(folder: Path, **options: Any) -> flagstone.Db:
    db = flagstone.open(folder, settings=options.pop("settings", LIVE), **options)
    eventually(lambda: announced(folder))
    return db


def wait_for_load(db: flagstone.Db, report: LoadReport) -> None:
    """Wait until the writer shows the load; the driver sees it in the manifest a moment earlier."""
    eventually(
        lambda: db.status()["committed_seq"] >= report.seq and db.status()["last_l0_seq"] >= report.seq
    )


def load(db: flagstone.Db, folder: Path, *tasks: Any, **options: Any) -> LoadReport:
    report = spark_loads.load(folder, *tasks, **options)
    wait_for_load(db, report)
    return report


def begin(folder: Path, owner: str = "") -> LoadPlan:
    return begin_load(address_of(folder), owner=owner)


def load_states(folder: Path) -> list[str]:
    manifests = ManifestStore(*open_store(address_of(folder)))
    return [held.record.state for held in held_loads(manifests.require_latest().value)]


def assert_verified(folder: Path) -> None:
    """No damage; the unused SSTs of a cancelled load or an interrupted compaction are only a note."""
    report = Admin(folder).verify()
    assert report.ok, report.findings


def test_a_live_writer_adopts_a_load_and_continues_after_it(folder: Path) -> None:
    with open_live(folder) as db:
        before = db.put(b"k00000", b"older than the load", await_durable=True)
        db.put(b"mine", b"not in the load")
        report = load(db, folder, [pairs(ROWS)])
        assert report.seq > before.seq + SEQ_GAP // 2
        assert db.get(b"k00000") == b"loaded 0"
        assert db.get(b"k01999") == b"loaded 1999"
        assert db.get(b"mine") == b"not in the load"
        after = db.put(b"k00001", b"newer than the load", await_durable=True)
        assert after.seq == report.seq + 1
        assert dict(db.scan()) == {**ROWS, b"mine": b"not in the load", b"k00001": b"newer than the load"}
        assert db.status()["state"] == "open"
        assert db.status()["l0_tables"] == 0
    expected = {**ROWS, b"mine": b"not in the load", b"k00001": b"newer than the load"}
    assert shown(folder) == expected
    assert_verified(folder)
    with flagstone.open(folder, settings=QUIET) as db:
        assert dict(db.scan()) == expected
        assert db.put(b"next", b"").seq == report.seq + 2


def test_busy_writers_lose_no_row_and_adopt_the_load_within_two_polls(folder: Path) -> None:
    acknowledged: dict[bytes, bytes] = {}
    stop = threading.Event()
    with open_live(folder) as db:

        def write() -> None:
            number = 0
            while not stop.is_set():
                key, value = b"w%06d" % (number % 500), b"%d" % number
                db.put(key, value, await_durable=number % 10 == 0)
                acknowledged[key] = value
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for turn in range(3):
                plan = begin(folder)
                rows = dict.fromkeys(ROWS, b"turn %d" % turn)
                made = run_task(plan, folder, [pairs(rows)])
                requested_at = time.monotonic()
                wait_for_load(db, commit_load(plan, write_options(folder), made))
                adopted_s = time.monotonic() - requested_at
                assert db.get(b"k00017") == b"turn %d" % turn
                print(f"turn {turn}: visible after {adopted_s:.2f} s, polls every {POLL_S} s")
        finally:
            stop.set()
            writer.join()
        assert db.status()["state"] == "open"
        expected = {**dict.fromkeys(ROWS, b"turn 2"), **acknowledged}
        assert dict(db.scan()) == expected
    assert shown(folder) == expected
    assert_verified(folder)


def test_a_writer_without_a_wal_adopts_a_load(folder: Path) -> None:
    with open_live(folder, settings=replace(LIVE, wal_enabled=False)) as db:
        for turn in range(5):
            db.put(b"own %d" % turn, b"row")
            load(db, folder, [pairs(dict.fromkeys(ROWS, b"turn %d" % turn))])
            assert db.get(b"k00017") == b"turn %d" % turn
    expected = {**dict.fromkeys(ROWS, b"turn 4"), **{b"own %d" % turn: b"row" for turn in range(5)}}
    assert shown(folder) == expected


def test_an_overwriting_load_replaces_all_rows_in_one_step(folder: Path) -> None:
    with open_live(folder) as db:
        db.put(b"old", b"row", await_durable=True)
        with db.snapshot() as snapshot:
            load(db, folder, [pairs(ROWS)], replaces_all=True)
            assert dict(db.scan()) == ROWS
            assert dict(snapshot.scan()) == {b"old": b"row"}
        db.put(b"new", b"row")
        assert dict(db.scan()) == {**ROWS, b"new": b"row"}
    assert_verified(folder)


def test_snapshots_and_transactions_started_before_a_load_do_not_see_it(folder: Path) -> None:
    with open_live(folder) as db:
        db.put(b"k00005", b"before")
        snapshot = db.snapshot()
        meeting = db.transaction("snapshot")
        reading = db.transaction("serializable")
        apart = db.transaction("serializable")
        assert meeting.get(b"k00005") == b"before"
        assert list(reading.scan(b"k0", b"k1")) == [(b"k00005", b"before")]
        assert apart.get(b"z") is None
        load(db, folder, [pairs(ROWS)])
        assert snapshot.get(b"k00005") == b"before"
        assert meeting.get(b"k00005") == b"before"
        meeting.put(b"k00005", b"lost update")
        with pytest.raises(TransactionConflict, match="loaded"):
            meeting.commit()
        reading.put(b"elsewhere", b"")
        with pytest.raises(TransactionConflict, match="loaded"):
            reading.commit()
        apart.put(b"z", b"fine")
        apart.commit()
        with db.transaction("serializable") as later:
            later.put(b"k00005", later.get(b"k00005") or b"")
        assert db.get(b"k00005") == b"loaded 5"
        snapshot.close()


def test_the_embedded_compactor_continues_after_a_load(folder: Path) -> None:
    settings = Settings(
        garbage_collector_options=None, manifest_poll_interval=timedelta(seconds=POLL_S), l0_max_ssts=8
    )
    with open_live(folder, settings=settings) as db:
        rows: dict[bytes, bytes] = {}
        for turn in range(3):
            for number in range(6):
                key = b"own %d %d" % (turn, number)
                rows[key] = b"x"
                db.put(key, b"x")
                db.flush()
            load(db, folder, [pairs(ROWS)])
        eventually(lambda: db.status()["compactor"]["state"] == "coordinating", timeout_s=60)
        eventually(lambda: db.status()["sorted_runs"] + db.status()["l0_tables"] < 12, timeout_s=60)
        assert dict(db.scan()) == {**rows, **ROWS}
    assert_verified(folder)


def test_the_ssts_of_a_load_are_kept_while_it_runs_and_collected_after_its_abort(folder: Path) -> None:
    with open_live(folder) as db:
        plan = begin(folder)
        made = run_task(plan, folder, [pairs(ROWS)])
        orphan = run_task(plan, folder, [pairs(ROWS)])
        for number in range(3):
            db.put(b"own %d" % number, b"")
            db.flush()
        Admin(folder).collect_garbage(min_age=NOW)
        assert len(ssts_of(folder)) == 5
        commit_load(plan, write_options(folder), made)
        db.put(b"own", b"")
        db.flush()
        for held in Admin(folder).checkpoints():
            Admin(folder).delete_checkpoint(held.id)
        Admin(folder).collect_garbage(min_age=NOW)
        assert len(ssts_of(folder)) == 5, "the SST of the load and four of the writer"
        assert orphan[0].sst.id not in db.manifest().ssts
        second = begin(folder)
        made = run_task(second, folder, [pairs(ROWS)])
        assert abort_load(second) == 1
        assert abort_load(second) == 0
        with pytest.raises(Closed, match="was cancelled"):
            commit_load(second, write_options(folder), made)
    assert_verified(folder)


def test_aborting_an_adopted_load_deletes_no_sst(folder: Path) -> None:
    with open_live(folder) as db:
        plan = begin(folder)
        made = run_task(plan, folder, [pairs(ROWS)])
        wait_for_load(db, commit_load(plan, write_options(folder), made))
        assert abort_load(plan) == 0
        assert dict(db.scan()) == ROWS


def test_a_load_claims_the_database_of_a_crashed_writer_after_the_timeout(folder: Path) -> None:
    first = open_live(folder)
    first.put(b"acknowledged", b"row", await_durable=True)
    first._engine.services.supervisor.stop(10)  # stops polling, as after a crash
    report = spark_loads.load(folder, [pairs(ROWS)], hand_over_timeout="1s")
    assert report.rows == len(ROWS)
    assert shown(folder) == {**ROWS, b"acknowledged": b"row"}
    assert_verified(folder)


def test_the_next_writer_adopts_a_waiting_load(folder: Path) -> None:
    first = open_live(folder)
    first._engine.services.supervisor.stop(10)
    plan = begin(folder)
    made = run_task(plan, folder, [pairs(ROWS)])
    committed = threading.Thread(target=lambda: commit_load(plan, write_options(folder), made))
    committed.start()
    eventually(lambda: load_states(folder) == ["ready"])
    with flagstone.open(folder, settings=LIVE) as second:
        eventually(lambda: second.get(b"k00000") is not None)
        committed.join(10)
        assert not committed.is_alive()
        assert dict(second.scan()) == ROWS


def test_a_load_into_a_closed_database_opens_it_only_for_its_commit(folder: Path) -> None:
    open_live(folder).close()
    before = Admin(folder).manifest().value.writer_epoch
    plan = begin(folder)
    made = run_task(plan, folder, [pairs(ROWS)])
    assert Admin(folder).manifest().value.writer_epoch == before
    began = time.monotonic()
    commit_load(plan, write_options(folder), made)
    assert time.monotonic() - began < 3
    assert Admin(folder).manifest().value.writer_epoch == before + 1
    assert shown(folder) == ROWS


def test_of_two_load_requests_of_one_query_only_the_later_is_adopted(folder: Path) -> None:
    with open_live(folder) as db:
        early = begin(folder, owner="query")
        made_early = run_task(early, folder, [pairs(dict.fromkeys(ROWS, b"early"))])
        other = begin(folder)
        late = begin(folder, owner="query")
        made_late = run_task(late, folder, [pairs(dict.fromkeys(ROWS, b"late"))])
        with pytest.raises(Closed, match="was cancelled"):
            commit_load(early, write_options(folder), made_early)
        wait_for_load(db, commit_load(late, write_options(folder), made_late))
        assert db.get(b"k00000") == b"late"
        # The other load began earlier, so its sequence number may be below that of the adopted load.
        made_other = run_task(other, folder, [pairs({b"other": b"", b"k00000": b"other"})])
        wait_for_load(db, commit_load(other, write_options(folder), made_other))
        assert db.get(b"k00000") == b"other"
    assert_verified(folder)


def test_an_empty_load_leaves_no_load_request(folder: Path) -> None:
    with open_live(folder):
        report = spark_loads.load(folder)
        assert (report.rows, report.tables) == (0, 0)
        assert load_states(folder) == []


def test_the_wheel_reads_and_writes_a_database_with_an_adopted_load(folder: Path, wheel: Any) -> None:
    with open_live(folder) as db:
        db.put(b"k00003", b"older")
        load(db, folder, [pairs(ROWS)])
        db.put(b"k00004", b"newer", await_durable=True)
    expected = {**ROWS, b"k00004": b"newer"}
    assert wheel.scan(str(folder.parent), folder.name) == expected
    wheel.apply(str(folder.parent), folder.name, [("put", b"k00005", b"theirs")])
    with flagstone.open(folder, settings=LIVE) as db:
        assert dict(db.scan()) == {**expected, b"k00005": b"theirs"}
    assert_verified(folder)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_bulk_load_accepts_an_open_database(folder: Path, spark: Any) -> None:
    frame = spark.createDataFrame(list(ROWS.items()), "key binary, value binary")
    with open_live(folder) as db:
        db.put(b"mine", b"row")
        report = bulk_load(frame, db)
        assert report is not None
        assert report.rows == len(ROWS)
        assert dict(db.scan()) == {**ROWS, b"mine": b"row"}
        assert db.put(b"after", b"").seq == report.seq + 1
    with (
        flagstone.open("memory://nowhere/db") as hidden,
        pytest.raises(flagstone.InvalidRequest, match="memory of this process"),
    ):
        bulk_load(frame, hidden)
