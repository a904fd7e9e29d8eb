"""The compactions file: which compaction jobs exist, who works on them, and how far they are.

    Submitted -> Scheduled -> Running -> Compacted -> Completed
                     ^___________|          (a worker that failed or fell silent gives the job back)
    Submitted -> Completed (applied at once), Submitted | Compacted -> Failed

The coordinator owns every step but two: a worker claims a scheduled job and reports a running one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from flagstone.errors import InternalError
from flagstone.lsm.tree import BytesRange
from flagstone.metadata.manifest import SsTable
from flagstone.types import RunId, Seq, Ulid


class JobStatus(IntEnum):
    """How far a job is. Stored: never renumber."""

    SUBMITTED = 0
    RUNNING = 1
    COMPLETED = 2
    FAILED = 3
    COMPACTED = 4
    SCHEDULED = 5

    @property
    def finished(self) -> bool:
        return self in (JobStatus.COMPLETED, JobStatus.FAILED)


@dataclass(frozen=True, slots=True)
class TieredSpec:
    """Merge L0 views (newest first) and runs (descending) of one segment into run `destination`."""

    l0_view_ids: tuple[Ulid, ...]
    sorted_runs: tuple[RunId, ...]
    destination: RunId
    segment: bytes = b""


@dataclass(frozen=True, slots=True)
class DrainSpec:
    """Drop L0 views and runs of one segment without replacement."""

    segment: bytes
    l0_view_ids: tuple[Ulid, ...] = ()
    sorted_runs: tuple[RunId, ...] = ()


Spec = TieredSpec | DrainSpec


@dataclass(frozen=True, slots=True)
class Worker:
    """Who has claimed a job, and when it last said that it is alive."""

    id: str
    last_heartbeat_ms: int = 0


@dataclass(frozen=True, slots=True)
class Subcompaction:
    """One key range of a job and the SSTs finished in it so far, which only ever grow in number."""

    range: BytesRange
    output_ssts: tuple[SsTable, ...] = ()


@dataclass(frozen=True, slots=True)
class JobContext:
    """What a resumed job must repeat exactly: its ranges and the snapshot barrier it started with."""

    subcompactions: tuple[Subcompaction, ...] = ()
    retention_min_seq: Seq = Seq(0)  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Job:
    """One compaction. `output_ssts` is set when all is done, `context` while work is going on."""

    id: Ulid
    spec: Spec
    status: JobStatus = JobStatus.SUBMITTED
    output_ssts: tuple[SsTable, ...] = ()
    worker: Worker | None = None
    context: JobContext | None = None


@dataclass(frozen=True, slots=True)
class Compactions:
    """All jobs worth remembering, ascending by id, under the epoch of the coordinator that owns them."""

    compactor_epoch: int = 0
    jobs: tuple[Job, ...] = field(default=())

    def job(self, job_id: Ulid) -> Job | None:
        """The job of that id, if it is still listed."""
        return next((job for job in self.jobs if job.id == job_id), None)

    @property
    def newest_job(self) -> Ulid | None:
        """The id a new job must not be older than."""
        return max((job.id for job in self.jobs), default=None)


_NEXT: Final = {
    JobStatus.SUBMITTED: {JobStatus.SCHEDULED, JobStatus.COMPLETED, JobStatus.FAILED},
    JobStatus.SCHEDULED: {JobStatus.RUNNING, JobStatus.SUBMITTED, JobStatus.FAILED},
    JobStatus.RUNNING: {JobStatus.SCHEDULED, JobStatus.COMPACTED, JobStatus.FAILED},
    JobStatus.COMPACTED: {JobStatus.COMPLETED, JobStatus.FAILED},
    JobStatus.COMPLETED: set[JobStatus](),
    JobStatus.FAILED: set[JobStatus](),
}


def may_follow(before: JobStatus, after: JobStatus) -> bool:
    """Whether a job may go from one status to the other in one step; staying is always allowed."""
    return before is after or after in _NEXT[before]


def add_job(compactions: Compactions, job: Job) -> Compactions:
    """The file with one more job; itself when it has that job already."""
    if compactions.job(job.id) is not None:
        return compactions
    return _with_jobs(compactions, (*compactions.jobs, job))


def edit_job(compactions: Compactions, job_id: Ulid, edit: Callable[[Job], Job]) -> Compactions:
    """The file with one job edited. A step the life cycle does not have raises InternalError."""
    before = compactions.job(job_id)
    if before is None:
        raise InternalError(f"compaction job {job_id:#x} is not in the compactions file")
    after = edit(before)
    if not may_follow(before.status, after.status):
        raise InternalError(
            f"compaction job {job_id:#x} cannot go from {before.status.name} to {after.status.name}"
        )
    return _with_jobs(compactions, (after if job.id == job_id else job for job in compactions.jobs))


def trim_finished(compactions: Compactions) -> Compactions:
    """The file without finished jobs, except the newest: garbage collection needs its time."""
    finished = [job.id for job in compactions.jobs if job.status.finished]
    newest = max(finished, default=None)
    return _with_jobs(
        compactions, (job for job in compactions.jobs if not job.status.finished or job.id == newest)
    )


def _with_jobs(compactions: Compactions, jobs: Iterable[Job]) -> Compactions:
    return replace(compactions, jobs=tuple(sorted(jobs, key=lambda job: job.id)))
