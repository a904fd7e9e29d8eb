"""Repairs after crashes of two-phase writers: what to complete, what to clean, what to forget.

Both passes list the base first and read the log second. A record read later than the listing can only be
further along, so what the listing shows and the record no longer needs is safe to delete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flagstone.store.commit_log.port import CommitRecord, RecordState
from flagstone.store.intents import IntentBroken, Intents, checksum, staged_checksum, staged_destination
from flagstone.store.port import ObjectMeta, ObjectMissing


@dataclass(slots=True)
class RecoveryReport:
    """What a recovery pass did, by path."""

    completed: list[str] = field(default_factory=list)
    """Destinations whose decided write was carried out."""
    deleted: list[str] = field(default_factory=list)
    """Destinations whose decided deletion was carried out."""
    repaired: list[str] = field(default_factory=list)
    """Destinations updated in place that held outdated bytes and were copied again."""
    cleaned: list[str] = field(default_factory=list)
    """Temporaries removed because nobody needs them any more."""
    broken: list[str] = field(default_factory=list)
    """Destinations whose decided write cannot be carried out; an operator must look."""


@dataclass(slots=True)
class GarbageReport:
    """What garbage collection removed, or would remove: orphaned temporaries, and records by destination."""

    temporaries: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)


def recover(intents: Intents, prefix: str) -> RecoveryReport:
    """One recovery pass below `prefix`; see `TwoPhaseStore.recover`."""
    present = {meta.path for meta in intents.base.list(prefix)}
    report = RecoveryReport()
    for record in intents.log.records(prefix):
        try:
            _recover_record(intents, record, present, report)
        except IntentBroken:
            report.broken.append(record.destination)
    return report


def collect_garbage(
    intents: Intents,
    prefix: str,
    *,
    min_age_ms: int,
    dry_run: bool,
    chosen: Callable[[str], bool] = lambda _: True,
) -> GarbageReport:
    """One collection below `prefix`; see `TwoPhaseStore.collect_garbage`."""
    horizon_ms = intents.clock.now_ms() - min_age_ms
    listing = list(intents.base.list(prefix))
    present = {meta.path for meta in listing}
    report = GarbageReport()
    for meta in plan_orphan_candidates(listing, horizon_ms):
        if chosen(staged_destination(meta.path) or "") and not _wanted(intents, meta.path):
            report.temporaries.append(meta.path)
    if not dry_run:
        intents.base.delete_many(report.temporaries)
    for record in intents.log.records(prefix):
        if (
            record.created_ms <= horizon_ms
            and chosen(record.destination)
            and _object_is_gone(intents, record, present)
        ):
            report.records.append(record.destination)
            if not dry_run:
                _forget(intents, record)
    return report


def plan_orphan_candidates(listing: list[ObjectMeta], horizon_ms: int) -> list[ObjectMeta]:
    """Choose the temporaries so old that a writer yet to decide on them must be presumed dead."""
    return [
        meta
        for meta in listing
        if meta.last_modified_ms <= horizon_ms and staged_destination(meta.path) is not None
    ]


def unneeded_sources(record: CommitRecord) -> list[str]:
    """The temporaries named by a record that nobody will read again."""
    if record.state is RecordState.PENDING:
        return []
    kept = record.state is RecordState.COMMITTED and record.version > 1
    sources = [] if kept else [record.source]
    return sources if record.replaced is None else [*sources, record.replaced]


def _recover_record(
    intents: Intents, record: CommitRecord, present: set[str], report: RecoveryReport
) -> None:
    destination = record.destination
    if record.state is RecordState.PENDING:
        intents.align(record)
        report.completed.append(destination)
        return
    if record.state is RecordState.DELETED and (destination in present or record.source in present):
        intents.align(record)
        report.deleted.append(destination)
    elif record.state is RecordState.COMMITTED and record.version > 1 and not _mirrored(intents, record):
        intents.align(record)
        report.repaired.append(destination)
    leftovers = [source for source in unneeded_sources(record) if source in present]
    intents.base.delete_many(leftovers)
    report.cleaned.extend(leftovers)


def _mirrored(intents: Intents, record: CommitRecord) -> bool:
    """Whether the destination holds the bytes of the committed source, by checksum."""
    try:
        found = intents.base.get(record.destination)
    except ObjectMissing:
        return False
    return checksum(found.data) == staged_checksum(record.source)


def _wanted(intents: Intents, temporary: str) -> bool:
    destination = staged_destination(temporary)
    record = None if destination is None else intents.log.find(destination)
    return record is not None and record.source == temporary and temporary not in unneeded_sources(record)


def _object_is_gone(intents: Intents, record: CommitRecord, present: set[str]) -> bool:
    if record.state is RecordState.DELETED:
        return True
    if record.state is RecordState.PENDING or record.version > 1 or record.destination in present:
        return False
    # Deleted in the base by somebody else. The listing may be older than the object: look again.
    try:
        intents.base.head(record.destination)
    except ObjectMissing:
        return True
    return False


def _forget(intents: Intents, record: CommitRecord) -> None:
    # The source must be gone before the record is: without a record nothing would stop a late copy of it.
    intents.base.delete(record.source)
    if record.state is RecordState.DELETED:
        intents.base.delete(record.destination)
    intents.log.remove(record)
