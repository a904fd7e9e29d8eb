"""Objects in a dictionary: the reference that the other adapters are tested against.

Named stores live as long as the process, so that `memory://NAME/db` opened twice is the same database.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.sync import Lock
from flagstone.store.port import (
    ObjectChanged,
    ObjectExists,
    ObjectMeta,
    ObjectMissing,
    ObjectVersion,
    Piece,
    Range,
    StoredObject,
    Upload,
    UploadLost,
    check_path,
    check_prefix,
    check_range,
)

PART_BYTES: Final = 1024 * 1024


class _Entry(NamedTuple):
    data: bytes
    generation: int
    last_modified_ms: int
    token: str | None


class MemoryStore:
    """A store that lives in this process. Pickles by name; an unnamed one does not pickle."""

    def __init__(
        self, name: str | None = None, *, clock: Clock = SYSTEM_CLOCK, part_bytes: int = PART_BYTES
    ) -> None:
        self._name = name
        self._clock = clock
        self._part_bytes = part_bytes
        self._lock = Lock()
        self._entries: dict[str, _Entry] = {}
        self._paths: list[str] = []  # sorted, for listings
        self._generation = 0

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The process-wide store of that name, created on first use."""
        with _named_lock:
            store = _named.get(name)
            if store is None:
                store = _named[name] = cls(name)
            return store

    @property
    def url(self) -> str:
        return f"memory://{self._name or ''}"

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r}, objects={len(self._entries)})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        if self._name is None:
            raise TypeError("an unnamed MemoryStore lives in one process only; use MemoryStore.named(...)")
        return (MemoryStore.named, (self._name,))

    def get(self, path: str) -> StoredObject:
        entry = self._entry(path)
        return StoredObject(entry.data, self._describe(path, entry))

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        entry = self._entry(path)
        if _version(entry) == known:
            return None
        return StoredObject(entry.data, self._describe(path, entry))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        check_range(path, start, stop)
        return self._entry(path).data[start:stop]

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        data = self._entry(path).data
        for start, stop in ranges:
            check_range(path, start, stop)
        return [data[start:stop] for start, stop in ranges]

    def get_tail(self, path: str, length: int) -> StoredObject:
        entry = self._entry(path)
        return StoredObject(
            entry.data[max(len(entry.data) - max(length, 0), 0) :], self._describe(path, entry)
        )

    def head(self, path: str) -> ObjectMeta:
        return self._describe(path, self._entry(path))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        folder = check_prefix(prefix)
        with self._lock:
            paths = self._paths
            start = bisect_left(paths, folder)
            if after is not None:
                start = max(start, bisect_right(paths, after))
            # Folders end with a slash; "0" is the character after it.
            stop = bisect_left(paths, folder[:-1] + "0") if folder else len(paths)
            # An interrupt may leave a path here whose object was not stored, or was deleted.
            found = [(path, entry) for path in paths[start:stop] if (entry := self._entries.get(path))]
        for path, entry in found:
            yield ObjectMeta(path, len(entry.data), entry.last_modified_ms, _version(entry))

    def put(self, path: str, data: bytes) -> ObjectVersion:
        with self._lock:
            return self._store(path, data, None)

    def upload(self, path: str) -> Upload:
        return CollectedUpload(check_path(path), self.put, part_bytes=self._part_bytes)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        with self._lock:
            if check_path(path) in self._entries:
                raise ObjectExists(path)
            return self._store(path, data, token)

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        with self._lock:
            entry = self._entries.get(check_path(path))
            if entry is None or _version(entry) != version:
                raise ObjectChanged(path)
            return self._store(path, data, token)

    def copy(self, source: str, destination: str) -> None:
        with self._lock:
            entry = self._entries.get(check_path(source))
            if entry is None:
                raise ObjectMissing(source)
            self._store(destination, entry.data, None)

    def delete(self, path: str) -> None:
        with self._lock:
            if self._entries.pop(check_path(path), None) is not None:
                del self._paths[bisect_left(self._paths, path)]

    def delete_many(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.delete(path)

    def _entry(self, path: str) -> _Entry:
        entry = self._entries.get(check_path(path))
        if entry is None:
            raise ObjectMissing(path)
        return entry

    def _store(self, path: str, data: bytes, token: str | None) -> ObjectVersion:
        self._generation += 1
        entry = _Entry(bytes(data), self._generation, self._clock.now_ms(), token)
        position = bisect_left(self._paths, check_path(path))
        if self._paths[position : position + 1] != [path]:
            self._paths.insert(position, path)
        # Last: from here on the object is there.
        self._entries[path] = entry
        return _version(entry)

    @staticmethod
    def _describe(path: str, entry: _Entry) -> ObjectMeta:
        return ObjectMeta(path, len(entry.data), entry.last_modified_ms, _version(entry), entry.token)


class CollectedUpload:
    """An upload whose parts wait in memory until `commit` puts them as one object."""

    def __init__(self, path: str, put: Callable[[str, bytes], object], *, part_bytes: int) -> None:
        self._path = path
        self._put = put
        self._part_bytes = part_bytes
        self._parts: dict[int, bytes] | None = {}
        self._committed = False

    @property
    def part_bytes(self) -> int:
        return self._part_bytes

    def write(self, start: int, part: Piece) -> None:
        self._held().setdefault(start, bytes(part))

    def commit(self) -> None:
        if not self._committed:
            parts = self._held()
            self._put(self._path, b"".join(parts[start] for start in sorted(parts)))
            self._committed = True
            self._parts = None

    def abort(self) -> None:
        self._parts = None

    def _held(self) -> dict[int, bytes]:
        if self._parts is None:
            raise UploadLost(f"the upload of {self._path} has ended")
        return self._parts


def _version(entry: _Entry) -> ObjectVersion:
    return ObjectVersion(etag=f'"{entry.generation}"')


_named: dict[str, MemoryStore] = {}
_named_lock = Lock()
