"""Conditional writes for object stores that lack them, decided by a transactional table.

The layout in the base store is the one a store with conditional writes would have, so a database can move
to such a store by dropping this wrapper. `flagstone.store.intents` describes the steps.

**Creating.** The record's destination is unique, so at most one intent is ever inserted. The call returns
only after the copy, so every acknowledged object is visible in the base. The loser completes the winner's
intent before it raises `ObjectExists`; otherwise its caller could not read the object that exists. Every reader
that meets a pending intent does the same.

**Updating in place.** Replacing the record, which compares version and source, is the commit point. The
hazard is an outdated copy: a process reads version 1, stalls, and copies it over version 2. No check before
the copy can exclude that. Therefore the destination is authoritative only for version 1, all copies of
which are equal. From version 2 on the record is authoritative: `get`, `head` and `get_if_changed` read the
source that the record names, which is kept until the next version is committed. The copy at the destination
is for tools and for databases that stop using this wrapper. A process that overwrites it with an outdated copy
finds the newer record afterwards and repairs it. If the process dies in between, `recover` repairs it by the
checksum in the source's name. A reader whose source disappears starts over with the new record.

**Deleting** replaces the record by a deleted one, deletes the source, then the destination. The record stays,
so a creator that stalled before its decision is still refused, and a late copy is not read. A deleted path
cannot be created again until `collect_garbage` has removed the record; `put` can always write it. When a crash
interrupts a deletion or an outdated copy, listings may show the deleted object until `recover` has run.

**Forgetting.** A record is removed `min_age_ms` after the deletion; its source is gone by then. A copy that
arrives even later would have been in flight for that long; this is the only assumption about time.

**Deciding late.** The request for a decision may arrive when garbage collection has deleted the temporary as an orphan.
The create was never acknowledged. `collect_garbage` makes its record that of a deletion, so the path becomes free again
later. A writer that is still there stages the bytes again, and acknowledges the object only if it was not given up.

**Objects without a record** were written by plain `put`, or before the wrapper was used. `put_if_absent`
refuses them, because it checks the base before it decides. It does not detect a plain `put` to the same new
path between that check and the decision: one of the two byte strings stays. `put_if_match` compares the base's
own version and inserts the first record, so one of several conditional writers wins; it does not detect a plain
`put` or `delete` in between either. So write a path either always conditionally or never, as the engine does.
Once a path has a record, `put` and `delete` go through it and are exact.

`get_range`, `get_ranges` and `get_tail` read the destination without the commit log, because SSTs are immutable
and read often; they read the record only when the destination is missing. Metadata from `get_tail` and `list`
carries the base's version, with which a conditional write to a recorded path always loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.commit_log import CommitLog, CommitRecord, RecordState
from flagstone.store.intents import (
    ATTEMPTS,
    GarbageReport,
    IntentBroken,
    Intents,
    RecoveryReport,
    content_path,
    lost_every_race,
    record_version,
    staged_destination,
    was_given_up,
)
from flagstone.store.memory import CollectedUpload
from flagstone.store.port import (
    ObjectChanged,
    ObjectExists,
    ObjectMeta,
    ObjectMissing,
    ObjectStore,
    ObjectVersion,
    Piece,
    Range,
    StoredObject,
    Upload,
    check_path,
)

_DAY_MS: Final = 24 * 60 * 60 * 1000
_Answer = TypeVar("_Answer")


class TwoPhaseStore:
    """The store `base` with the conditional writes it lacks, decided by `log`.

    All processes that write conditionally to `base` must use the same commit log. The conditional writes of `base`
    are never called. Pickles when both parts do.
    """

    def __init__(
        self, base: ObjectStore, log: CommitLog, *, ids: Ids = SYSTEM_IDS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._base = base
        self._log = log
        self._clock = clock
        self._intents = Intents(base, log, ids=ids, clock=clock)

    @property
    def url(self) -> str:
        return self._base.url

    def __repr__(self) -> str:
        return f"TwoPhaseStore({self._base!r}, {self._log!r})"

    def get(self, path: str) -> StoredObject:
        return self._read(path, self._base.get, _labelled_object)

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        record = self._intents.current(check_path(path))
        if record is None:
            return self._base.get_if_changed(path, known)
        if record.state is RecordState.COMMITTED and record_version(record) == known:
            return None
        return self.get(path)

    def head(self, path: str) -> ObjectMeta:
        return self._read(path, self._base.head, _labelled_meta)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._read_directly(path, lambda where: self._base.get_range(where, start, stop))

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        return self._read_directly(path, lambda where: self._base.get_ranges(where, ranges))

    def get_tail(self, path: str, length: int) -> StoredObject:
        return self._read_directly(path, lambda where: self._base.get_tail(where, length))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        """As `ObjectStore.list`; completes pending intents below `prefix` first and hides temporaries.

        An intent whose temporary is gone was never acknowledged, and its object is not listed.
        """
        for record in self._log.pending(prefix):
            with suppress(IntentBroken):
                self._intents.align(record)
        for meta in self._base.list(prefix, after=after):
            if staged_destination(meta.path) is None:
                yield meta

    def put(self, path: str, data: bytes) -> ObjectVersion:
        """Create or replace. A path without a record is written in the base.

        A crash leaves the old object or the new one, which the next reader completes.
        """
        _check_destination(path)
        record = self._intents.current(path)
        if record is None:
            return self._base.put(path, data)
        source = self._intents.stage(path, data)
        for _ in range(ATTEMPTS):
            if record is None:
                self._base.delete(source)
                return self._base.put(path, data)
            intent = self._successor(record, source, None)
            if self._intents.decide(record, intent):
                self._intents.finish(intent, data)
                return record_version(intent)
            record = self._intents.current(path)
        self._base.delete(source)
        raise lost_every_race(path)

    def upload(self, path: str) -> Upload:
        """As `ObjectStore.upload`. The first part asks the commit log; without a record the parts go to the base.

        With a record they wait in memory: the name of a temporary has the checksum of the whole object.
        """
        _check_destination(path)

        def collected() -> Upload | None:
            if self._intents.current(path) is None:
                return None
            return CollectedUpload(path, self.put, part_bytes=direct.part_bytes)

        direct = self._base.upload(path)
        return _ChosenUpload(direct, collected)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        """As `ObjectStore.put_if_absent`; also refuses a deleted path that still has its record.

        A crash before the decision leaves only a temporary; a crash after it leaves an object that the next
        reader, writer or `recover` completes. After `Unavailable` either may be true: `head` returns the token.
        """
        _check_destination(path)
        if self._present(path):
            self._intents.current(path)
            raise ObjectExists(path)
        source = self._intents.stage(path, data)
        intent = CommitRecord(path, source, 1, RecordState.PENDING, self._clock.now_ms(), token)
        if not self._intents.decide(None, intent):
            self._base.delete(source)
            self._intents.current(path)
            raise ObjectExists(path)
        current = self._intents.finish(intent, data)
        if current is None or was_given_up(current):
            raise Unavailable(
                f"{path} was decided so late that garbage collection had given the create up; whether another process "
                "has seen it is unknown"
            )
        return record_version(intent)

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        """As `ObjectStore.put_if_match`.

        A crash before the decision leaves the old object, a crash after it the new one, never a mixture.
        """
        _check_destination(path)
        record = self._intents.current(path)
        if not self._matches(path, record, version):
            raise ObjectChanged(path)
        source = self._intents.stage(path, data)
        intent = self._successor(record, source, token) if record else self._adoption(path, source, token)
        if not self._intents.decide(record, intent):
            self._base.delete(source)
            self._intents.current(path)
            raise ObjectChanged(path)
        self._intents.finish(intent, data)
        return record_version(intent)

    def copy(self, source: str, destination: str) -> None:
        """As `ObjectStore.copy`. A destination with a record is replaced through the record."""
        _check_destination(destination)
        origin = self._intents.current(check_path(source))
        if self._intents.current(destination) is None and (origin is None or origin.version == 1):
            self._base.copy(source, destination)
        else:
            self.put(destination, self.get(source).data)

    def delete(self, path: str) -> None:
        """Remove the object; its record stays until `collect_garbage`.

        A crash leaves the object, or files in the base that reads ignore and `recover` removes.
        """
        gone = self._intents.mark_deleted(check_path(path))
        if gone is None:
            self._base.delete(path)
        else:
            self._intents.align(gone)

    def delete_many(self, paths: Iterable[str]) -> None:
        """Remove many objects with few requests to the base, and one write to the commit log for each record."""
        destinations = [*paths]
        marked = [self._intents.mark_deleted(check_path(path)) for path in destinations]
        gone = [record for record in marked if record is not None]
        # Sources first, for the reason given in `Intents.align`.
        self._base.delete_many([record.source for record in gone])
        self._base.delete_many(destinations)
        for record in gone:
            latest = self._log.find(record.destination)
            if latest is not None and latest != record:
                self._intents.align(latest)

    def recover(self, prefix: str = "") -> RecoveryReport:
        """Complete or clean every interrupted step below `prefix`.

        Any number of processes may run this at any time, also beside writers. Reads and writes do not depend on
        it: each completes the intents it meets. Costs one listing and one pass over the commit log.
        """
        return self._intents.recover(prefix)

    def collect_garbage(
        self,
        *,
        prefix: str = "",
        min_age_ms: int = _DAY_MS,
        dry_run: bool = False,
        chosen: Callable[[str], bool] = lambda _: True,
    ) -> GarbageReport:
        """Remove temporaries that no intent names and records of deleted objects, if older than `min_age_ms`.

        Only destinations for which `chosen` returns True. With `dry_run` nothing is removed; the report lists what
        would be. A crash in between loses nothing.
        """
        return self._intents.collect_garbage(prefix, min_age_ms=min_age_ms, dry_run=dry_run, chosen=chosen)

    def _read(
        self,
        path: str,
        read: Callable[[str], _Answer],
        label: Callable[[_Answer, CommitRecord], _Answer],
    ) -> _Answer:
        record = self._intents.current(check_path(path))
        for _ in range(ATTEMPTS):
            if record is None:
                return read(path)
            if record.state is RecordState.DELETED:
                raise ObjectMissing(path)
            try:
                return label(read(content_path(record)), record)
            except ObjectMissing:
                latest = self._intents.current(path)
                if latest != record:
                    record = latest
                    continue
                if record.version == 1:
                    raise  # another tool deleted the object in the base
                raise CorruptData(
                    f"version {record.version} was committed from {record.source}, which is gone", object=path
                ) from None
        raise lost_every_race(path)

    def _read_directly(self, path: str, read: Callable[[str], _Answer]) -> _Answer:
        try:
            return read(check_path(path))
        except ObjectMissing:
            record = self._intents.current(path)
            if record is None or record.state is RecordState.DELETED:
                raise
            return read(content_path(record))

    def _present(self, path: str) -> bool:
        try:
            self._base.head(path)
        except ObjectMissing:
            return False
        return True

    def _matches(self, path: str, record: CommitRecord | None, version: ObjectVersion) -> bool:
        if record is not None:
            return record.state is RecordState.COMMITTED and record_version(record) == version
        try:
            return self._base.head(path).version == version
        except ObjectMissing:
            return False

    def _successor(self, record: CommitRecord, source: str, token: str | None) -> CommitRecord:
        return CommitRecord(
            destination=record.destination,
            source=source,
            version=record.version + 1,
            state=RecordState.PENDING,
            created_ms=self._clock.now_ms(),
            token=token,
            replaced=record.source,
        )

    def _adoption(self, path: str, source: str, token: str | None) -> CommitRecord:
        """The first record of an object that exists without one: version 2, since the object was version 1."""
        return CommitRecord(path, source, 2, RecordState.PENDING, self._clock.now_ms(), token)


class _ChosenUpload:
    """The upload that `choose` returns with the first part, or `direct` if that is None."""

    def __init__(self, direct: Upload, choose: Callable[[], Upload | None]) -> None:
        self._direct = direct
        self._choose = choose
        self._chosen: Upload | None = None

    @property
    def part_bytes(self) -> int:
        return self._direct.part_bytes

    def write(self, start: int, part: Piece) -> None:
        self._upload().write(start, part)

    def commit(self) -> None:
        self._upload().commit()

    def abort(self) -> None:
        if self._chosen is not None:
            self._chosen.abort()

    def _upload(self) -> Upload:
        if self._chosen is None:
            self._chosen = self._choose() or self._direct
        return self._chosen


def _check_destination(path: str) -> None:
    if staged_destination(check_path(path)) is not None:
        raise InvalidRequest(
            f"{path} has the form of a temporary object of the two-phase protocol; use another name"
        )


def _labelled_meta(meta: ObjectMeta, record: CommitRecord) -> ObjectMeta:
    return replace(meta, path=record.destination, version=record_version(record), token=record.token)


def _labelled_object(found: StoredObject, record: CommitRecord) -> StoredObject:
    return StoredObject(found.data, _labelled_meta(found.meta, record))
