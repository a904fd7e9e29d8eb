"""The rules of collection without a store: what a plan deletes and what it keeps."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from flagstone.format.sst_info import SsTableInfo
from flagstone.gc.metadata import plan_boundary, plan_detach, plan_versions
from flagstone.gc.plan import TOO_YOUNG, Plan, apply_age, drop, keep
from flagstone.gc.ssts import SstObject, compacted_l0, plan_ssts, sst_cutoff
from flagstone.gc.wal import WalObject, kept_ranges, plan_wal
from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec
from flagstone.metadata.manifest import ExternalDb, Manifest, SsTable
from flagstone.metadata.sequenced import Listed
from flagstone.store.port import ObjectMeta, ObjectVersion
from flagstone.types import RunId, Ulid, WalId


def meta(path: str = "x", *, size: int = 100, modified_ms: int = 1) -> ObjectMeta:
    return ObjectMeta(path, size, modified_ms, ObjectVersion("e"))


def ulid(ms: int, low: int = 0) -> Ulid:
    return Ulid(ms << 80 | low)


def with_l0(*times_ms: int) -> Manifest:
    ssts = [SsTable(ulid(ms), SsTableInfo(b"a", b"z", 1, 1, 1, 0)) for ms in times_ms]
    return Manifest(
        ssts={sst.id: sst for sst in ssts},
        tree=Tree(l0=tuple(SstView.whole(sst.id) for sst in reversed(ssts))),
    )


def job(ms: int, status: JobStatus) -> Job:
    return Job(ulid(ms), TieredSpec((), (), RunId(0)), status)


@given(
    st.sets(st.integers(1, 40), min_size=1),
    st.sets(st.integers(1, 40)),
    st.integers(1, 40),
    st.integers(0, 100),
)
def test_no_plan_deletes_the_latest_or_a_checkpointed_manifest(
    present: set[int], checkpointed: set[int], latest: int, min_age_ms: int
) -> None:
    listed = [Listed(number, meta(modified_ms=number)) for number in sorted(present)]
    plan = plan_versions("manifest", listed, latest=latest, checkpointed=checkpointed)
    aged = apply_age(plan, now_ms=60, min_age_ms=min_age_ms)

    doomed = {verdict.id for verdict in aged.deletions}
    assert doomed == {
        number
        for number in present
        if number < latest and number not in checkpointed and number <= 60 - min_age_ms
    }
    boundary = plan_boundary(aged)
    assert boundary == max(doomed, default=None)
    assert boundary is None or boundary < latest
    assert len(aged.verdicts) == len(present)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans())),
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))),
)
def test_every_wal_file_that_a_reader_replays_is_kept(
    files: list[tuple[int, bool]], replay_after: int, checkpoints: list[tuple[int, int]]
) -> None:
    listed = [WalObject(WalId(number), meta(size=0 if fence else 50)) for number, fence in files]
    checkpointed = [Manifest(replay_after_wal_id=WalId(a), wal_id_last_seen=WalId(b)) for a, b in checkpoints]
    kept = kept_ranges(Manifest(replay_after_wal_id=WalId(replay_after)), checkpointed)
    plans = [plan_wal("wal", listed, kept), plan_wal("wal_fence", listed, kept)]

    assert sum(len(plan.verdicts) for plan in plans) == len(files)
    for plan in plans:
        for verdict in plan.verdicts:
            needed = verdict.id >= replay_after or any(a < verdict.id <= b for a, b in checkpoints)
            assert verdict.delete == (not needed)
            assert (plan.kind == "wal_fence") == (verdict.meta.size == 0)


def test_a_wal_file_of_up_to_ten_bytes_is_a_fence() -> None:
    assert WalObject(WalId(1), meta(size=10)).kind == "wal_fence"
    assert WalObject(WalId(1), meta(size=11)).kind == "wal"


@given(
    l0=st.lists(st.integers(1, 60), max_size=4).map(sorted),
    jobs=st.lists(st.tuples(st.integers(1, 60), st.sampled_from(list(JobStatus))), max_size=4),
    orphans=st.lists(st.integers(1, 60), max_size=6),
)
def test_only_ssts_older_than_every_running_flush_and_job_are_garbage(
    l0: list[int], jobs: list[tuple[int, JobStatus]], orphans: list[int]
) -> None:
    manifest = with_l0(*l0)
    compactions = Compactions(jobs=tuple(job(ms, status) for ms, status in jobs))
    listed = [SstObject(ulid(ms, 1), meta()) for ms in orphans]
    listed += [SstObject(sst_id, meta()) for sst_id in manifest.ssts]
    plan = plan_ssts(listed, referenced=manifest.ssts, cutoff=sst_cutoff(manifest, compactions))

    active = [ms for ms, status in jobs if status not in (JobStatus.COMPLETED, JobStatus.FAILED)]
    doomed = sorted(verdict.id >> 80 for verdict in plan.deletions)
    assert doomed == sorted(
        ms for ms in orphans if l0 and ms < max(l0) and all(ms < begun for begun in active)
    )


def test_without_a_flush_no_sst_is_garbage() -> None:
    assert sst_cutoff(Manifest(), None).before_ms == 0


def test_last_compacted_l0_is_the_cutoff_when_l0_is_empty() -> None:
    assert sst_cutoff(Manifest(tree=Tree(last_compacted_l0=ulid(30))), None).before_ms == 30


def test_the_last_compacted_l0_itself_is_garbage() -> None:
    manifest = Manifest(tree=Tree(last_compacted_l0=ulid(30, 1)))
    listed = [SstObject(ulid(30, 1), meta()), SstObject(ulid(30, 2), meta())]
    plan = plan_ssts(
        listed, referenced=(), cutoff=sst_cutoff(manifest, None), compacted=compacted_l0(manifest)
    )
    assert [verdict.id for verdict in plan.deletions] == [ulid(30, 1)]


def test_an_object_with_a_time_in_whole_seconds_counts_as_up_to_a_second_younger() -> None:
    plan = Plan("wal", (drop(meta(modified_ms=5000), 1, "r"), drop(meta(modified_ms=5001), 2, "r")))
    assert [verdict.id for verdict in apply_age(plan, now_ms=5510, min_age_ms=10).deletions] == [2]
    assert len(apply_age(plan, now_ms=6009, min_age_ms=10).deletions) == 2


def test_an_sst_whose_id_is_of_the_future_is_kept_until_then() -> None:
    listed = [SstObject(ulid(9000), meta(modified_ms=1))]
    plan = plan_ssts(listed, referenced=(), cutoff=sst_cutoff(with_l0(20_000), None))
    assert len(plan.deletions) == 1
    young = apply_age(plan, now_ms=8000, min_age_ms=10)
    assert not young.deletions
    assert young.verdicts[0].reason == TOO_YOUNG
    assert young.youngest_due_ms == 9000


def test_an_object_that_the_rules_keep_is_kept_at_any_age() -> None:
    plan = Plan("wal", (keep(meta(modified_ms=1), 1, "needed"),))
    assert apply_age(plan, now_ms=10**9, min_age_ms=0) == plan


def external(path: str, number: int, *ssts: int) -> ExternalDb:
    return ExternalDb(path, UUID(int=number), UUID(int=100 + number), tuple(ulid(ms) for ms in ssts))


def test_a_lender_is_released_when_no_reachable_manifest_uses_its_ssts() -> None:
    latest = Manifest(
        external_dbs=(external("a", 1), external("b", 2), external("c", 3, 7), external("a", 4))
    )
    checkpointed = [Manifest(external_dbs=(external("a", 1), external("b", 2, 9)))]
    assert plan_detach(latest, checkpointed) == [external("a", 1), external("a", 4)]


def test_an_unfinished_clone_releases_no_lender() -> None:
    assert plan_detach(Manifest(initialized=False, external_dbs=(external("a", 1),)), []) == []
