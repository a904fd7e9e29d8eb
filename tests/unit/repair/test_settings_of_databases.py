"""Repair where the WAL has a store of its own, with segments, beside consumers of changes, and beside a busy writer."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import pytest

import flagstone
from flagstone import Settings
from flagstone.config import CompactorOptions, GarbageCollectorOptions, GcDirectoryOptions
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.errors import InvalidRequest
from flagstone.format.filter import FixedPrefix
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.memory import MemoryStore
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.types import WalId
from flagstone.wal.replay import decode_wal
from kit.databases import IDLE, encode_wal
from kit.faults import InterposingStore
from kit.repair import PATHS, RepairWorld


def reuse_a_sequence_number(store: MemoryStore | TwoPhaseStore) -> None:
    """Give the last WAL file with rows a sequence number of an earlier one."""
    paths = [meta.path for meta in store.list(PATHS.wal_folder) if meta.size]
    rows = decode_wal(store.get(paths[-1]).data, paths[-1])
    store.put(paths[-1], encode_wal([(row[0], 1, *row[2:]) for row in rows]))


def test_a_wal_in_a_store_of_its_own_is_repaired_there() -> None:
    main, wal_store = MemoryStore(), MemoryStore()
    db = open_database("db", store=main, wal_store=wal_store, settings=IDLE)
    for key in (b"a", b"b", b"c"):
        db.put(key, b"value")
        db.flush("wal")
    left = {meta.path: main.get(meta.path).data for meta in main.list("db")}
    db.close()
    for meta in list(main.list("db")):
        main.put(meta.path, left[meta.path]) if meta.path in left else main.delete(meta.path)
    reuse_a_sequence_number(wal_store)
    admin = Admin("db", store=main, wal_store=wal_store)
    assert not admin.repair().sound

    report = admin.repair(plan_only=False)

    assert report.applied
    assert admin.verify().ok
    assert all(wal_store.get(path).data for path in report.kept_aside)
    with open_database("db", store=main, wal_store=wal_store, settings=IDLE) as db:
        assert [key for key, _ in db.scan()] == [b"a", b"b", b"c"]


def test_rows_go_to_their_segments_and_a_new_segment_needs_the_extractor() -> None:
    world = RepairWorld()
    extractor = FixedPrefix("first3", 3)

    def opened() -> flagstone.Db:
        return world.open(segment_extractor=extractor)

    db = opened()
    db.put(b"aaa/1", b"1")
    db.flush()
    db.put(b"aaa/2", b"2")
    db.flush("wal")
    db.put(b"bbb/1", b"3")
    db.flush("wal")
    world.crash(db)
    reuse_a_sequence_number(world.store)
    before = world.objects("db")
    with pytest.raises(InvalidRequest, match="segment_extractor"):
        world.admin().repair(plan_only=False)
    assert before.items() <= world.objects("db").items()

    report = world.admin().repair(plan_only=False, segment_extractor=extractor)

    assert report.applied
    assert world.admin().verify().ok
    with opened() as db:
        assert dict(db.scan()) == {b"aaa/1": b"1", b"aaa/2": b"2", b"bbb/1": b"3"}
    _, manifest = world.manifest()
    assert [segment.prefix for segment in manifest.segments] == [b"aaa", b"bbb"]


def test_a_consumer_whose_wal_file_is_given_up_is_named() -> None:
    world = RepairWorld()
    db = world.open()
    db.put(b"a", b"1")
    db.flush("wal")
    with flagstone.open_feed("db", "replica", store=world.store, clock=world.clock) as feed:
        feed.copied()
    for key in (b"b", b"c"):
        db.put(key, b"2")
        db.flush("wal")
    world.crash(db)
    path = PATHS.wal(WalId(world.wal_ids()[-2]))
    world.store.put(path, world.store.get(path).data[:-20])

    report = world.repair()

    assert any("consumer 'replica'" in defect.gives_up for defect in report.defects)
    assert world.admin().checkpoints() == ()
    assert world.rows() == {b"a": b"1", b"c": b"2"}


def test_a_database_on_a_two_phase_store_is_repaired(tmp_path: Path) -> None:
    log = SqliteCommitLog(tmp_path / "log.db", synchronous="OFF")
    store = TwoPhaseStore(MemoryStore(), log)
    db = open_database("db", store=store, settings=IDLE)
    for key in (b"a", b"b", b"c"):
        db.put(key, b"value")
        db.flush("wal")
    reuse_a_sequence_number(store)
    admin = Admin("db", store=store, ids=SYSTEM_IDS)

    report = admin.repair(plan_only=False)

    assert report.applied, report.defects
    assert admin.repair().sound
    with pytest.raises(flagstone.Closed):
        db.put(b"late", b"1", await_durable=True)
    db.close()
    with open_database("db", store=store, settings=IDLE) as db:
        assert [key for key, _ in db.scan()] == [b"a", b"b", b"c"]
    log.close()


def test_a_plan_beside_a_busy_writer_finds_nothing() -> None:
    every = GcDirectoryOptions(interval=timedelta(milliseconds=20), min_age=timedelta(0))
    settings = Settings(
        flush_interval=timedelta(milliseconds=10),
        l0_sst_size_bytes=4096,
        max_unflushed_bytes=1 << 20,
        compactor_options=CompactorOptions(poll_interval=timedelta(milliseconds=20)),
        garbage_collector_options=GarbageCollectorOptions(
            manifest_options=every, wal_options=every, compacted_options=every, compactions_options=every
        ),
    )
    store = MemoryStore()
    stop = Event()

    def write(db: flagstone.Db) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            db.put(b"%d" % (number % 50), bytes(100))

    with open_database("db", store=store, settings=settings) as db:
        writer = Thread(target=write, args=(db,))
        writer.start()
        try:
            found = [Admin("db", store=store).repair().defects for _ in range(4)]
        finally:
            stop.set()
            writer.join()
    assert [defects for defects in found if defects] == []


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_writer_that_opens_the_database_during_a_repair_loses_no_acknowledged_row(at: int) -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, {b"b": b"2"}, {b"c": b"3"}, flushed=2)
    # Opening takes the reused sequence number for flushed and skips it, so a writer can open this database.
    _, second, third = world.wal_ids()
    (row,) = world.wal_rows(third)
    world.store.put(PATHS.wal(WalId(second)), b"")
    world.put_wal(third, [(row[0], 1, *row[2:])])
    opened: list[flagstone.Db] = []

    def rival() -> None:
        opened.append(world.open())
        opened[0].put(b"late", b"4", await_durable=True)

    store = InterposingStore(world.store, rival, op="put_if_absent", nth=at)
    admin = Admin("db", store=store, clock=world.clock, ids=world.ids)

    report = admin.repair(plan_only=False)

    assert report.applied
    (writer,) = opened
    with pytest.raises(flagstone.Closed):
        writer.put(b"too late", b"5", await_durable=True)
    writer.close()
    assert world.admin().verify().ok
    assert world.rows() == {**world.model, b"late": b"4"}
