"""Reads the sources of a merge: the blocks of one key range, in order, a chunk at a time and ahead of need.

Nothing goes through the block cache: what a compaction reads is about to be replaced. Requests are made as late as
they can be without the merge having to wait, so memory stays small where the store is quick.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from flagstone.errors import CorruptData
from flagstone.format.block import BLOCK_SIZES, FORMAT_V2, decode_rows
from flagstone.format.checksum import CHECKSUM_BYTES
from flagstone.format.codec import Codec
from flagstone.format.sst import BlockIndex, damaged_block, open_block, open_index
from flagstone.kernels import block_writer, sealing
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.pool import Future, IoPool
from flagstone.runtime.sync import Lock
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.store.rereading import read_checked
from flagstone.table.reader import Table
from flagstone.table.table_store import TableGone, compare_footer
from flagstone.types import KeyRange

T = TypeVar("T")

INDEX_CACHE_BYTES: Final = 8 * 1024 * 1024
"""Stored size of the indexes that are kept: they are read for planning and again for every range."""

FIRST_FETCH_BYTES: Final = 512 * 1024
"""Enough where the store is a disk or memory, and small enough to be still in the processor's cache when merged."""


@dataclass(frozen=True, slots=True)
class Part:
    """The keys of one table that belong to a source."""

    table: SsTable
    path: str
    keys: KeyRange

    def within(self, keys: KeyRange) -> Part:
        """The part of it with those keys."""
        return replace(self, keys=self.keys.intersect(keys))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Raw blocks of format version 2, fit for `kernels.merge`; `first_block` is the number of the first in its table.

    `low` and `high` are set where rows at its edges may lie outside of the wanted keys.
    """

    part: Part
    index: BlockIndex
    first_block: int
    data: bytes
    bounds: array[int]
    low: bytes | None
    high: bytes | None

    def damaged(self, error: CorruptData, block: int) -> CorruptData:
        """A finding in the given block of this chunk, told with the name of the object."""
        number = self.first_block + block
        return damaged_block(error, number, object=self.part.path, offset=self.index.offsets[number])


class TableFetcher:
    """Reads pieces of tables from the store. Safe to use from many threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = Lock()
        self._indexes: OrderedDict[str, tuple[BlockIndex, int]] = OrderedDict()
        self._held_bytes = 0

    def fetch_index(self, table: SsTable, path: str) -> BlockIndex:
        """The index of a table, from memory if it was read lately."""
        with self._lock:
            held = self._indexes.get(path)
            if held is not None:
                self._indexes.move_to_end(path)
                return held[0]
        info = table.info
        opened = Table(table.id, path, info, format_version=table.format_version)
        start, stop = info.index_offset, info.index_offset + info.index_len

        def decode(stored: bytes) -> BlockIndex:
            index = open_index(_whole(stored[: stop - start], path, start, stop), info, path)
            if not opened.has_footer(stored, start):
                compare_footer(self._store, opened)
            return index

        index = self._read(table, path, start, opened.footer_range[1], decode)
        with self._lock:
            if path not in self._indexes:
                self._indexes[path] = (index, info.index_len)
                self._held_bytes += info.index_len
            while self._held_bytes > INDEX_CACHE_BYTES and len(self._indexes) > 1:
                self._held_bytes -= self._indexes.popitem(last=False)[1][1]
        return index

    def fetch_chunk(self, part: Part, index: BlockIndex, first: int, last: int) -> Chunk:
        """Blocks `first` to `last`, checked and unpacked. Raises `CorruptData` naming object and offset."""
        start, stop = index.offsets[first], index.stops[last]
        data, bounds = self._read(
            part.table,
            part.path,
            start,
            stop,
            lambda stored: self._blocks(part, index, first, last, _whole(stored, part.path, start, stop)),
        )
        low, high = _edges(part.keys, index, first, last)
        return Chunk(part, index, first, data, bounds, low, high)

    def _blocks(
        self, part: Part, index: BlockIndex, first: int, last: int, stored: bytes
    ) -> tuple[bytes, array[int]]:
        """The raw blocks in one run of bytes, and where each begins and ends in it."""
        start, numbers = index.offsets[first], range(first, last + 1)
        if part.table.info.codec is Codec.NONE and part.table.format_version == FORMAT_V2:
            bounds = sealing.bounds_within(index.offsets, index.stops, first, last, CHECKSUM_BYTES)
            wrong = sealing.first_damaged(stored, bounds)
            if wrong >= 0:
                # Said again by the code that words it for everybody.
                self._open(part, index, first + wrong, stored, start)
            return stored, bounds
        return _joined([raw for number in numbers for raw in self._open(part, index, number, stored, start)])

    def fetch_last_row(self, table: SsTable, path: str) -> tuple[bytes, int]:
        """Key and sequence number of the last row of one of our own tables."""
        index = self.fetch_index(table, path)
        number = len(index) - 1
        start, stop, version = index.offsets[number], index.stops[number], table.format_version

        def decode(stored: bytes) -> bytes:
            return open_block(_whole(stored, path, start, stop), table.info, path, start, version=version)

        raw = self._read(table, path, start, stop, decode)
        try:
            row = decode_rows(raw, version)[-1]
        except CorruptData as error:
            raise damaged_block(error, number, object=path, offset=start) from None
        return row[0], row[1]

    def _open(self, part: Part, index: BlockIndex, number: int, stored: bytes, base: int) -> list[bytes]:
        """One block, unsealed and, where it is of the old format, rewritten in the new one."""
        start, stop = index.offsets[number], index.stops[number]
        version = part.table.format_version
        raw = open_block(
            stored[start - base : stop - base], part.table.info, part.path, start, version=version
        )
        if version == FORMAT_V2:
            return [raw]
        try:
            rows = decode_rows(raw, version)
        except CorruptData as error:
            raise damaged_block(error, number, object=part.path, offset=start) from None
        writer = block_writer.BlockWriter(BLOCK_SIZES[-1], False)
        writer.add_rows(rows)
        return [block[0] for block in writer.finish()]

    def _read(self, table: SsTable, path: str, start: int, stop: int, decode: Callable[[bytes], T]) -> T:
        try:
            return read_checked(self._store, path, start, stop, decode)
        except ObjectMissing:
            raise TableGone(table.id, path) from None


