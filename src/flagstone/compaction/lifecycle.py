"""The steps of compaction jobs as edits of the compactions file: pure, and harmless when applied twice.

Coordinator: `reset_jobs`, `settle_jobs`, `reclaim_jobs`, `drop_impossible`, `accept_jobs`, `add_jobs`, `release_role`.
Worker: `claim_jobs`, `renew_claims`, `report_jobs`, `return_jobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from flagstone.compaction.validation import find_commit_problem, find_problem
from flagstone.metadata.annotations import coordinator_left
from flagstone.metadata.compactions import (
    Compactions,
    DrainSpec,
    Job,
    JobContext,
    JobStatus,
    Spec,
    TieredSpec,
    Worker,
    add_job,
    edit_job,
    trim_finished,
)
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.types import RunId, Ulid


def reset_jobs(compactions: Compactions) -> Compactions:
    """The file that a new coordinator begins with: jobs without a worker are submitted again, to be checked again."""

    def reset(job: Job) -> Job:
        return replace(job, status=JobStatus.SUBMITTED, worker=None)

    return trim_finished(_edit_where(compactions, lambda job: job.status is JobStatus.SCHEDULED, reset))


def settle_jobs(compactions: Compactions, outcomes: Mapping[Ulid, JobStatus]) -> Compactions:
    """Give the jobs their final statuses."""

    def settle(job: Job) -> Job:
        return replace(job, status=outcomes[job.id], worker=None, context=None)

    open_ones = (job.id for job in compactions.jobs if not job.status.finished)
    return _edit_each(compactions, [job_id for job_id in open_ones if job_id in outcomes], settle)


def reclaim_jobs(
    compactions: Compactions, *, now_ms: int, timeout_ms: int, alive: Collection[str] = ()
) -> Compactions:
    """Free the running jobs whose worker has not renewed its claim in time; they keep what it recorded.

    `alive` are workers that are known to be alive, whatever the file contains.
    """

    def silent(job: Job) -> bool:
        if job.status is not JobStatus.RUNNING:
            return False
        worker = job.worker
        return worker is None or (worker.id not in alive and worker.last_heartbeat_ms + timeout_ms < now_ms)

    return _edit_where(compactions, silent, _freed)


def drop_impossible(
    compactions: Compactions, manifest: Manifest, *, among: Collection[Ulid]
) -> tuple[Compactions, dict[Ulid, str]]:
    """Fail the jobs whose sources are gone, and return the reasons: no worker could ever finish them.

    `among` are the jobs that are not newer than the manifest; other jobs cannot be checked against it.
    """
    problems = {
        job.id: problem
        for job in compactions.jobs
        if job.status in (JobStatus.SCHEDULED, JobStatus.RUNNING)
        and job.id in among
        and (problem := find_commit_problem(job.spec, manifest)) is not None
    }
    return settle_jobs(compactions, dict.fromkeys(problems, JobStatus.FAILED)), problems


def accept_jobs(
    compactions: Compactions, manifest: Manifest, *, among: Collection[Ulid]
) -> tuple[Compactions, dict[Ulid, str]]:
    """Schedule the submitted jobs, or fail them, and return the reasons. Drains stay submitted: they need no worker.

    `among` are the jobs that are not newer than the manifest; other jobs cannot be checked against it.
    """
    problems: dict[Ulid, str] = {}
    for job in compactions.jobs:
        if job.status is not JobStatus.SUBMITTED or job.id not in among:
            continue
        problem = find_problem(job.spec, manifest, compactions, job_id=job.id)
        if problem is not None:
            problems[job.id] = problem
            compactions = settle_jobs(compactions, {job.id: JobStatus.FAILED})
        elif not isinstance(job.spec, DrainSpec):
            compactions = edit_job(compactions, job.id, lambda job: replace(job, status=JobStatus.SCHEDULED))
    return compactions, problems


def add_jobs(
    compactions: Compactions,
    specs: Iterable[Spec],
    manifest: Manifest,
    mint: Callable[[Compactions], Ulid],
    claim: Callable[[Compactions], Worker | None] = lambda _: None,
) -> tuple[Compactions, list[tuple[Spec, str]]]:
    """Add one scheduled job for each valid spec; return the other specs with the reasons.

    A job for which `claim` returns a worker is running for that worker from the start. Drains are only submitted.
    """
    refused: list[tuple[Spec, str]] = []
    for spec in specs:
        problem = find_problem(spec, manifest, compactions)
        if problem is not None:
            refused.append((spec, problem))
        elif isinstance(spec, DrainSpec):
            compactions = add_job(compactions, Job(mint(compactions), spec))
        else:
            worker = claim(compactions)
            status = JobStatus.SCHEDULED if worker is None else JobStatus.RUNNING
            compactions = add_job(compactions, Job(mint(compactions), spec, status, worker=worker))
    return compactions, refused


def release_role(
    compactions: Compactions, mint: Callable[[Compactions], Ulid], *, now_ms: int
) -> Compactions:
    """Record that the coordinator has released its role, as the worker of the last finished job.

    If no job has finished, a completed job without sources is added for it. SlateDB does not read that field. The next
    claim changes the epoch, and the note becomes invalid.
    """
    if not any(job.status.finished for job in compactions.jobs):
        nothing = TieredSpec((), (), RunId(0))
        compactions = add_job(compactions, Job(mint(compactions), nothing, JobStatus.COMPLETED))
    finished = [job.id for job in compactions.jobs if job.status.finished]
    note = Worker(coordinator_left(compactions.compactor_epoch), now_ms)
    return _edit_each(compactions, finished[-1:], lambda job: replace(job, worker=note))


def is_released(compactions: Compactions) -> bool:
    """Whether the coordinator of this epoch has released the role."""
    note = coordinator_left(compactions.compactor_epoch)
    return any(job.worker is not None and job.worker.id == note for job in compactions.jobs)


def claim_jobs(
    compactions: Compactions, worker: Worker, *, slots: int, unwanted: Collection[Ulid]
) -> Compactions:
    """Claim the oldest jobs without a worker for this one, until it has `slots` of them."""
    free = slots - len(jobs_of(compactions, worker.id))
    wanted = [
        job.id
        for job in compactions.jobs
        if job.status is JobStatus.SCHEDULED and job.worker is None and job.id not in unwanted
    ]
    return _edit_each(
        compactions, wanted[: max(0, free)], lambda job: replace(job, status=JobStatus.RUNNING, worker=worker)
    )


def renew_claims(
    compactions: Compactions, worker: Worker, contexts: Mapping[Ulid, JobContext | None]
) -> Compactions:
    """Renew the worker's claims and record its progress. Jobs that it has lost are left alone."""

    def renew(job: Job) -> Job:
        return replace(job, worker=worker, context=contexts[job.id] or job.context)

    return _edit_each(compactions, _own(compactions, worker.id, contexts), renew)


