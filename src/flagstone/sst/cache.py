"""Decides what of the open SSTs stays in memory, within a bound.

The blocks themselves lie in their SSTs, where a reader finds them without hashing or locking; the cache keeps
the accounts. A hit sets a reference flag and nothing else, so hits scale with the readers.

Eviction is S3-FIFO: newcomers wait in a small queue and move to the main queue only if they were used again
before their turn came; the main queue gives what was used another round. A block that comes back soon after it
was evicted goes to the main queue at once. A flood of blocks that are read once thus pushes out only other
newcomers. Index and filters go to the main queue at once: every read of their SST needs them.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock
from flagstone.sst.reader import META, Sst, SstMeta
from flagstone.types import Ulid

DEFAULT_CAPACITY_BYTES: Final = 640 * 1024 * 1024
"""What SlateDB's two caches hold together: 512 MiB of blocks, 128 MiB of indexes and filters."""

CACHE_BYTES: Final = "flagstone.db_cache.bytes"
CACHE_EVICTIONS: Final = "flagstone.db_cache.evictions"
_SMALL_SHARE: Final = 10
"""The small queue gets one in this many bytes."""

_Entry = tuple[Sst, int]


class SstCache:
    """Bounds the bytes held by all SSTs that are admitted through it. Safe to use from many threads.

    A bound of 0 keeps nothing: every read goes to the store. What a reader pinned for itself is not counted.
    """

    def __init__(
        self, *, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, metrics: Metrics | None = None
    ) -> None:
        if capacity_bytes < 0:
            raise InvalidRequest(f"capacity_bytes is {capacity_bytes}; use 0 (keep nothing) or more")
        registry = metrics or Metrics()
        self.capacity_bytes: Final = capacity_bytes
        self._gauge = registry.gauge(CACHE_BYTES)
        self._evictions = registry.counter(CACHE_EVICTIONS)
        self._lock = Lock()
        self._small: deque[_Entry] = deque()
        self._main: deque[_Entry] = deque()
        self._small_bytes = 0
        self._main_bytes = 0
        # Where each entry that is held stands, by size: positive in the main queue, negative in the small one.
        self._held: dict[_Entry, int] = {}
        self._ghosts: dict[tuple[Ulid, int], None] = {}

    @property
    def held_bytes(self) -> int:
        """What is in memory now; never above the capacity once an admission has returned."""
        return self._small_bytes + self._main_bytes

    def admit_block(self, sst: Sst, number: int, raw: bytes, *, count: int) -> None:
        """Keep a block of an SST that has `count` of them, if it fits at all."""
        if len(raw) > self.capacity_bytes:
            return
        with self._lock:
            if (sst, number) in self._held:
                return
            sst.hold_block(number, raw, count)
            came_back = (sst.id, number) in self._ghosts
            if came_back:
                del self._ghosts[sst.id, number]
            self._enter((sst, number), len(raw), main=came_back)
            self._shrink()

    def admit_meta(self, sst: Sst, meta: SstMeta) -> None:
        """Keep index and filters of an SST, if they fit at all."""
        if sst.meta_bytes > self.capacity_bytes:
            return
        with self._lock:
            if (sst, META) in self._held:
                return
            sst.filters = meta.filters
            sst.hold_meta(*meta.pinned)
            self._enter((sst, META), sst.meta_bytes, main=True)
            self._shrink()

    def drop(self, sst: Sst) -> None:
        """Release all that is held of an SST. Readers that still use it fetch what they need again."""
        with self._lock:
            for number in (*sst.held_numbers(), META):
                if (sst, number) in self._held:
                    self._leave((sst, number))
            # Entries of dropped SSTs would otherwise wait in the queues until the cache is full.
            if len(self._small) + len(self._main) > 2 * len(self._held) + 64:
                self._small = deque(entry for entry in self._small if self._held.get(entry, 1) < 0)
                self._main = deque(entry for entry in self._main if self._held.get(entry, 0) > 0)
            self._gauge.set(self.held_bytes)

    def _enter(self, entry: _Entry, size: int, *, main: bool) -> None:
        # Empty parts do not exist in the format; counting one byte keeps the sign meaningful in any case.
        size = max(size, 1)
        self._held[entry] = size if main else -size
        if main:
            self._main.append(entry)
            self._main_bytes += size
        else:
            self._small.append(entry)
            self._small_bytes += size

    def _leave(self, entry: _Entry) -> None:
        sst, number = entry
        size = self._held.pop(entry)
        if size > 0:
            self._main_bytes -= size
        else:
            self._small_bytes += size
        if number == META:
            sst.release_meta()
            sst.filters = None
        else:
            sst.release_block(number)

    def _shrink(self) -> None:
        while self.held_bytes > self.capacity_bytes:
            small_first = self._small_bytes * _SMALL_SHARE > self.capacity_bytes or not self._main_bytes
            if small_first and self._small:
                self._turn_small()
            else:
                self._turn_main()
        self._gauge.set(self.held_bytes)

    def _turn_small(self) -> None:
        entry = self._small.popleft()
        size = self._held.get(entry, 0)
        if size >= 0:
            return  # dropped since, or already promoted
        sst, number = entry
        if sst.take_touch(number):
            self._held[entry] = -size
            self._small_bytes += size
            self._main_bytes -= size
            self._main.append(entry)
        else:
            self._leave(entry)
            self._remember(sst.id, number)

    def _turn_main(self) -> None:
        entry = self._main.popleft()
        if self._held.get(entry, 0) <= 0:
            return
        sst, number = entry
        if sst.take_touch(number):
            self._main.append(entry)
        else:
            self._leave(entry)
            self._evictions.add()

    def _remember(self, sst_id: Ulid, number: int) -> None:
        self._evictions.add()
        self._ghosts[sst_id, number] = None
        if len(self._ghosts) > len(self._held) + 64:
            del self._ghosts[next(iter(self._ghosts))]
