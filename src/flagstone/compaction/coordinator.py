"""The coordinator: schedules compaction jobs, and commits the results of workers.

A database has one coordinator. The latest claim owns the role, and the former coordinator fails at its next write. The
manifest and the compactions file hold all of its state, so after a crash the next coordinator repeats the interrupted
step: it checks scheduled jobs again, and commits compacted jobs that were not committed.

Inside a writer it reads the store rarely: the engine passes on new manifests, and the local worker reports finished
jobs. It polls for jobs of other processes (a compaction submitted by an operator) every `poll_interval`; while it finds
none the wait grows, up to three times that. While workers of other processes have jobs it polls every
`commit_compacted_interval`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from flagstone.compaction import lifecycle
from flagstone.compaction.commit import Result, commit_result, is_applied, plan_drain, plan_trivial_move
from flagstone.compaction.extensions import Scheduler
from flagstone.compaction.lifecycle import is_released, release_role, reset_jobs
from flagstone.compaction.policy import new_scheduler
from flagstone.compaction.shared_state import Board
from flagstone.compaction.survey import Survey
from flagstone.compaction.validation import find_commit_problem, find_problem
from flagstone.config.settings import CompactorOptions
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.metadata.compactions import Compactions, Job, JobStatus, Spec, Worker, add_job, trim_finished
from flagstone.metadata.fencing import Fence, claim_compactions, claim_compactor
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import CompactionsStore
from flagstone.runtime import metric_names as names
from flagstone.runtime.ids import Ids, ulid_ms, ulid_text
from flagstone.types import Ulid

_log = logging.getLogger("flagstone.compaction")

_ATTEMPTS: Final = 100
_LONGEST_WAIT: Final = 3
"""How many poll intervals an idle coordinator inside a writer waits at the longest."""

_FIRST_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 60.0


def claim_role(board: Board) -> Fence:
    """Claim the manifest, then the compactions file, then reset its jobs: one new object for each step, as in SlateDB.

    A crash in between costs an epoch; the next claim starts over.

    Raises:
        Closed: another process claimed the role at the same time, and owns it.

    """
    fence, claimed = claim_compactor(board.manifests)
    board.note_manifest(claimed)
    board.publish(claimed)
    current = claim_compactions(board.compactions, fence)
    for _ in range(_ATTEMPTS):
        fence.check(current.value)
        try:
            current = board.compactions.create_next(reset_jobs(current.value), current)
            break
        except SequencedConflict:
            current = board.compactions.require_latest()
    else:
        raise Unavailable(f"lost {_ATTEMPTS} races for the compactions file; try again")
    board.note_jobs(current)
    _log.info("became compaction coordinator epoch=%d", fence.epoch)
    return fence


def mint_job(jobs: Compactions, ids: Ids) -> Ulid:
    """An id for a new job, not older than any listed one."""
    newest = jobs.newest_job
    return ids.ulid(0 if newest is None else ulid_ms(newest))


def release_taken_role(compactions: CompactionsStore, epoch: int, *, ids: Ids, now_ms: int) -> None:
    """Release the role that a manifest took under `epoch`, so that the former coordinator claims it again.

    If the store fails here, that coordinator has to be restarted.
    """
    with suppress(FlagstoneError):
        if compactions.latest() is not None:
            fence = Fence("compactor", epoch)
            claim_compactions(compactions, fence)
            compactions.update(
                fence.guard(
                    lambda now: release_role(now.value, lambda jobs: mint_job(jobs, ids), now_ms=now_ms)
                )
            )


class RoleWatch:
    """Watches the coordinator that took over. The role is free when that coordinator has released it, or is
    presumably dead: writes wait for a compaction (`stalled`), and for `patience_s` no process has changed the jobs.
    """

    def __init__(self, stalled: Callable[[Manifest], bool], *, patience_s: float) -> None:
        self._stalled = stalled
        self._patience_s = patience_s
        self._idle_since = 0.0
        self._jobs_id = 0

    def begin(self, now: float) -> None:
        """The role was lost at `now`."""
        self._idle_since = now

    def is_free(self, board: Board, now: float) -> bool:
        """Read the compactions file; whether the role is free."""
        jobs, manifest = board.fetch_jobs(), board.manifest
        if jobs is None or manifest is None:
            return False
        if is_released(jobs.value):
            return True
        if jobs.id != self._jobs_id or not self._stalled(manifest.value):
            self._jobs_id, self._idle_since = jobs.id, now
        return now - self._idle_since >= self._patience_s


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """The worker in the same process: new jobs are claimed for it while it has a free slot."""

    id: str
    slots: int


class Coordinator:
    """A background service; `wake` it when the manifest or a job has changed.

    Inside a writer (`embedded`) the engine keeps the board's manifest up to date. The coordinator then claims its role
    only once there is something to compact, or `poll_interval` has passed: a database that is opened for a moment costs
    no claim.

    Before it plans, it lets `survey` read what the scheduler must know of new runs, a few SSTs at a time.

    It ends when a newer coordinator takes over, and calls `on_end`. With `stalled`, which returns whether writes wait
    for a compaction, it watches the newer one instead, and claims the role back when it is free (`RoleWatch`):
    released, or not used for twice `worker_heartbeat_timeout` while writes wait.
    """

    name = "compaction-coordinator"

    def __init__(
        self,
        board: Board,
        options: CompactorOptions,
        *,
        scheduler: Scheduler | None = None,
        survey: Survey | None = None,
        local: LocalWorker | None = None,
        embedded: bool = False,
        stalled: Callable[[Manifest], bool] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._board = board
        self._options = options
        patience_s = 2 * options.worker_heartbeat_timeout.total_seconds()
        self._watch = None if stalled is None else RoleWatch(stalled, patience_s=patience_s)
        self._on_end = on_end
        self._scheduler = scheduler or new_scheduler(options, survey)
        self._survey = survey
        self._local = local
        self._clock = clock = board.clock
        self._ids = board.ids
        self._embedded = embedded
        self._fence: Fence | None = None
        self._poll_wait_s = options.poll_interval.total_seconds()
        self._longest_wait_s = _LONGEST_WAIT * self._poll_wait_s
        self._claim_at = clock.monotonic() + (self._poll_wait_s if embedded else 0)
        self._polled_at = clock.monotonic()
        self._retry_s = _FIRST_RETRY_S
        self._retry_at = 0.0
        self._failure: Exception | None = None
        self._lost: Closed | None = None
        self._claims_back = False
        self._stopped = False
        metrics = board.metrics
        self._epoch = metrics.gauge(names.COMPACTOR_EPOCH)
        self._last_commit = metrics.gauge(names.COMPACTOR_LAST_COMPACTION_TIMESTAMP_SEC)
        self._reclaimed = metrics.counter(names.COMPACTOR_JOBS_RECLAIMED)
        self._failures = metrics.counter(names.COMPACTOR_COORDINATOR_FAILURES)

    # -- the service --------------------------------------------------------------------------------------

    def run_once(self) -> float | None:
        """One tick. After a failure, which `status` shows, it retries with growing delays; a fenced one ends."""
        if self._stopped:
            return None
        if self._claims_back:
            self._claim_at = self._clock.monotonic() if self._fence or self._lost else self._claim_at
            self._claims_back, self._fence, self._lost, self._retry_at = False, None, None, 0.0
        if (wait_s := self._retry_at - self._clock.monotonic()) > 0:
            return wait_s
        try:
            if self._lost and not self._regain():
                self._retry_at = self._clock.monotonic() + self._longest_wait_s
                return self._longest_wait_s
            delay = self._tick()
        except Closed as closed:
            return self._lose(closed)
        except Exception as error:  # noqa: BLE001 - a bug, perhaps in a user's scheduler, must not end compaction
            return self._failed(error)
        self._failure, self._retry_s = None, _FIRST_RETRY_S
        return delay

    def _lose(self, closed: Closed) -> float | None:
        _log.warning("stopped coordinating epoch=%s reason=%s", self._fence and self._fence.epoch, closed)
        self._lost, self._fence = closed, None
        if self._watch is not None:
            self._watch.begin(self._clock.monotonic())
            return self._longest_wait_s
        self._stopped = True
        self._on_end()
        return None

    def _regain(self) -> bool:
        """Prepare to claim the lost role, if it is free again."""
        now = self._clock.monotonic()
        if self._watch is None or not self._watch.is_free(self._board, now):
            return False
        _log.warning("the other coordinator has left: claiming the role back")
        self._lost, self._claim_at = None, now
        return True

    def claim_back(self) -> None:
        """Claim the role again, after this process itself took it to add a bulk load. Wake the service afterwards."""
        self._claims_back = True

    def stop(self) -> None:
        """Begin nothing more. Jobs under way stay in the compactions file for the next coordinator."""
        self._stopped = True

    def release(self) -> None:
        """After `stop`: record that the role is free. If the store fails, other processes notice after a timeout."""
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
        elif now >= self._next_poll_at():
            self._poll(now)
        current = self._board.manifest
        if self._survey is not None and current is not None and self._survey.read(current.value):
            self._step()
            return 0.0  # there is more to read
        self._step()
        return max(0.0, self._next_poll_at() - self._clock.monotonic())

    def _step(self) -> None:
        """Do everything that the board's manifest and jobs ask for: commit, settle, reclaim, schedule."""
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
        # A job that appears only now may be based on a newer manifest: it waits for the next tick.
        known = {job.id for job in jobs.jobs}
        reclaimed: list[Ulid] = []
        warnings: list[str] = []

        def edit(now: Versioned[Compactions]) -> Compactions:
            nonlocal reclaimed, warnings
            settled = lifecycle.settle_jobs(now.value, outcomes)
            for job in moved:
                settled = add_job(settled, job)
            planned, reclaimed, warnings = self._planned(settled, manifest, known)  # of the last attempt only
            return planned

        self._board.edit_jobs(fence.guard(edit))
        self._reclaimed.add(len(reclaimed))
        for warning in warnings:
            _log.warning("%s", warning)

    def _planned(
        self, before: Compactions, manifest: Manifest, known: set[Ulid]
    ) -> tuple[Compactions, list[Ulid], list[str]]:
        """The next compactions file, the jobs that were reclaimed, and warnings to log.

        `known` are the jobs that are not newer than the manifest.
        """
        local = self._local
        jobs = lifecycle.reclaim_jobs(
            before,
            now_ms=self._clock.now_ms(),
            timeout_ms=int(self._options.worker_heartbeat_timeout.total_seconds() * 1000),
            alive=() if local is None else (local.id,),
        )
        reclaimed = [job.id for job in jobs.jobs if before.job(job.id) != job]
        warnings = [
            f"reclaimed compaction job={ulid_text(job_id)} from a silent worker" for job_id in reclaimed
        ]
        jobs, lost = lifecycle.drop_impossible(jobs, manifest, among=known)
        jobs, refused = lifecycle.accept_jobs(jobs, manifest, among=known)
        warnings += [
            f"failed compaction job={ulid_text(job_id)} reason={problem}"
            for job_id, problem in (lost | refused).items()
        ]
        jobs, dropped = lifecycle.add_jobs(
            jobs, self._scheduler.plan(manifest, jobs), manifest, self._mint, self._claim_for_local
        )
        warnings += [
            f"dropped a compaction the scheduler proposed spec={spec} reason={why}" for spec, why in dropped
        ]
        return trim_finished(jobs), reclaimed, warnings

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
        """Commit the submitted jobs that need no worker: drains, and with `enable_trivial_move` moves."""
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
        """Commit the scheduler's jobs that rewrite no SST."""
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
        self._polled_at = self._clock.monotonic()

    def _poll(self, now: float) -> None:
        """Read what other processes may have written; if that is nothing new, wait longer the next time."""
        before = self._board.jobs
        jobs = self._board.fetch_jobs()
        fence, _ = self._require_claim()
        if jobs is not None:
            fence.check(jobs.value)
        news = before is None or jobs is None or jobs.id != before.id
        if news or not self._embedded:
            # After the jobs, so that it has the sources they name.
            fence.check(self._board.fetch_manifest().value)
        self._polled_at = now
        shortest = self._options.poll_interval.total_seconds()
        idle = self._embedded and not news
        self._poll_wait_s = min(self._poll_wait_s + shortest, self._longest_wait_s) if idle else shortest

    def _next_poll_at(self) -> float:
        wait_s = self._poll_wait_s
        jobs = self._board.jobs
        local = None if self._local is None else self._local.id
        if jobs is not None and lifecycle.others_work(jobs.value, local):
            wait_s = min(
                self._options.commit_compacted_interval.total_seconds(),
                self._options.poll_interval.total_seconds(),
            )
        return self._polled_at + wait_s

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
