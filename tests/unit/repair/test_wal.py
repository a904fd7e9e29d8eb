"""A WAL out of order, with holes or damaged files: repair keeps every row that can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagstone.errors import FlagstoneError
from flagstone.store.port import ObjectMissing
from flagstone.types import VALUE, WalId
from kit.repair import PATHS, RepairWorld, sequences


@pytest.fixture
def world() -> RepairWorld:
    made = RepairWorld()
    made.write_and_crash(
        {b"a": b"1", b"b": b"1"},
        {b"c": b"2"},
        {b"a": b"3", b"d": b"3"},
        {b"e": b"4"},
        flushed=1,
    )
    return made


def must_not_open(world: RepairWorld) -> None:
    before = world.objects("db")
    with pytest.raises(FlagstoneError):
        world.open()
    for path in world.objects("db").keys() - before.keys():
        world.store.delete(path)


def test_a_sound_database_has_nothing_to_repair(world: RepairWorld) -> None:
    before = world.objects("db")

    report = world.admin().repair(plan_only=False)

    assert report.sound
    assert not report.applied
    assert report.defects == ()
    assert world.objects("db") == before


def test_a_reused_sequence_number_is_renumbered_and_no_row_is_given_up(world: RepairWorld) -> None:
    _, second, third, _ = world.wal_ids()
    reused = world.wal_rows(second)[-1][1]
    # A torn batch: its rows have a sequence number that the next WAL file uses again.
    torn = (b"torn", reused + 1, VALUE, b"half", world.wal_rows(second)[-1][4], None)
    world.put_wal(second, [*world.wal_rows(second), torn])
    must_not_open(world)

    plan = world.plan()

    (defect,) = plan.defects
    assert defect.kind == "wal order"
    assert defect.object == PATHS.wal(WalId(third))
    assert "out-of-order sequence numbers" in defect.problem
    assert "b'a'" in defect.remedy
    assert defect.gives_up == ""
    assert plan.losses.sequences == ()
    report = world.repair()
    assert world.rows() == {**world.model, b"torn": b"half"}
    assert any(path.endswith(PATHS.wal(WalId(third)).rpartition("/")[2]) for path in report.kept_aside)


def test_the_later_write_in_the_wal_wins_over_a_row_with_the_same_sequence_number(world: RepairWorld) -> None:
    _, second, third, _ = world.wal_ids()
    number = world.wal_rows(third)[0][1]
    created = world.wal_rows(second)[-1][4]
    world.put_wal(second, [*world.wal_rows(second), (b"a", number, VALUE, b"torn", created, None)])

    world.repair()

    assert world.rows() == world.model, "the third file wrote a=3 after the torn row"


def test_a_wal_file_that_starts_over_with_old_sequence_numbers_is_kept(world: RepairWorld) -> None:
    ids = world.wal_ids()
    rows = world.wal_rows(ids[-1])
    world.put_wal(ids[-1], [(row[0], 1, *row[2:]) for row in rows])
    must_not_open(world)

    world.repair()

    assert world.rows() == world.model


def test_a_sequence_number_used_twice_inside_a_wal_file_keeps_both_writes_in_order(
    world: RepairWorld,
) -> None:
    last = world.wal_ids()[-1]
    (row,) = world.wal_rows(last)
    world.put_wal(last, [(b"e", row[1], VALUE, b"torn", row[4], None), row])

    world.repair()

    assert world.rows() == world.model


def test_a_row_whose_reused_sequence_number_counts_as_flushed_is_kept(world: RepairWorld) -> None:
    # The rows of the first file are in an SST. The second begins with a sequence number of the first: opening skips it.
    first, second, *_ = world.wal_ids()
    flushed = world.wal_rows(first)[-1][1]
    (row,) = world.wal_rows(second)
    world.put_wal(second, [(row[0], flushed, *row[2:])])

    world.repair()

    assert world.rows() == world.model


def test_rows_behind_a_missing_wal_file_are_kept(world: RepairWorld) -> None:
    second = world.wal_ids()[1]
    world.store.delete(PATHS.wal(WalId(second)))

    (defect,) = world.plan().defects

    assert defect.kind == "wal hole"
    assert f"WAL file {second} is missing" in defect.problem
    report = world.repair()
    assert report.losses.wal_ids == (second,)
    assert report.losses.sequences == ((3, 3),)
    del world.model[b"c"]
    assert world.rows() == world.model


def test_a_wal_whose_last_file_is_missing_is_repaired_and_reported() -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, {b"b": b"2"}, {b"c": b"3"})
    with world.open() as db:  # closing records the last WAL file in the manifest
        db.put(b"d", b"4")
        db.flush("wal")
    world.write_and_crash({b"e": b"5"})
    manifest_id, manifest = world.manifest()
    world.put_manifest(manifest_id, replace(manifest, wal_id_last_seen=WalId(world.wal_ids()[-1])))
    world.store.delete(PATHS.wal(WalId(world.wal_ids()[-1])))

    report = world.repair()

    assert [defect.kind for defect in report.defects] == ["wal hole"]
    assert world.rows() == {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 9, 10, 11, 40])
@pytest.mark.parametrize("which", ["middle", "last"])
def test_a_truncated_wal_file_is_given_up_and_no_other(world: RepairWorld, which: str, size: int) -> None:
    wal_id = world.wal_ids()[1 if which == "middle" else -1]
    path = PATHS.wal(WalId(wal_id))
    lost = {row[0] for row in world.wal_rows(wal_id)}
    world.store.put(path, world.store.get(path).data[:size])

    report = world.repair()

    (defect,) = [found for found in report.defects if found.kind == "wal damage"]
    assert defect.object == path
    assert ("in the middle of" if which == "middle" else "at the end of") in defect.gives_up
    assert report.losses.wal_ids == (wal_id,)
    for key in lost:
        del world.model[key]
    assert world.rows() == world.model
    copy = next(kept for kept in report.kept_aside if kept.endswith(path.rpartition("/")[2]))
    assert len(world.store.get(copy).data) == size, "the removed bytes can be put back by hand"


def test_sound_blocks_of_a_damaged_wal_file_are_kept() -> None:
    world = RepairWorld()
    world.write_and_crash({b"%04d" % number: bytes(1000) for number in range(200)}, {b"z": b"last"})
    wal_id = world.wal_ids()[0]
    path = PATHS.wal(WalId(wal_id))
    data = bytearray(world.store.get(path).data)
    data[70_000] ^= 1  # the second block of 64 KiB
    world.store.put(path, bytes(data))

    report = world.repair()

    rows = world.rows()
    assert rows[b"z"] == b"last"
    assert 100 < len(rows) < 201
    assert rows.items() <= world.model.items()
    assert "rows of its sound blocks are kept" in report.defects[0].gives_up


def test_a_damaged_wal_file_before_the_replay_start_costs_no_row(world: RepairWorld) -> None:
    with world.open() as db:
        db.flush()
    path = PATHS.wal(WalId(world.wal_ids()[0]))
    world.store.put(path, b"cut")

    report = world.repair()

    assert [defect.gives_up for defect in report.defects] == [""]
    assert world.rows() == world.model
    with pytest.raises(ObjectMissing):
        world.store.head(path)


def test_a_running_writer_is_fenced_by_a_repair(world: RepairWorld) -> None:
    with world.open() as writer:
        writer.put(b"live", b"1", await_durable=True)
        world.store.delete(PATHS.wal(WalId(world.wal_ids()[1])))
        world.admin().repair(plan_only=False)
        with pytest.raises(FlagstoneError, match=r"fenced|replaced|taken"):
            writer.put(b"late", b"2", await_durable=True)
    rows = world.rows()
    assert rows[b"live"] == b"1"
    assert b"late" not in rows


def test_the_wal_of_these_tests_has_ascending_sequence_numbers(world: RepairWorld) -> None:
    assert sequences(world) == [[1, 2], [3], [4, 5], [6]]
