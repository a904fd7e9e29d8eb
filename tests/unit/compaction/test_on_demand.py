"""Compaction on demand beside a coordinator that answers, one that does not, and jobs of other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flagstone.compaction.coordinator import Coordinator, release_taken_role
from flagstone.compaction.lifecycle import is_released
from flagstone.compaction.on_demand import CompactNow, Progress
from flagstone.compaction.picker import plan_full
from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.errors import Unavailable
from flagstone.loads.edit import Load, apply_load
from flagstone.metadata.compactions import Job, JobStatus
from flagstone.metadata.compactions import Worker as Claim
from flagstone.metadata.fencing import claim_compactor
from flagstone.runtime.pool import IoPool
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.types import Seq
from kit.compactors import CompactionWorld, RowExecutor


@pytest.fixture
def world() -> CompactionWorld:
    return CompactionWorld().create()


def now(
    world: CompactionWorld, meanwhile: Callable[[Progress], None] = lambda _: None, **changes: Any
) -> CompactNow:
    """A full compaction; `meanwhile` is what other processes do between two of its steps."""
    executor = RowExecutor(world.store, ids=world.ids)
    world.executors.append(executor)
    return CompactNow(
        world.board(),
        plan_full,
        executor,
        CompactorOptions(),
        CompactionWorkerOptions(),
        fallback=lambda manifest, jobs: plan_full(manifest, jobs, around=True),
        once=True,
        progress=meanwhile,
        pool=IoPool(max_workers=0, name="inline"),
        **changes,
    )


def test_compacting_a_database_without_a_coordinator_begins_at_once(world: CompactionWorld) -> None:
    world.flush_many(3)
    before = world.contents()
    started = world.clock.monotonic()

    assert len(now(world).run()) == 1

    assert world.clock.monotonic() - started < 5
    assert len(world.manifest.tree.runs) == 1
    assert world.contents() == before
    assert is_released(world.compactions.require_latest().value)


class LoadsFirst(IoPool):
    """Between the first claim and the work on it, a bulk load is added: SSTs of L0 become sorted runs."""

    def __init__(self, world: CompactionWorld) -> None:
        super().__init__(max_workers=0, name="inline")
        self.world, self.done = world, False

    def submit(self, function: Any, *arguments: Any) -> Any:
        if not self.done:
            self.done, world = True, self.world
            load = Load((), Seq(world.seq + 1), world.clock.now_ms(), world.ids.ulid())
            loaded = world.manifests.update(lambda now: apply_load(now.value, load))
            epoch = loaded.value.compactor_epoch
            release_taken_role(world.compactions, epoch, ids=world.ids, now_ms=world.clock.now_ms())
        return super().submit(function, *arguments)


def test_a_compaction_whose_sources_a_bulk_load_moves_is_planned_again(world: CompactionWorld) -> None:
    world.flush_many(3)
    before = world.contents()
    compaction = now(world)
    compaction.pool = LoadsFirst(world)

    assert len(compaction.run()) == 1

    assert len(world.manifest.tree.runs) == 1
    assert world.contents() == before


def test_a_compaction_that_cannot_create_the_compactions_file_yet_tries_again() -> None:
    failing = Fault("error", op="put_if_absent", path="db/compactions/*")
    store = FaultyStore(MemoryStore(), [failing, failing])
    world = CompactionWorld(store).create()
    world.flush_many(3)
    before = world.contents()
    files_seen: list[bool] = []

    def meanwhile(progress: Progress) -> None:
        if progress.coordinating:
            files_seen.append(world.compactions.latest() is not None)

    assert len(now(world, meanwhile).run()) == 1

    assert files_seen[0] is False, "it coordinated before there was a compactions file"
    assert len(world.manifest.tree.runs) == 1
    assert world.contents() == before


def test_compacting_after_a_coordinator_has_left_begins_at_once(world: CompactionWorld) -> None:
    world.flush_many(3)
    now(world).run()
    world.flush_many(3, start=3)
    started = world.clock.monotonic()

    assert len(now(world).run()) == 1

    assert world.clock.monotonic() - started < 5
    assert world.manifest.compactor_epoch == 2


def test_compacting_a_compacted_database_writes_nothing(world: CompactionWorld) -> None:
    world.flush_many(3)
    now(world).run()
    before = world.versions()
    assert now(world).run() == []
    assert world.versions() == before


def test_compacting_after_an_idle_coordinator_has_left_begins_at_once(world: CompactionWorld) -> None:
    idle = world.coordinator()
    idle.run_once()
    idle.stop()
    idle.release()
    world.flush_many(3)
    started = world.clock.monotonic()

    assert len(now(world).run()) == 1

    assert world.clock.monotonic() - started < 5


def test_a_coordinator_that_answers_keeps_its_role(world: CompactionWorld) -> None:
    coordinator = world.coordinator()
    coordinator.run_once()
    world.flush_many(3)

    assert len(now(world, lambda _: coordinator.run_once() and None).run()) == 1

    assert world.manifest.compactor_epoch == 1
    assert len(world.manifest.tree.runs) == 1


def test_a_coordinator_that_does_not_answer_for_twenty_seconds_loses_its_role(world: CompactionWorld) -> None:
    world.coordinator().run_once()
    world.flush_many(3)
    started = world.clock.monotonic()

    assert len(now(world).run()) == 1

    assert 20 < world.clock.monotonic() - started < 40
    assert world.manifest.compactor_epoch == 2


def test_a_compaction_that_loses_the_role_continues_under_the_new_coordinator(world: CompactionWorld) -> None:
    world.flush_many(3)
    others: list[Coordinator] = []

    def meanwhile(progress: Progress) -> None:
        if progress.coordinating and progress.jobs and not others:
            others.append(world.coordinator())
        for other in others:
            other.run_once()

    assert len(now(world, meanwhile).run()) == 1

    assert others[0].claimed
    assert world.manifest.compactor_epoch == 2
    assert len(world.manifest.tree.runs) == 1


def busy_elsewhere(world: CompactionWorld) -> tuple[Coordinator, Callable[[Progress], None]]:
    """A coordinator whose worker never finishes a job of L0."""
    coordinator = world.coordinator()
    coordinator.run_once()
    assert [job.status for job in world.jobs()][-1] is JobStatus.SCHEDULED

    def run(job: Job) -> Job:
        return replace(job, status=JobStatus.RUNNING, worker=Claim("elsewhere", world.clock.now_ms()))

    first = world.jobs()[-1].id

    def meanwhile(_: Progress) -> None:
        def change(file: Any) -> Any:
            return replace(
                file.value, jobs=tuple(run(job) if job.id == first else job for job in file.value.jobs)
            )

        world.compactions.update(change)
        coordinator.run_once()

    meanwhile(Progress(0, 0, 0, 0, coordinating=False))
    return coordinator, meanwhile


def test_the_sources_of_a_job_that_never_ends_are_left_out(world: CompactionWorld) -> None:
    for start in (0, 4, 8):
        world.flush_many(4, start=start)
        world.settle(*world.pair())
    assert len(world.manifest.tree.runs) == 3
    world.flush_many(4, start=12)
    before = world.contents()
    _, meanwhile = busy_elsewhere(world)

    assert len(now(world, meanwhile).run()) == 1

    tree = world.manifest.tree
    assert (len(tree.l0), len(tree.runs)) == (4, 1)
    assert world.contents() == before


def test_a_compaction_blocked_by_other_jobs_raises_unavailable_with_the_reason(
    world: CompactionWorld,
) -> None:
    world.flush_many(4)
    _, meanwhile = busy_elsewhere(world)
    with pytest.raises(Unavailable, match=r"not done after 100\.0 s: jobs of other processes come first"):
        now(world, meanwhile).run(timeout_s=100.0)


def test_claims_of_the_role_during_a_compaction_lose_no_row(world: CompactionWorld) -> None:
    world.flush_many(3)
    before = world.contents()
    claims = 0

    def meanwhile(progress: Progress) -> None:
        nonlocal claims
        if progress.coordinating and claims < 3:
            claims += 1
            claim_compactor(world.manifests)

    now(world, meanwhile).run()
    assert world.contents() == before
    assert len(world.manifest.tree.runs) == 1