@dataclass(frozen=True, slots=True)
class _Request:
    part: Part
    index: BlockIndex
    first: int
    last: int


class Source:
    """The chunks of one L0 view or one run, whose parts come in key order. Used by one thread.

    Begins with one request of `first_bytes` ahead of the merge. Whenever the merge had to wait, requests become larger,
    up to `bytes_to_fetch`, and after that more, up to `max_fetch_tasks`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        fetcher: TableFetcher,
        *,
        pool: IoPool,
        bytes_to_fetch: int,
        max_fetch_tasks: int,
        first_bytes: int = FIRST_FETCH_BYTES,
    ) -> None:
        self._fetcher = fetcher
        self._pool = pool
        self._max_bytes = bytes_to_fetch
        self._max_tasks = max_fetch_tasks
        self._bytes = min(first_bytes, bytes_to_fetch)
        self._tasks = 1
        self._requests = self._plan(parts)
        self._under_way: deque[Future[Chunk]] = deque()
        self.last: Chunk | None = None
        """The chunk handed out last: the one the merge is about."""

    def start(self) -> None:
        """Ask for the first chunk without waiting for it."""
        while len(self._under_way) < self._tasks:
            request = next(self._requests, None)
            if request is None:
                return
            self._under_way.append(
                self._pool.submit(
                    self._fetcher.fetch_chunk, request.part, request.index, request.first, request.last
                )
            )

    def next_chunk(self) -> Chunk | None:
        """The next chunk, or None at the end. Waits for the store if it must."""
        self.start()
        if not self._under_way:
            return None
        future = self._under_way.popleft()
        if self.last is not None and not future.done():
            if self._bytes < self._max_bytes:
                self._bytes = min(2 * self._bytes, self._max_bytes)
            else:
                self._tasks = min(self._tasks + 1, self._max_tasks)
        self.start()
        self.last = future.result()
        return self.last

    def close(self) -> None:
        """Give up what was asked for and is not needed any more."""
        for future in self._under_way:
            future.cancel()
        self._under_way.clear()

    def _plan(self, parts: Sequence[Part]) -> Iterator[_Request]:
        upcoming = [part for part in parts if not part.keys.empty]
        ahead: deque[Future[BlockIndex]] = deque()
        for position, part in enumerate(upcoming):
            for each in upcoming[position + len(ahead) : position + 2]:
                ahead.append(self._pool.submit(self._fetcher.fetch_index, each.table, each.path))
            index = ahead.popleft().result()
            first, stop = _blocks_of(part.keys, index)
            while first < stop:
                last = first
                while last + 1 < stop and index.stops[last] - index.offsets[first] < self._bytes:
                    last += 1
                yield _Request(part, index, first, last)
                first = last + 1


def _whole(stored: bytes, path: str, start: int, stop: int) -> bytes:
    if len(stored) != stop - start:
        raise CorruptData(
            f"the object ends {stop - start - len(stored)} bytes before byte {stop}, which it should have",
            object=path,
            offset=start + len(stored),
        )
    return stored


def common_prefix(keys: Sequence[KeyRange]) -> int:
    """How many bytes all keys in all the ranges certainly begin with in common."""
    starts = [each.start for each in keys]
    stops = [each.stop for each in keys]
    if not keys or None in starts or None in stops:
        return 0
    low = min(start for start in starts if start is not None)
    high = max(stop for stop in stops if stop is not None)
    size = min(len(low), len(high))
    return next((at for at in range(size) if low[at] != high[at]), size)


def _blocks_of(keys: KeyRange, index: BlockIndex) -> tuple[int, int]:
    """The blocks that may hold one of the keys: from the first up to, not including, the second number."""
    first = 0 if keys.start is None else max(bisect_left(index.first_keys, keys.start) - 1, 0)
    stop = len(index) if keys.stop is None else bisect_left(index.first_keys, keys.stop)
    return first, stop


def _edges(keys: KeyRange, index: BlockIndex, first: int, last: int) -> tuple[bytes | None, bytes | None]:
    """The bounds that rows of these blocks may overstep; None where the index rules that out."""
    low = keys.start if keys.start is not None and index.first_keys[first] < keys.start else None
    # Versions of one key may straddle two blocks; then the key equals the separator between them.
    below = last + 1 < len(index) and keys.stop is not None and index.first_keys[last + 1] < keys.stop
    return low, None if below else keys.stop


def _joined(blocks: list[bytes]) -> tuple[bytes, array[int]]:
    bounds = array("q")
    at = 0
    for block in blocks:
        bounds.extend((at, at + len(block)))
        at += len(block)
    return b"".join(blocks), bounds
