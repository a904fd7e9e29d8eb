"""A WAL out of order, with holes or damaged files: repair keeps every row that can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagstone.errors import FlagstoneError
from flagstone.store.port import ObjectMissing
from flagstone.types import VALUE, WalId
from unit.repair.repair_rig import PATHS, Patient, sequences


@pytest.fixture
def patient() -> Patient:
    made = Patient()
    made.write(
        {b"a": b"1", b"b": b"1"},
        {b"c": b"2"},
        {b"a": b"3", b"d": b"3"},
        {b"e": b"4"},
        tables=1,
    )
    return made


def must_not_open(patient: Patient) -> None:
    before = patient.objects()
    with pytest.raises(FlagstoneError):
        patient.open()
    for path in patient.objects().keys() - before.keys():
        patient.store.delete(path)


def test_a_sound_database_has_nothing_to_repair(patient: Patient) -> None:
    before = patient.objects()

    report = patient.admin.repair(plan_only=False)

    assert report.sound
    assert not report.applied
    assert report.defects == ()
    assert patient.objects() == before


def test_a_number_that_is_used_again_is_renumbered_and_no_row_is_given_up(patient: Patient) -> None:
    _, second, third, _ = patient.wal_ids()
    reused = patient.wal_rows(second)[-1][1]
    # A torn batch: rows under the number that the next file uses again.
    torn = (b"torn", reused + 1, VALUE, b"half", patient.wal_rows(second)[-1][4], None)
    patient.put_wal(second, [*patient.wal_rows(second), torn])
    must_not_open(patient)

    plan = patient.plan()

    (defect,) = plan.defects
    assert defect.kind == "wal order"
    assert defect.object == PATHS.wal(WalId(third))
    assert "out-of-order sequence numbers" in defect.problem
    assert "b'a'" in defect.remedy
    assert defect.gives_up == ""
    assert plan.losses.sequences == ()
    report = patient.repair()
    assert patient.rows() == {**patient.model, b"torn": b"half"}
    assert any(path.endswith(PATHS.wal(WalId(third)).rpartition("/")[2]) for path in report.kept_aside)


def test_the_later_write_in_the_wal_wins_over_a_row_with_the_same_number(patient: Patient) -> None:
    _, second, third, _ = patient.wal_ids()
    number = patient.wal_rows(third)[0][1]
    created = patient.wal_rows(second)[-1][4]
    patient.put_wal(second, [*patient.wal_rows(second), (b"a", number, VALUE, b"torn", created, None)])

    patient.repair()

    assert patient.rows() == patient.model, "file three wrote a=3 after the torn a"


def test_a_whole_wal_that_starts_over_with_old_numbers_is_kept(patient: Patient) -> None:
    ids = patient.wal_ids()
    rows = patient.wal_rows(ids[-1])
    patient.put_wal(ids[-1], [(row[0], 1, *row[2:]) for row in rows])
    must_not_open(patient)

    patient.repair()

    assert patient.rows() == patient.model


def test_a_number_used_twice_inside_a_file_keeps_both_writes_in_order(patient: Patient) -> None:
    last = patient.wal_ids()[-1]
    (row,) = patient.wal_rows(last)
    patient.put_wal(last, [(b"e", row[1], VALUE, b"torn", row[4], None), row])

    patient.repair()

    assert patient.rows() == patient.model


def test_a_reused_number_that_opening_would_take_for_flushed_is_kept(patient: Patient) -> None:
    # The first file's rows are in an SST. The second one begins with a number of the first: opening would skip it.
    first, second, *_ = patient.wal_ids()
    flushed = patient.wal_rows(first)[-1][1]
    (row,) = patient.wal_rows(second)
    patient.put_wal(second, [(row[0], flushed, *row[2:])])

    patient.repair()

    assert patient.rows() == patient.model


def test_rows_behind_a_hole_are_kept(patient: Patient) -> None:
    second = patient.wal_ids()[1]
    patient.store.delete(PATHS.wal(WalId(second)))

    (defect,) = patient.plan().defects

    assert defect.kind == "wal hole"
    assert f"WAL file {second} is missing" in defect.problem
    report = patient.repair()
    assert report.losses.wal_ids == (second,)
    assert report.losses.sequences == ((3, 3),)
    del patient.model[b"c"]
    assert patient.rows() == patient.model


def test_a_wal_whose_last_files_are_missing_is_mended_and_says_so() -> None:
    patient = Patient()
    patient.write({b"a": b"1"}, {b"b": b"2"}, {b"c": b"3"})
    with patient.open() as db:  # closing records the last WAL file in the manifest
        db.put(b"d", b"4")
        db.flush("wal")
    patient.write({b"e": b"5"})
    manifest_id, manifest = patient.manifest()
    patient.put_manifest(manifest_id, replace(manifest, wal_id_last_seen=WalId(patient.wal_ids()[-1])))
    patient.store.delete(PATHS.wal(WalId(patient.wal_ids()[-1])))

    report = patient.repair()

    assert [defect.kind for defect in report.defects] == ["wal hole"]
    assert patient.rows() == {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 9, 10, 11, 40])
@pytest.mark.parametrize("which", ["middle", "last"])
def test_a_file_that_was_cut_short_is_given_up_and_nothing_else(
    patient: Patient, which: str, size: int
) -> None:
    wal_id = patient.wal_ids()[1 if which == "middle" else -1]
    path = PATHS.wal(WalId(wal_id))
    lost = {row[0] for row in patient.wal_rows(wal_id)}
    patient.store.put(path, patient.store.get(path).data[:size])

    report = patient.repair()

    (defect,) = [found for found in report.defects if found.kind == "wal damage"]
    assert defect.object == path
    assert ("in the middle of" if which == "middle" else "at the end of") in defect.gives_up
    assert report.losses.wal_ids == (wal_id,)
    for key in lost:
        del patient.model[key]
    assert patient.rows() == patient.model
    copy = next(kept for kept in report.kept_aside if kept.endswith(path.rpartition("/")[2]))
    assert len(patient.store.get(copy).data) == size, "what was removed can be put back by hand"


def test_sound_blocks_of_a_damaged_file_are_kept() -> None:
    patient = Patient()
    patient.write({b"%04d" % number: bytes(1000) for number in range(200)}, {b"z": b"last"})
    wal_id = patient.wal_ids()[0]
    path = PATHS.wal(WalId(wal_id))
    data = bytearray(patient.store.get(path).data)
    data[70_000] ^= 1  # the second block of 64 KiB
    patient.store.put(path, bytes(data))

    report = patient.repair()

    rows = patient.rows()
    assert rows[b"z"] == b"last"
    assert 100 < len(rows) < 201
    assert rows.items() <= patient.model.items()
    assert "rows of its sound blocks are kept" in report.defects[0].gives_up


def test_a_damaged_file_behind_the_start_of_the_wal_costs_nothing(patient: Patient) -> None:
    with patient.open() as db:
        db.flush()
    path = PATHS.wal(WalId(patient.wal_ids()[0]))
    patient.store.put(path, b"cut")

    report = patient.repair()

    assert [defect.gives_up for defect in report.defects] == [""]
    assert patient.rows() == patient.model
    with pytest.raises(ObjectMissing):
        patient.store.head(path)


def test_a_writer_at_work_is_fenced_by_a_repair(patient: Patient) -> None:
    with patient.open() as writer:
        writer.put(b"live", b"1", await_durable=True)
        patient.store.delete(PATHS.wal(WalId(patient.wal_ids()[1])))
        patient.admin.repair(plan_only=False)
        with pytest.raises(FlagstoneError, match=r"fenced|replaced|taken"):
            writer.put(b"late", b"2", await_durable=True)
    rows = patient.rows()
    assert rows[b"live"] == b"1"
    assert b"late" not in rows


def test_the_rig_can_tell_an_ordered_wal_from_another(patient: Patient) -> None:
    assert sequences(patient) == [[1, 2], [3], [4, 5], [6]]
