"""What a compaction job reads: its sources, the key ranges it is cut into, and the blocks of one range.

Sources and ranges are pure. The ranges are merged independently of each other, and are the same as SlateDB's: each
source SST contributes a few keys, spread evenly over its bytes (anchors), and the boundaries are chosen among all
anchors so that the ranges have about the same number of bytes.

Blocks are read in order, a chunk at a time, ahead of the merge. They bypass the block cache, because the compaction
replaces the SSTs it reads. Requests are made as late as possible without making the merge wait, so memory stays small
if the store is quick.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeVar

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.codec import CHECKSUM_BYTES, Codec
from flagstone.format.sst import (
    BLOCK_SIZES,
    FORMAT_V2,
    BlockIndex,
    damaged_block,
    decode_rows,
    open_block,
    open_filters,
    open_index,
)
from flagstone.kernels import block_writer, sealing
from flagstone.lsm.tree import BytesRange, SstView, Tree
from flagstone.metadata.compactions import TieredSpec
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.runtime.ids import ulid_text
from flagstone.runtime.pool import Future, IoPool
from flagstone.runtime.sync import Lock
from flagstone.sst.reader import Sst
from flagstone.sst.store import SstGone, compare_footer
from flagstone.store.caching import read_twice
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore, read_range_into
from flagstone.types import KeyRange

T = TypeVar("T")
B = TypeVar("B", bytes, bytes | memoryview)

MAX_ANCHORS: Final = 128
"""Per SST."""

INDEX_CACHE_BYTES: Final = 8 * 1024 * 1024
"""Stored size of the indexes that are cached: they are read for planning and again for every range."""

FIRST_FETCH_BYTES: Final = 512 * 1024
"""Enough if the store is a disk or memory, and small enough to be still in the processor's cache when merged."""

WHOLE: Final = (BytesRange(),)


@dataclass(frozen=True, slots=True)
class Part:
    """The keys of one SST that belong to a source."""

    sst: SsTable
    path: str
    keys: KeyRange

    def within(self, keys: KeyRange) -> Part:
        """The part of it within those keys."""
        return replace(self, keys=self.keys.intersect(keys))


def plan_sources(manifest: Manifest, spec: TieredSpec, paths: DbPaths) -> list[list[Part]]:
    """The sources of a job, newest first; of each source the SSTs in key order with their visible keys.

    Raises `InvalidRequest` if the manifest lacks one: the job was planned on another tree.
    """
    tree = _tree(manifest, spec)
    l0 = {view.id: view for view in tree.l0}
    runs = {run.id: run for run in tree.runs}
    missing = [f"L0 {ulid_text(view_id)}" for view_id in spec.l0_view_ids if view_id not in l0]
    missing += [f"run {run_id}" for run_id in spec.sorted_runs if run_id not in runs]
    if missing:
        raise InvalidRequest(f"the manifest has no {', '.join(missing)}: this compaction is out of date")
    groups: list[tuple[SstView, ...]] = [(l0[view_id],) for view_id in spec.l0_view_ids]
    groups += [runs[run_id].views for run_id in spec.sorted_runs]
    return [[part_of(manifest, view, paths) for view in group] for group in groups]


def is_last_run(manifest: Manifest, spec: TieredSpec) -> bool:
    """Whether no older rows of the same keys lie below the output, so that no tombstone is needed."""
    runs = _tree(manifest, spec).runs
    return not runs or runs[-1].id == spec.destination


def _tree(manifest: Manifest, spec: TieredSpec) -> Tree:
    tree = manifest.tree_of(spec.segment)
    if tree is None:
        raise InvalidRequest(f"the manifest has no segment {spec.segment!r}: this compaction is out of date")
    return tree


