"""Compactions file <-> bytes: u16 BE version, then a FlatBuffers buffer. Reads versions 1 and 2, writes 2.

Both versions hold the same table. In version 1 the destination of a job is not stored but follows from its
sources: the lowest source run, or 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from flagstone.errors import CorruptData
from flagstone.format import flat
from flagstone.metadata.compactions import (
    Compactions,
    DrainSpec,
    Job,
    JobContext,
    JobStatus,
    Subcompaction,
    TieredSpec,
    Worker,
)
from flagstone.metadata.integrity import unseal_metadata
from flagstone.metadata.invariants import check_stored_compactions
from flagstone.metadata.manifest import SsTable
from flagstone.metadata.manifest_codec import BYTES_RANGE, PLACED_TABLE, ULID, open_envelope
from flagstone.types import RunId

VERSION: Final = 2
_ENVELOPE_BYTES: Final = 2
_TIERED: Final = 1
_DRAIN: Final = 2
_TIERED_CONTEXT: Final = 1
_STATUSES: Final = {status.value: status for status in JobStatus}


def encode_compactions(compactions: Compactions) -> bytes:
    """The stored bytes, version 2."""
    return VERSION.to_bytes(_ENVELOPE_BYTES, "big") + flat.encode(_COMPACTIONS, compactions)


def decode_compactions(data: bytes, *, strict: bool = False) -> Compactions:
    """The compactions file in `data`; anything else raises CorruptData with the offset inside `data`.

    `strict` is for files without a checksum: nothing may be left over, and what cannot be right is refused.
    """
    version, body = open_envelope(data, "compactions file")
    if version not in (1, VERSION):
        raise CorruptData(f"unsupported compactions format version {version}", offset=0)
    try:
        compactions = flat.decode(_COMPACTIONS, body, strict=strict)
    except CorruptData as error:
        raise error.within(None, _ENVELOPE_BYTES) from None
    if strict:
        check_stored_compactions(compactions)
    if version == 1:
        return replace(compactions, jobs=tuple(_with_derived_destination(job) for job in compactions.jobs))
    return compactions


def load_compactions(stored: bytes, path: str) -> Compactions:
    """The compactions file out of the bytes at `path`. Raises CorruptData naming object and offset."""
    data, vouched = unseal_metadata(stored, path)
    try:
        return decode_compactions(data, strict=not vouched)
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
    return Job(job_id, spec, status, _tables_of(output) if done else (), worker, context)


def _take_job(job: Job) -> tuple[Any, ...]:
    return (
        job.id,
        _TIERED if isinstance(job.spec, TieredSpec) else _DRAIN,
        job.spec,
        job.status,
        _placed(job.output_ssts),
        job.worker,
        0 if job.context is None else _TIERED_CONTEXT,
        job.context,
    )


def _make_compactions(values: list[Any]) -> Compactions:
    epoch, jobs = values
    return Compactions(epoch, tuple(sorted(jobs, key=lambda job: job.id)))


def _tables_of(placed: tuple[tuple[SsTable, Any], ...] | None) -> tuple[SsTable, ...]:
    return tuple(table for table, _ in placed or ())


def _placed(tables: tuple[SsTable, ...]) -> list[tuple[SsTable, None]]:
    return [(table, None) for table in tables]


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
    flat.Children(PLACED_TABLE),
    make=lambda values: Subcompaction(values[0], _tables_of(values[1])),
    take=lambda part: (part.range, _placed(part.output_ssts) or None),
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
    flat.Children(PLACED_TABLE),
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
