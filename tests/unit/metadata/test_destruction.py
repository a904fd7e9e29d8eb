"""The destruction mark in the manifest: its name, the edits it forbids, and what the next database inherits."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from flagstone.errors import Closed, InternalError, InvalidRequest
from flagstone.metadata.annotations import Destroyed, mark_entries
from flagstone.metadata.destruction import (
    erase,
    find_mark,
    incarnation,
    is_vacant,
    mark_destroyed,
    note_fence,
    settle_at,
    wal_shift,
)
from flagstone.metadata.invariants import (
    check_destruction,
    check_manifest,
    check_replaced_state,
    check_stored,
)
from flagstone.metadata.manifest import (
    Checkpoint,
    ExternalDb,
    Manifest,
    add_checkpoint,
    new_manifest,
    remove_checkpoint,
)
from flagstone.types import ManifestId, Seq, WalId

MARK, OTHER = UUID(int=1), UUID(int=2)
ALIVE = Manifest(
    writer_epoch=4,
    compactor_epoch=2,
    replay_after_wal_id=WalId(7),
    wal_id_last_seen=WalId(9),
    last_l0_seq=Seq(50),
    checkpoints=(Checkpoint(OTHER, ManifestId(3), 5, 100, "held"),),
    external_dbs=(ExternalDb("parent", OTHER, OTHER, ()),),
)
PENDING = note_fence(
    mark_destroyed(ALIVE, mark_id=MARK, at_ms=10_000, grace_ms=500, manifest_id=ManifestId(8)), WalId(11)
)


def vacant() -> Manifest:
    entry = find_mark(PENDING)
    assert entry is not None
    return erase(PENDING, entry, manifest_id=ManifestId(9), wal_end=WalId(12))


def test_the_destruction_mark_claims_both_roles_and_has_its_times() -> None:
    entry = find_mark(PENDING)
    assert entry is not None
    assert entry.mark == Destroyed(10_000, 500, 5, 3, WalId(11))
    assert (PENDING.writer_epoch, PENDING.compactor_epoch) == (5, 3)
    assert entry.mark.due_ms == 10_500
    assert find_mark(ALIVE) is None


def test_a_second_destruction_mark_replaces_the_first() -> None:
    again = mark_destroyed(
        replace(PENDING, writer_epoch=9),
        mark_id=UUID(int=3),
        at_ms=20_000,
        grace_ms=0,
        manifest_id=ManifestId(12),
    )
    assert [entry.mark.at_ms for entry in mark_entries(again)] == [20_000]


@pytest.mark.parametrize(
    "edited",
    [
        replace(PENDING, writer_epoch=6),
        replace(PENDING, compactor_epoch=4),
        replace(PENDING, wal_id_last_seen=WalId(10)),
        replace(PENDING, last_l0_seq=Seq(51)),
        add_checkpoint(PENDING, Checkpoint(UUID(int=7), ManifestId(9), 5)),
        add_checkpoint(PENDING, replace(ALIVE.checkpoints[0], expires_s=101)),
        add_checkpoint(PENDING, replace(ALIVE.checkpoints[0], expires_s=None)),
        add_checkpoint(PENDING, replace(ALIVE.checkpoints[0], manifest_id=ManifestId(4))),
        replace(PENDING, external_dbs=(*ALIVE.external_dbs, ExternalDb("q", OTHER, None, ()))),
    ],
)
@pytest.mark.parametrize("check", [check_manifest, check_replaced_state])
def test_an_edit_that_adds_to_a_destroyed_database_is_refused(edited: Manifest, check: object) -> None:
    with pytest.raises(Closed, match="destroyed"):
        check(edited, PENDING)  # type: ignore[operator]
    check_stored(edited, PENDING)


@pytest.mark.parametrize(
    "edited",
    [
        remove_checkpoint(PENDING, OTHER),
        add_checkpoint(PENDING, replace(ALIVE.checkpoints[0], expires_s=99)),
        replace(PENDING, external_dbs=()),
    ],
)
def test_an_edit_that_removes_from_a_destroyed_database_is_accepted(edited: Manifest) -> None:
    check_manifest(edited, PENDING)


def test_no_edit_removes_a_destruction_mark() -> None:
    for current in (PENDING, settle_at(new_manifest(), vacant())):
        with pytest.raises(InvalidRequest, match="cannot be changed or deleted"):
            check_manifest(remove_checkpoint(current, MARK), current)


def test_the_destroyer_may_erase_ssts_but_never_lower_an_id_epoch_or_sequence_number() -> None:
    check_destruction(vacant(), PENDING)
    for lower in (
        replace(vacant(), writer_epoch=4),
        replace(vacant(), replay_after_wal_id=WalId(6)),
        replace(vacant(), last_l0_seq=Seq(49)),
    ):
        with pytest.raises(InternalError, match="check_destruction"):
            check_destruction(lower, PENDING)


def test_a_vacant_manifest_refers_to_no_sst_and_keeps_ids_epochs_and_sequence_numbers() -> None:
    path = vacant()
    assert is_vacant(path)
    assert not is_vacant(PENDING)
    assert (path.ssts, path.tree.l0, [entry.id for entry in path.checkpoints]) == ({}, (), [MARK])
    assert path.replay_after_wal_id == path.wal_id_last_seen == 12
    assert (path.writer_epoch, path.compactor_epoch) == (5, 3)
    assert path.last_l0_seq > 50 + 2**32
    assert [lender.path for lender in path.external_dbs] == ["parent"]
    assert incarnation(path) == 9


def test_the_next_database_continues_ids_epochs_and_sequence_numbers() -> None:
    first = settle_at(new_manifest(segment_extractor_name="x"), vacant())
    check_manifest(first, vacant())
    assert not is_vacant(first)
    assert find_mark(first) is None
    assert incarnation(first) == 9
    assert (first.writer_epoch, first.compactor_epoch) == (6, 3)
    assert first.replay_after_wal_id == 12
    assert first.last_l0_seq == vacant().last_l0_seq
    assert first.segment_extractor_name == "x"
    assert wal_shift(first) == 12


def test_a_clone_keeps_its_sequence_numbers_and_shifts_its_wal() -> None:
    unborn = Manifest(
        initialized=False,
        replay_after_wal_id=WalId(2),
        wal_id_last_seen=WalId(5),
        last_l0_seq=Seq(8),
        external_dbs=(ExternalDb("source", OTHER, OTHER, ()),),
    )
    first = settle_at(unborn, vacant())
    assert (first.replay_after_wal_id, first.wal_id_last_seen, wal_shift(first)) == (12, 15, 10)
    assert first.last_l0_seq == 8
    assert settle_at(replace(unborn, replay_after_wal_id=WalId(30)), vacant()).replay_after_wal_id == 30


@pytest.mark.parametrize(
    "name", ["flagstone.destroyed/", "flagstone.destroyed/pending?at_ms=x", "flagstone.destroyed"]
)
def test_a_malformed_checkpoint_name_is_no_destruction_mark(name: str) -> None:
    manifest = replace(ALIVE, checkpoints=(Checkpoint(MARK, ManifestId(1), 0, None, name),))
    assert mark_entries(manifest) == []
    assert find_mark(manifest) is None
