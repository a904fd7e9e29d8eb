"""Coordinators and workers start, stop and crash in any order: the rows are always the same.

Every seed is one history. `COMPACTION_HISTORIES=600` runs more of them than an ordinary run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from flagstone.compaction import lifecycle
from flagstone.compaction.extensions import CompactionTask
from flagstone.metadata.compactions import JobContext
from flagstone.metadata.compactions import Worker as Claim
from flagstone.metadata.manifest import SsTable
from flagstone.verification.verifier import Verifier
from kit.compactors import PATHS, CompactionWorld, RowExecutor

HISTORIES = int(os.environ.get("COMPACTION_HISTORIES", "12"))
STEPS = 80


class Killed(BaseException):
    """The process that ran the job was killed."""


class MortalExecutor(RowExecutor):
    """After any SST it may renew its claim, lose its job because time passes, or be killed."""

    def __init__(self, history: History) -> None:
        super().__init__(history.world.store, ids=history.world.ids, rows_per_sst=3)
        self.history = history
        self.owner = ""

    def run(
        self, task: CompactionTask, *, record: Callable[[JobContext], None], **more: Any
    ) -> tuple[SsTable, ...]:
        latest: list[JobContext] = []

        def note(context: JobContext) -> None:
            record(context)
            latest[:] = [context]

        def after_sst(_: int) -> None:
            world, chance = self.history.world, self.history.random.random()
            if chance < 0.3:
                claim = Claim(self.owner, world.clock.now_ms())
                contexts = {task.job_id: latest[0]}
                world.compactions.update(lambda now: lifecycle.renew_claims(now.value, claim, contexts))
            elif chance < 0.4:
                world.clock.advance(40_000)
                self.history.let_others_act(self.owner)
            elif chance < 0.5:
                raise Killed

        self.after_sst = after_sst
        return super().run(task, record=note, **more)


class History:
    """One random history of a database."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = CompactionWorld(seed=seed).create()
        self.model: dict[bytes, bytes] = {}
        self.actors: list[list[Any]] = []
        self.acting: set[int] = set()
        self.deaths = 0

    def run(self) -> None:
        for _ in range(STEPS):
            action = self.random.choices(
                [self.flush, self.act, self.start, self.kill, self.wait], weights=[5, 12, 1, 1, 4]
            )[0]
            action()
            assert self.world.contents() == self.model

    def flush(self) -> None:
        rows: dict[bytes, bytes | None] = {}
        for _ in range(self.random.randint(1, 6)):
            key = b"key%02d" % self.random.randrange(30)
            rows[key] = None if self.random.random() < 0.3 else b"%d" % self.random.randrange(10**6)
        self.world.flush(*rows.items())
        for key, value in rows.items():
            self.model.pop(key, None)
            if value is not None:
                self.model[key] = value

    def start(self) -> None:
        """Start a process with a coordinator, a worker, or both."""
        kind = self.random.choice(["both", "coordinator", "worker"])
        executor = MortalExecutor(self)
        if kind == "both":
            coordinator, worker = self.world.pair(executor=executor)
            actor: list[Any] = [coordinator, worker]
        elif kind == "coordinator":
            actor = [self.world.coordinator()]
        else:
            worker = self.world.worker(executor=executor)
            actor = [worker]
        if kind != "coordinator":
            executor.owner = worker.id
        self.actors.append(actor)

    def act(self) -> None:
        free = [actor for actor in self.actors if id(actor) not in self.acting]
        if not free:
            return
        actor = self.random.choice(free)
        self.acting.add(id(actor))
        service = self.random.choice(actor)
        service.run_once()
        self.acting.discard(id(actor))
        if any(self._was_killed(part) for part in actor):
            self.deaths += 1
            self.actors.remove(actor)

    def _was_killed(self, service: Any) -> bool:
        executions = getattr(service, "_executions", {})
        return any(
            isinstance(execution.future.exception(), Killed)
            for execution in executions.values()
            if execution.future.done()
        )

    def let_others_act(self, owner: str) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.act()

    def kill(self) -> None:
        free = [actor for actor in self.actors if id(actor) not in self.acting]
        if free:
            self.actors.remove(self.random.choice(free))

    def wait(self) -> None:
        self.world.clock.advance(self.random.choice([10, 1000, 6000, 35_000]))


@pytest.mark.slow
def test_random_histories_of_coordinators_and_workers_lose_no_row_and_finish_every_job() -> None:
    deaths = jobs = 0
    for seed in range(HISTORIES):
        history = History(seed)
        try:
            history.run()
            world = history.world
            world.clock.advance(60_000)
            world.settle(*world.pair())
            assert world.contents() == history.model
            assert len(world.manifest.tree.l0) < 4
            assert all(job.status.finished for job in world.jobs())
            assert Verifier(world.store, PATHS, clock=world.clock).verify().ok
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        deaths += history.deaths
        jobs += len(world.manifest.checkpoints)
    assert deaths
    assert jobs > HISTORIES
    print(f"{HISTORIES} histories, {jobs} commits, {deaths} workers killed in the middle of a job")
