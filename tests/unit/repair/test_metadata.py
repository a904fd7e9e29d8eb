"""Manifests, boundaries, compactions files and half-made databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.errors import CorruptData, FlagstoneError, InvalidRequest
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec, encode_compactions
from flagstone.metadata.manifest import replace_trees
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.store.port import ObjectMissing
from flagstone.types import CompactionsId, ManifestId, RunId, WalId
from unit.repair.repair_rig import PATHS, SETTINGS, Patient


@pytest.fixture
def patient() -> Patient:
    made = Patient()
    made.write({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"}, tables=2)
    return made


def test_an_unreadable_newest_manifest_is_replaced_by_the_one_before(patient: Patient) -> None:
    newest, _ = patient.manifest()
    path = PATHS.manifest(ManifestId(newest))
    patient.store.put(path, b"\x00\x02 nothing of the kind")
    with pytest.raises(CorruptData):
        patient.open()

    (defect,) = patient.plan().defects

    assert (defect.kind, defect.object) == ("manifest", path)
    assert f"go back to manifest {newest - 1}" in defect.remedy
    assert "WAL files are gone" in defect.gives_up
    report = patient.repair()
    assert report.manifest_id == newest + 1
    assert patient.rows() == patient.model, "the rows of the flush are still in the WAL"
    with pytest.raises(ObjectMissing):
        patient.store.head(path)


@pytest.mark.parametrize("folder", ["manifest", "compactions"])
def test_what_a_later_release_wrote_is_left_alone(patient: Patient, folder: str) -> None:
    newest, _ = patient.manifest()
    path = (
        PATHS.manifest(ManifestId(newest + 1))
        if folder == "manifest"
        else PATHS.compactions(CompactionsId(1))
    )
    patient.store.put(path, b"\x00\x03 the format of a later release")
    before = patient.objects()

    report = patient.admin.repair(plan_only=False)

    assert not report.sound
    assert "cannot read" in report.defects[0].problem
    assert patient.objects() == before


def test_going_back_says_which_rows_are_lost_with_their_wal_files(patient: Patient) -> None:
    newest, manifest = patient.manifest()
    path = PATHS.manifest(ManifestId(newest))
    for wal_id in patient.wal_ids():
        if wal_id <= manifest.replay_after_wal_id:
            patient.store.delete(PATHS.wal(WalId(wal_id)))
    first_left = patient.wal_ids()[0]
    patient.store.delete(PATHS.wal(WalId(first_left)))
    patient.store.put(path, b"\x00\x02 nothing of the kind")

    report = patient.repair()

    assert {defect.kind for defect in report.defects} == {"manifest", "wal hole"}
    assert report.losses.sequences
    assert patient.rows()[b"a"] == b"3"


def test_the_new_epoch_is_above_every_epoch_an_unreadable_manifest_may_have(patient: Patient) -> None:
    newest, manifest = patient.manifest()
    for number in (newest + 1, newest + 2):
        patient.store.put(PATHS.manifest(ManifestId(number)), b"junk of a writer that claimed the database")

    patient.repair()

    latest, repaired = patient.manifest()
    assert latest == newest + 3
    assert repaired.writer_epoch > manifest.writer_epoch + 2
    assert repaired.compactor_epoch > manifest.compactor_epoch + 2


def test_an_unreadable_older_manifest_is_moved_aside(patient: Patient) -> None:
    newest, _ = patient.manifest()
    patient.store.put(PATHS.manifest(ManifestId(newest - 1)), b"junk")

    report = patient.repair()

    assert [defect.gives_up for defect in report.defects] == [""]
    assert patient.rows() == patient.model
    assert ManifestStore(patient.store, PATHS).read_boundary() == newest - 1


def test_a_checkpoint_without_its_manifest_is_deleted_and_named(patient: Patient) -> None:
    kept = patient.admin.create_checkpoint(name="kept")
    lost = patient.admin.create_checkpoint(name="before the change")
    with patient.open() as db:
        db.put(b"c", b"4")
        db.flush()
    patient.model[b"c"] = b"4"
    patient.store.delete(PATHS.manifest(lost.manifest_id))

    report = patient.repair()

    assert report.losses.checkpoints == (f"checkpoint {lost.id} (before the change)",)
    assert [entry.id for entry in patient.admin.checkpoints()] == [kept.id]
    assert patient.rows() == patient.model


def test_a_checkpoint_whose_ssts_are_gone_is_deleted() -> None:
    patient = Patient()
    patient.write({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"}, tables=3)
    patient.admin.create_checkpoint(name="pinned")
    manifest_id, manifest = patient.manifest()
    lost = min(manifest.ssts)
    with patient.open() as db:
        db.put(b"c", b"4")
        db.flush()
    # The current state does not need it: as after a compaction.
    manifest_id, manifest = patient.manifest()

    tree = replace(manifest.tree, l0=tuple(view for view in manifest.tree.l0 if view.sst_id != lost))
    patient.put_manifest(manifest_id, replace_trees(manifest, tree=tree))
    patient.store.delete(PATHS.sst(lost))

    report = patient.repair()

    assert [defect.kind for defect in report.defects] == ["checkpoint"]
    assert patient.admin.checkpoints() == ()


def test_an_sst_that_is_gone_leaves_the_manifest_and_its_keys_are_named() -> None:
    patient = Patient()
    patient.write({b"a": b"1"}, {b"b": b"2"}, {b"c": b"3"}, tables=3)
    _, manifest = patient.manifest()
    lost = next(sst_id for sst_id, table in manifest.ssts.items() if table.info.first_entry == b"b")
    path = PATHS.sst(lost)
    patient.store.delete(path)
    for wal_id in patient.wal_ids():
        patient.store.delete(PATHS.wal(WalId(wal_id)))

    report = patient.repair()

    (defect,) = (found for found in report.defects if found.kind == "missing sst")
    assert "b'b' to b'b'" in defect.gives_up
    assert report.losses.ssts == (path,)
    assert patient.rows() == {b"a": b"1", b"c": b"3"}


def test_an_sst_that_is_gone_is_made_again_from_the_wal() -> None:
    patient = Patient()
    patient.write({b"a": b"1", b"b": b"1"}, {b"b": b"2"}, {b"a": b"3", b"c": b"3"}, {b"d": b"4"}, tables=3)
    _, manifest = patient.manifest()
    for lost in manifest.ssts:
        patient.store.delete(PATHS.sst(lost))

    report = patient.repair()

    assert [(defect.kind, defect.gives_up) for defect in report.defects] == [("missing sst", "")] * 3
    assert report.losses.ssts == ()
    _, repaired = patient.manifest()
    assert len(repaired.tree.l0) == 3, "each stands where the lost one stood"
    assert patient.rows() == patient.model


def test_an_sst_is_made_again_in_part_when_some_of_its_wal_files_are_gone() -> None:
    patient = Patient()
    db = patient.open()
    for key in (b"a", b"b", b"c"):
        db.put(key, b"value")
        db.flush("wal")
    db.flush()
    patient.crash(db)
    _, manifest = patient.manifest()
    (lost,) = manifest.ssts
    patient.store.delete(PATHS.sst(lost))
    patient.store.delete(PATHS.wal(WalId(patient.wal_ids()[1])))

    report = patient.repair()

    assert "whose WAL files are gone" in report.defects[0].gives_up
    assert report.losses.ssts == (PATHS.sst(lost),)
    assert patient.rows() == {b"a": b"value", b"c": b"value"}


def test_an_sst_that_was_cut_is_named_and_left_alone() -> None:
    patient = Patient()
    patient.write({b"a": b"1"}, tables=1)
    _, manifest = patient.manifest()
    path = PATHS.sst(next(iter(manifest.ssts)))
    patient.store.put(path, patient.store.get(path).data[:20])
    before = patient.objects()

    report = patient.admin.repair(plan_only=False)

    assert not report.sound
    assert not report.applied
    assert [(defect.kind, defect.remedy) for defect in report.defects] == [("damaged sst", "")]
    assert patient.objects() == before


def test_a_clone_whose_parent_is_gone_keeps_its_own_rows(patient: Patient) -> None:
    with patient.open() as db:
        db.flush()
    patient.admin.clone("clone")
    with open_database("clone", store=patient.store, settings=SETTINGS, clock=patient.clock) as db:
        db.put(b"own", b"9")
        db.flush()
    for path in patient.objects():
        patient.store.delete(path)
    admin = Admin("clone", store=patient.store, clock=patient.clock, ids=patient.ids)

    plan = admin.repair()

    assert {defect.kind for defect in plan.defects} == {"missing sst", "lender"}
    report = admin.repair(plan_only=False)
    assert report.applied
    assert admin.verify().ok
    assert admin.repair().sound
    with open_database("clone", store=patient.store, settings=SETTINGS, clock=patient.clock) as db:
        assert dict(db.scan()) == {b"own": b"9"}
    assert admin.manifest().value.external_dbs == ()


# -- boundaries and compactions files ---------------------------------------------------------------------


def test_a_boundary_above_the_newest_manifest_is_stepped_over(patient: Patient) -> None:
    newest, _ = patient.manifest()
    patient.store.put(PATHS.boundary("manifest"), b"%d" % (newest + 5))
    with pytest.raises(CorruptData):
        patient.open()

    report = patient.repair()

    assert report.manifest_id == newest + 6
    assert patient.rows() == patient.model


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"junk", b"", b"18446744073709551615"])
@pytest.mark.parametrize("of", ["manifest", "compactions"])
def test_a_boundary_that_is_none_is_rewritten(patient: Patient, content: bytes, of: str) -> None:
    newest, _ = patient.manifest()
    patient.store.put(PATHS.boundary(of), content)  # type: ignore[arg-type]

    patient.repair()

    assert patient.rows() == patient.model
    assert ManifestStore(patient.store, PATHS).read_boundary() < newest + 1


def _job(patient: Patient, **changes: object) -> Job:
    _, manifest = patient.manifest()
    view = manifest.tree.l0[0].id
    job = Job(patient.ids.ulid(), TieredSpec((view,), (), RunId(0)), JobStatus.SCHEDULED)
    return replace(job, **changes)


def test_an_unreadable_compactions_file_is_replaced(patient: Patient) -> None:
    compactions = CompactionsStore(patient.store, PATHS)
    compactions.create_next(Compactions(3, (_job(patient),)), None)
    patient.store.put(PATHS.compactions(CompactionsId(2)), b"junk")

    report = patient.repair()

    assert [defect.gives_up for defect in report.defects] == ["the compaction jobs in it; no rows"]
    latest = CompactionsStore(patient.store, PATHS).require_latest()
    assert (latest.id, latest.value.jobs) == (3, ())
    assert latest.value.compactor_epoch == patient.manifest()[1].compactor_epoch
    assert patient.rows() == patient.model


def test_a_job_whose_output_is_gone_is_marked_as_failed(patient: Patient) -> None:
    _, manifest = patient.manifest()
    table = replace(next(iter(manifest.ssts.values())), id=patient.ids.ulid())
    job = _job(patient, status=JobStatus.COMPACTED, output_ssts=(table,))
    job = replace(job, id=type(job.id)(job.id - (1 << 80)))
    patient.store.put(PATHS.compactions(CompactionsId(1)), encode_compactions(Compactions(0, (job,))))

    patient.repair()

    latest = CompactionsStore(patient.store, PATHS).require_latest().value
    assert [found.status for found in latest.jobs] == [JobStatus.FAILED]


# -- half-made databases ----------------------------------------------------------------------------------


def test_wal_files_without_a_manifest_become_a_database_again() -> None:
    patient = Patient()
    patient.write({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"})
    for meta in list(patient.store.list(PATHS.manifest_folder)):
        patient.store.delete(meta.path)

    report = patient.repair()

    assert [(defect.kind, defect.gives_up) for defect in report.defects] == [("half-made", "")]
    assert patient.rows() == patient.model


def test_ssts_without_a_manifest_are_left_alone(patient: Patient) -> None:
    for meta in list(patient.store.list(PATHS.manifest_folder)):
        patient.store.delete(meta.path)
    for wal_id in patient.wal_ids()[:1]:
        patient.store.delete(PATHS.wal(WalId(wal_id)))
    before = patient.objects()

    report = patient.admin.repair(plan_only=False)

    assert [(defect.kind, defect.remedy) for defect in report.defects] == [("half-made", "")]
    assert "backup" in report.defects[0].problem
    assert patient.objects() == before


def test_a_path_without_any_object_is_refused() -> None:
    patient = Patient()
    with pytest.raises(InvalidRequest, match="no database"):
        patient.admin.repair(plan_only=False)
    assert patient.objects() == {}


def test_a_database_whose_first_manifests_were_collected_is_sound(patient: Patient) -> None:
    patient.admin.collect_garbage(min_age=timedelta(0))
    assert patient.plan().sound


def test_a_destroyed_database_is_left_alone(patient: Patient) -> None:
    patient.admin.destroy(soft=True)
    before = patient.objects()
    report = patient.admin.repair(plan_only=False)
    assert not report.sound
    assert "destroyed" in report.defects[0].problem
    assert patient.objects() == before


def test_a_clone_that_is_not_finished_is_finished(patient: Patient) -> None:
    with patient.open() as db:
        db.flush()

    paths = type(PATHS)("clone")
    patient.admin.clone("clone")
    # As if the maker had died before the last manifest.
    patient.store.delete(paths.manifest(ManifestId(2)))
    admin = Admin("clone", store=patient.store, clock=patient.clock, ids=patient.ids)
    with pytest.raises(InvalidRequest):
        open_database("clone", store=patient.store, settings=SETTINGS, clock=patient.clock)

    report = admin.repair(plan_only=False)

    assert report.applied
    assert admin.repair().sound
    with open_database("clone", store=patient.store, settings=SETTINGS, clock=patient.clock) as db:
        assert dict(db.scan()) == patient.model


def test_a_clone_that_has_no_manifest_yet_is_finished(patient: Patient) -> None:
    with patient.open() as db:
        db.flush()
    paths = type(PATHS)("clone")
    patient.admin.clone("clone")
    for meta in list(patient.store.list(paths.manifest_folder)):
        patient.store.delete(meta.path)
    admin = Admin("clone", store=patient.store, clock=patient.clock, ids=patient.ids)
    assert [defect.kind for defect in admin.repair().defects] == ["half-made"]

    assert admin.repair(plan_only=False).applied

    with open_database("clone", store=patient.store, settings=SETTINGS, clock=patient.clock) as db:
        assert dict(db.scan()) == patient.model


# -- crashes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["order", "hole", "manifest", "clock"])
def test_a_crash_at_any_request_of_a_repair_leaves_a_database_that_can_be_repaired(damage: str) -> None:
    for step in range(1, 200):
        patient = Patient()
        patient.write({b"a": b"1"}, {b"b": b"2"}, {b"a": b"3"}, {b"c": b"4"}, tables=1)
        ids = patient.wal_ids()
        if damage == "order":
            rows = patient.wal_rows(ids[-1])
            patient.put_wal(ids[-1], [(row[0], 1, *row[2:]) for row in rows])
        elif damage == "hole":
            patient.store.delete(PATHS.wal(WalId(ids[1])))
            del patient.model[b"b"]
        elif damage == "manifest":
            newest, _ = patient.manifest()
            patient.store.put(PATHS.manifest(ManifestId(newest)), b"junk")
        else:
            newest, manifest = patient.manifest()
            ahead = patient.clock.now_ms() + 10**9
            patient.put_manifest(newest, replace(manifest, last_l0_clock_tick=ahead))
        died = _repair_that_dies(patient, step)
        if not died:
            assert patient.plan().sound
            assert patient.rows() == patient.model
            assert step > 3
            return
        if not patient.plan().sound:
            patient.repair()
        fences = [meta for meta in patient.store.list(PATHS.wal_folder) if not meta.size]
        assert patient.manifest()[1].writer_epoch >= len(fences), "each fence has its epoch"
        assert patient.admin.verify().ok
        assert patient.rows() == patient.model, f"after a crash at write {step}"
    pytest.fail("a repair takes fewer writes than that")


def _repair_that_dies(patient: Patient, step: int) -> bool:
    """Repair on a store that stops taking writes at the `step`-th; whether it did."""

    store = _Stopping(patient.store, step)
    try:
        Admin("db", store=store, clock=patient.clock, ids=patient.ids).repair(plan_only=False)
    except _Died:
        return True
    except FlagstoneError as error:
        raise AssertionError(f"write {step}") from error
    return False


class _Died(BaseException):
    """The process is gone."""


class _Stopping:
    """A store whose user dies at the n-th write: before it happens."""

    def __init__(self, inner: object, step: int) -> None:
        self.inner = inner
        self._left = step

    def __getattr__(self, name: str) -> object:
        verb = getattr(self.inner, name)
        if name not in ("put", "put_if_absent", "put_if_match", "copy", "delete", "delete_many"):
            return verb

        def counted(*args: object, **kwargs: object) -> object:
            self._left -= 1
            if self._left <= 0:
                raise _Died
            return verb(*args, **kwargs)

        return counted
