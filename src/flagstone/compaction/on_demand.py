"""Compaction on demand: submits jobs, works on them, and waits until their results are in the manifest.

If a coordinator is alive in any process, it schedules the jobs, and this process is one of its workers. If none
answers, this process claims the role until it is done; it claims it at once if the last coordinator released it. If
another coordinator takes the role meanwhile, this process goes on as its worker. A crash leaves jobs in the compactions
file that any coordinator can continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from flagstone.compaction.commit import source_bytes, source_views
from flagstone.compaction.coordinator import Coordinator, LocalWorker, mint_job
from flagstone.compaction.extensions import Executor
from flagstone.compaction.lifecycle import is_released, settle_jobs
from flagstone.compaction.shared_state import Board
from flagstone.compaction.validation import find_problem
from flagstone.compaction.worker import SourcesGone, Worker
from flagstone.config.settings import CompactionWorkerOptions, CompactorOptions
from flagstone.errors import Unavailable
from flagstone.lsm.tree import SstView
from flagstone.metadata.compactions import Compactions, Job, JobStatus, Spec, add_job
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.ids import ulid_text
from flagstone.runtime.pool import IoPool
from flagstone.types import Ulid

_log = logging.getLogger("flagstone.compaction")

PATIENCE_S: Final = 20.0
"""How long a living coordinator may take to notice a job: longer than any waits between two polls."""

_STEP_S: Final = 0.05
_LONGEST_STEP_S: Final = 0.5
_MAX_FAILURES: Final = 5
_COMPLETED: Final = JobStatus.COMPLETED

Planner = Callable[[Manifest, Compactions], Sequence[Spec]]


class SubmittedOnly:
    """A `Scheduler` that proposes no job: only submitted jobs are done."""

    def plan(self, manifest: Manifest, compactions: Compactions) -> list[Spec]:  # noqa: ARG002
        return []


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a compaction on demand. Bytes are those of SSTs written so far, and of the sources."""

    jobs_done: int
    jobs: int
    bytes_written: int
    bytes_to_read: int
    coordinating: bool


@dataclass(slots=True)
class _Submission:
    job_id: Ulid
    spec: Spec
    source_bytes: int
    views: list[SstView]
    finished: JobStatus | None = None
    written_bytes: int = 0


