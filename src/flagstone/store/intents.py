"""The steps of a two-phase write, each of which any process may take or repeat.

A write is decided by one record in the commit log and then carried out in the base store:

    1. stage    the bytes go to a temporary object `<destination>.<uuid>.<checksum>`
    2. decide   the record (source, destination, pending) is inserted, or replaces the record that was read
    3. copy     the temporary is copied to the destination
    4. commit   the record is marked committed
    5. clean    what is no longer needed is deleted

Step 2 is the commit point. Before it nothing happened; after it everyone who meets the record carries on from
step 3. The steps from 3 on are `align`: make the base say what the record says, then look whether the record
is still the same, and start over if not. So whoever disturbs a destination with an outdated copy repairs it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b
from typing import Final

from flagstone.errors import CorruptData, Unavailable
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.store.commit_log.port import CommitLog, CommitRecord, RecordState
from flagstone.store.port import ObjectMissing, ObjectStore, ObjectVersion

_TEMPORARY: Final = re.compile(
    r"(.+)\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.([0-9a-f]{16})", re.DOTALL
)


ATTEMPTS: Final = 100
"""How often a step is repeated when other processes change the record in between."""


class IntentBroken(CorruptData):
    """A decided write cannot be carried out: its temporary object was removed by somebody else."""


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

        A commit log client may repeat a request whose answer was lost, and is then told that it lost to
        itself. Sources are unique, so reading the record back tells.
        """
        if self.log.insert(new) if old is None else self.log.replace(old, new):
            return True
        found = self.log.find(new.destination)
        return found is not None and new.source in (found.source, found.replaced)

    def finish(self, record: CommitRecord, data: bytes) -> None:
        """Carry out an intent this process decided; on return the destination is visible in the base.

        The temporary may have been collected as an orphan while this writer was stalled for longer than
        the minimum age, between staging and deciding. Only the writer still has the bytes: it stages again.
        """
        try:
            self.align(record)
        except IntentBroken:
            self.base.put(record.source, data)
            self.align(record)

    def current(self, destination: str) -> CommitRecord | None:
        """The record of `destination`, after helping a pending intent to its end."""
        record = self.log.find(destination)
        if record is None or record.state is not RecordState.PENDING:
            return record
        return self.align(record)

    def align(self, record: CommitRecord) -> CommitRecord | None:
        """Make the base say what the record says, and return the record that holds then.

        Idempotent; any number of processes may align the same destination at once. A crash anywhere leaves
        the work to the next one who comes along.
        Raises `IntentBroken` when the record wants a temporary object that is gone, and `Unavailable` when other
        processes change the record again and again.
        """
        latest: CommitRecord | None = record
        for _ in range(ATTEMPTS):
            if latest is None:
                return None
            record = latest
            if record.state is RecordState.DELETED:
                # The source goes first: a copy that starts later fails, one that came earlier is erased.
                self.base.delete(record.source)
                self.base.delete(record.destination)
            elif record.state is RecordState.PENDING or record.version > 1:
                try:
                    self.base.copy(record.source, record.destination)
                except ObjectMissing:
                    latest = self.log.find(record.destination)
                    if latest == record:
                        raise IntentBroken(
                            f"version {record.version} was decided, but its source {record.source} is gone",
                            object=record.destination,
                        ) from None
                    continue
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
        """Decide that `destination` is deleted; None when it has no record. `align` carries it out."""
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

    def _clean(self, committed: CommitRecord) -> None:
        if committed.version == 1:
            self.base.delete(committed.source)
        elif committed.replaced is not None:
            self.base.delete(committed.replaced)


def lost_every_race(destination: str) -> Unavailable:
    """What a caller hears when the record of a destination changes faster than it can be followed."""
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


def record_version(record: CommitRecord) -> ObjectVersion:
    """The version callers compare: it names one write, so it never comes back with other bytes."""
    return ObjectVersion(etag=record.source[len(record.destination) + 1 :], generation=str(record.version))


def content_path(record: CommitRecord) -> str:
    """Where the bytes of a committed record are read: the source once the object was updated in place."""
    return record.source if record.version > 1 else record.destination
