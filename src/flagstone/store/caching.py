"""A disk cache of parts of SSTs in front of a slower store.

Only SSTs (`…/compacted/<ULID>.sst`) are cached: they never change once written. Requests for WAL files pass
through. Requests for manifests, compactions files and boundaries raise `InternalError`: processes agree with each
other by these objects, and a cached answer could be outdated.

The cache only makes reads faster. Damaged, evicted or unwritable files cost another request, never a wrong byte
and never an error. After a crash the next process can use the folder as it is. The cache keeps what the store
answered, and only the reader's checksums show whether the answer was right. A cache that kept a bad answer of the
network, or a disk that changed it since, would return the same bytes for ever. So every reader of an SST decodes its
bytes by `read_checked`: when they are damaged, it drops what is cached of the object and reads from the store once
more. Damage in the stored object shows again and is raised; nothing of it stays in the cache.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from flagstone.config import ObjectStoreCacheOptions
from flagstone.errors import CorruptData, InternalError, InvalidRequest
from flagstone.runtime import metric_names
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Event, Lock
from flagstone.store.kept_uploads import KeptUpload
from flagstone.store.part_files import (
    DESCRIPTION,
    Damaged,
    PartKey,
    StagedPart,
    drop_object,
    drop_part,
    has_part,
    read_part,
    scan_parts,
    stage_part,
    touch_part,
)
from flagstone.store.paths import (
    COMPACTIONS_FOLDER,
    GC_FOLDER,
    MANIFEST_FOLDER,
    SST_FOLDER,
    folder_of,
)
from flagstone.store.port import (
    ObjectMeta,
    ObjectStore,
    ObjectVersion,
    Range,
    StoredObject,
    Upload,
    check_range,
)

_log = logging.getLogger("flagstone.store")

T = TypeVar("T")

_METADATA: Final = frozenset([MANIFEST_FOLDER, COMPACTIONS_FOLDER, GC_FOLDER])
_TOUCH_EVERY_MS: Final = 10_000
_UNFINISHED_AGE_MS: Final = 3_600_000
_KEPT_AFTER_EVICTION: Final = 0.9
_RESCAN_FRACTION: Final = 16
_NO_LIMIT: Final = 1 << 62
_FLIGHT_PATIENCE_S: Final = 30.0
"""How long a caller waits for parts that another caller fetches, before it fetches them itself."""

_FETCHED_PARTS: Final = 64
"""How many parts one request of a read fetches at most: a damaged record may ask for any number."""

_PRELOADED_PARTS: Final = 4
"""How many parts one request of a preload fetches."""


class CachingStore:
    """A store that keeps parts of another store's SSTs in `folder`, about `max_bytes` at most.

    Many processes may share the folder. Each measures it when it has written a sixteenth of the limit, or when it
    writes `scan_interval_s` after the last measurement, and removes the least recently used parts. Between
    measurements each process may exceed the limit by a sixteenth. Within one process, concurrent readers of a
    missing part wait for one request. An SST that another process deletes stays readable until its parts are
    evicted; `head` and `get_if_changed` always ask the store and raise `ObjectMissing`.

    A file is open only while a part is read or written, so there are never more open files than such threads.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        folder: str | os.PathLike[str],
        max_bytes: int,
        part_bytes: int = 4 * 1024 * 1024,
        cache_on_put: bool = False,
        scan_interval_s: float = 3600.0,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        if part_bytes < 1024 or max_bytes < 2 * part_bytes:
            raise InvalidRequest(
                f"a cache of {max_bytes} bytes in parts of {part_bytes} is too small; "
                "need part_bytes >= 1024 and max_bytes >= 2 * part_bytes"
            )
        self._inner = inner
        self._url = inner.url
        self._folder = Path(folder).absolute()
        self._max_bytes = max_bytes
        self._part_bytes = part_bytes
        self._cache_on_put = cache_on_put
        self._scan_interval_s = scan_interval_s
        self._measured_at = clock.monotonic()
        self._clock = clock
        self._ids = ids
        self._lock = Lock()
        self._flights: dict[PartKey, Event] = {}
        self._touched_ms: dict[PartKey, int] = {}
        self._bytes = self._keys = 0
        self._unmeasured = max_bytes  # so that writing the first part measures the folder
        registry = metrics or Metrics()
        self._hits = registry.counter(metric_names.OBJECT_STORE_CACHE_PART_HIT_COUNT)
        self._accesses = registry.counter(metric_names.OBJECT_STORE_CACHE_PART_ACCESS_COUNT)
        self._cache_keys = registry.gauge(metric_names.OBJECT_STORE_CACHE_CACHE_KEYS)
        self._cache_bytes = registry.gauge(metric_names.OBJECT_STORE_CACHE_CACHE_BYTES)
        self._evicted_keys = registry.counter(metric_names.OBJECT_STORE_CACHE_EVICTED_KEYS)
        self._evicted_bytes = registry.counter(metric_names.OBJECT_STORE_CACHE_EVICTED_BYTES)

    @property
    def url(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"CachingStore({self._inner!r}, folder={str(self._folder)!r}, max_bytes={self._max_bytes})"

    def __reduce__(self) -> tuple[object, tuple[ObjectStore]]:
        reopen = partial(
            CachingStore,
            folder=str(self._folder),
            max_bytes=self._max_bytes,
            part_bytes=self._part_bytes,
            cache_on_put=self._cache_on_put,
            scan_interval_s=self._scan_interval_s,
        )
        return (reopen, (self._inner,))

    def get(self, path: str) -> StoredObject:
        if not _is_sst(path):
            return self._uncached(path).get(path)
        meta = self._described(path)
        if meta is not None:
            return StoredObject(self.get_range(path, 0, meta.size) if meta.size else b"", meta)
        found = self._inner.get(path)
        if len(found.data) == found.meta.size:
            self._describe(found.meta)
            self.keep_whole(path, found.data)
        return found

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        return self._uncached(path).get_if_changed(path, known)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        if not _is_sst(path):
            return self._uncached(path).get_range(path, start, stop)
        check_range(path, start, stop)
        if start == stop:
            return self._inner.get_range(path, start, stop)
        first, last = start // self._part_bytes, (stop - 1) // self._part_bytes
        pieces = []
        for number, part in enumerate(self._parts(path, first, last, start, stop), first):
            pieces.append(part)
            if len(part) < min(stop, (number + 1) * self._part_bytes) - max(start, number * self._part_bytes):
                break  # the object ends here
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        if not _is_sst(path):
            return self._uncached(path).get_ranges(path, ranges)
        for start, stop in ranges:
            check_range(path, start, stop)
        return [self.get_range(path, start, stop) for start, stop in ranges]

    def get_tail(self, path: str, length: int) -> StoredObject:
        if not _is_sst(path):
            return self._uncached(path).get_tail(path, length)
        meta = self._described(path)
        if meta is None:
            found = self._inner.get_tail(path, length)
            if len(found.data) == min(max(length, 0), found.meta.size):
                self._describe(found.meta)
            return found
        start = max(meta.size - max(length, 0), 0)
        return StoredObject(self.get_range(path, start, meta.size) if start < meta.size else b"", meta)

    def head(self, path: str) -> ObjectMeta:
        return self._uncached(path).head(path)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        return self._uncached(f"{prefix}/").list(prefix, after=after)

    def put(self, path: str, data: bytes) -> ObjectVersion:
        version = self._uncached(path).put(path, data)
        if _is_sst(path):
            self._forget(path)
            if self._cache_on_put:
                self.keep_whole(path, data)
        return version

    def upload(self, path: str) -> Upload:
        upload = self._uncached(path).upload(path)
        return KeptUpload(self, path, upload, keep=self._cache_on_put) if _is_sst(path) else upload

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        version = self._uncached(path).put_if_absent(path, data, token=token)
        self._forget(path)
        return version

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        swapped = self._uncached(path).put_if_match(path, data, version, token=token)
        self._forget(path)
        return swapped

    def copy(self, source: str, destination: str) -> None:
        self._uncached(source)
        self._uncached(destination).copy(source, destination)
        self._forget(destination)

    def delete(self, path: str) -> None:
        self._uncached(path).delete(path)
        self._forget(path)

    def delete_many(self, paths: Iterable[str]) -> None:
        wanted = list(paths)
        for path in wanted:
            self._uncached(path)
        self._inner.delete_many(wanted)
        for path in wanted:
            self._forget(path)

    def forget(self, path: str) -> None:
        """Drop all cached parts of an object, so that the next read asks the store. For readers that found damage."""
        self._forget(path)

    def preload(self, path: str, size: int) -> bool:
        """Fetch the missing parts of an SST's first `size` bytes; False when the cache has no room for all of them.

        Raises `ObjectMissing`, and `Unavailable` when the store does not answer; parts fetched before stay cached.
        """
        parts, number = -(-size // self._part_bytes), 0
        while number < parts:
            if has_part(self._folder, self._key(path, number)):
                number += 1
                continue
            end, most = number + 1, min(parts, number + _PRELOADED_PARTS)
            while end < most and not has_part(self._folder, self._key(path, end)):
                end += 1
            if self._bytes + (end - number) * self._part_bytes > self._max_bytes * _KEPT_AFTER_EVICTION:
                return False
            self.get_range(path, number * self._part_bytes, min(size, end * self._part_bytes))
            number = end
        return True

    def _uncached(self, path: str) -> ObjectStore:
        if folder_of(path) in _METADATA:
            raise InternalError(f"{path} is metadata and must not pass through a cache")
        return self._inner

    def _parts(self, path: str, first: int, last: int, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of [start, stop) in each of the parts `first` to `last`; missing neighbours in one request."""
        size = self._part_bytes
        fetched: dict[int, bytes] = {}
        for number in range(first, last + 1):
            low, high = max(start - number * size, 0), min(stop - number * size, size)
            self._accesses.add()
            if number in fetched:
                yield fetched.pop(number)[low:high]
                continue
            piece = self._read(path, number, low, high)
            while piece is None:
                run = self._claim(path, number, last)
                if run:
                    fetched.update(self._fetch(path, run, stop))
                    piece = fetched.pop(number)[low:high]
                else:
                    # Another caller has fetched it or failed to, or the cache cannot keep it.
                    piece = self._read(path, number, low, high)
            yield piece

    def _read(self, path: str, number: int, low: int, high: int) -> bytes | None:
        key = self._key(path, number)
        try:
            piece = read_part(self._folder, key, low, high)
        except Damaged:
            drop_part(self._folder, key)
            return None
        except OSError:
            return None
        self._hits.add()
        now_ms = self._clock.now_ms()
        if now_ms - self._touched_ms.get(key, 0) >= _TOUCH_EVERY_MS:
            self._touched_ms[key] = now_ms
            touch_part(self._folder, key, now_ms * 1_000_000)
        return piece

    def _claim(self, path: str, number: int, last: int) -> range:
        """The missing parts from `number` on that this caller has to fetch.

        Empty when another caller was fetching `number`; returns only after that caller is done.
        """
        first = self._key(path, number)
        with self._lock:
            flight = self._flights.get(first)
            if flight is None:
                end = number
                last = min(last, number + _FETCHED_PARTS - 1)
                while end <= last and (key := self._key(path, end)) not in self._flights:
                    if end > number and has_part(self._folder, key):
                        break
                    self._flights[key] = Event()
                    end += 1
                return range(number, end)
        if not flight.wait(_FLIGHT_PATIENCE_S):
            # An interrupt may have ended that caller before it set the event.
            with self._lock:
                if self._flights.get(first) is flight:
                    del self._flights[first]
        return range(0)

    def _fetch(self, path: str, run: range, wanted_stop: int) -> dict[int, bytes]:
        """The parts of the run. An answer that ends before `wanted_stop` was cut short and is not cached."""
        size = self._part_bytes
        try:
            content = self._inner.get_range(path, run.start * size, run.stop * size)
            starts = range(0, len(run) * size, size)
            parts = {number: content[at : at + size] for number, at in zip(run, starts, strict=True)}
            if run.start * size + len(content) >= min(wanted_stop, run.stop * size):
                for number, part in parts.items():
                    self._keep(path, number, part)
            return parts
        finally:
            with self._lock:
                for number in run:
                    flight = self._flights.pop(self._key(path, number), None)
                    if flight is not None:
                        flight.set()

    def keep_whole(self, path: str, content: bytes) -> None:
        """Keep an SST that is on the store with this content."""
        for number, at in enumerate(range(0, len(content), self._part_bytes)):
            self._keep(path, number, content[at : at + self._part_bytes])

    @property
    def part_bytes(self) -> int:
        """The size of the parts in the cache."""
        return self._part_bytes

    def stage(self, path: str, number: int, content: bytes) -> StagedPart | None:
        """Write a part of an object that is still being uploaded; None if the disk does not take it."""
        try:
            return stage_part(
                self._folder,
                self._key(path, number),
                content,
                writer=self._ids.token(),
                now_ns=self._clock.now_ms() * 1_000_000,
            )
        except OSError:
            return None

    def publish(self, path: str, staged: Iterable[StagedPart]) -> None:
        """Keep these parts, and no others, of an object that is on the store now."""
        self._forget(path)
        for part in staged:
            with suppress(OSError):
                part.publish()
                self._count(part.size)

    def _describe(self, meta: ObjectMeta) -> None:
        fields = [meta.size, meta.last_modified_ms, meta.version.etag, meta.version.generation, meta.token]
        self._keep(meta.path, DESCRIPTION, json.dumps(fields).encode())

    def _described(self, path: str) -> ObjectMeta | None:
        try:
            fields = read_part(self._folder, self._key(path, DESCRIPTION), 0, self._part_bytes)
            size, last_modified_ms, etag, generation, token = json.loads(fields)
            return ObjectMeta(path, size, last_modified_ms, ObjectVersion(etag, generation), token)
        except Damaged:
            drop_part(self._folder, self._key(path, DESCRIPTION))
            return None
        except (OSError, ValueError, TypeError):
            return None

    def _keep(self, path: str, number: int, content: bytes) -> None:
        staged = self.stage(path, number, content)
        if staged is not None:  # on a full or read-only disk the store works without the cache
            with suppress(OSError):
                staged.publish()
                self._count(staged.size)

    def _count(self, size: int) -> None:
        """Count a new part, and evict others if there are too many."""
        with self._lock:
            self._bytes += size
            self._keys += 1
            self._unmeasured += size
            now = self._clock.monotonic()
            due = (
                self._bytes > self._max_bytes
                or self._unmeasured > self._max_bytes // _RESCAN_FRACTION
                or now - self._measured_at >= self._scan_interval_s
            )
            if due:
                self._unmeasured, self._measured_at = 0, now
        if due:
            self._measure_and_evict()

    def _measure_and_evict(self) -> None:
        horizon_ns = (self._clock.now_ms() - _UNFINISHED_AGE_MS) * 1_000_000
        parts = sorted(
            scan_parts(self._folder, unfinished_before_ns=horizon_ns), key=lambda part: part.used_ns
        )
        total, kept = sum(part.size for part in parts), len(parts)
        if total > self._max_bytes:
            for part in parts:
                if total <= self._max_bytes * _KEPT_AFTER_EVICTION:
                    break
                with suppress(OSError):
                    part.file.unlink()
                    self._evicted_keys.add()
                    self._evicted_bytes.add(part.size)
                total -= part.size
                kept -= 1
        with self._lock:
            self._bytes, self._keys = total, kept
            self._touched_ms.clear()
        self._cache_bytes.set(total)
        self._cache_keys.set(kept)

    def _forget(self, path: str) -> None:
        if _is_sst(path):
            drop_object(self._folder, self._url, path)

    def _key(self, path: str, number: int) -> PartKey:
        return PartKey(self._url, path, self._part_bytes, number)


def _is_sst(path: str) -> bool:
    return folder_of(path) == SST_FOLDER


def cached_on_disk(
    store: ObjectStore, options: ObjectStoreCacheOptions, *, metrics: Metrics | None = None
) -> ObjectStore:
    """The store with the disk cache that the options describe; the store itself when they name no folder."""
    if options.root_folder is None:
        return store
    return CachingStore(
        store,
        folder=options.root_folder,
        max_bytes=_NO_LIMIT if options.max_cache_size_bytes is None else options.max_cache_size_bytes,
        part_bytes=options.part_size_bytes,
        cache_on_put=options.cache_on_flush,
        scan_interval_s=options.scan_interval.total_seconds(),
        metrics=metrics,
    )


def read_checked(store: ObjectStore, path: str, start: int, stop: int, decode: Callable[[bytes], T]) -> T:
    """What `decode` returns for bytes [start, stop) of the object, which are read twice at most.

    `decode` must raise `CorruptData` for damaged bytes and change no state then.
    """
    return read_twice(store, path, lambda: decode(store.get_range(path, start, stop)))


def read_twice(store: ObjectStore, path: str, read: Callable[[], T]) -> T:
    """What `read` returns, which reads the object and checks the bytes. After `CorruptData` it is called once more."""
    try:
        return read()
    except CorruptData as error:
        _log.warning("read damaged bytes, reading once more: path=%s error=%s", path, error)
    if isinstance(store, CachingStore):
        store.forget(path)
    try:
        return read()
    except CorruptData:
        if isinstance(store, CachingStore):
            store.forget(path)
        raise
