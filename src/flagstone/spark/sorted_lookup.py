"""The values of many ascending keys, from the SSTs of one state: index, filter, and only blocks that can have a key.

Consecutive keys share a block, which is fetched and decompressed once; adjacent blocks are one request, and several
requests are under way while blocks are searched. Keys that need more than one version (merge operands), and rows that
are only in the WAL, are read in the ordinary way.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.compaction.inputs import Part, SstFetcher, part_of
from flagstone.db.reader.reader import DbReader
from flagstone.format.sst import FORMAT_V2, BlockIndex
from flagstone.kernels import lookup
from flagstone.kernels.columns import room, strings, view
from flagstone.runtime.pool import Future, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import MAX_KEY_BYTES

MAX_GAP_BYTES: Final = 16 * 1024
"""Touched blocks closer than this are fetched with one request, together with the blocks between them."""

MAX_REQUEST_BYTES: Final = 2 * 1024 * 1024
_REQUESTS: Final = 6
"""Requests under way at once."""

_FILTER_SHARE: Final = 4
"""A filter is fetched if it is smaller than this part of the blocks that it may save."""

_MAX_VALUE_BYTES: Final = 256 * 1024 * 1024
"""The values of one lookup may have this size together, unless it has one key."""

Span = list[int]


class TooManyValues(Exception):
    """The values of a lookup are too large to hold at once: look up fewer keys."""


class SortedLookup:
    """Looks up keys in one state of a database. Used by one thread; the reader must stay open."""

    def __init__(
        self, reader: DbReader, store: ObjectStore, paths: DbPaths, *, now_ms: int, include_expired: bool
    ) -> None:
        self._reader = reader
        self._fetcher = SstFetcher(store)
        self._now_ms = now_ms
        self._include_expired = include_expired
        self._view, self._max_seq = reader._newest_read_point()  # noqa: SLF001 - it searches the view itself
        self._filters: dict[str, bytes | None] = {}
        manifest = reader.manifest()
        # With segments a key has a tree of its own; those are read in the ordinary way.
        self._ordinary = bool(manifest.segments) or manifest.segment_extractor_name is not None
        sources = (*((each,) for each in manifest.tree.l0), *(run.views for run in manifest.tree.runs))
        self._sources = [[part_of(manifest, each, paths) for each in views] for views in sources]
        self._memtables = self._view.memtables if reader.status()["memtable_bytes"] else ()
        self.touched_bytes: int = 0
        """The stored bytes of all blocks that were searched."""

    def find(self, keys: pa.Array) -> pa.Array:
        """The values of ascending keys without duplicates and nulls; null for a key without a visible row.

        Raises:
            CorruptData: an SST is damaged; the error names it.
            TooManyValues: the values are too large; look up fewer keys at once.
            Unavailable: the store did not answer, or an SST is gone.

        """
        count = len(keys)
        if not count:
            return pa.array([], pa.binary())
        asked = _Asked(keys)
        rest = array("q", range(count))
        slow: list[int] = []
        if self._ordinary:
            slow, rest = list(rest), array("q")
        elif self._memtables:
            slow = [at for at, key in enumerate(keys.to_pylist()) if self._in_memory(key)]
            chosen = set(slow)
            rest = array("q", (at for at in rest if at not in chosen))
        for parts in self._sources:
            if not rest:
                break
            for part in parts:
                self._search_part(part, asked, rest, slow)
            rest = array("q", (at for at in rest if not asked.status[at]))
        slow += [at for at in range(count) if asked.status[at] == lookup.OPEN]
        if slow:
            slow = sorted(set(slow))
            asked.add(array("q", slow), pa.array(self._read(keys, slow), pa.binary()))
        return asked.values()

    def _read(self, keys: pa.Array, positions: list[int]) -> list[bytes | None]:
        """The values at some positions, in the ordinary way."""
        asked = [keys[at].as_py() for at in positions]
        usable = [key for key in asked if 0 < len(key) <= MAX_KEY_BYTES]
        found = dict(
            zip(usable, self._reader.multi_get(usable, include_expired=self._include_expired), strict=True)
        )
        return [found.get(key) for key in asked]

    def _in_memory(self, key: bytes) -> bool:
        return any(memtable.get(key, self._max_seq) is not None for memtable in self._memtables)

    def _search_part(self, part: Part, asked: _Asked, rest: array[int], slow: list[int]) -> None:
        positions = asked.within(part, rest)
        if not positions:
            return
        if part.sst.format_version != FORMAT_V2:
            slow.extend(positions)
            for at in positions:
                asked.status[at] = lookup.HIDDEN  # older sources must not answer
            return
        index = self._fetcher.fetch_index(part.sst, part.path)
        rows, slots, blocks = lookup.locate(index.first_keys, asked.offsets, asked.data, positions)
        size = sum(index.stops[number] - index.offsets[number] for number in blocks)
        bloom = self._filter(part, size)
        if bloom is not None:
            positions = lookup.may_contain(bloom, asked.offsets, asked.data, positions)
            rows, slots, blocks = lookup.locate(index.first_keys, asked.offsets, asked.data, positions)
            size = sum(index.stops[number] - index.offsets[number] for number in blocks)
        self.touched_bytes += size
        first = 0  # of the span, as a slot
        for numbers, (data, bounds) in self._fetched(part, index, blocks):
            low, high = bisect_left(slots, first), bisect_left(slots, first + len(numbers))
            probes, places = rows[low:high], slots[low:high]
            found = lookup.find(
                data,
                bounds,
                probes,
                places,
                first,
                asked.offsets,
                asked.data,
                self._max_seq,
                self._now_ms,
                not self._include_expired,
                asked.status,
                asked.places,
                asked.sizes,
            )
            if found < 0:
                # The slow path raises the detailed error.
                slow.extend(set(probes))
                for at in probes:
                    asked.status[at] = lookup.HIDDEN
            else:
                asked.gather(data, probes, found)
            first += len(numbers)

    def _filter(self, part: Part, block_bytes: int) -> bytes | None:
        """The filter of an SST if it is worth its bytes."""
        if part.path in self._filters:
            return self._filters[part.path]
        if not part.sst.info.filter_len or part.sst.info.filter_len * _FILTER_SHARE > block_bytes:
            return None
        found = self._fetcher.fetch_filter(part)
        self._filters[part.path] = found
        return found

    def _fetched(
        self, part: Part, index: BlockIndex, blocks: Sequence[int]
    ) -> Iterator[tuple[Span, tuple[bytes, array[int]]]]:
        """The blocks, span by span, fetched ahead."""
        spans = deque(plan_spans(index, blocks))
        under_way: deque[tuple[Span, Future[tuple[bytes, array[int]]]]] = deque()
        pool = shared_pool()
        try:
            while spans or under_way:
                while spans and len(under_way) < _REQUESTS:
                    span = spans.popleft()
                    under_way.append((span, pool.submit(self._fetcher.fetch_blocks, part, index, span)))
                span, future = under_way.popleft()
                yield span, future.result()
        finally:
            for _, future in under_way:
                future.cancel()


class _Asked:
    """The keys of one lookup and what was found for them so far."""

    def __init__(self, keys: pa.Array) -> None:
        self.offsets, self.data = strings(keys)
        self.status = bytearray(len(keys))
        self.places = array("q", bytes(8 * len(keys)))
        self.sizes = array("q", bytes(8 * len(keys)))
        self._count = len(keys)
        self._bytes = 0
        self._pieces: list[tuple[Any, pa.Array]] = []

    def within(self, part: Part, positions: array[int]) -> array[int]:
        """Those of the ascending positions whose keys lie in the part."""
        keys = part.keys
        low = 0 if keys.start is None else lookup.lower_bound(self.offsets, self.data, keys.start)
        high = self._count if keys.stop is None else lookup.lower_bound(self.offsets, self.data, keys.stop)
        return positions[bisect_left(positions, low) : bisect_left(positions, high)]

    def gather(self, data: bytes, probes: array[int], size: int) -> None:
        """Keep the values that were found in a chunk."""
        self._bytes += size
        if self._bytes > _MAX_VALUE_BYTES and self._count > 1:
            raise TooManyValues
        found, ends, values = room(8 * len(probes)), room(4 * (len(probes) + 1)), room(size)
        count = lookup.gather(
            data,
            probes,
            self.status,
            self.places,
            self.sizes,
            view(found, "q"),
            view(ends, "i"),
            view(values, "B"),
        )
        if count:
            positions = pa.Array.from_buffers(pa.int64(), count, [None, found])
            self._pieces.append((positions, pa.Array.from_buffers(pa.binary(), count, [None, ends, values])))

    def add(self, positions: array[int], values: pa.Array) -> None:
        """Keep values, and nulls, that were read in another way."""
        self._pieces.append((pa.array(positions, pa.int64()), values))

    def values(self) -> pa.Array:
        """The values of all keys, in their order."""
        if not self._pieces:
            return pa.nulls(self._count, pa.binary())
        found = pa.concat_arrays([values for _, values in self._pieces])
        positions = pa.concat_arrays([each for each, _ in self._pieces])
        every = pa.array(array("q", range(self._count)), pa.int64())
        if positions.equals(every):
            return found
        return found.take(pc.index_in(every, value_set=positions))


def plan_spans(index: BlockIndex, blocks: Sequence[int]) -> Iterator[Span]:
    """The ascending blocks in requests: split at wide gaps, and where a request would become too large. Pure."""
    span: Span = []
    for number in blocks:
        if span and (
            index.offsets[number] - index.stops[span[-1]] > MAX_GAP_BYTES
            or index.stops[number] - index.offsets[span[0]] > MAX_REQUEST_BYTES
        ):
            yield span
            span = []
        span.append(number)
    if span:
        yield span