def report_jobs(
    compactions: Compactions, worker_id: str, outputs: Mapping[Ulid, tuple[SsTable, ...]]
) -> Compactions:
    """Mark the worker's jobs as compacted, so that the coordinator commits them."""

    def report(job: Job) -> Job:
        return replace(job, status=JobStatus.COMPACTED, output_ssts=outputs[job.id], context=None)

    return _edit_each(compactions, _own(compactions, worker_id, outputs), report)


def return_jobs(
    compactions: Compactions, worker_id: str, contexts: Mapping[Ulid, JobContext | None]
) -> Compactions:
    """Free jobs that the worker does not finish; another worker continues from what was recorded."""

    def free(job: Job) -> Job:
        return _freed(replace(job, context=contexts[job.id] or job.context))

    return _edit_each(compactions, _own(compactions, worker_id, contexts), free)


def jobs_of(compactions: Compactions, worker_id: str) -> dict[Ulid, Job]:
    """The running jobs of that worker."""
    return {
        job.id: job
        for job in compactions.jobs
        if job.status is JobStatus.RUNNING and job.worker is not None and job.worker.id == worker_id
    }


def others_work(compactions: Compactions, worker_id: str | None) -> bool:
    """Whether workers other than that one have a job, or may claim one because there is no such worker."""
    return any(
        (job.status is JobStatus.RUNNING and (job.worker is None or job.worker.id != worker_id))
        or (worker_id is None and job.status is JobStatus.SCHEDULED)
        for job in compactions.jobs
    )


def _own(compactions: Compactions, worker_id: str, job_ids: Iterable[Ulid]) -> list[Ulid]:
    own = jobs_of(compactions, worker_id)
    return [job_id for job_id in job_ids if job_id in own]


def _freed(job: Job) -> Job:
    return replace(job, status=JobStatus.SCHEDULED, worker=None)


def _edit_where(
    compactions: Compactions, chosen: Callable[[Job], bool], edit: Callable[[Job], Job]
) -> Compactions:
    return _edit_each(compactions, [job.id for job in compactions.jobs if chosen(job)], edit)


def _edit_each(compactions: Compactions, job_ids: Iterable[Ulid], edit: Callable[[Job], Job]) -> Compactions:
    for job_id in job_ids:
        compactions = edit_job(compactions, job_id, edit)
    return compactions
