"""The compactions file: which compaction jobs exist, which worker runs them, and their state; its rules and its bytes.

    Submitted -> Scheduled -> Running -> Compacted -> Completed
                     ^___________|          (a worker that failed or stopped its heartbeat gives the job back)
    Submitted -> Completed (applied at once), Submitted | Compacted -> Failed

The coordinator owns every step but two: a worker claims a scheduled job and reports a running one.

The bytes are a u16 BE version and a FlatBuffers buffer. Versions 1 and 2 are read, 2 is written. Both hold the same
FlatBuffers table. In version 1 the destination of a job is not stored but follows from its sources: the lowest source
run, or 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, Final

from flagstone.errors import CorruptData, InternalError
from flagstone.format import flat
from flagstone.lsm.tree import BytesRange
from flagstone.metadata.integrity import unseal_metadata
from flagstone.metadata.invariants import broken, check_record, ulid_texts
from flagstone.metadata.manifest import SsTable
from flagstone.metadata.manifest_codec import BYTES_RANGE, ENVELOPE_BYTES, OUTPUT_SST, ULID, envelope_version
from flagstone.runtime.ids import ulid_ms, ulid_text
from flagstone.types import RunId, Seq, Ulid


class JobStatus(IntEnum):
    """The state of a job. Stored: never renumber."""

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
    """The worker that has claimed a job, and its last heartbeat."""

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
    """One compaction job. `output_ssts` is set when it is done, `context` while it runs."""

    id: Ulid
    spec: Spec
    status: JobStatus = JobStatus.SUBMITTED
    output_ssts: tuple[SsTable, ...] = ()
    worker: Worker | None = None
    context: JobContext | None = None


@dataclass(frozen=True, slots=True)
class Compactions:
    """The listed jobs, ascending by id, under the epoch of the coordinator that owns them."""

    compactor_epoch: int = 0
    jobs: tuple[Job, ...] = field(default=())

    def job(self, job_id: Ulid) -> Job | None:
        """The job with that id, if it is still listed."""
        return next((job for job in self.jobs if job.id == job_id), None)

    @property
    def newest_job(self) -> Ulid | None:
        """The id that a new job must not be older than."""
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
    """The file with one job edited. A step that is not in the life cycle raises InternalError."""
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
    """The file without finished jobs, except the newest: garbage collection needs its time stamp."""
    finished = [job.id for job in compactions.jobs if job.status.finished]
    newest = max(finished, default=None)
    return _with_jobs(
        compactions, (job for job in compactions.jobs if not job.status.finished or job.id == newest)
    )


def _with_jobs(compactions: Compactions, jobs: Iterable[Job]) -> Compactions:
    return replace(compactions, jobs=tuple(sorted(jobs, key=lambda job: job.id)))


# -- rules ------------------------------------------------------------------------------------------------


def check_compactions(following: Compactions, current: Compactions | None) -> None:
    """Raise InternalError unless `following` may be committed after `current`."""
    for state_rule in _COMPACTIONS_STATE_RULES:
        state_rule(following)
    if current is not None:
        for step_rule in _COMPACTIONS_STEP_RULES:
            step_rule(following, current)


def check_stored_compactions(compactions: Compactions) -> None:
    """Raise CorruptData if no coordinator can have written this compactions file."""
    try:
        job_ids_ascend(compactions)
    except InternalError as error:
        raise CorruptData(f"no coordinator makes such a file: {error}", offset=0) from None
    for job in compactions.jobs:
        parts = job.context.subcompactions if job.context else ()
        for sst in (*job.output_ssts, *(sst for part in parts for sst in part.output_ssts)):
            check_record(sst)


def job_ids_ascend(following: Compactions) -> None:
    """Jobs are listed once each, ascending by id."""
    for one, next_one in pairwise(job.id for job in following.jobs):
        if one >= next_one:
            broken(job_ids_ascend, f"{ulid_text(one)} before {ulid_text(next_one)}")


def outputs_not_older_than_job(following: Compactions) -> None:
    """No output of a job is stamped earlier than the job itself."""
    for job in following.jobs:
        parts = job.context.subcompactions if job.context else ()
        outputs = [*job.output_ssts, *(sst for part in parts for sst in part.output_ssts)]
        early = [sst.id for sst in outputs if ulid_ms(sst.id) < ulid_ms(job.id)]
        if early:
            broken(outputs_not_older_than_job, f"{ulid_texts(early)} of job {ulid_text(job.id)}")


def coordinator_epoch_grows(following: Compactions, current: Compactions) -> None:
    """The epoch of the compactions file never goes back."""
    if following.compactor_epoch < current.compactor_epoch:
        broken(coordinator_epoch_grows, f"from {current.compactor_epoch} to {following.compactor_epoch}")


def new_job_not_older(following: Compactions, current: Compactions) -> None:
    """A new job is not stamped earlier than the newest one before it; equal milliseconds are fine."""
    newest = current.newest_job
    for job in following.jobs:
        if newest is not None and current.job(job.id) is None and ulid_ms(job.id) < ulid_ms(newest):
            broken(new_job_not_older, f"{ulid_text(job.id)} after {ulid_text(newest)}")


def jobs_follow_life_cycle(following: Compactions, current: Compactions) -> None:
    """A job's status changes only along its life cycle."""
    for job in following.jobs:
        before = current.job(job.id)
        if before is not None and not may_follow(before.status, job.status):
            broken(
                jobs_follow_life_cycle,
                f"job {ulid_text(job.id)} from {before.status.name} to {job.status.name}",
            )


