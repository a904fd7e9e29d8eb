"""Manifests, boundaries, compactions files and unfinished databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from flagstone.db.admin.admin import Admin
from flagstone.errors import CorruptData, FlagstoneError, InvalidRequest
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec, encode_compactions
from flagstone.metadata.manifest import replace_trees
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.store.port import ObjectMissing
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import CompactionsId, ManifestId, RunId, WalId
from kit.repair import PATHS, RepairWorld


@pytest.fixture
def world() -> RepairWorld:
    made = RepairWorld()
    made.write_and_crash({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"}, flushed=2)
    return made


def test_an_unreadable_newest_manifest_is_replaced_by_the_one_before(world: RepairWorld) -> None:
    newest, _ = world.manifest()
    path = PATHS.manifest(ManifestId(newest))
    world.store.put(path, b"\x00\x02 nothing of the kind")
    with pytest.raises(CorruptData):
        world.open()

    (defect,) = world.plan().defects

    assert (defect.kind, defect.object) == ("manifest", path)
    assert f"go back to manifest {newest - 1}" in defect.remedy
    assert "WAL files are gone" in defect.gives_up
    report = world.repair()
    assert report.manifest_id == newest + 1
    assert world.rows() == world.model, "the rows of the flush are still in the WAL"
    with pytest.raises(ObjectMissing):
        world.store.head(path)


@pytest.mark.parametrize("folder", ["manifest", "compactions"])
def test_metadata_of_a_later_release_is_left_alone(world: RepairWorld, folder: str) -> None:
    newest, _ = world.manifest()
    path = (
        PATHS.manifest(ManifestId(newest + 1))
        if folder == "manifest"
        else PATHS.compactions(CompactionsId(1))
    )
    world.store.put(path, b"\x00\x03 the format of a later release")
    before = world.objects("db")

    report = world.admin().repair(plan_only=False)

    assert not report.sound
    assert "cannot read" in report.defects[0].problem
    assert world.objects("db") == before


def test_going_back_says_which_rows_are_lost_with_their_wal_files(world: RepairWorld) -> None:
    newest, manifest = world.manifest()
    path = PATHS.manifest(ManifestId(newest))
    for wal_id in world.wal_ids():
        if wal_id <= manifest.replay_after_wal_id:
            world.store.delete(PATHS.wal(WalId(wal_id)))
    first_left = world.wal_ids()[0]
    world.store.delete(PATHS.wal(WalId(first_left)))
    world.store.put(path, b"\x00\x02 nothing of the kind")

    report = world.repair()

    assert {defect.kind for defect in report.defects} == {"manifest", "wal hole"}
    assert report.losses.sequences
    assert world.rows()[b"a"] == b"3"


def test_the_new_epoch_is_above_every_epoch_an_unreadable_manifest_may_have(world: RepairWorld) -> None:
    newest, manifest = world.manifest()
    for number in (newest + 1, newest + 2):
        world.store.put(PATHS.manifest(ManifestId(number)), b"junk of a writer that claimed the database")

    world.repair()

    latest, repaired = world.manifest()
    assert latest == newest + 3
    assert repaired.writer_epoch > manifest.writer_epoch + 2
    assert repaired.compactor_epoch > manifest.compactor_epoch + 2


def test_an_unreadable_older_manifest_is_moved_aside(world: RepairWorld) -> None:
    newest, _ = world.manifest()
    world.store.put(PATHS.manifest(ManifestId(newest - 1)), b"junk")

    report = world.repair()

    assert [defect.gives_up for defect in report.defects] == [""]
    assert world.rows() == world.model
    assert ManifestStore(world.store, PATHS).read_boundary() == newest - 1


def test_a_checkpoint_without_its_manifest_is_deleted_and_named(world: RepairWorld) -> None:
    kept = world.admin().create_checkpoint(name="kept")
    lost = world.admin().create_checkpoint(name="before the change")
    with world.open() as db:
        db.put(b"c", b"4")
        db.flush()
    world.model[b"c"] = b"4"
    world.store.delete(PATHS.manifest(lost.manifest_id))

    report = world.repair()

    assert report.losses.checkpoints == (f"checkpoint {lost.id} (before the change)",)
    assert [entry.id for entry in world.admin().checkpoints()] == [kept.id]
    assert world.rows() == world.model


def test_a_checkpoint_whose_ssts_are_gone_is_deleted() -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"}, flushed=3)
    world.admin().create_checkpoint(name="pinned")
    manifest_id, manifest = world.manifest()
    lost = min(manifest.ssts)
    with world.open() as db:
        db.put(b"c", b"4")
        db.flush()
    # The latest manifest does not need the SST, as after a compaction.
    manifest_id, manifest = world.manifest()

    tree = replace(manifest.tree, l0=tuple(view for view in manifest.tree.l0 if view.sst_id != lost))
    world.put_manifest(manifest_id, replace_trees(manifest, tree=tree))
    world.store.delete(PATHS.sst(lost))

    report = world.repair()

    assert [defect.kind for defect in report.defects] == ["checkpoint"]
    assert world.admin().checkpoints() == ()


def test_an_sst_that_is_gone_leaves_the_manifest_and_its_keys_are_named() -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, {b"b": b"2"}, {b"c": b"3"}, flushed=3)
    _, manifest = world.manifest()
    lost = next(sst_id for sst_id, sst in manifest.ssts.items() if sst.info.first_entry == b"b")
    path = PATHS.sst(lost)
    world.store.delete(path)
    for wal_id in world.wal_ids():
        world.store.delete(PATHS.wal(WalId(wal_id)))

    report = world.repair()

    (defect,) = (found for found in report.defects if found.kind == "missing sst")
    assert "b'b' to b'b'" in defect.gives_up
    assert report.losses.ssts == (path,)
    assert world.rows() == {b"a": b"1", b"c": b"3"}


def test_an_sst_that_is_gone_is_made_again_from_the_wal() -> None:
    world = RepairWorld()
    world.write_and_crash(
        {b"a": b"1", b"b": b"1"}, {b"b": b"2"}, {b"a": b"3", b"c": b"3"}, {b"d": b"4"}, flushed=3
    )
    _, manifest = world.manifest()
    for lost in manifest.ssts:
        world.store.delete(PATHS.sst(lost))

    report = world.repair()

    assert [(defect.kind, defect.gives_up) for defect in report.defects] == [("missing sst", "")] * 3
    assert report.losses.ssts == ()
    _, repaired = world.manifest()
    assert len(repaired.tree.l0) == 3, "each is at the position of the lost one"
    assert world.rows() == world.model


def test_an_sst_is_made_again_in_part_when_some_of_its_wal_files_are_gone() -> None:
    world = RepairWorld()
    db = world.open()
    for key in (b"a", b"b", b"c"):
        db.put(key, b"value")
        db.flush("wal")
    db.flush()
    world.crash(db)
    _, manifest = world.manifest()
    (lost,) = manifest.ssts
    world.store.delete(PATHS.sst(lost))
    world.store.delete(PATHS.wal(WalId(world.wal_ids()[1])))

    report = world.repair()

    assert "whose WAL files are gone" in report.defects[0].gives_up
    assert report.losses.ssts == (PATHS.sst(lost),)
    assert world.rows() == {b"a": b"value", b"c": b"value"}


def test_an_sst_that_was_cut_is_named_and_left_alone() -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, flushed=1)
    _, manifest = world.manifest()
    path = PATHS.sst(next(iter(manifest.ssts)))
    world.store.put(path, world.store.get(path).data[:20])
    before = world.objects("db")

    report = world.admin().repair(plan_only=False)

    assert not report.sound
    assert not report.applied
    assert [(defect.kind, defect.remedy) for defect in report.defects] == [("damaged sst", "")]
    assert world.objects("db") == before


def test_a_clone_whose_parent_is_gone_keeps_its_own_rows(world: RepairWorld) -> None:
    with world.open() as db:
        db.flush()
    world.admin().clone("clone")
    with world.open("clone") as db:
        db.put(b"own", b"9")
        db.flush()
    for path in world.objects("db"):
        world.store.delete(path)
    admin = world.admin("clone")

    plan = admin.repair()

    assert {defect.kind for defect in plan.defects} == {"missing sst", "lender"}
    report = admin.repair(plan_only=False)
    assert report.applied
    assert admin.verify().ok
    assert admin.repair().sound
    with world.open("clone") as db:
        assert dict(db.scan()) == {b"own": b"9"}
    assert admin.manifest().value.external_dbs == ()


# -- boundaries and compactions files ---------------------------------------------------------------------


def test_a_boundary_above_the_newest_manifest_is_stepped_over(world: RepairWorld) -> None:
    newest, _ = world.manifest()
    world.store.put(PATHS.boundary("manifest"), b"%d" % (newest + 5))
    with pytest.raises(CorruptData):
        world.open()

    report = world.repair()

    assert report.manifest_id == newest + 6
    assert world.rows() == world.model


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"junk", b"", b"18446744073709551615"])
@pytest.mark.parametrize("of", ["manifest", "compactions"])
def test_an_unreadable_or_too_large_boundary_is_rewritten(
    world: RepairWorld, content: bytes, of: str
) -> None:
    newest, _ = world.manifest()
    world.store.put(PATHS.boundary(of), content)  # type: ignore[arg-type]

    world.repair()

    assert world.rows() == world.model
    assert ManifestStore(world.store, PATHS).read_boundary() < newest + 1


def _job(world: RepairWorld, **changes: object) -> Job:
    _, manifest = world.manifest()
    view = manifest.tree.l0[0].id
    job = Job(world.ids.ulid(), TieredSpec((view,), (), RunId(0)), JobStatus.SCHEDULED)
    return replace(job, **changes)


def test_an_unreadable_compactions_file_is_replaced(world: RepairWorld) -> None:
    compactions = CompactionsStore(world.store, PATHS)
    compactions.create_next(Compactions(3, (_job(world),)), None)
    world.store.put(PATHS.compactions(CompactionsId(2)), b"junk")

    report = world.repair()

    assert [defect.gives_up for defect in report.defects] == ["the compaction jobs in it; no rows"]
    latest = CompactionsStore(world.store, PATHS).require_latest()
    assert (latest.id, latest.value.jobs) == (3, ())
    assert latest.value.compactor_epoch == world.manifest()[1].compactor_epoch
    assert world.rows() == world.model


def test_a_job_whose_output_is_gone_is_marked_as_failed(world: RepairWorld) -> None:
    _, manifest = world.manifest()
    sst = replace(next(iter(manifest.ssts.values())), id=world.ids.ulid())
    job = _job(world, status=JobStatus.COMPACTED, output_ssts=(sst,))
    job = replace(job, id=type(job.id)(job.id - (1 << 80)))
    world.store.put(PATHS.compactions(CompactionsId(1)), encode_compactions(Compactions(0, (job,))))

    world.repair()

    latest = CompactionsStore(world.store, PATHS).require_latest().value
    assert [found.status for found in latest.jobs] == [JobStatus.FAILED]


# -- unfinished databases ---------------------------------------------------------------------------------


def test_wal_files_without_a_manifest_become_a_database_again() -> None:
    world = RepairWorld()
    world.write_and_crash({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"})
    for meta in list(world.store.list(PATHS.manifest_folder)):
        world.store.delete(meta.path)

    report = world.repair()

    assert [(defect.kind, defect.gives_up) for defect in report.defects] == [("half-made", "")]
    assert world.rows() == world.model


def test_ssts_without_a_manifest_are_left_alone(world: RepairWorld) -> None:
    for meta in list(world.store.list(PATHS.manifest_folder)):
        world.store.delete(meta.path)
    for wal_id in world.wal_ids()[:1]:
        world.store.delete(PATHS.wal(WalId(wal_id)))
    before = world.objects("db")

    report = world.admin().repair(plan_only=False)

    assert [(defect.kind, defect.remedy) for defect in report.defects] == [("half-made", "")]
    assert "backup" in report.defects[0].problem
    assert world.objects("db") == before


def test_a_path_without_any_object_is_refused() -> None:
    world = RepairWorld()
    with pytest.raises(InvalidRequest, match="no database"):
        world.admin().repair(plan_only=False)
    assert world.objects("db") == {}


def test_a_database_whose_first_manifests_were_collected_is_sound(world: RepairWorld) -> None:
    world.admin().collect_garbage(min_age=timedelta(0))
    assert world.plan().sound


def test_a_destroyed_database_is_left_alone(world: RepairWorld) -> None:
    world.admin().destroy(soft=True)
    before = world.objects("db")
    report = world.admin().repair(plan_only=False)
    assert not report.sound
    assert "destroyed" in report.defects[0].problem
    assert world.objects("db") == before


def test_a_clone_that_is_not_finished_is_finished(world: RepairWorld) -> None:
    with world.open() as db:
        db.flush()

    paths = type(PATHS)("clone")
    world.admin().clone("clone")
    # As after a crash before the last manifest.
    world.store.delete(paths.manifest(ManifestId(2)))
    admin = world.admin("clone")
    with pytest.raises(InvalidRequest):
        world.open("clone")

    report = admin.repair(plan_only=False)

    assert report.applied
    assert admin.repair().sound
    with world.open("clone") as db:
        assert dict(db.scan()) == world.model


def test_a_clone_that_has_no_manifest_yet_is_finished(world: RepairWorld) -> None:
    with world.open() as db:
        db.flush()
    paths = type(PATHS)("clone")
    world.admin().clone("clone")
    for meta in list(world.store.list(paths.manifest_folder)):
        world.store.delete(meta.path)
    admin = world.admin("clone")
    assert [defect.kind for defect in admin.repair().defects] == ["half-made"]

    assert admin.repair(plan_only=False).applied

    with world.open("clone") as db:
        assert dict(db.scan()) == world.model


# -- crashes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["order", "hole", "manifest", "clock"])
def test_a_crash_at_any_request_of_a_repair_leaves_a_database_that_can_be_repaired(damage: str) -> None:
    for step in range(1, 200):
        world = RepairWorld()
        world.write_and_crash({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"}, {b"c": b"4"}, flushed=1)
        ids = world.wal_ids()
        if damage == "order":
            rows = world.wal_rows(ids[-1])
            world.put_wal(ids[-1], [(row[0], 1, *row[2:]) for row in rows])
        elif damage == "hole":
            world.store.delete(PATHS.wal(WalId(ids[1])))
            del world.model[b"b"]
        elif damage == "manifest":
            newest, _ = world.manifest()
            world.store.put(PATHS.manifest(ManifestId(newest)), b"junk")
        else:
            newest, manifest = world.manifest()
            ahead = world.clock.now_ms() + 10**9
            world.put_manifest(newest, replace(manifest, last_l0_clock_tick=ahead))
        crashed = _repair_that_crashes(world, step)
        if not crashed:
            assert world.plan().sound
            assert world.rows() == world.model
            assert step > 3
            return
        if not world.plan().sound:
            world.repair()
        fences = [meta for meta in world.store.list(PATHS.wal_folder) if not meta.size]
        assert world.manifest()[1].writer_epoch >= len(fences), "each fence has its epoch"
        assert world.admin().verify().ok
        assert world.rows() == world.model, f"after a crash at write {step}"
    pytest.fail("a repair takes fewer writes than that")


def _repair_that_crashes(world: RepairWorld, step: int) -> bool:
    """Repair, and crash at the `step`-th write; returns whether there was such a write."""
    store = FaultyStore(world.store, [Fault("crash", nth=step, op="[pcd]*")])  # put*, copy, delete*
    try:
        Admin("db", store=store, clock=world.clock, ids=world.ids).repair(plan_only=False)
    except Crashed:
        return True
    except FlagstoneError as error:
        raise AssertionError(f"write {step}") from error
    return False
