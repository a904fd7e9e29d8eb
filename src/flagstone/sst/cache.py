"""The cache: bounds how many bytes of open SSTs stay in memory.

Each SST holds its own blocks, so a reader finds them without hashing or locking. The cache only counts their bytes and
decides what to evict. A hit sets a reference flag and nothing else, so hits scale with the number of readers.

Eviction is S3-FIFO. A new block enters a small queue. When it reaches the end of that queue, it moves to the main queue
if it was used again, and is evicted otherwise. The main queue keeps a block for another round if it was used. A block
that is fetched again soon after its eviction goes straight to the main queue. So a long scan evicts only blocks that
were read once. Index and filters of an SST are one entry, which may have one part without the other. It
goes straight to the main queue: every read of the SST needs the index.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.format.filter import Filters
from flagstone.format.sst import BlockIndex
from flagstone.runtime import metric_names
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock
from flagstone.sst.reader import META, Sst
from flagstone.types import Ulid

DEFAULT_CAPACITY_BYTES: Final = 640 * 1024 * 1024
"""The sum of SlateDB's two caches: 512 MiB of blocks, 128 MiB of indexes and filters."""

_SMALL_SHARE: Final = 10
"""The small queue gets 1/10 of the capacity."""

_Entry = tuple[Sst, int]


class SstCache:
    """Bounds the bytes that SSTs hold. Safe to use from many threads.

    A capacity of 0 keeps nothing: every read goes to the store. Blocks that a running read holds are not counted.
    """

    def __init__(
        self, *, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, metrics: Metrics | None = None
    ) -> None:
        if capacity_bytes < 0:
            raise InvalidRequest(f"capacity_bytes is {capacity_bytes}; use 0 (keep nothing) or more")
        registry = metrics or Metrics()
        self.capacity_bytes: int = capacity_bytes
        self._gauge = registry.gauge(metric_names.DB_CACHE_BYTES)
        self._evictions = registry.counter(metric_names.DB_CACHE_EVICTIONS)
        self._lock = Lock()
        self._small: deque[_Entry] = deque()
        self._main: deque[_Entry] = deque()
        self._small_bytes = 0
        self._main_bytes = 0
        # The size of each entry: positive in the main queue, negative in the small one.
        self._held: dict[_Entry, int] = {}
        self._ghosts: dict[tuple[Ulid, int], None] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes in memory. When `admit_…` returns, they are within the capacity."""
        return self._small_bytes + self._main_bytes

    def resize(self, capacity_bytes: int) -> int:
        """Keep at most this much from now on; returns how many bytes were released for that.

        A cache that holds more releases everything: blocks that stay lie between those that go, and then the system
        gets few whole pages back.
        """
        if capacity_bytes == self.capacity_bytes:
            return 0
        with self._lock:
            before = self.held_bytes
            if before > capacity_bytes:
                self.capacity_bytes = 0
                self._shrink()
            self.capacity_bytes = capacity_bytes
            return before - self.held_bytes

    def admit_block(self, sst: Sst, number: int, raw: bytes, *, count: int) -> None:
        """Keep a block, unless it is larger than the whole cache. The SST has `count` blocks."""
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

    def admit_parts(self, sst: Sst, index: BlockIndex | None, filters: Filters | None) -> None:
        """Keep the index or the filters of an SST, or both, unless they are larger than the whole cache.

        They are one entry, which grows when the other part comes.
        """
        info = sst.info
        with self._lock:
            held = self._held.get((sst, META), 0)
            size = held
            if index is not None and sst.index is None:
                size += info.index_len
            if filters is not None and sst.filters is None:
                size += info.filter_len
            if size > self.capacity_bytes:
                return
            sst.hold_parts(index, filters)
            if not held:
                self._enter((sst, META), sst.held_meta_bytes, main=True)
            else:
                grown = sst.held_meta_bytes - held
                self._held[sst, META] += grown
                self._main_bytes += grown
            self._shrink()

    def drop(self, sst: Sst) -> None:
        """Release all parts of an SST. A read that still uses the SST fetches them again."""
        with self._lock:
            for number in (*sst.held_numbers(), META):
                if (sst, number) in self._held:
                    self._leave((sst, number))
            # Otherwise the entries of dropped SSTs would stay in the queues until the cache is full.
            if len(self._small) + len(self._main) > 2 * len(self._held) + 64:
                self._small = deque(entry for entry in self._small if self._held.get(entry, 1) < 0)
                self._main = deque(entry for entry in self._main if self._held.get(entry, 0) > 0)
            self._gauge.set(self.held_bytes)

    def _enter(self, entry: _Entry, size: int, *, main: bool) -> None:
        # The format has no empty parts. Should one appear, one byte keeps the sign meaningful.
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
            sst.release_parts()
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
            return  # dropped or promoted since
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
        if sst.take_meta_touch() if number == META else sst.take_touch(number):
            self._main.append(entry)
        else:
            self._leave(entry)
            self._evictions.add()

    def _remember(self, sst_id: Ulid, number: int) -> None:
        self._evictions.add()
        self._ghosts[sst_id, number] = None
        if len(self._ghosts) > len(self._held) + 64:
            del self._ghosts[next(iter(self._ghosts))]
