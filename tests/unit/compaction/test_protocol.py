"""Coordinator and workers on one database, step by step: every state of a job, and which process changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from flagstone.compaction.commit import checkpoint_id
from flagstone.compaction.coordinator import LocalWorker
from flagstone.compaction.extensions import CompactionTask
from flagstone.config.settings import CompactionWorkerOptions, CompactorOptions, SchedulerOptions
from flagstone.errors import Closed
from flagstone.lsm.tree import BytesRange
from flagstone.metadata.compactions import (
    Compactions,
    DrainSpec,
    Job,
    JobContext,
    JobStatus,
    Subcompaction,
    TieredSpec,
    Worker,
    add_job,
)
from flagstone.metadata.fencing import claim_compactor
from flagstone.metadata.manifest import SsTable, apply_compaction
from flagstone.store.counting import CountingStore
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.types import RunId, Ulid
from kit.compactors import CompactionWorld, RowExecutor

SUBMITTED, SCHEDULED, RUNNING = JobStatus.SUBMITTED, JobStatus.SCHEDULED, JobStatus.RUNNING
COMPACTED, COMPLETED, FAILED = JobStatus.COMPACTED, JobStatus.COMPLETED, JobStatus.FAILED


@pytest.fixture
def world() -> CompactionWorld:
    return CompactionWorld().create()


def submit(world: CompactionWorld, spec: TieredSpec | DrainSpec) -> Ulid:
    job = Job(world.ids.ulid(), spec)
    world.compactions.update(lambda now: add_job(now.value, job))
    return job.id


# -- starting


def test_the_first_start_writes_three_compactions_files_and_later_ones_two(world: CompactionWorld) -> None:
    world.coordinator().run_once()

    versions = [world.compactions.load(entry.id) for entry in world.compactions.list()]
    assert versions == [Compactions(0), Compactions(1), Compactions(1)]
    assert world.manifest.compactor_epoch == 1

    world.coordinator().run_once()

    assert world.versions() == (3, 5)
    assert world.compactions.require_latest().value == Compactions(2)


def test_a_starting_coordinator_checks_scheduled_jobs_again_and_keeps_running_ones(
    world: CompactionWorld,
) -> None:
    world.flush_many(4)
    world.coordinator().run_once()
    assert world.statuses() == [SCHEDULED]
    world.edit_job(lambda job: replace(job, status=RUNNING, worker=Worker("w", world.clock.now_ms())))

    world.coordinator().run_once()

    assert world.jobs()[0].worker is not None
    world.edit_job(lambda job: replace(job, status=SCHEDULED, worker=None))
    world.coordinator().run_once()
    statuses = [
        [job.status for job in world.compactions.load(entry.id).jobs] for entry in world.compactions.list()
    ]
    assert statuses[-2:] == [[SUBMITTED], [SCHEDULED]]


def test_an_embedded_coordinator_claims_its_role_when_there_is_work(world: CompactionWorld) -> None:
    board = world.board()
    coordinator = world.coordinator(board=board, embedded=True)
    world.flush_many(3)
    board.note_manifest(world.manifests.require_latest())

    assert coordinator.run_once() == 5.0
    assert world.compactions.latest() is None

    world.flush_many(1, start=3)
    board.note_manifest(world.manifests.require_latest())
    coordinator.run_once()

    assert world.statuses() == [SCHEDULED]


def test_an_embedded_coordinator_claims_its_role_after_five_seconds_without_work(
    world: CompactionWorld,
) -> None:
    coordinator = world.coordinator(embedded=True)
    world.clock.advance(5000)

    coordinator.run_once()

    assert coordinator.claimed


# -- the life of a job


def test_a_job_of_a_separate_worker_goes_through_all_states(
    world: CompactionWorld,
) -> None:
    world.flush_many(4)
    before = world.contents()
    coordinator, worker = world.coordinator(), world.worker()

    world.settle(coordinator, worker)

    states = [
        job.status for entry in world.compactions.list() for job in world.compactions.load(entry.id).jobs
    ]
    assert states == [SCHEDULED, RUNNING, COMPACTED, COMPLETED]
    assert not world.manifest.tree.l0
    assert [run.id for run in world.manifest.tree.runs] == [0]
    assert world.contents() == before


def test_a_job_of_a_local_worker_costs_three_compactions_files(world: CompactionWorld) -> None:
    world.flush_many(4)
    before = world.contents()
    coordinator, worker = world.pair()

    world.settle(coordinator, worker)

    states = [
        job.status for entry in world.compactions.list() for job in world.compactions.load(entry.id).jobs
    ]
    assert states == [RUNNING, COMPACTED, COMPLETED]
    assert world.contents() == before


def test_a_commit_creates_a_checkpoint_of_the_state_before_it(world: CompactionWorld) -> None:
    world.flush_many(4)
    world.settle(*world.pair())

    (job,) = world.jobs()
    kept = world.manifest.checkpoint(checkpoint_id(job.id))
    assert kept is not None
    assert kept.expires_s is not None
    assert kept.expires_s - kept.created_s == 900
    before = world.manifests.load(kept.manifest_id)
    assert len(before.tree.l0) == 4
    assert before.checkpoint(kept.id) == kept
    assert kept.manifest_id == world.manifest_id - 1
    assert world.manifest.tree.last_compacted_l0 == job.spec.l0_view_ids[0]


def test_the_compactions_file_keeps_only_the_newest_finished_job(world: CompactionWorld) -> None:
    coordinator, worker = world.pair()
    for start in range(0, 12, 4):
        world.flush_many(4, start=start)
        world.settle(coordinator, worker)
    assert world.statuses() == [COMPLETED]


@pytest.mark.slow
def test_many_rounds_keep_every_row_and_few_sources(world: CompactionWorld) -> None:
    coordinator, worker = world.pair()
    for start in range(0, 60, 2):
        world.flush_many(2, start=start)
        before = world.contents()
        world.settle(coordinator, worker)
        assert world.contents() == before
    tree = world.manifest.tree
    assert len(tree.l0) < 4
    assert len(tree.runs) < 8


def test_a_job_waits_while_the_local_worker_has_no_free_slot(world: CompactionWorld) -> None:
    board = world.board()
    worker = world.worker(CompactionWorkerOptions(max_concurrent_compactions=1), board=board, polls=False)
    coordinator = world.coordinator(board=board, local=LocalWorker("busy", 0))
    world.flush_many(4)
    coordinator.run_once()
    assert world.statuses() == [SCHEDULED]
    worker.run_once()
    assert world.jobs()[0].worker == Worker(worker.id, world.clock.now_ms())


# -- submissions


def test_a_submitted_job_is_checked_and_scheduled(world: CompactionWorld) -> None:
    coordinator, worker = world.pair(
        CompactorOptions(scheduler_options=SchedulerOptions(min_compaction_sources=8))
    )
    world.flush_many(3)
    coordinator.run_once()
    l0 = tuple(view.id for view in world.manifest.tree.l0)
    submit(world, TieredSpec(l0, (), RunId(0)))
    world.clock.advance(5000)

    world.settle(coordinator, worker)

    assert world.statuses() == [COMPLETED]
    assert len(world.manifest.tree.runs) == 1


def test_an_invalid_submitted_job_fails(world: CompactionWorld) -> None:
    coordinator = world.coordinator()
    coordinator.run_once()
    before = world.manifest
    submit(world, TieredSpec((Ulid(5),), (), RunId(0)))
    world.clock.advance(5000)

    coordinator.run_once()

    assert world.statuses() == [FAILED]
    assert world.manifest == before


def test_a_drain_is_applied_at_once(world: CompactionWorld) -> None:
    coordinator = world.coordinator()
    oldest = world.flush((b"seg1", b"1"), segment=b"seg")
    newest = world.flush((b"seg2", b"1"), segment=b"seg")
    coordinator.run_once()
    # `last_compacted_l0` becomes the newest source, whatever the order of the sources.
    submit(world, DrainSpec(b"seg", (oldest, newest)))
    world.clock.advance(5000)

    coordinator.run_once()

    tree = world.manifest.tree_of(b"seg")
    assert tree is not None
    assert tree.empty
    assert tree.last_compacted_l0 == newest
    assert world.statuses() == [COMPLETED]


@pytest.mark.parametrize("drained", [(0,), (1,), (0, 1), (0, 2)])
def test_a_drain_that_leaves_older_ssts_in_l0_fails(world: CompactionWorld, drained: tuple[int, ...]) -> None:
    l0 = [world.flush((b"seg%d" % number, b"1"), segment=b"seg") for number in range(3)][::-1]
    coordinator = world.coordinator()
    coordinator.run_once()
    before = world.manifest
    submit(world, DrainSpec(b"seg", tuple(l0[index] for index in drained)))
    world.clock.advance(5000)

    coordinator.run_once()

    assert world.statuses() == [FAILED]
    assert world.manifest == before


def test_a_drain_of_the_root_tree_fails(world: CompactionWorld) -> None:
    only = world.flush((b"key", b"1"))
    coordinator = world.coordinator()
    coordinator.run_once()
    submit(world, DrainSpec(b"", (only,)))
    world.clock.advance(5000)

    coordinator.run_once()

    assert world.statuses() == [FAILED]
    assert [view.id for view in world.manifest.tree.l0] == [only]


def test_sources_that_do_not_overlap_are_moved_with_enable_trivial_move(world: CompactionWorld) -> None:
    for number in (2, 0, 3, 1):
        world.flush((b"%d" % number, b"value"))
    ssts = {view.sst_id for view in world.manifest.tree.l0}
    before = world.contents()
    coordinator = world.coordinator(CompactorOptions(enable_trivial_move=True))

    coordinator.run_once()

    (run,) = world.manifest.tree.runs
    assert {view.sst_id for view in run.views} == ssts
    firsts = [world.manifest.sst(view).info.first_entry for view in run.views]
    assert firsts == [b"0", b"1", b"2", b"3"]
    assert world.statuses() == [COMPLETED]
    assert world.contents() == before


def test_sources_that_overlap_are_not_moved(world: CompactionWorld) -> None:
    world.flush_many(4)
    world.coordinator(CompactorOptions(enable_trivial_move=True)).run_once()
    assert world.statuses() == [SCHEDULED]


# -- workers that fail


class Died(BaseException):
    """The process crashed."""


def dies_after(ssts: int) -> Callable[[int], None]:
    def after_sst(made: int) -> None:
        if made == ssts:
            raise Died

    return after_sst


def test_the_job_of_a_crashed_worker_is_resumed_by_another_from_its_recorded_ssts(
    world: CompactionWorld,
) -> None:
    world.flush_many(4, rows=8)
    before = world.contents()
    coordinator = world.coordinator()
    coordinator.run_once()
    # A worker that recorded two SSTs and then crashed.
    first = RowExecutor(world.store, ids=world.ids)
    contexts: list[JobContext] = []
    (job,) = world.jobs()
    first.after_sst = dies_after(2)
    assert isinstance(job.spec, TieredSpec)
    task = CompactionTask(job_id=job.id, spec=job.spec, manifest=world.manifest)
    with pytest.raises(Died):
        first.run(task, record=contexts.append, cancelled=lambda: False)
    lost = Worker("lost", world.clock.now_ms())
    world.edit_job(lambda job: replace(job, status=RUNNING, worker=lost, context=contexts[-1]))
    second = RowExecutor(world.store, ids=world.ids)
    worker = world.worker(executor=second)

    world.settle(coordinator, worker)
    assert world.statuses() == [RUNNING]
    world.clock.advance(30_000)
    world.settle(coordinator, worker)

    assert second.reused == 2
    assert world.statuses() == [COMPLETED]
    assert world.contents() == before
    assert world.metrics.as_dict()["slatedb.compactor.jobs_reclaimed"] == 1


class Stumbling(RowExecutor):
    """Fails before its first SST while `broken` is set."""

    attempts = 0
    broken = True

    def run(self, task: CompactionTask, **callbacks: Any) -> tuple[SsTable, ...]:
        self.attempts += 1
        if self.broken:
            raise OSError("disk full")
        return super().run(task, **callbacks)


def test_a_failed_job_is_scheduled_again_with_growing_pauses(world: CompactionWorld) -> None:
    world.flush_many(4)
    executor = Stumbling(world.store, ids=world.ids)
    coordinator, worker = world.pair(executor=executor)

    for _ in range(20):
        coordinator.run_once()
        worker.run_once()

    assert executor.attempts == 1
    (job,) = world.jobs()
    assert (job.status, job.worker) == (SCHEDULED, None)
    (setback,) = worker.status()["setbacks"].values()
    assert setback == {"failures": 1, "reason": "OSError: disk full"}

    for _ in range(200):
        world.clock.advance(1000)
        coordinator.run_once()
        worker.run_once()

    assert executor.attempts == 1 + 7  # 1, 2, 4, 8, … seconds apart
    assert world.metrics.as_dict()["flagstone.compactor.job_failures"] == 8
    executor.broken = False
    world.clock.advance(300_000)
    world.settle(coordinator, worker)
    assert world.statuses() == [COMPLETED]
    assert worker.status()["setbacks"] == {}


def test_ssts_written_before_a_failure_are_used_by_the_next_attempt(world: CompactionWorld) -> None:
    world.flush_many(4)
    before = world.contents()

    def fail_once(_: int) -> None:
        executor.after_sst = lambda _: None
        raise OSError("disk full")

    executor = RowExecutor(world.store, ids=world.ids, after_sst=fail_once)
    world.settle(*world.pair(executor=executor))

    assert executor.reused == 1
    assert world.contents() == before


def test_a_stopping_worker_returns_its_running_job(world: CompactionWorld) -> None:
    world.flush_many(4)
    worker = world.worker()

    def stop_after_one(_: int) -> None:
        worker.cancel()

    world.executors[-1].after_sst = stop_after_one
    world.coordinator().run_once()
    worker.run_once()
    assert worker.run_once() is None
    worker.stop(1.0)

    (job,) = world.jobs()
    assert (job.status, job.worker) == (SCHEDULED, None)
    assert job.context is not None
    assert len(job.context.subcompactions[0].output_ssts) == 1


def test_a_stopping_worker_returns_a_job_it_never_started(world: CompactionWorld) -> None:
    world.flush_many(4)
    coordinator, worker = world.pair()
    coordinator.run_once()
    assert world.statuses() == [RUNNING], "given to the worker of the same process at once"

    worker.stop(1.0)

    (job,) = world.jobs()
    assert (job.status, job.worker) == (SCHEDULED, None)


def test_a_worker_whose_job_was_given_to_another_reports_nothing(world: CompactionWorld) -> None:
    world.flush_many(4)
    worker = world.worker()
    other = Worker("other", world.clock.now_ms())

    def take_away(_: int) -> None:
        world.edit_job(lambda job: replace(job, worker=other))

    world.executors[-1].after_sst = take_away
    world.coordinator().run_once()
    worker.run_once()
    world.clock.advance(10_000)
    worker.run_once()
    worker.run_once()

    (job,) = world.jobs()
    assert (job.status, job.worker) == (RUNNING, other)
    assert not worker.busy


def test_a_job_whose_sources_are_gone_fails(world: CompactionWorld) -> None:
    world.flush_many(4)
    coordinator = world.coordinator()
    coordinator.run_once()
    (job,) = world.jobs()
    world.manifests.update(
        lambda now: apply_compaction(
            now.value, segment=b"", l0=job.spec.l0_view_ids, runs=(), destination=None
        )
    )
    world.clock.advance(5000)

    coordinator.run_once()

    assert world.statuses() == [FAILED]


# -- two coordinators


def test_a_newer_coordinator_fences_the_older_one(world: CompactionWorld) -> None:
    older, _ = world.pair()
    older.run_once()
    newer = world.coordinator()
    newer.run_once()
    world.flush_many(4)
    world.clock.advance(5000)

    older.run_once()

    assert older.run_once() is None
    assert older.fenced
    assert older.status()["state"] == "fenced"
    with pytest.raises(Closed, match="newer compactor"):
        older.raise_fenced()


def test_a_fenced_coordinator_cannot_commit(world: CompactionWorld) -> None:
    world.flush_many(4)
    coordinator, worker = world.pair()
    coordinator.run_once()
    worker.run_once()
    worker.run_once()
    assert world.statuses() == [COMPACTED]
    claim_compactor(world.manifests)
    before = world.manifest

    coordinator.run_once()

    assert coordinator.fenced
    assert world.manifest == before


def test_an_embedded_coordinator_claims_its_role_again_when_writes_stall_and_no_job_runs(
    world: CompactionWorld,
) -> None:
    full = False
    watched = FaultyStore(world.store, clock=world.clock)
    embedded = CompactionWorld(watched, clock=world.clock, seed=9).coordinator(stalled=lambda _: full)
    embedded.run_once()
    elsewhere = world.coordinator()
    elsewhere.run_once()
    world.flush_many(4)
    world.clock.advance(5000)
    embedded.run_once()
    assert embedded.fenced

    for _ in range(20):
        world.clock.advance(15_000)
        embedded.run_once()
    assert embedded.fenced  # writes do not stall

    requests = len(watched.calls)
    for _ in range(50):
        embedded.run_once()
    assert len(watched.calls) == requests  # further calls within the interval make none

    watched.faults.append(Fault("error"))
    world.clock.advance(15_000)
    embedded.run_once()
    assert embedded.fenced  # a failed request changes nothing

    full = True
    for _ in range(10):
        world.clock.advance(15_000)
        elsewhere.run_once()
        world.edit_job(lambda job: replace(job, status=RUNNING, worker=Worker("w", world.clock.now_ms())))
        embedded.run_once()
    assert embedded.fenced  # the other coordinator is at work

    for _ in range(6):
        world.clock.advance(15_000)
        embedded.run_once()
    assert embedded.claimed
    assert world.manifest.compactor_epoch == 3
    world.clock.advance(5000)
    elsewhere.run_once()
    assert elsewhere.fenced


def test_an_idle_embedded_coordinator_makes_few_requests(world: CompactionWorld) -> None:
    counting = CountingStore(world.store, component="test")
    world.store = counting
    board = world.board()
    worker = world.worker(board=board, polls=False)
    coordinator = world.coordinator(board=board, local=LocalWorker(worker.id, 4), embedded=True)
    world.clock.advance(5000)
    coordinator.run_once()
    counting.reset()
    for _ in range(600):
        coordinator.run_once()
        worker.run_once()
        world.clock.advance(1000)
    totals = counting.totals()
    requests = sum(totals["requests"].values())
    print(f"{requests} requests in ten idle minutes")
    assert requests <= 70


@pytest.mark.parametrize("interval", [timedelta(seconds=1), timedelta(seconds=20)])
def test_a_separate_worker_keeps_its_job_while_it_renews_its_claim(
    world: CompactionWorld, interval: timedelta
) -> None:
    world.flush_many(4)
    coordinator = world.coordinator()
    coordinator.run_once()
    context = JobContext((Subcompaction(BytesRange()),))
    for _ in range(20):
        beat = Worker("far away", world.clock.now_ms())
        world.edit_job(lambda job, beat=beat: replace(job, status=RUNNING, worker=beat, context=context))
        world.clock.advance(interval.total_seconds() * 1000)
        coordinator.run_once()
        assert world.statuses() == [RUNNING]
