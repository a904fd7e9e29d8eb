"""The steps of a two-phase write, each of which any process may take or repeat.

A write is decided by one record in the commit log and then carried out in the base store:

    1. stage    the bytes go to a temporary object `<destination>.<uuid>.<checksum>`
    2. decide   the record (source, destination, pending) is inserted, or replaces the record that was read
    3. copy     the temporary is copied to the destination
    4. commit   the record is marked committed
    5. clean    what is no longer needed is deleted

Step 2 is the commit point. Before it nothing has happened; after it every process that reads the record carries
on from step 3. `align` does the steps from 3 on: it brings the base store to the state of the record, reads the
record again, and starts over if it has changed. So a process that overwrites a destination with an outdated
copy also repairs it.

`recover` and `collect_garbage` list the base store first and read the commit log second. A record that is read
after the listing can only be further along, so an object that is listed and that the record does not need any
more is safe to delete.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

from flagstone.errors import CorruptData, Unavailable
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.store.commit_log import CommitLog, CommitRecord, RecordState
from flagstone.store.port import ObjectMissing, ObjectStore, ObjectVersion

_TEMPORARY: Final = re.compile(
    r"(.+)\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.([0-9a-f]{16})", re.DOTALL
)


ATTEMPTS: Final = 100
"""How often a step is repeated when other processes change the record in between."""


class IntentBroken(CorruptData):
    """A decided write cannot be carried out: another process removed its temporary object."""


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
    """Temporaries removed because no record needs them any more."""
    broken: list[str] = field(default_factory=list)
    """Destinations whose decided write cannot be carried out; an operator must repair them."""


@dataclass(slots=True)
class GarbageReport:
    """What garbage collection removed, or would remove: orphaned temporaries, and records by destination.

    `void` are the destinations of creates that were decided after their temporary had been collected. No process can
    carry them out, so they are given up: their records become those of deleted objects, see `was_given_up`.
    """

    temporaries: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    void: list[str] = field(default_factory=list)


class Intents:
    """Carries decided writes from the commit log `log` into the store `base`."""

    def __init__(self, base: ObjectStore, log: CommitLog, *, ids: Ids, clock: Clock) -> None:
        self.base = base
        self.log = log
        self.ids = ids
        self.clock = clock

    def stage(self, destination: str, data: bytes) -> str:
        """Write the temporary object for a new intent and return its path.

        A crash afterwards leaves an orphan, which garbage collection removes by its age.
        """
        source = f"{destination}.{self.ids.uuid()}.{checksum(data)}"
        self.base.put(source, data)
        return source

    def decide(self, old: CommitRecord | None, new: CommitRecord) -> bool:
        """Make `new` the record in place of `old` (None: there was none). True when this intent won.

        A commit log client may repeat a request whose answer was lost and then lose against itself. Sources are
        unique, so the record shows which write won.
        """
        if self.log.insert(new) if old is None else self.log.replace(old, new):
            return True
        found = self.log.find(new.destination)
        return found is not None and new.source in (found.source, found.replaced)

    def finish(self, record: CommitRecord, data: bytes) -> CommitRecord | None:
        """Carry out an intent that this process decided, and return the record that is current then.

        If that is not the record of a deletion, the base shows the destination. A writer that stalls between staging
        and deciding for longer than the minimum age loses its temporary object to garbage collection. Only this writer
        still has the bytes, so it stages them again.
        """
        try:
            return self.align(record)
        except IntentBroken:
            self.base.put(record.source, data)
            return self.align(record)

    def current(self, destination: str) -> CommitRecord | None:
        """The record of `destination`, after completing a pending intent."""
        record = self.log.find(destination)
        if record is None or record.state is not RecordState.PENDING:
            return record
        return self.align(record)

    def align(self, record: CommitRecord) -> CommitRecord | None:
        """Bring the base store to the state of the record, and return the record that is current then.

        Idempotent; any number of processes may align one destination at once. After a crash the next process
        that reads the record completes the work.
        Raises `IntentBroken` when the record wants a temporary object that is gone, and `Unavailable` when other
        processes change the record again and again.
        """
        latest: CommitRecord | None = record
        for _ in range(ATTEMPTS):
            if latest is None:
                return None
            record = latest
            if record.state is RecordState.DELETED:
                # The source goes first: a copy that starts later fails, and the result of an earlier one is deleted.
                self.base.delete(record.source)
                self.base.delete(record.destination)
            elif record.state is RecordState.PENDING or record.version > 1:
                try:
                    self.base.copy(record.source, record.destination)
                except ObjectMissing:
                    latest = self.log.find(record.destination)
                    if latest != record:
                        continue
                    if not self._was_copied(record):
                        raise IntentBroken(
                            f"version {record.version} was decided, but its source {record.source} is gone",
                            object=record.destination,
                        ) from None
            if record.state is RecordState.PENDING:
                committed = replace(record, state=RecordState.COMMITTED)
                if self.log.replace(record, committed):
                    self._clean(committed)
                    return committed
            latest = self.log.find(record.destination)
            if latest is None or latest == record or latest == replace(record, state=RecordState.COMMITTED):
                return latest
        raise lost_every_race(record.destination)

    def mark_deleted(self, destination: str) -> CommitRecord | None:
        """Decide the deletion of `destination`; None when it has no record. `align` carries it out."""
        for _ in range(ATTEMPTS):
            record = self.current(destination)
            if record is None or record.state is RecordState.DELETED:
                return record
            gone = replace(
                record,
                version=record.version + 1,
                state=RecordState.DELETED,
                created_ms=self.clock.now_ms(),
                token=None,
            )
            if self.log.replace(record, gone):
                return gone
        raise lost_every_race(destination)

    def recover(self, prefix: str) -> RecoveryReport:
        """One recovery pass below `prefix`; see `TwoPhaseStore.recover`."""
        present = {meta.path for meta in self.base.list(prefix)}
        report = RecoveryReport()
        for record in self.log.records(prefix):
            try:
                self._recover_record(record, present, report)
            except IntentBroken:
                report.broken.append(record.destination)
        return report

    def collect_garbage(
        self,
        prefix: str,
        *,
        min_age_ms: int,
        dry_run: bool,
        chosen: Callable[[str], bool] = lambda _: True,
    ) -> GarbageReport:
        """One collection below `prefix`; see `TwoPhaseStore.collect_garbage`."""
        horizon_ms = self.clock.now_ms() - min_age_ms
        listing = list(self.base.list(prefix))
        present = {meta.path for meta in listing}
        report = GarbageReport()
        for meta in listing:
            # A writer that has not decided after so long is presumed dead.
            destination = staged_destination(meta.path) if meta.last_modified_ms <= horizon_ms else None
            if destination is not None and chosen(destination) and not self._wanted(meta.path, destination):
                report.temporaries.append(meta.path)
        if not dry_run:
            self.base.delete_many(report.temporaries)
        for record in self.log.records(prefix):
            if (
                record.created_ms <= horizon_ms
                and chosen(record.destination)
                and self._object_is_gone(record, present)
            ):
                report.records.append(record.destination)
                if not dry_run:
                    self._forget(record)
            elif record.created_ms <= horizon_ms and chosen(record.destination) and self._is_void(record):
                report.void.append(record.destination)
                if not dry_run:
                    given_up = replace(
                        record, state=RecordState.DELETED, created_ms=self.clock.now_ms(), token=None
                    )
                    self.log.replace(record, given_up)
        return report

    def _clean(self, committed: CommitRecord) -> None:
        if committed.version == 1:
            self.base.delete(committed.source)
        elif committed.replaced is not None:
            self.base.delete(committed.replaced)

    def _recover_record(self, record: CommitRecord, present: set[str], report: RecoveryReport) -> None:
        destination = record.destination
        if record.state is RecordState.PENDING:
            self.align(record)
            report.completed.append(destination)
            return
        if record.state is RecordState.DELETED and (destination in present or record.source in present):
            self.align(record)
            report.deleted.append(destination)
        elif record.state is RecordState.COMMITTED and record.version > 1 and not self._mirrored(record):
            self.align(record)
            report.repaired.append(destination)
        leftovers = [source for source in unneeded_sources(record) if source in present]
        self.base.delete_many(leftovers)
        report.cleaned.extend(leftovers)

    def _mirrored(self, record: CommitRecord) -> bool:
        """Whether the destination holds the bytes of the committed source, by checksum."""
        try:
            found = self.base.get(record.destination)
        except ObjectMissing:
            return False
        return checksum(found.data) == staged_checksum(record.source)

    def _was_copied(self, record: CommitRecord) -> bool:
        """Whether a create has been carried out up to its commit, although its temporary is gone now."""
        return record.version == 1 and self._mirrored(record)

    def _is_void(self, record: CommitRecord) -> bool:
        """Whether a create was decided too late: its temporary was an orphan for long enough to be collected.

        The request for the decision may have been under way for days. If its writer is still there and stages the bytes
        again, it finds the record of the deletion, and does not acknowledge the object.
        """
        if record.state is not RecordState.PENDING or record.version > 1:
            return False
        try:
            self.base.head(record.source)
        except ObjectMissing:
            return not self._mirrored(record)
        return False

    def _wanted(self, temporary: str, destination: str) -> bool:
        record = self.log.find(destination)
        return record is not None and record.source == temporary and temporary not in unneeded_sources(record)

    def _object_is_gone(self, record: CommitRecord, present: set[str]) -> bool:
        if record.state is RecordState.DELETED:
            return True
        if record.state is RecordState.PENDING or record.version > 1 or record.destination in present:
            return False
        # Deleted in the base without its record. The listing may be older than the object, so ask again.
        try:
            self.base.head(record.destination)
        except ObjectMissing:
            return True
        return False

    def _forget(self, record: CommitRecord) -> None:
        # The source goes before the record: without a record nothing stops a late copy of it.
        self.base.delete(record.source)
        if record.state is RecordState.DELETED:
            self.base.delete(record.destination)
        self.log.remove(record)


def lost_every_race(destination: str) -> Unavailable:
    """The error for a record that changes faster than the caller can follow."""
    return Unavailable(
        f"the record of {destination} changed {ATTEMPTS} times while it was being followed; try again"
    )


def checksum(data: bytes) -> str:
    """The checksum that the name of a temporary object carries."""
    return blake2b(data, digest_size=8).hexdigest()


def staged_checksum(source: str) -> str:
    """The checksum in the name of a temporary object."""
    return source[source.rindex(".") + 1 :]


def staged_destination(path: str) -> str | None:
    """The destination a temporary object was staged for; None when `path` is not a temporary object."""
    match = _TEMPORARY.fullmatch(path)
    return match.group(1) if match else None


def was_given_up(record: CommitRecord) -> bool:
    """Whether the record is that of a create that was never carried out. A deletion has a higher version."""
    return record.state is RecordState.DELETED and record.version == 1


def record_version(record: CommitRecord) -> ObjectVersion:
    """The version that callers compare. It names one write, so no two contents share it."""
    return ObjectVersion(etag=record.source[len(record.destination) + 1 :], generation=str(record.version))


def content_path(record: CommitRecord) -> str:
    """Where the bytes of a committed record are read: the destination, after an update in place the source."""
    return record.source if record.version > 1 else record.destination


def unneeded_sources(record: CommitRecord) -> list[str]:
    """The temporaries named by a record that no process will read again."""
    if record.state is RecordState.PENDING:
        return []
    kept = record.state is RecordState.COMMITTED and record.version > 1
    sources = [] if kept else [record.source]
    return sources if record.replaced is None else [*sources, record.replaced]