@dataclass(slots=True)
class CompactNow:
    """One compaction on demand. It calls `planner` for the jobs that are left to do until there are none.

    Jobs of other processes that have the same sources come first; if those never end, `fallback` plans around them.
    With `once` every tree is compacted only once: SSTs flushed meanwhile are left for the next call.
    """

    board: Board
    planner: Planner
    executor: Executor
    options: CompactorOptions
    work: CompactionWorkerOptions
    fallback: Planner | None = None
    once: bool = False
    progress: Callable[[Progress], None] = lambda _: None
    patience_s: float = PATIENCE_S
    pool: IoPool | None = None
    _submissions: dict[Ulid, _Submission] = field(default_factory=dict)
    _coordinator: Coordinator | None = None
    _stalled_since: float = 0.0
    _blocked_since: float = 0.0
    _stalled_at: tuple[object, ...] = ()
    _failures: int = 0

    def run(self, *, timeout_s: float | None = None) -> list[Ulid]:
        """The ids of the jobs that were completed.

        Raises:
            Unavailable: it took longer than `timeout_s`, or the jobs failed repeatedly. Committed results stay.

        """
        started = self._stalled_since = self._blocked_since = self.board.clock.monotonic()
        worker = Worker(self.board, self.executor, self.work, accepts=self._accepts, pool=self.pool)
        pause_s, seen = _STEP_S, self._versions()
        try:
            self.board.fetch_jobs()
            while not self._step(worker):
                if timeout_s is not None and self.board.clock.monotonic() - started > timeout_s:
                    raise Unavailable(f"the compaction is not done after {timeout_s} s: {self._open_jobs()}")
                self._raise_failure(worker)
                if seen != self._versions():
                    pause_s, seen = _STEP_S, self._versions()
                    continue  # something has changed: there may be more to do at once
                self.board.clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_STEP_S)
        finally:
            worker.stop(self.patience_s)
            if self._coordinator is not None:
                self._coordinator.release()
        return [entry.job_id for entry in self._submissions.values() if entry.finished is _COMPLETED]

    def _step(self, worker: Worker) -> bool:
        """Coordinate, work, and submit what is left; whether all is done."""
        self._coordinate(worker)
        worker.run_once()
        jobs = self._jobs()
        self._settle(jobs)
        self._report(jobs)
        if any(entry.finished is None for entry in self._submissions.values()):
            return False
        active = [job for job in jobs.jobs if not job.status.finished]
        done = {entry.spec.segment for entry in self._submissions.values() if entry.finished is _COMPLETED}
        now, manifest = self.board.clock.monotonic(), self.board.fetch_manifest().value
        if not active:
            self._blocked_since = now
        planned = self.planner(manifest, jobs)
        specs = [spec for spec in planned if not (self.once and spec.segment in done)]
        if not specs:
            return True
        if self._coordinator is None and self._vacant():
            self._coordinator = self._make_coordinator(worker)
        elif self.board.jobs is None:
            # This process coordinates and could not create the compactions file yet. It tries again.
            return False
        elif active and self.fallback is not None and now - self._blocked_since > self.patience_s:
            self._submit(self.fallback(manifest, jobs))
        else:
            self._submit(specs)
        return False

    def _jobs(self) -> Compactions:
        jobs = self.board.jobs
        return Compactions() if jobs is None else jobs.value

    def _versions(self) -> tuple[int, int]:
        manifest, jobs = self.board.manifest, self.board.jobs
        return 0 if manifest is None else manifest.id, 0 if jobs is None else jobs.id

    def _vacant(self) -> bool:
        """Whether there is certainly no coordinator: there never was one, or the last one released the role."""
        jobs = self.board.jobs
        return jobs is None or is_released(jobs.value)

    def _raise_failure(self, worker: Worker) -> None:
        """Mark a job as failed if a retry does not help, and raise the error, unless planning again helps."""
        for entry in self._submissions.values():
            error = None if entry.finished else worker.setback(entry.job_id, at_least=_MAX_FAILURES)
            if error is not None:
                failed = {entry.job_id: JobStatus.FAILED}
                self.board.edit_jobs(lambda now, failed=failed: settle_jobs(now.value, failed))  # type: ignore[misc]
                if not isinstance(error, SourcesGone):
                    raise error

    def _coordinate(self, worker: Worker) -> None:
        if self._coordinator is not None:
            self._coordinator.run_once()
            if self._coordinator.fenced:
                self._coordinator = None
                self._stalled_since = self.board.clock.monotonic()
        elif self._abandoned():
            # The owner of the role does not use it; if it wakes up, it finds the role taken.
            _log.info("no coordinator answers within %.0f s: taking over", self.patience_s)
            self._coordinator = self._make_coordinator(worker)

    def _make_coordinator(self, worker: Worker) -> Coordinator:
        local = LocalWorker(worker.id, worker.slots)
        return Coordinator(self.board, self.options, scheduler=SubmittedOnly(), local=local)

    def _accepts(self, job_id: Ulid) -> bool:
        """Whether the worker may claim a job: its own ones, and as coordinator any."""
        return self._coordinator is not None or job_id in self._submissions

    def _abandoned(self) -> bool:
        """Whether jobs wait for a coordinator that does not act: neither jobs nor workers have changed."""
        now = self.board.clock.monotonic()
        active = [job for job in self._jobs().jobs if not job.status.finished]
        state = tuple((job.id, job.status, job.worker) for job in active)
        if state != self._stalled_at or not active:
            self._stalled_at, self._stalled_since = state, now
        return now - self._stalled_since > self.patience_s

    def _submit(self, specs: Sequence[Spec]) -> None:
        manifest = self.board.fetch_manifest().value
        added: dict[Ulid, _Submission] = {}

        def edit(now: Versioned[Compactions]) -> Compactions:
            added.clear()
            jobs = now.value
            for spec in specs:
                if find_problem(spec, manifest, jobs) is None:
                    job = Job(mint_job(jobs, self.board.ids), spec)
                    jobs = add_job(jobs, job)
                    added[job.id] = _Submission(
                        job.id, spec, source_bytes(manifest, spec), source_views(manifest, spec)
                    )
            return jobs

        self.board.edit_jobs(edit)
        if added:
            self._submissions |= added
            self._stalled_since = self._blocked_since = self.board.clock.monotonic()

    def _settle(self, jobs: Compactions) -> None:
        for entry in self._submissions.values():
            job = jobs.job(entry.job_id)
            if entry.finished is not None or (job is not None and not job.status.finished):
                continue
            # The coordinator soon drops finished jobs from the file. Then the job completed if its sources are gone; a
            # run that was rewritten alone has its id again, and other SSTs.
            done = job.status if job is not None else None
            if done is None:
                manifest = self.board.fetch_manifest().value
                left = find_problem(entry.spec, manifest, Compactions()) is None
                left = left and source_views(manifest, entry.spec) == entry.views
                done = JobStatus.FAILED if left else JobStatus.COMPLETED
            entry.finished = done
            if done is JobStatus.FAILED:
                self._failures += 1
                _log.warning("compaction job=%s failed; planning again", ulid_text(entry.job_id))
                if self._failures >= _MAX_FAILURES:
                    raise Unavailable(
                        f"{self._failures} compactions failed in a row; the coordinator has logged the reasons"
                    )

    def _report(self, jobs: Compactions) -> None:
        entries = [entry for entry in self._submissions.values() if entry.finished is not JobStatus.FAILED]
        for entry in entries:
            job = jobs.job(entry.job_id)
            if job is not None:
                parts = job.context.subcompactions if job.context else ()
                outputs = [*job.output_ssts, *(sst for part in parts for sst in part.output_ssts)]
                entry.written_bytes = sum(sst.info.estimated_size for sst in outputs)
        self.progress(
            Progress(
                sum(entry.finished is not None for entry in entries),
                len(entries),
                sum(entry.written_bytes for entry in entries),
                sum(entry.source_bytes for entry in entries),
                self._coordinator is not None,
            )
        )

    def _open_jobs(self) -> str:
        waiting = [ulid_text(entry.job_id) for entry in self._submissions.values() if entry.finished is None]
        return (
            f"jobs {', '.join(waiting)} are in the compactions file"
            if waiting
            else "jobs of other processes come first"
        )
