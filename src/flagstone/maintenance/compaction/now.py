"""Compaction on demand: submit what is to be merged, help doing it, and wait until it is in the manifest.

A coordinator that is alive, in whatever process, takes the jobs up; then this process is one of its workers. When none
answers, this process becomes the coordinator for as long as it takes; at once, where the last one said that it left.
Should one appear meanwhile and take the role back, the work goes on under it. A crash leaves jobs in the compactions
file that any coordinator can go on with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from flagstone.errors import Unavailable
from flagstone.maintenance.compaction.board import Board
from flagstone.maintenance.compaction.coordinator import Coordinator
from flagstone.maintenance.compaction.lifecycle import is_released, settle_jobs
from flagstone.maintenance.compaction.results import source_bytes
from flagstone.maintenance.compaction.validation import find_problem
from flagstone.maintenance.compaction.worker import Worker
from flagstone.metadata.compactions import Compactions, Job, JobStatus, Spec, add_job
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_ms, ulid_text
from flagstone.types import Ulid

_log = logging.getLogger("flagstone.compaction")

PATIENCE_S: Final = 20.0
"""How long a living coordinator may take to notice a job: longer than any idles between two looks."""

_STEP_S: Final = 0.05
_LONGEST_STEP_S: Final = 0.5
_MAX_FAILURES: Final = 5
_COMPLETED: Final = JobStatus.COMPLETED

Planner = Callable[[Manifest, Compactions], Sequence[Spec]]


class NoIdeas:
    """A `Scheduler` that never has an idea of its own: only what is submitted gets done."""

    def plan(self, manifest: Manifest, compactions: Compactions) -> list[Spec]:  # noqa: ARG002
        return []


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a compaction on demand is. Bytes are those of tables written so far, and of the sources."""

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
    finished: JobStatus | None = None
    written_bytes: int = 0


