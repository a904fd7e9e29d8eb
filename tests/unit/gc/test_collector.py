"""Rounds on a small database: which objects are deleted, which are kept, and in which order."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

import flagstone
from flagstone import Admin
from flagstone.clones.checkpoint import delete_checkpoint
from flagstone.config import GarbageCollectorOptions
from flagstone.errors import InvalidRequest
from flagstone.gc.collector import Collector
from flagstone.gc.plan import MIN_FENCE_AGE_MS, TOO_YOUNG, KindOptions, kind_options, requested_options
from flagstone.metadata.annotations import final_name
from flagstone.metadata.compactions import JobStatus
from flagstone.metadata.manifest import Checkpoint, ExternalDb, add_checkpoint
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.counting import CountingStore
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import StoredObject
from flagstone.store.retrying import RetryingStore
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import CompactionsId, ManifestId, Ulid, WalId
from kit.databases import QUIET
from kit.faults import InterposingStore
from kit.garbage import GarbageWorld, no_checkpoint

UPLOAD = "upload of a process that died"


@pytest.fixture
def world() -> GarbageWorld:
    return GarbageWorld()


# -- metadata ---------------------------------------------------------------------------------------------


def test_old_manifests_are_deleted_and_the_boundary_is_advanced_over_them(world: GarbageWorld) -> None:
    world.claim(9)
    saved = world.checkpoint()
    world.claim(2)
    world.advance(61)
    report = world.collect("manifest")

    assert world.manifest_ids() == [saved.manifest_id, 13]
    assert world.manifests.read_boundary() == 12
    assert report.of("manifest").reasons == {"superseded": 11, "named by a checkpoint": 1, "the latest": 1}
    assert (report.of("manifest").examined, report.of("manifest").kept, report.deleted) == (13, 2, 11)
    assert report.of("manifest").bytes > 0
    assert world.manifests.load(saved.manifest_id).checkpoints
    assert world.manifests.require_latest().id == 13


def test_young_manifests_are_kept_and_the_report_has_the_time_of_the_next_round(world: GarbageWorld) -> None:
    world.claim(3)
    world.advance(20)
    world.claim(1)
    report = world.collect("manifest")
    assert report.of("manifest").reasons == {TOO_YOUNG: 4, "the latest": 1}
    assert report.revisit_in_ms == 40_000
    assert world.manifests.read_boundary() == 0
    world.advance(40)
    assert world.collect("manifest").deleted == 4


def test_all_compactions_files_but_the_latest_are_deleted(world: GarbageWorld) -> None:
    for _ in range(4):
        world.job()
    world.advance(61)
    world.collect("compactions")
    assert [entry.id for entry in world.compactions.list()] == [5]
    assert world.compactions.read_boundary() == 4


def test_without_boundary_files_old_manifests_are_deleted_too(world: GarbageWorld) -> None:
    world.claim(5)
    world.advance(61)
    world.collect("manifest", boundary_files=False)
    assert world.manifest_ids() == [6]
    assert world.paths_in("gc") == []


def test_the_boundary_advances_in_every_round_on_a_local_store(tmp_path: Path) -> None:
    world = GarbageWorld(LocalStore(tmp_path, fsync=False, clock=(clock := VirtualClock())), clock=clock)
    boundaries = []
    for _ in range(3):
        world.claim(2)
        world.advance(61)
        world.collect("manifest")
        boundaries.append(world.manifests.read_boundary())
    assert boundaries == [2, 4, 6]
    assert world.manifest_ids() == [7]


def test_a_staging_file_of_a_killed_process_is_deleted_after_an_hour(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.put(b"k", b"v")
    sst = next((tmp_path / "db" / "compacted").iterdir())
    left, fresh, elsewhere = (
        Path(f"{sst}#1"),
        Path(f"{sst}#2"),
        tmp_path / "other" / "compacted" / f"{sst.name}#1",
    )
    elsewhere.parent.mkdir(parents=True)
    for path in (left, fresh, elsewhere):
        path.write_bytes(b"half")
    for path in (left, elsewhere):
        os.utime(path, (0, 0))
    admin = Admin(tmp_path / "db")
    assert admin.collect_garbage(min_age=timedelta(), dry_run=True).of("compacted").reasons[UPLOAD] == 1
    assert left.exists()
    admin.collect_garbage(min_age=timedelta())
    assert (left.exists(), fresh.exists(), elsewhere.exists()) == (False, True, True)
    assert sst.exists()


def test_no_manifest_is_deleted_if_the_boundary_cannot_be_advanced(world: GarbageWorld) -> None:
    world.claim(5)
    world.advance(61)
    faulty = FaultyStore(world.store, [Fault("error", nth=None, op="put_if_absent", path="*.boundary")])
    report = Collector(faulty, world.paths, {"manifest": KindOptions(0)}, clock=world.clock).collect()
    assert world.manifest_ids() == [1, 2, 3, 4, 5, 6]
    assert [error[:9] for error in report.errors] == ["manifest:"]
    assert not report.ok


def test_a_crash_between_boundary_and_deletion_is_completed_by_the_next_round(world: GarbageWorld) -> None:
    world.claim(5)
    world.advance(61)
    faulty = FaultyStore(world.store, [Fault("crash", op="delete_many")])
    with pytest.raises(Crashed):
        Collector(faulty, world.paths, {"manifest": KindOptions(0)}, clock=world.clock).collect()
    assert world.manifests.read_boundary() == 5
    assert world.manifests.require_latest().id == 6
    world.collect("manifest")
    assert world.manifest_ids() == [6]


# -- checkpoints ------------------------------------------------------------------------------------------


def test_expired_checkpoints_are_removed_and_keep_no_manifest(world: GarbageWorld) -> None:
    world.flush()
    brief = world.checkpoint(lifetime=timedelta(seconds=30))
    lasting = world.checkpoint()
    world.compact()
    world.flush()
    world.advance(100)
    report = world.collect()
    assert no_checkpoint([brief.id], world)
    assert not no_checkpoint([lasting.id], world)
    assert report.of("checkpoint").paths == [str(brief.id)]
    assert brief.manifest_id not in world.manifest_ids()
    assert lasting.manifest_id in world.manifest_ids()


def test_the_next_round_is_due_when_the_next_checkpoint_expires(world: GarbageWorld) -> None:
    world.checkpoint(lifetime=timedelta(seconds=300))
    report = world.collect("wal")
    assert report.revisit_in_ms is not None
    assert 299_000 <= report.revisit_in_ms <= 300_000


def test_a_collector_whose_clock_is_ahead_removes_no_checkpoint_and_no_young_manifest(
    world: GarbageWorld,
) -> None:
    world.claim(3)
    held = world.checkpoint(lifetime=timedelta(seconds=600))
    fast = VirtualClock(world.clock.now_ms() + 3_600_000)
    report = Collector(world.store, world.paths, {"manifest": KindOptions(60_000)}, clock=fast).collect()
    assert not no_checkpoint([held.id], world)
    assert report.deleted == 0


# -- WAL --------------------------------------------------------------------------------------------------


def test_wal_files_are_kept_from_the_replay_start_on(world: GarbageWorld) -> None:
    world.write_wal(5)
    world.flush()
    world.write_wal(3)
    world.advance(61)
    report = world.collect("wal")
    assert world.wal_ids() == [5, 6, 7, 8, 9]
    assert report.of("wal").reasons == {"its rows are in SSTs": 4, "needed to open the database": 5}


def test_a_checkpoint_keeps_the_wal_files_its_readers_replay(world: GarbageWorld) -> None:
    world.write_wal(3)
    world.flush()
    world.write_wal(2)
    world.manifests.update(lambda now: replace(now.value, wal_id_last_seen=WalId(6)))
    held = world.checkpoint()
    world.flush()
    world.flush()
    world.advance(61)
    world.collect("wal")
    assert world.wal_ids() == [4, 5, 6, 7, 8]
    delete_checkpoint(world.manifests, held.id)
    world.collect("wal")
    assert world.wal_ids() == [7, 8]


def test_fences_are_only_reported_by_default_and_never_deleted_young(world: GarbageWorld) -> None:
    fence = world.fence()
    world.write_wal(2)
    world.flush()
    world.advance(301)
    collector = world.collector(dict(kind_options(GarbageCollectorOptions())))
    report = collector.collect(["wal", "wal_fence"])
    assert report.of("wal_fence").dry_run
    assert report.of("wal_fence").paths == [world.paths.wal(WalId(fence))]
    assert world.wal_ids() == [1, 3, 4]

    asked = requested_options(GarbageCollectorOptions(), ["wal_fence"], timedelta())
    assert asked["wal_fence"] == KindOptions(MIN_FENCE_AGE_MS, False, timedelta(seconds=600))
    world.collector(dict(asked)).collect()
    assert world.wal_ids() == [3, 4]


def test_a_wal_in_another_store_is_collected_there(world: GarbageWorld) -> None:
    elsewhere = MemoryStore(clock=world.clock)
    world.flush()
    for number in range(1, 4):
        elsewhere.put(world.paths.wal(WalId(number)), b"rows of a WAL file")
    world.manifests.update(lambda now: replace(now.value, replay_after_wal_id=WalId(3)))
    world.advance(61)
    Collector(
        world.store, world.paths, {"wal": KindOptions(60_000)}, wal_store=elsewhere, clock=world.clock
    ).collect()
    assert [meta.path for meta in elsewhere.list("")] == [world.paths.wal(WalId(3))]
    assert world.wal_ids() == [1]


# -- SSTs -------------------------------------------------------------------------------------------------


def test_ssts_without_a_reference_are_deleted(world: GarbageWorld) -> None:
    first, second = world.flush(), world.flush()
    world.advance(1)
    run = world.compact()
    world.advance(1)
    live = world.flush()
    world.advance(61)
    report = world.collect("compacted")
    assert not world.has(first)
    assert not world.has(second)
    assert world.has(run)
    assert world.has(live)
    assert report.of("compacted").bytes == 100


def test_ssts_of_a_checkpoint_are_kept_until_it_is_deleted(world: GarbageWorld) -> None:
    old = world.flush()
    held = world.checkpoint()
    world.advance(1)
    world.compact()
    world.flush()
    world.advance(61)
    world.collect()
    assert world.has(old)
    delete_checkpoint(world.manifests, held.id)
    world.advance(61)
    world.collect()
    assert not world.has(old)


def test_outputs_of_a_running_compaction_job_are_kept(world: GarbageWorld) -> None:
    world.flush()
    world.advance(1)
    orphan = world.upload()
    world.advance(1)
    running = world.job(JobStatus.RUNNING)
    world.advance(1)
    output = world.upload()
    world.advance(1)
    world.flush()
    world.advance(61)
    report = world.collect("compacted")
    assert world.has(output)
    assert not world.has(orphan)
    assert report.of("compacted").reasons["perhaps of a compaction under way"] == 1
    world.compactions.update(
        lambda now: replace(
            now.value, jobs=tuple(replace(job, status=JobStatus.FAILED) for job in now.value.jobs)
        )
    )
    world.collect("compacted")
    assert not world.has(output)
    assert ulid_ms(running.id) < ulid_ms(output.id)


def test_uploads_of_a_running_flush_are_kept(world: GarbageWorld) -> None:
    world.flush()
    world.advance(1)
    uploaded = world.upload()
    world.advance(1000)
    world.collect("compacted", min_age_s=0)
    assert world.has(uploaded)
    world.flush(uploaded)


def test_without_a_compactions_file_orphaned_ssts_are_deleted(world: GarbageWorld) -> None:
    orphan = world.upload()
    world.advance(1)
    world.flush()
    world.advance(61)
    world.collect("compacted")
    assert not world.has(orphan)


def test_a_job_that_commits_between_the_two_reads_keeps_its_outputs(world: GarbageWorld) -> None:
    """The compactions file is read before the manifest: the outputs of a finished job are then in the manifest."""
    world.flush()
    world.advance(1)
    job = world.job(JobStatus.COMPACTED)
    world.advance(1)
    output = world.upload()
    world.advance(1)
    world.flush()
    world.advance(100)

    def commit() -> None:
        world.compact(output=output)
        world.compactions.update(
            lambda now: replace(
                now.value,
                jobs=tuple(
                    replace(entry, status=JobStatus.COMPLETED) if entry.id == job.id else entry
                    for entry in now.value.jobs
                ),
            )
        )

    world.store = InterposingStore(world.store, commit, op="list", path="db/manifest", after=True)
    world.collect("compacted", "compactions")
    assert world.store.acted
    assert world.has(output)


def test_foreign_files_are_never_deleted(world: GarbageWorld) -> None:
    world.flush()
    names = [
        "compacted/readme.txt",
        "compacted/01abc.sst",
        "wal/7.sst",
        "wal/x",
        "manifest/00.manifest",
        "gc/note",
        "own",
    ]
    for name in names:
        world.store.put(f"db/{name}", b"")
    world.store.put("db2/compacted/" + "0" * 26 + ".sst", b"")
    world.store.put("db/compacted/deeper/" + "0" * 26 + ".sst", b"")
    world.claim(3)
    world.advance(1000)
    world.collect(min_age_s=0)
    left = {meta.path for meta in world.store.list("")}
    assert {f"db/{name}" for name in names} <= left
    assert {"db2/compacted/" + "0" * 26 + ".sst", "db/compacted/deeper/" + "0" * 26 + ".sst"} <= left


def test_a_checkpoint_without_its_manifest_stops_the_kinds_that_depend_on_it(world: GarbageWorld) -> None:
    old = world.flush()
    stray = replace(world.checkpoint(), id=UUID(int=5), manifest_id=ManifestId(77))
    world.manifests.update(lambda now: add_checkpoint(now.value, stray))
    world.advance(1)
    world.compact()
    world.flush()
    world.advance(61)
    report = world.collect()
    assert world.has(old)
    assert sorted(kind.kind for kind in report if kind.errors) == ["compacted", "detach", "wal", "wal_fence"]
    assert "00000000000000000077.manifest" in report.errors[0]
    assert report.of("manifest").deleted > 0


def test_checkpoints_deleted_during_a_round_cause_no_error() -> None:
    clock = VirtualClock()

    class Meddling(MemoryStore):
        def get(self, path: str) -> StoredObject:
            held = [entry for entry in saved if path == DbPaths("db").manifest(entry.manifest_id)]
            for entry in held:
                saved.remove(entry)
                delete_checkpoint(ManifestStore(self, DbPaths("db")), entry.id)
                super().delete(path)
            return super().get(path)

    saved: list[Checkpoint] = []
    world = GarbageWorld(Meddling(clock=clock), clock=clock)
    sst = world.flush()
    kept = world.checkpoint()
    saved += [world.checkpoint() for _ in range(5)]
    world.compact()
    report = world.collect()
    assert report.ok, report.errors
    assert saved == []
    assert world.has(sst)
    assert not no_checkpoint([kept.id], world)


# -- clones -----------------------------------------------------------------------------------------------


def test_a_clone_that_uses_no_lent_sst_releases_its_final_checkpoint(world: GarbageWorld) -> None:
    parent = GarbageWorld(world.store, root="parent", clock=world.clock)
    parent.flush()
    name = final_name(world.paths.root)
    final, other = parent.checkpoint(name=name), parent.checkpoint(name=name)
    entries = (
        ExternalDb("parent", UUID(int=1), final.id, ()),
        ExternalDb("parent", UUID(int=2), other.id, (Ulid(5),)),
        ExternalDb("gone", UUID(int=3), UUID(int=4), ()),
    )
    world.manifests.update(lambda now: replace(now.value, external_dbs=entries))
    dry = world.collect("detach", dry_run=True)
    assert dry.of("detach").paths == ["parent", "gone"]
    assert world.manifests.require_latest().value.external_dbs == entries

    report = world.collect("detach")
    assert world.manifests.require_latest().value.external_dbs == entries[1:2]
    assert report.manifest_id == world.manifests.require_latest().id
    assert no_checkpoint([final.id], parent)
    assert not no_checkpoint([other.id], parent)


# -- the round --------------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing_and_reports_what_a_round_deletes(world: GarbageWorld) -> None:
    first = world.flush()
    world.checkpoint(lifetime=timedelta(seconds=10))
    world.advance(1)
    world.compact()
    world.flush()
    world.advance(100)
    before = {meta.path for meta in world.store.list("")}
    report = world.collect(dry_run=True)
    assert {meta.path for meta in world.store.list("")} == before
    assert report.deleted == 0
    assert report.of("compacted").paths == [world.paths.sst(first.id)]
    assert report.of("checkpoint").deleted == 1

    acted = world.collect()
    assert [entry.paths for entry in acted if entry.kind != "manifest"] == [
        entry.paths for entry in report if entry.kind != "manifest"
    ]


def test_a_second_round_deletes_nothing(world: GarbageWorld) -> None:
    for _ in range(4):
        world.flush()
        world.advance(1)
    world.compact()
    world.flush()
    world.advance(61)
    assert world.collect().deleted > 0
    second = world.collect()
    assert second.deleted == 0
    assert second.ok
    assert second.revisit_in_ms is None


def test_the_clock_of_the_store_is_not_read_when_no_object_is_unneeded(world: GarbageWorld) -> None:
    world.flush()
    counting = CountingStore(world.store, component="test")
    Collector(counting, world.paths, {"compacted": KindOptions(0)}, clock=world.clock).collect()
    assert set(counting.totals()["requests"]) <= {"get", "list", "get_if_changed"}


def test_one_kind_that_fails_does_not_stop_the_others(world: GarbageWorld) -> None:
    world.write_wal(3)
    world.flush()
    world.advance(61)

    failing = FaultyStore(world.store, [Fault("error", op="delete_many", path="*/wal/*")])
    report = Collector(
        failing, world.paths, {"wal": KindOptions(0), "manifest": KindOptions(0)}, clock=world.clock
    ).collect()
    assert [error.partition(" at ")[0] for error in report.errors] == ["wal: Unavailable: injected error"]
    assert report.of("wal").deleted == 0
    assert report.of("manifest").deleted == 1
    assert len(world.wal_ids()) == 4


def test_an_unreadable_compactions_file_stops_the_deletion_of_ssts(world: GarbageWorld) -> None:
    world.flush()
    world.advance(1)
    orphan = world.upload()
    world.advance(1)
    world.job()
    world.flush()
    world.claim(2)
    world.advance(61)
    world.store.put(world.paths.compactions(CompactionsId(9)), b"damage")
    report = world.collect()
    assert world.has(orphan)
    assert [error.partition(":")[0] for error in report.errors] == ["compactions", "compacted"]
    assert report.of("manifest").deleted > 0


def test_a_halted_collector_deletes_nothing_and_reports_an_error(world: GarbageWorld) -> None:
    world.claim(5)
    world.advance(61)
    collector = world.collector()
    collector.halt()
    report = collector.collect(["manifest"])
    assert report.errors == ["manifest: stopped before all garbage was deleted"]
    assert len(world.manifest_ids()) == 6


def test_collecting_an_empty_path_is_refused_and_writes_nothing() -> None:
    store = MemoryStore()
    with pytest.raises(InvalidRequest, match="no database"):
        Collector(store, DbPaths("nothing"), {"wal": KindOptions(0)}).collect()
    assert [*store.list("")] == []


def test_unknown_kinds_and_negative_ages_are_refused(world: GarbageWorld) -> None:
    with pytest.raises(InvalidRequest, match="choose from manifest"):
        requested_options(GarbageCollectorOptions(), ["tables"], None)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="negative"):
        requested_options(GarbageCollectorOptions(), None, timedelta(seconds=-1))
    with pytest.raises(InvalidRequest, match="cannot collect wal"):
        requested_options(GarbageCollectorOptions(wal_options=None), ["wal"], None)
    with pytest.raises(InvalidRequest, match="cannot collect compacted"):
        world.collector({"wal": KindOptions(0)}).collect(["compacted"])


def test_a_round_counts_deleted_and_remaining_versions_in_the_metrics(world: GarbageWorld) -> None:
    world.claim(4)
    world.advance(61)
    world.collect()
    values = {metric.key: metric.value for metric in world.metrics.snapshot()}
    assert values["slatedb.gc.deleted_count{resource=manifest}"] == 4
    assert values["slatedb.gc.version_count{resource=manifest}"] == 5
    assert values["slatedb.gc.count"] == 1


def test_two_concurrent_collectors_keep_the_latest_manifest(world: GarbageWorld) -> None:
    world.claim(10)
    world.advance(61)
    two = world.collector()

    racing = InterposingStore(world.store, two.collect, op="delete_many")

    Collector(racing, world.paths, {"manifest": KindOptions(0)}, clock=world.clock).collect()
    assert racing.acted
    assert world.manifest_ids() == [11]


def test_the_pause_after_a_lost_race_comes_from_the_ids_of_the_admin() -> None:
    def paused_s(seed: int) -> float:
        world = GarbageWorld()
        world.checkpoint(lifetime=timedelta(seconds=1))
        world.advance(61)
        racing = InterposingStore(world.store, world.claim, op="put_if_absent", path="db/manifest/*")
        ids, started = Ids(seed, clock=world.clock), world.clock.monotonic()
        Admin("db", store=racing, clock=world.clock, ids=ids).collect_garbage(kinds=["manifest"])
        assert racing.acted
        return world.clock.monotonic() - started

    assert paused_s(1) == paused_s(1) > 0
    assert paused_s(1) != paused_s(2)


# -- two-phase --------------------------------------------------------------------------------------------


def test_unused_temporaries_and_records_of_a_two_phase_store_are_deleted(tmp_path: Path) -> None:
    clock = VirtualClock()
    base = MemoryStore(clock=clock)
    log = SqliteCommitLog(tmp_path / "commits.db", synchronous="OFF")
    two_phase = TwoPhaseStore(base, log, clock=clock)
    world = GarbageWorld(CountingStore(RetryingStore(two_phase, clock=clock), component="test"), clock=clock)
    world.claim(5)
    temporary = f"{world.paths.manifest(ManifestId(9))}.{UUID(int=3)}.{'0' * 16}"
    base.put(temporary, b"left by a crash")
    world.advance(61)
    world.collect("manifest")
    assert len([*log.records("db/manifest")]) == 6
    world.advance(61)
    report = world.collect("two_phase")
    assert report.of("two_phase").reasons == {
        "temporary without a decision": 1,
        "record of a deleted object": 5,
    }
    assert [record.destination for record in log.records("db/manifest")] == [
        world.paths.manifest(ManifestId(6))
    ]
    assert temporary not in {meta.path for meta in base.list("")}
    assert ManifestStore(world.store, world.paths).require_latest().id == 6
    log.close()
