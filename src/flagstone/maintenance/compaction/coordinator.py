"""The coordinator: decides what is compacted, and commits what workers have done.

There is one per database; who claims the role later wins, and the former one learns it at its next write. Everything
it knows is in the manifest and the compactions file, so a crash after any step is repaired by the next coordinator
doing the step again: jobs found scheduled are checked anew, jobs found compacted are committed unless they were.

Inside a writer it reads the store rarely: the engine tells it of new tables and the local worker of finished jobs. It
looks for what strangers did (a compaction submitted by an operator) every `poll_interval`, and when there was nothing,
less and less often, up to three times that. While strangers work on its jobs it looks every
`commit_compacted_interval`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from flagstone.config.settings import CompactorOptions
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.maintenance.compaction import lifecycle
from flagstone.maintenance.compaction.board import Board
from flagstone.maintenance.compaction.commit import commit_result
from flagstone.maintenance.compaction.picker import Scheduler, SizeTieredScheduler
from flagstone.maintenance.compaction.results import Result, is_applied, plan_drain, plan_trivial_move
from flagstone.maintenance.compaction.role import RoleWatch, claim_role, mint_job
from flagstone.maintenance.compaction.validation import find_commit_problem, find_problem
from flagstone.metadata.compactions import Compactions, Job, JobStatus, Spec, Worker, add_job, trim_finished
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime import metric_names as names
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_text
from flagstone.runtime.metrics import Metrics
from flagstone.types import Ulid

_log = logging.getLogger("flagstone.compaction")

_MOST_PATIENT: Final = 3
_FIRST_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """The worker in the same process: jobs go to it directly, while it has a hand free."""

    id: str
    slots: int


@dataclass(slots=True)
class _Told:
    """What a tick found worth telling."""

    reclaimed: list[Ulid] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Coordinator:
    """A background service; `wake` it when the manifest or a job has changed.

    With `eager=False` it claims its role only once there is something to compact, or `poll_interval` has passed: a
    database that is opened for a moment then costs nothing. `follows` says that somebody else keeps the board's
    manifest up to date.

    A newer coordinator that takes over ends it, and `on_end` is called. With `stalled`, which says whether writes wait
    for a compaction, it watches instead, and claims the role back when the other one has left: when that one said so,
    or when writes wait and in twice `worker_heartbeat_timeout` nobody has touched the jobs.
    """

    name = "compaction-coordinator"

    def __init__(
        self,
        board: Board,
        options: CompactorOptions,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        scheduler: Scheduler | None = None,
        local: LocalWorker | None = None,
        eager: bool = True,
        follows: bool = False,
        stalled: Callable[[Manifest], bool] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._board = board
        self._options = options
        patience_s = 2 * options.worker_heartbeat_timeout.total_seconds()
        self._watch = None if stalled is None else RoleWatch(stalled, patience_s=patience_s)
        self._on_end = on_end
        self._scheduler = scheduler or SizeTieredScheduler(options)
        self._local = local
        self._clock = clock
        self._ids = ids
        self._follows = follows
        self._fence: Fence | None = None
        self._claim_at = clock.monotonic() + (0 if eager else options.poll_interval.total_seconds())
        self._looked_at = clock.monotonic()
        self._patience_s = options.poll_interval.total_seconds()
        self._most_patient_s = _MOST_PATIENT * self._patience_s
        self._retry_s = _FIRST_RETRY_S
        self._retry_at = 0.0
        self._failure: Exception | None = None
        self._lost: Closed | None = None
        self._claims_back = False
        self._stopped = False
        self._epoch = metrics.gauge(names.COMPACTOR_EPOCH)
        self._last_commit = metrics.gauge(names.COMPACTOR_LAST_COMPACTION_TIMESTAMP_SEC)
        self._reclaimed = metrics.counter(names.COMPACTOR_JOBS_RECLAIMED)
        self._failures = metrics.counter("flagstone.compactor.coordinator_failures")

    # -- the service --------------------------------------------------------------------------------------

    def run_once(self) -> float | None:
        """One tick. What fails is kept for `status` and tried again, ever less often; a newer coordinator ends it."""
        if self._stopped:
            return None
        if self._claims_back:
            self._claim_at = self._clock.monotonic() if self._fence or self._lost else self._claim_at
            self._claims_back, self._fence, self._lost, self._retry_at = False, None, None, 0.0
        if (wait_s := self._retry_at - self._clock.monotonic()) > 0:
            return wait_s
        try:
            if self._lost and not self._reclaims():
                self._retry_at = self._clock.monotonic() + self._most_patient_s
                return self._most_patient_s
            delay = self._tick()
        except Closed as closed:
            return self._lose(closed)
        except Exception as error:  # noqa: BLE001 - a scheduler may be anybody's; a bug must not end compaction
            return self._failed(error)
        self._failure, self._retry_s = None, _FIRST_RETRY_S
        return delay

    def _lose(self, closed: Closed) -> float | None:
        _log.warning("stopped coordinating epoch=%s reason=%s", self._fence and self._fence.epoch, closed)
        self._lost, self._fence = closed, None
        if self._watch is not None:
            self._watch.begin(self._clock.monotonic())
            return self._most_patient_s
        self._stopped = True
        self._on_end()
        return None

    def _reclaims(self) -> bool:
        """Whether the role that was lost is free again."""
        now = self._clock.monotonic()
        if self._watch is None or not self._watch.sees_it_free(self._board, now):
            return False
        _log.warning("the other coordinator has left: claiming the role back")
        self._lost, self._claim_at = None, now
        return True

    def claim_back(self) -> None:
        """Claim the role again, which this process itself took for a moment. Wake it afterwards."""
        self._claims_back = True

    def stop(self) -> None:
        """Begin nothing more. What is under way stays in the compactions file for the next coordinator."""
        self._stopped = True

    def release(self) -> None:
        """After `stop`: tell others that the role is free. What the store cannot be told, they find out by waiting."""
        fence = self._fence
        if fence is not None and self._board.jobs is not None:
            with suppress(FlagstoneError):
                now_ms, free = self._clock.now_ms(), lifecycle.release_role
                self._board.edit_jobs(fence.guard(lambda now: free(now.value, self._mint, now_ms=now_ms)))

    def raise_fenced(self) -> None:
        """Raise `Closed` when a newer coordinator has taken over."""
        if self._lost is not None:
            raise Closed(str(self._lost), reason=self._lost.reason)

    @property
    def fenced(self) -> bool:
        """Whether a newer coordinator has taken over."""
        return self._lost is not None

    @property
    def claimed(self) -> bool:
        """Whether this process has claimed the role, and not lost it."""
        return self._fence is not None

    def status(self) -> dict[str, Any]:
        """Plain values for an operator."""
        failure = self._lost or self._failure
        state = "waiting" if self._fence is None else "coordinating"
        if failure is not None:
            state = "fenced" if self.fenced else "failing"
        elif self._stopped:
            state = "stopped"
        jobs = self._board.jobs
        active = [] if jobs is None else [job for job in jobs.value.jobs if not job.status.finished]
        return {
            "state": state,
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
            "epoch": None if self._fence is None else self._fence.epoch,
            "jobs": {ulid_text(job.id): job.status.name.lower() for job in active},
        }

    # -- one tick -----------------------------------------------------------------------------------------

    def _tick(self) -> float:
        now = self._clock.monotonic()
        if self._fence is None:
            manifest = self._board.manifest
            if now < self._claim_at and not (
                manifest and self._scheduler.plan(manifest.value, Compactions())
            ):
                return self._claim_at - now
            self._claim()
        elif now >= self._look_at():
            self._look(now)
        self._step()
        return max(0.0, self._look_at() - self._clock.monotonic())

    def _step(self) -> None:
        """Everything there is to do for the versions on the board: commit, settle, reclaim, schedule."""
        fence, (manifest, jobs) = self._require_claim()
        outcomes = {
            job.id: self._commit(Result.of_job(job), job.id)
            for job in jobs.jobs
            if job.status is JobStatus.COMPACTED
        }
        outcomes |= self._apply_submitted(jobs)
        manifest = self._current()[0]
        moved = self._apply_moves(manifest, lifecycle.settle_jobs(jobs, outcomes))
        manifest = self._current()[0]
        # A job that appears only now may rest on a manifest we have not seen: it waits for the next tick.
        known = {job.id for job in jobs.jobs}
        told = _Told()

        def edit(now: Versioned[Compactions]) -> Compactions:
            nonlocal told
            told = _Told()  # of the last attempt only
            return self._planned(now.value, manifest, known=known, outcomes=outcomes, moved=moved, told=told)

        self._board.edit_jobs(fence.guard(edit))
        self._reclaimed.add(len(told.reclaimed))
        for warning in told.warnings:
            _log.warning("%s", warning)

    def _planned(
        self,
        jobs: Compactions,
        manifest: Manifest,
        *,
        known: set[Ulid],
        outcomes: dict[Ulid, JobStatus],
        moved: list[Job],
        told: _Told,
    ) -> Compactions:
        now_ms = self._clock.now_ms()
        local = self._local
        jobs = lifecycle.settle_jobs(jobs, outcomes)
        for job in moved:
            jobs = add_job(jobs, job)
        before = jobs
        jobs = lifecycle.reclaim_jobs(
            jobs,
            now_ms=now_ms,
            timeout_ms=int(self._options.worker_heartbeat_timeout.total_seconds() * 1000),
            alive=() if local is None else (local.id,),
        )
        told.reclaimed = [job.id for job in jobs.jobs if before.job(job.id) != job]
        told.warnings += [
            f"reclaimed compaction job={ulid_text(job_id)} from a silent worker" for job_id in told.reclaimed
        ]
        jobs, lost = lifecycle.drop_impossible(jobs, manifest, among=known)
        jobs, refused = lifecycle.accept_jobs(jobs, manifest, among=known)
        told.warnings += [
            f"failed compaction job={ulid_text(job_id)} reason={problem}"
            for job_id, problem in (lost | refused).items()
        ]
        jobs, dropped = lifecycle.add_jobs(
            jobs, self._scheduler.plan(manifest, jobs), manifest, self._mint, self._claim_for_local
        )
        told.warnings += [
            f"dropped a compaction the scheduler proposed spec={spec} reason={why}" for spec, why in dropped
        ]
        return trim_finished(jobs)

    def _claim_for_local(self, jobs: Compactions) -> Worker | None:
        local = self._local
        if local is None or len(lifecycle.jobs_of(jobs, local.id)) >= local.slots:
            return None
        return Worker(local.id, self._clock.now_ms())

    def _mint(self, jobs: Compactions) -> Ulid:
        return mint_job(jobs, self._ids)

    # -- committing ---------------------------------------------------------------------------------------

    def _commit(self, result: Result, job_id: Ulid) -> JobStatus:
        fence, _ = self._require_claim()
        lifetime_s = int(self._options.checkpoint_lifetime.total_seconds())
        status = commit_result(self._board, fence, result, job_id, lifetime_s=lifetime_s, clock=self._clock)
        if status is JobStatus.COMPLETED:
            self._last_commit.set(self._clock.now_ms() // 1000)
        return status

    def _apply_submitted(self, jobs: Compactions) -> dict[Ulid, JobStatus]:
        """Submitted jobs that need no worker: drains, and where it is switched on, moves."""
        outcomes: dict[Ulid, JobStatus] = {}
        for job in jobs.jobs:
            if job.status is not JobStatus.SUBMITTED:
                continue
            manifest = self._current()[0]
            result = self._without_worker(manifest, job.spec)
            if result is None:
                continue
            settled = lifecycle.settle_jobs(jobs, outcomes)
            if is_applied(manifest, result, job.id):
                outcomes[job.id] = JobStatus.COMPLETED
            elif find_problem(job.spec, manifest, settled, job_id=job.id) is None:
                outcomes[job.id] = self._commit(result, job.id)
        return outcomes

    def _apply_moves(self, manifest: Manifest, jobs: Compactions) -> list[Job]:
        """What the scheduler wants and can be had without rewriting a table."""
        moved: list[Job] = []
        if not self._options.enable_trivial_move:
            return moved
        for spec in self._scheduler.plan(manifest, jobs):
            result = self._without_worker(manifest, spec)
            if result is not None and find_problem(spec, manifest, jobs) is None:
                job_id = self._mint(jobs)
                moved.append(Job(job_id, spec, self._commit(result, job_id)))
        return moved

    def _without_worker(self, manifest: Manifest, spec: Spec) -> Result | None:
        drained = plan_drain(spec)
        if drained is None and self._options.enable_trivial_move and not find_commit_problem(spec, manifest):
            return plan_trivial_move(manifest, spec)
        return drained

    # -- the role and the store ---------------------------------------------------------------------------

    def _claim(self) -> None:
        self._fence = claim_role(self._board)
        self._epoch.set(self._fence.epoch)
        self._looked_at = self._clock.monotonic()

    def _look(self, now: float) -> None:
        """Read what strangers may have written; with nothing new be more patient the next time."""
        before = self._board.jobs
        jobs = self._board.fetch_jobs()
        fence, _ = self._require_claim()
        if jobs is not None:
            fence.check(jobs.value)
        news = before is None or jobs is None or jobs.id != before.id
        if news or not self._follows:
            # After the jobs, so that it has the tables they speak of.
            fence.check(self._board.fetch_manifest().value)
        self._looked_at = now
        shortest = self._options.poll_interval.total_seconds()
        idle = self._follows and not news
        self._patience_s = min(self._patience_s + shortest, self._most_patient_s) if idle else shortest

    def _look_at(self) -> float:
        wait_s = self._patience_s
        jobs = self._board.jobs
        local = None if self._local is None else self._local.id
        if jobs is not None and lifecycle.others_work(jobs.value, local):
            wait_s = min(
                self._options.commit_compacted_interval.total_seconds(),
                self._options.poll_interval.total_seconds(),
            )
        return self._looked_at + wait_s

    def _require_claim(self) -> tuple[Fence, tuple[Manifest, Compactions]]:
        if self._fence is None:
            self._claim()
        assert self._fence is not None
        return self._fence, self._current()

    def _current(self) -> tuple[Manifest, Compactions]:
        manifest, jobs = self._board.manifest, self._board.jobs
        assert manifest is not None
        assert jobs is not None
        return manifest.value, jobs.value

    def _failed(self, error: Exception) -> float:
        self._failure = error
        self._failures.add()
        delay = self._retry_s
        level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
        _log.log(level, "cannot coordinate compactions retry_s=%.0f error=%s", delay, error)
        self._retry_at = self._clock.monotonic() + delay
        self._retry_s = min(2 * delay, _LONGEST_RETRY_S)
        return delay