@dataclass(slots=True)
class CompactNow:
    """One compaction on demand. `planner` says what is left to do, and is asked again until that is nothing.

    Jobs of others come first, as far as they want the same tables; where those never end, `fallback` plans around
    them. With `once` every tree is done only once: what is flushed meanwhile is left for the next time.
    `make_worker(accepts)` and `make_coordinator(worker)` build the parts around `board`.
    """

    board: Board
    planner: Planner
    make_worker: Callable[[Callable[[Ulid], bool]], Worker]
    make_coordinator: Callable[[Worker], Coordinator]
    clock: Clock
    ids: Ids
    fallback: Planner | None = None
    once: bool = False
    progress: Callable[[Progress], None] = lambda _: None
    patience_s: float = PATIENCE_S
    _submissions: dict[Ulid, _Submission] = field(default_factory=dict)
    _coordinator: Coordinator | None = None
    _stalled_since: float = 0.0
    _blocked_since: float = 0.0
    _stalled_at: tuple[object, ...] = ()
    _failures: int = 0

    def run(self, *, timeout_s: float | None = None) -> list[Ulid]:
        """The ids of the jobs that were completed.

        Raises:
            Unavailable: it took longer than `timeout_s`, or the jobs failed again and again. What was committed stays.

        """
        started = self._stalled_since = self._blocked_since = self.clock.monotonic()
        worker = self.make_worker(lambda job_id: self._coordinator is not None or job_id in self._submissions)
        pause_s, seen = _STEP_S, self._versions()
        try:
            self.board.fetch_jobs()
            while not self._step(worker):
                if timeout_s is not None and self.clock.monotonic() - started > timeout_s:
                    raise Unavailable(f"the compaction is not done after {timeout_s} s: {self._open_jobs()}")
                self._raise_failure(worker)
                if seen != self._versions():
                    pause_s, seen = _STEP_S, self._versions()
                    continue  # something happened: perhaps there is more to do at once
                self.clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_STEP_S)
        finally:
            worker.stop(self.patience_s)
            if self._coordinator is not None:
                self._coordinator.release()
        return [entry.job_id for entry in self._submissions.values() if entry.finished is _COMPLETED]

    def _step(self, worker: Worker) -> bool:
        """Take one turn; whether all is done."""
        self._coordinate(worker)
        worker.run_once()
        jobs = self._jobs()
        self._settle(jobs)
        self._report(jobs)
        if any(entry.finished is None for entry in self._submissions.values()):
            return False
        active = [job for job in jobs.jobs if not job.status.finished]
        done = {entry.spec.segment for entry in self._submissions.values() if entry.finished is _COMPLETED}
        now, manifest = self.clock.monotonic(), self.board.fetch_manifest().value
        if not active:
            self._blocked_since = now
        planned = self.planner(manifest, jobs)
        specs = [spec for spec in planned if not (self.once and spec.segment in done)]
        if not specs:
            return True
        if self._coordinator is None and self._vacant():
            self._coordinator = self.make_coordinator(worker)
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
        """Whether it is certain that there is no coordinator: there never was one, or the last one has left."""
        jobs = self.board.jobs
        return jobs is None or is_released(jobs.value)

    def _raise_failure(self, worker: Worker) -> None:
        """Raise what the executor raised for a job of ours, where trying again will not help; the job is withdrawn."""
        for entry in self._submissions.values():
            error = worker.setback(entry.job_id, at_least=_MAX_FAILURES)
            if error is not None:
                failed = {entry.job_id: JobStatus.FAILED}
                self.board.edit_jobs(lambda now, failed=failed: settle_jobs(now.value, failed))  # type: ignore[misc]
                raise error

    def _coordinate(self, worker: Worker) -> None:
        if self._coordinator is not None:
            self._coordinator.run_once()
            if self._coordinator.fenced:
                self._coordinator = None
                self._stalled_since = self.clock.monotonic()
        elif self._abandoned():
            # Whoever has the role does not use it; should it wake up, it finds the role taken.
            _log.info("no coordinator answers within %.0f s: taking over", self.patience_s)
            self._coordinator = self.make_coordinator(worker)

    def _abandoned(self) -> bool:
        """Whether jobs wait for a coordinator that does not come: nothing changes, and nobody works."""
        now = self.clock.monotonic()
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
                    newest = jobs.newest_job
                    job = Job(self.ids.ulid(0 if newest is None else ulid_ms(newest)), spec)
                    jobs = add_job(jobs, job)
                    added[job.id] = _Submission(job.id, spec, source_bytes(manifest, spec))
            return jobs

        self.board.edit_jobs(edit)
        if added:
            self._submissions |= added
            self._stalled_since = self._blocked_since = self.clock.monotonic()

    def _settle(self, jobs: Compactions) -> None:
        for entry in self._submissions.values():
            job = jobs.job(entry.job_id)
            if entry.finished is not None or (job is not None and not job.status.finished):
                continue
            # Finished jobs are soon forgotten; that the sources are gone says how it went.
            done = job.status if job is not None else None
            if done is None:
                left = find_problem(entry.spec, self.board.fetch_manifest().value, Compactions()) is None
                done = JobStatus.FAILED if left else JobStatus.COMPLETED
            entry.finished = done
            if done is JobStatus.FAILED:
                self._failures += 1
                _log.warning("compaction job=%s failed; planning anew", ulid_text(entry.job_id))
                if self._failures >= _MAX_FAILURES:
                    raise Unavailable(
                        f"{self._failures} compactions failed one after the other; the coordinator's log says why"
                    )

    def _report(self, jobs: Compactions) -> None:
        entries = [entry for entry in self._submissions.values() if entry.finished is not JobStatus.FAILED]
        for entry in entries:
            job = jobs.job(entry.job_id)
            if job is not None:
                parts = job.context.subcompactions if job.context else ()
                outputs = [*job.output_ssts, *(table for part in parts for table in part.output_ssts)]
                entry.written_bytes = sum(table.info.estimated_size for table in outputs)
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
            f"jobs {', '.join(waiting)} are in the compactions file" if waiting else "others' jobs come first"
        )
