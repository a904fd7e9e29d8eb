"""Uploads whose bytes go into the disk cache, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flagstone.store.part_files import StagedPart
from flagstone.store.port import ObjectStore, ObjectVersion, Piece, Upload

if TYPE_CHECKING:
    from flagstone.store.caching import CachingStore


class KeptUpload:
    """An upload that forgets what the cache has of its object and, with `keep`, keeps its parts instead.

    The parts have no names before the commit: until then a reader of an older object under this path finds none of
    them. A crash leaves files without names, which the next measurement of the folder removes.
    """

    def __init__(self, cache: CachingStore, path: str, inner: Upload, *, keep: bool) -> None:
        self._cache = cache
        self._path = path
        self._inner = inner
        self._keep = keep
        self._pending = bytearray()
        self._staged: list[StagedPart] = []

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    def write(self, start: int, part: Piece) -> None:
        self._inner.write(start, part)
        if self._keep:
            self._pending += part
            self._stage(self._cache.part_bytes)

    def commit(self) -> None:
        self._inner.commit()
        if self._keep:
            self._stage(1)
        staged, self._staged = self._staged, []
        self._cache.publish(self._path, staged if self._keep else ())

    def abort(self) -> None:
        self._inner.abort()
        self._discard()

    def _stage(self, least: int) -> None:
        """Write parts to the disk while at least that many bytes wait."""
        size = self._cache.part_bytes
        while self._keep and len(self._pending) >= least:
            staged = self._cache.stage(self._path, len(self._staged), bytes(self._pending[:size]))
            if staged is None:
                self._discard()
                return
            self._staged.append(staged)
            del self._pending[:size]

    def _discard(self) -> None:
        self._keep = False
        self._pending.clear()
        for part in self._staged:
            part.discard()
        self._staged.clear()


class KeepingStore:
    """Writes to `store`, and keeps what it writes in `cache`."""

    def __init__(self, store: ObjectStore, cache: CachingStore) -> None:
        self._store = store
        self._cache = cache

    def put(self, path: str, data: bytes) -> ObjectVersion:
        version = self._store.put(path, data)
        self._cache.keep_whole(path, data)
        return version

    def upload(self, path: str) -> Upload:
        return KeptUpload(self._cache, path, self._store.upload(path), keep=True)
