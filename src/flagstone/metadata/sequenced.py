"""One value kept as a sequence of immutable, numbered objects: the highest id is the current version.

A read finds the highest id; a write creates the next one and loses if another process created it first. That create is
the only commit point: there is no lock, no pointer and nothing to repair after a crash. The boundary (see
`boundary.py`) covers the one gap, ids that were deleted and could be created again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from flagstone.errors import (
    CorruptData,
    FlagstoneError,
    InternalError,
    InvalidRequest,
    TransactionConflict,
    Unavailable,
)
from flagstone.metadata.boundary import Boundary
from flagstone.metadata.integrity import seal_metadata
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.sync import Lock
from flagstone.store.port import ObjectExists, ObjectMeta, ObjectMissing, ObjectStore

T = TypeVar("T")

UPDATE_TIMEOUT_S: Final = 300.0
_PROBES: Final = 4
_TRUSTED_MS: Final = 60_000
"""A version read this recently is not followed by a gap: no garbage collector deletes younger versions."""

_ASSUMED_MS: Final = 1_000
"""A version read this recently counts as current for a writer: if it is not, the create fails, which is rare."""

_RELIST_AFTER_S: Final = 600.0
_MAX_READS: Final = 8
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 1.0


class SequencedConflict(TransactionConflict):
    """The version of another process came first: read the latest one and decide again."""


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A value and the id it is stored under."""

    id: int
    value: T

    @property
    def next_id(self) -> int:
        """The id under which a change of this version will be stored."""
        return self.id + 1


class Listed(NamedTuple):
    """A stored version, without its content."""

    id: int
    meta: ObjectMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming(Generic[T]):
    """How the versions of one kind of value are named and encoded.

    `encode` gives the bytes of the format, to which the checksum is added; `decode` takes the stored bytes and a path.
    `check(next, current)` raises InternalError when `next` must not follow `current` (None: the first one).
    """

    kind: str
    folder: str
    path_of: Callable[[int], str]
    parse: Callable[[str], int | None]
    encode: Callable[[T], bytes]
    decode: Callable[[bytes, str], T]
    check: Callable[[T, T | None], None]


