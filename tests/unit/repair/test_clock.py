"""A clock that ran ahead: writes are refused until time catches up, unless repair resets what it stored."""

from __future__ import annotations

from datetime import timedelta

import pytest

from flagstone.db.open import open_database
from flagstone.errors import InvalidRequest
from flagstone.runtime.ids import ulid_ms
from unit.repair.repair_rig import SETTINGS, Patient

YEAR_MS = 365 * 24 * 3600 * 1000


def glitched(*, flushed: bool) -> Patient:
    """A database with a row of next year, in an SST or only in the WAL."""
    patient = Patient()
    patient.write({b"a": b"1"}, tables=1)
    patient.clock.shift_wall(YEAR_MS)
    db = patient.open()
    db.put(b"b", b"2")
    db.put(b"short", b"life", ttl=timedelta(hours=1))
    db.flush() if flushed else db.flush("wal")
    patient.crash(db)
    patient.clock.shift_wall(-YEAR_MS)
    patient.model |= {b"b": b"2", b"short": b"life"}
    db = patient.open()
    with pytest.raises(InvalidRequest, match="flagstone repair"):
        db.put(b"c", b"3")
    patient.crash(db)
    return patient


@pytest.mark.parametrize("flushed", [False, True])
def test_repair_lets_writes_go_on(*, flushed: bool) -> None:
    patient = glitched(flushed=flushed)

    report = patient.repair()

    assert {defect.kind for defect in report.defects} == {"clock"}
    assert all(defect.gives_up == "" for defect in report.defects)
    assert patient.rows() == patient.model
    with patient.open() as db:
        written = db.put(b"c", b"3")
        assert written.created_ms <= patient.clock.now_ms()
        db.flush()
    _, manifest = patient.manifest()
    assert manifest.last_l0_clock_tick <= patient.clock.now_ms()
    assert all(ulid_ms(view.sst_id) <= patient.clock.now_ms() for view in manifest.tree.l0)
    assert patient.admin.verify().ok


def test_a_ttl_in_the_wal_counts_from_the_repair() -> None:
    patient = glitched(flushed=False)
    patient.repair()

    patient.clock.advance(30 * 60 * 1000)
    assert patient.rows()[b"short"] == b"life"
    patient.clock.advance(31 * 60 * 1000)
    assert b"short" not in patient.rows()


def test_a_few_seconds_ahead_are_not_a_defect() -> None:
    patient = Patient()
    patient.write({b"a": b"1"}, tables=1)
    patient.clock.shift_wall(-9_000)
    assert patient.plan().sound


def test_after_a_compaction_the_marker_of_l0_is_reset_too() -> None:
    patient = Patient()
    patient.write({b"a": b"1"}, tables=1)
    patient.clock.shift_wall(YEAR_MS)
    with patient.open() as db:
        db.put(b"b", b"2")
        db.flush()
    patient.admin.compact()
    patient.clock.shift_wall(-YEAR_MS)

    patient.repair()

    settings = SETTINGS.replace(on_clock_regression="refuse")
    with open_database("db", store=patient.store, settings=settings, clock=patient.clock) as db:
        db.put(b"c", b"3")
        db.flush()
        assert dict(db.scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    _, manifest = patient.manifest()
    newest = manifest.newest_l0
    assert newest is not None
    assert ulid_ms(newest) <= patient.clock.now_ms()