def part_of(manifest: Manifest, view: SstView, paths: DbPaths) -> Part:
    """The SST of a view, with its path in the database that owns it and the keys that the view shows."""
    sst = manifest.sst(view)
    owner = manifest.path_of_owner(view.sst_id)
    path = (paths if owner is None else DbPaths(owner)).sst(view.sst_id)
    return Part(sst, path, view.effective_range(sst.info))


@dataclass(frozen=True, slots=True)
class Anchor:
    """A key, and how many bytes of one SST lie between it and the SST's next anchor."""

    key: bytes
    size: int


@dataclass(frozen=True, slots=True)
class SampledView:
    """One source SST: its size as schedulers count it, and its anchors."""

    size: int
    anchors: tuple[Anchor, ...]


def sample_view(index: BlockIndex, keys: KeyRange, size: int) -> SampledView:
    """The anchors of an SST of which `keys` are visible."""
    stride = -(-len(index) // MAX_ANCHORS)
    anchors = []
    for first in range(0, len(index), stride):
        last = min(first + stride, len(index)) - 1
        # The first block has an empty key in the index, which is in no SST's range.
        if index.first_keys[first] in keys:
            anchors.append(Anchor(index.first_keys[first], index.stops[last] - index.offsets[first]))
    return SampledView(size, tuple(anchors))


def plan_ranges(views: Sequence[SampledView], max_subcompactions: int) -> tuple[BytesRange, ...]:
    """Adjacent ranges that cover all keys: one, or up to `max_subcompactions`."""
    anchors = sorted((anchor for view in views for anchor in view.anchors), key=lambda anchor: anchor.key)
    total = sum(anchor.size for anchor in anchors)
    if max_subcompactions <= 1 or not anchors:
        return WHOLE
    # A range smaller than an SST would not read less: each SST overlaps all ranges alike.
    target = max(total // max_subcompactions, *(view.size for view in views))
    if target == 0 or target >= total:
        return WHOLE
    boundaries: list[bytes] = []
    threshold, passed, last = target, 0, anchors[0].key
    for anchor in anchors:
        if passed >= threshold and len(boundaries) < max_subcompactions - 1 and anchor.key > last:
            boundaries.append(anchor.key)
            last = anchor.key
            threshold += target
        passed += anchor.size
    edges = [None, *boundaries, None]
    return tuple(BytesRange.of(KeyRange(start, stop)) for start, stop in pairwise(edges))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Raw blocks of format version 2, as `kernels.merge` takes them; `first_block` is the first one's index in its SST.

    `stored` are the same blocks as the object has them; their checksums are valid. `low` and `high` are set if rows at
    the edges may lie outside of the wanted keys.
    """

    part: Part
    index: BlockIndex
    first_block: int
    data: bytes | memoryview
    bounds: array[int]
    stored: bytes | memoryview
    low: bytes | None
    high: bytes | None

    def stored_with(self, codec: Codec) -> bool:
        """Whether an SST of that codec can have the blocks as they are stored."""
        return self.part.sst.format_version == FORMAT_V2 and self.part.sst.info.codec is codec

    def damaged(self, error: CorruptData, block: int) -> CorruptData:
        """The error about the given block of this chunk, with the name of the object."""
        number = self.first_block + block
        return damaged_block(error, number, object=self.part.path, offset=self.index.offsets[number])


class SstFetcher:
    """Reads parts of SSTs from the store. Safe to use from many threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = Lock()
        self._indexes: OrderedDict[str, tuple[BlockIndex, int]] = OrderedDict()
        self._held_bytes = 0

    def fetch_index(self, sst: SsTable, path: str) -> BlockIndex:
        """The index of an SST, from the cache if it was read recently."""
        with self._lock:
            held = self._indexes.get(path)
            if held is not None:
                self._indexes.move_to_end(path)
                return held[0]
        info = sst.info
        opened = Sst(sst.id, path, info, format_version=sst.format_version)
        start, stop = info.index_offset, info.index_offset + info.index_len

        def decode(stored: bytes) -> BlockIndex:
            index = open_index(_whole(stored[: stop - start], path, start, stop), info, path)
            if not opened.has_footer(stored, start):
                compare_footer(self._store, opened)
            return index

        index = self._read(sst, path, start, opened.footer_range[1], decode)
        with self._lock:
            if path not in self._indexes:
                self._indexes[path] = (index, info.index_len)
                self._held_bytes += info.index_len
            while self._held_bytes > INDEX_CACHE_BYTES and len(self._indexes) > 1:
                self._held_bytes -= self._indexes.popitem(last=False)[1][1]
        return index

    def fetch_chunk(
        self, part: Part, index: BlockIndex, first: int, last: int, memory: bytearray | None = None
    ) -> Chunk:
        """Blocks `first` to `last`, checked and decompressed. Raises `CorruptData` with object and offset.

        The bytes may be in `memory`, which is large enough and must not change while the chunk is in use.
        """
        start, stop = index.offsets[first], index.stops[last]

        def read() -> tuple[bytes | memoryview, array[int], bytes | memoryview]:
            stored = (
                self._store.get_range(part.path, start, stop)
                if memory is None
                else read_range_into(self._store, part.path, start, stop, memoryview(memory))
            )
            return self._blocks(part, index, first, last, _whole(stored, part.path, start, stop))

        data, bounds, stored = self._read_twice(part.sst, part.path, read)
        low, high = _edges(part.keys, index, first, last)
        return Chunk(part, index, first, data, bounds, stored, low, high)

    def _blocks(
        self, part: Part, index: BlockIndex, first: int, last: int, stored: bytes | memoryview
    ) -> tuple[bytes | memoryview, array[int], bytes | memoryview]:
        """The raw blocks as one byte string, where each begins and ends in it, and the blocks as they are stored."""
        start, numbers = index.offsets[first], range(first, last + 1)
        if part.sst.info.codec is Codec.NONE and part.sst.format_version == FORMAT_V2:
            bounds = sealing.bounds_within(index.offsets, index.stops, first, last, CHECKSUM_BYTES)
            wrong = sealing.first_damaged(stored, bounds)
            if wrong >= 0:
                # The slow path raises the detailed error.
                self._open(part, index, first + wrong, stored, start)
            return stored, bounds, stored
        raws = [raw for number in numbers for raw in self._open(part, index, number, stored, start)]
        return *_joined(raws), stored

    def fetch_blocks(self, part: Part, index: BlockIndex, numbers: Sequence[int]) -> tuple[bytes, array[int]]:
        """Some ascending blocks of format version 2 in one request: the raw blocks, and where each begins and ends.

        Blocks between them are fetched, but neither checked nor decompressed.
        """
        start, stop = index.offsets[numbers[0]], index.stops[numbers[-1]]

        def decode(stored: bytes) -> tuple[bytes, array[int]]:
            whole = _whole(stored, part.path, start, stop)
            if part.sst.info.codec is not Codec.NONE:
                return _joined(
                    [raw for number in numbers for raw in self._open(part, index, number, whole, start)]
                )
            edges = ((index.offsets[at] - start, index.stops[at] - start - CHECKSUM_BYTES) for at in numbers)
            bounds = array("q", [edge for pair in edges for edge in pair])
            wrong = sealing.first_damaged(whole, bounds)
            if wrong >= 0:
                # The slow path raises the detailed error.
                self._open(part, index, numbers[wrong], whole, start)
            return whole, bounds

        return self._read(part.sst, part.path, start, stop, decode)

    def fetch_filter(self, part: Part) -> bytes | None:
        """The bloom filter over whole keys of an SST, or None if it has none."""
        info = part.sst.info
        start, stop = info.filter_offset, info.filter_offset + info.filter_len

        def decode(stored: bytes) -> bytes | None:
            filters = open_filters(_whole(stored, part.path, start, stop), info, part.path)
            return None if filters is None else filters.whole_key_bloom

        return self._read(part.sst, part.path, start, stop, decode)

    def fetch_stored(self, part: Part, start: int, stop: int) -> bytes:
        """Bytes of the file as they are stored, unchecked."""

        def decode(stored: bytes) -> bytes:
            return _whole(stored, part.path, start, stop)

        return self._read(part.sst, part.path, start, stop, decode)

    def fetch_last_row(self, sst: SsTable, path: str) -> tuple[bytes, int]:
        """Key and sequence number of the last row of an SST that an executor uploaded."""
        index = self.fetch_index(sst, path)
        number = len(index) - 1
        start, stop, version = index.offsets[number], index.stops[number], sst.format_version

        def decode(stored: bytes) -> bytes:
            return open_block(_whole(stored, path, start, stop), sst.info, path, start, version=version)

        raw = self._read(sst, path, start, stop, decode)
        try:
            row = decode_rows(raw, version)[-1]
        except CorruptData as error:
            raise damaged_block(error, number, object=path, offset=start) from None
        return row[0], row[1]

    def _open(
        self, part: Part, index: BlockIndex, number: int, stored: bytes | memoryview, base: int
    ) -> list[bytes]:
        """One block, checked and decompressed; a block of format version 1 is rewritten in version 2."""
        start, stop = index.offsets[number], index.stops[number]
        version = part.sst.format_version
        block = bytes(stored[start - base : stop - base])
        raw = open_block(block, part.sst.info, part.path, start, version=version)
        if version == FORMAT_V2:
            return [raw]
        try:
            rows = decode_rows(raw, version)
        except CorruptData as error:
            raise damaged_block(error, number, object=part.path, offset=start) from None
        writer = block_writer.BlockWriter(BLOCK_SIZES[-1], ordered=False, want_hashes=False)
        writer.add_rows(rows)
        return writer.finish_blocks()

    def _read(self, sst: SsTable, path: str, start: int, stop: int, decode: Callable[[bytes], T]) -> T:
        return self._read_twice(sst, path, lambda: decode(self._store.get_range(path, start, stop)))

    def _read_twice(self, sst: SsTable, path: str, read: Callable[[], T]) -> T:
        try:
            return read_twice(self._store, path, read)
        except ObjectMissing:
            raise SstGone(sst.id, path) from None


@dataclass(frozen=True, slots=True)
class _Request:
    part: Part
    index: BlockIndex
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.index.stops[self.last] - self.index.offsets[self.first]


class Source:
    """The chunks of one L0 view or one sorted run, whose parts are in key order. Used by one thread.

    It begins with one request of `first_bytes` ahead of the merge. Each time the merge has to wait, requests become
    larger, up to `bytes_to_fetch`, and after that more numerous, up to `max_fetch_tasks`.

    With `reuse`, the memory of a chunk is used again for a later one: fresh memory costs as much as reading a file into
    it. The bytes of a chunk are then valid until the next call of `next_chunk`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        fetcher: SstFetcher,
        *,
        pool: IoPool,
        bytes_to_fetch: int,
        max_fetch_tasks: int,
        first_bytes: int = FIRST_FETCH_BYTES,
        reuse: bool = False,
    ) -> None:
        self._fetcher = fetcher
        self._pool = pool
        self._max_bytes = bytes_to_fetch
        self._max_tasks = max_fetch_tasks
        self._bytes = min(first_bytes, bytes_to_fetch)
        self._tasks = 1
        self._requests = self._plan(parts)
        self._under_way: deque[tuple[Future[Chunk], bytearray | None]] = deque()
        self._reuse = reuse
        self._spare: list[bytearray] = []
        self._in_use: bytearray | None = None
        self.last: Chunk | None = None
        """The chunk that `next_chunk` returned last, which the merge is reading."""

    def start(self) -> None:
        """Request the first chunk without waiting for it."""
        while len(self._under_way) < self._tasks:
            request = next(self._requests, None)
            if request is None:
                return
            memory = self._memory(request.size) if self._reuse else None
            fetched = self._pool.submit(
                self._fetcher.fetch_chunk, request.part, request.index, request.first, request.last, memory
            )
            self._under_way.append((fetched, memory))

    def _memory(self, size: int) -> bytearray:
        """Memory that no chunk uses."""
        if self._spare and len(memory := self._spare.pop()) >= size:
            return memory
        # Blocks differ in size; the next chunk may be a little larger.
        return bytearray(size + size // 16)

    def next_chunk(self) -> Chunk | None:
        """The next chunk, or None at the end. Waits for the store if necessary."""
        self.start()
        if not self._under_way:
            return None
        future, memory = self._under_way.popleft()
        if self.last is not None and not future.done():
            if self._bytes < self._max_bytes:
                self._bytes = min(2 * self._bytes, self._max_bytes)
            else:
                self._tasks = min(self._tasks + 1, self._max_tasks)
        if self._in_use is not None:
            self._spare.append(self._in_use)
        self._in_use = memory
        self.start()
        self.last = future.result()
        return self.last

    def close(self) -> None:
        """Cancel the requests that are under way."""
        for future, _ in self._under_way:
            future.cancel()
        self._under_way.clear()

    def _plan(self, parts: Sequence[Part]) -> Iterator[_Request]:
        upcoming = [part for part in parts if not part.keys.empty]
        ahead: deque[Future[BlockIndex]] = deque()
        for position, part in enumerate(upcoming):
            for each in upcoming[position + len(ahead) : position + 2]:
                ahead.append(self._pool.submit(self._fetcher.fetch_index, each.sst, each.path))
            index = ahead.popleft().result()
            first, stop = _blocks_of(part.keys, index)
            while first < stop:
                last = bisect_left(index.stops, index.offsets[first] + self._bytes, first, stop - 1)
                yield _Request(part, index, first, last)
                first = last + 1


def _whole(stored: B, path: str, start: int, stop: int) -> B:
    if len(stored) != stop - start:
        raise CorruptData(
            f"the object ends {stop - start - len(stored)} bytes before byte {stop}, which it should have",
            object=path,
            offset=start + len(stored),
        )
    return stored


def common_prefix(keys: Sequence[KeyRange]) -> int:
    """The length of a prefix that all keys in all the ranges share."""
    starts = [each.start for each in keys]
    stops = [each.stop for each in keys]
    if not keys or None in starts or None in stops:
        return 0
    low = min(start for start in starts if start is not None)
    high = max(stop for stop in stops if stop is not None)
    size = min(len(low), len(high))
    return next((at for at in range(size) if low[at] != high[at]), size)


def _blocks_of(keys: KeyRange, index: BlockIndex) -> tuple[int, int]:
    """The blocks that may hold one of the keys, as a half-open range of block numbers."""
    first = 0 if keys.start is None else max(bisect_left(index.first_keys, keys.start) - 1, 0)
    stop = len(index) if keys.stop is None else bisect_left(index.first_keys, keys.stop)
    return first, stop


def _edges(keys: KeyRange, index: BlockIndex, first: int, last: int) -> tuple[bytes | None, bytes | None]:
    """The bounds that rows of these blocks may exceed; None if the index rules that out."""
    low = keys.start if keys.start is not None and index.first_keys[first] < keys.start else None
    # Versions of one key may be in two blocks; then the key equals the separator between them.
    below = last + 1 < len(index) and keys.stop is not None and index.first_keys[last + 1] < keys.stop
    return low, None if below else keys.stop


def _joined(blocks: list[bytes]) -> tuple[bytes, array[int]]:
    bounds = array("q")
    at = 0
    for block in blocks:
        bounds.extend((at, at + len(block)))
        at += len(block)
    return b"".join(blocks), bounds