class SequencedObject(Generic[T]):
    """The versions of one value in one store. May be shared between threads; keeps the latest version it read."""

    def __init__(
        self,
        store: ObjectStore,
        naming: Naming[T],
        boundary: Boundary,
        *,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        self._store = store
        self._naming = naming
        self._boundary = boundary
        self._clock = clock
        self._ids = ids
        self._lock = Lock()
        self._known: Versioned[T] | None = None
        self._created_id = 0
        self._listed_at = clock.monotonic()
        # By the wall clock, because a suspended machine does not count that time as elapsed.
        self._read_ms = self._confirmed_ms = 0

    def load(self, version_id: int) -> T:
        """The version with that id. Raises `ObjectMissing`, and CorruptData naming the object."""
        path = self._naming.path_of(version_id)
        return self._decode(path, self._store.get(path).data)

    def list(self) -> Sequence[Listed]:
        """All stored versions, ascending. Other names in the folder are skipped."""
        return self._list(after=None)

    def latest(self) -> Versioned[T] | None:
        """The current version, or None when there is none at all.

        Usually two small requests: is there a next id, and has the boundary moved. A version at or below the boundary
        is not current, whatever the store returns: read again. Because garbage collection never deletes the highest
        id, a boundary that no version exceeds is damage, and raises CorruptData.
        """
        boundary, found = 0, None
        for attempt in range(_MAX_READS):
            try:
                found = self._probe() if attempt == 0 else self._find_highest()
            except ObjectMissing:
                continue  # collected between listing and reading, so there is a newer one
            boundary = self._boundary.read()
            if found is None and boundary == 0:
                return None
            if found is not None and found.id > boundary:
                self._recognize(found)
                self._remember(found)
                self._confirmed_ms = self._read_ms
                return found
        if found is None and boundary == 0:
            raise Unavailable(f"the {self._naming.kind} of {self._store.url} vanishes while it is being read")
        newest = found.id if found else "missing"
        raise CorruptData(
            f"the boundary is {boundary}, but the newest {self._naming.kind} is {newest}",
            object=self._boundary.path,
            offset=0,
        )

    def require_latest(self) -> Versioned[T]:
        """The current version; raises InvalidRequest when there is none."""
        found = self.latest()
        if found is None:
            raise InvalidRequest(f"no {self._naming.kind} in {self._naming.folder} of {self._store.url}")
        return found

    def poll(self) -> Versioned[T]:
        """The current version for callers that poll: one small request while there is no newer one.

        A newer version, and once a minute the absence of one, is confirmed by `require_latest`. In between, a version
        that was created and deleted within the minute is missed; a write based on the older version still fails.
        """
        known = self._known
        if known is not None and self._is_recent(self._confirmed_ms) and self._probe() is known:
            return known
        return self.require_latest()

    def create_next(self, value: T, base: Versioned[T] | None) -> Versioned[T]:
        """Make `value` the version after `base` (None: the first one).

        Raises SequencedConflict when another version took the id, or when the id is at or below the boundary; in the
        second case an object that is never read stays behind. After `Unavailable`, or a crash, the version may have
        become current: read the latest one before deciding anything.
        """
        self._naming.check(value, None if base is None else base.value)
        created = Versioned(1 if base is None else base.next_id, value)
        path = self._naming.path_of(created.id)
        started_ms = self._clock.now_ms()
        try:
            self._store.put_if_absent(path, seal_metadata(self._naming.encode(value), path))
        except ObjectExists:
            raise SequencedConflict(f"{path} was created by another process") from None
        if not self._boundary.admits(created.id):
            raise SequencedConflict(f"{path} is behind the boundary: its id was used before")
        self._remember(created)
        self._created_id, self._read_ms, self._confirmed_ms = created.id, started_ms, started_ms
        return created

    def update(
        self, edit: Callable[[Versioned[T]], T | None], *, timeout_s: float = UPDATE_TIMEOUT_S
    ) -> Versioned[T]:
        """Apply `edit` to the current version and make the result the next one; returns the current version then.

        A lost race applies `edit` again, to the version that won; so it must be pure. An edit that returns None or an
        equal value writes nothing. An exception of it ends the update. Raises `Unavailable` after `timeout_s` of lost
        races.

        If the known version is our own, or was read a moment ago, nothing is read first: the create fails if it is
        not the current one any more. An edit that leads to no create (nothing to change, or an error) is decided by a
        fresh version.
        """
        deadline = self._clock.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        current = self._assumed()
        while True:
            fresh = current is None
            if current is None:
                current = self.require_latest()
            try:
                value = edit(current)
            except FlagstoneError:
                if fresh:
                    raise
                current = None
                continue
            if value is None or value == current.value:
                if fresh:
                    return current
                current = None
                continue
            try:
                return self.create_next(value, current)
            except SequencedConflict as conflict:
                if self._clock.monotonic() >= deadline:
                    raise Unavailable(f"lost every race for {timeout_s} s: {conflict}") from conflict
                self._clock.sleep(self._ids.uniform(0, pause))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                current = None

    def read_boundary(self) -> int:
        """The id up to which versions may have been deleted."""
        return self._boundary.read()

    def advance_boundary(self, desired: int) -> int:
        """Record that versions up to `desired` are going to be deleted; see `Boundary.advance`."""
        return self._boundary.advance(desired)

    def delete(self, version_ids: Iterable[int], *, bounded: bool = True) -> None:
        """Delete old versions. Versions beyond the boundary raise InternalError, unless the boundary is not in use."""
        doomed = sorted(version_ids)
        if bounded and doomed and doomed[-1] > (boundary := self._boundary.read()):
            raise InternalError(
                f"{self._naming.kind} {doomed[-1]} is beyond the boundary {boundary}: not deleted"
            )
        self._store.delete_many([self._naming.path_of(version_id) for version_id in doomed])

    def _assumed(self) -> Versioned[T] | None:
        """The known version, if it probably is current, and cannot have been followed by versions deleted since."""
        known = self._known
        if known is None:
            return None
        within_ms = _TRUSTED_MS if known.id == self._created_id else _ASSUMED_MS
        return known if self._is_recent(self._read_ms, within_ms) else None

    def _is_recent(self, time_ms: int, within_ms: int = _TRUSTED_MS) -> bool:
        return self._clock.now_ms() - time_ms <= within_ms

    def _probe(self) -> Versioned[T] | None:
        """The newest version, found by probing the ids after the known one where that is cheaper."""
        known, started_ms = self._known, self._clock.now_ms()
        # Without a boundary a suspended process could take a collected gap for the end; a listing cannot.
        listed_long_ago = self._clock.monotonic() - self._listed_at > _RELIST_AFTER_S
        if known is None or listed_long_ago or not self._is_recent(self._read_ms):
            found = self._find_highest()
        else:
            found = self._try_next(known)
        self._read_ms = started_ms
        return found

    def _try_next(self, known: Versioned[T]) -> Versioned[T] | None:
        newest, path, data = known.id, "", b""
        for version_id in range(known.id + 1, known.id + 1 + _PROBES):
            try:
                data = self._store.get(self._naming.path_of(version_id)).data
            except ObjectMissing:
                break
            newest, path = version_id, self._naming.path_of(version_id)
        else:
            return self._find_highest()
        return known if newest == known.id else Versioned(newest, self._decode(path, data))

    def _find_highest(self) -> Versioned[T] | None:
        started = self._clock.monotonic()
        known = self._known
        listed = self._list(after=None if known is None else self._naming.path_of(known.id - 1))
        if not listed and known is not None:
            listed = self._list(after=None)
        self._listed_at = started
        if not listed:
            return None
        highest = listed[-1].id
        return known if known and highest == known.id else Versioned(highest, self.load(highest))

    def _list(self, *, after: str | None) -> Sequence[Listed]:
        parse = self._naming.parse
        found = [
            Listed(version_id, meta)
            for meta in self._store.list(self._naming.folder, after=after)
            if (version_id := parse(meta.path)) is not None
        ]
        return sorted(found, key=lambda entry: entry.id)

    def _decode(self, path: str, data: bytes) -> T:
        return self._naming.decode(data, path)

    def _recognize(self, found: Versioned[T]) -> None:
        """Raise when the version belongs to another history than those read before."""

    def _remember(self, version: Versioned[T]) -> None:
        with self._lock:
            if self._known is None or version.id >= self._known.id:
                self._known = version
