"""A clock that ran ahead: writes are refused until time catches up, unless repair resets the stored times."""

from __future__ import annotations

from datetime import timedelta

import pytest

from flagstone.db.open import open_database
from flagstone.errors import InvalidRequest
from flagstone.runtime.ids import ulid_ms
from kit.databases import IDLE
from kit.repair import RepairWorld

YEAR_MS = 365 * 24 * 3600 * 1000


def glitched(*, flushed: bool) -> RepairWorld:
    """A database with a row of next year, in an SST or only in the WAL."""
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, flushed=1)
    world.clock.shift_wall(YEAR_MS)
    db = world.open()
    db.put(b"b", b"2")
    db.put(b"short", b"life", ttl=timedelta(hours=1))
    db.flush() if flushed else db.flush("wal")
    world.crash(db)
    world.clock.shift_wall(-YEAR_MS)
    world.model |= {b"b": b"2", b"short": b"life"}
    db = world.open()
    with pytest.raises(InvalidRequest, match="flagstone repair"):
        db.put(b"c", b"3")
    world.crash(db)
    return world


@pytest.mark.parametrize("flushed", [False, True])
def test_after_the_repair_of_a_clock_ahead_writes_are_accepted(*, flushed: bool) -> None:
    world = glitched(flushed=flushed)

    report = world.repair()

    assert {defect.kind for defect in report.defects} == {"clock"}
    assert all(defect.gives_up == "" for defect in report.defects)
    assert world.rows() == world.model
    with world.open() as db:
        written = db.put(b"c", b"3")
        assert written.created_ms <= world.clock.now_ms()
        db.flush()
    _, manifest = world.manifest()
    assert manifest.last_l0_clock_tick <= world.clock.now_ms()
    assert all(ulid_ms(view.sst_id) <= world.clock.now_ms() for view in manifest.tree.l0)
    assert world.admin().verify().ok


def test_a_ttl_in_the_wal_counts_from_the_repair() -> None:
    world = glitched(flushed=False)
    world.repair()

    world.clock.advance(30 * 60 * 1000)
    assert world.rows()[b"short"] == b"life"
    world.clock.advance(31 * 60 * 1000)
    assert b"short" not in world.rows()


def test_a_clock_a_few_seconds_ahead_is_no_defect() -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, flushed=1)
    world.clock.shift_wall(-9_000)
    assert world.plan().sound


def test_a_repair_after_a_compaction_resets_last_compacted_l0() -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, flushed=1)
    world.clock.shift_wall(YEAR_MS)
    with world.open() as db:
        db.put(b"b", b"2")
        db.flush()
    world.admin().compact()
    world.clock.shift_wall(-YEAR_MS)

    world.repair()

    settings = IDLE.replace(on_clock_regression="refuse")
    with open_database("db", store=world.store, settings=settings, clock=world.clock) as db:
        db.put(b"c", b"3")
        db.flush()
        assert dict(db.scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    _, manifest = world.manifest()
    newest = manifest.newest_l0
    assert newest is not None
    assert ulid_ms(newest) <= world.clock.now_ms()