_COMPACTIONS_STATE_RULES = (job_ids_ascend, outputs_not_older_than_job)
_COMPACTIONS_STEP_RULES = (coordinator_epoch_grows, new_job_not_older, jobs_follow_life_cycle)


# -- bytes ------------------------------------------------------------------------------------------------

VERSION: Final = 2
_TIERED: Final = 1
_DRAIN: Final = 2
_TIERED_CONTEXT: Final = 1
_STATUSES: Final = {status.value: status for status in JobStatus}


def encode_compactions(compactions: Compactions) -> bytes:
    """The stored bytes, version 2."""
    return flat.encode(_COMPACTIONS, compactions, before=VERSION.to_bytes(ENVELOPE_BYTES, "big"))


def decode_compactions(data: bytes | memoryview, *, strict: bool = False) -> Compactions:
    """The compactions file in `data`; anything else raises CorruptData with the offset inside `data`.

    `strict` is for files without a checksum: no byte may be left over, and impossible content is refused.
    """
    version = envelope_version(data, "compactions file")
    if version not in (1, VERSION):
        raise CorruptData(f"unsupported compactions format version {version}", offset=0)
    try:
        compactions = flat.decode(_COMPACTIONS, data, start=ENVELOPE_BYTES, strict=strict)
    except CorruptData as error:
        raise error.within(None, ENVELOPE_BYTES) from None
    if strict:
        check_stored_compactions(compactions)
    if version == 1:
        return replace(compactions, jobs=tuple(_with_derived_destination(job) for job in compactions.jobs))
    return compactions


def load_compactions(stored: bytes, path: str) -> Compactions:
    """The compactions file in the bytes at `path`. Raises CorruptData naming object and offset."""
    data, checked = unseal_metadata(stored, path)
    try:
        return decode_compactions(data, strict=not checked)
    except CorruptData as error:
        raise error.within(path) from None


def _with_derived_destination(job: Job) -> Job:
    if not isinstance(job.spec, TieredSpec):
        return job
    destination = min(job.spec.sorted_runs, default=RunId(0))
    return replace(job, spec=replace(job.spec, destination=destination))


def _make_tiered(values: list[Any]) -> TieredSpec:
    old_sst_ids, sorted_runs, l0_view_ids, segment, destination = values
    # Before views had ids of their own, sources were named by SST id; the two are equal in such files.
    return TieredSpec(l0_view_ids or old_sst_ids or (), sorted_runs or (), destination, segment or b"")


def _make_drain(values: list[Any]) -> DrainSpec:
    segment, l0_view_ids, sorted_runs = values
    return DrainSpec(segment, l0_view_ids or (), sorted_runs or ())


def _make_worker(values: list[Any]) -> Worker | None:
    worker_id, last_heartbeat_ms = values
    return None if worker_id is None else Worker(worker_id, last_heartbeat_ms)


def _make_job(values: list[Any]) -> Job:
    job_id, _, spec, status_number, output, worker, context_kind, context = values
    if context_kind and context is None:
        raise CorruptData(f"compaction context of kind {context_kind} is missing")
    status = _STATUSES.get(status_number, JobStatus.SUBMITTED)
    # Until a job is done its progress lives in the context; an output beside it would be a stale copy.
    done = status.finished or status is JobStatus.COMPACTED
    return Job(job_id, spec, status, output or () if done else (), worker, context)


def _take_job(job: Job) -> tuple[Any, ...]:
    return (
        job.id,
        _TIERED if isinstance(job.spec, TieredSpec) else _DRAIN,
        job.spec,
        job.status,
        job.output_ssts,
        job.worker,
        0 if job.context is None else _TIERED_CONTEXT,
        job.context,
    )


def _make_compactions(values: list[Any]) -> Compactions:
    epoch, jobs = values
    return Compactions(epoch, tuple(sorted(jobs, key=lambda job: job.id)))


_TIERED_SPEC: Final = flat.Shape[TieredSpec](
    "TieredCompactionSpec",
    flat.Children(ULID),
    flat.Numbers(),
    flat.Children(ULID),
    flat.Bytes(),
    flat.U32,
    make=_make_tiered,
    take=lambda spec: (
        None,
        spec.sorted_runs or None,
        spec.l0_view_ids or None,
        spec.segment,
        spec.destination,
    ),
    order=(0, 2, 1, 3),
)
_DRAIN_SPEC: Final = flat.Shape[DrainSpec](
    "DrainSegmentSpec",
    flat.Bytes(required=True),
    flat.Children(ULID),
    flat.Numbers(),
    make=_make_drain,
    take=lambda spec: (spec.segment, spec.l0_view_ids or None, spec.sorted_runs or None),
    order=(1, 2, 0),
)
_WORKER: Final = flat.Shape[Worker | None](
    "WorkerSpec",
    flat.Text(),
    flat.U64,
    make=_make_worker,
    take=lambda worker: (None, 0) if worker is None else (worker.id, worker.last_heartbeat_ms),
)
_SUBCOMPACTION: Final = flat.Shape[Subcompaction](
    "Subcompaction",
    flat.Child(BYTES_RANGE, required=True),
    flat.Children(OUTPUT_SST),
    make=lambda values: Subcompaction(values[0], values[1] or ()),
    take=lambda part: (part.range, part.output_ssts or None),
)
_CONTEXT: Final = flat.Shape[JobContext](
    "TieredCompactionContext",
    flat.Children(_SUBCOMPACTION),
    flat.U64,
    make=lambda values: JobContext(values[0] or (), values[1]),
    take=lambda context: (context.subcompactions, context.retention_min_seq),
)
_JOB: Final = flat.Shape[Job](
    "Compaction",
    flat.Child(ULID, required=True),
    flat.U8,
    flat.Union({_TIERED: _TIERED_SPEC, _DRAIN: _DRAIN_SPEC}, required=True),
    flat.I8,
    flat.Children(OUTPUT_SST),
    flat.Child(_WORKER),
    flat.U8,
    flat.Union({_TIERED_CONTEXT: _CONTEXT}),
    make=_make_job,
    take=_take_job,
    order=(0, 2, 5, 7, 4),
)
_COMPACTIONS: Final = flat.Shape[Compactions](
    "CompactionsV1",
    flat.U64,
    flat.Children(_JOB, required=True),
    make=_make_compactions,
    take=lambda held: (held.compactor_epoch, held.jobs),
)
