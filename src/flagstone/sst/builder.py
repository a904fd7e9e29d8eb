"""The one writer of SSTs: flush, compaction, bulk load, repair and the WAL all build their files here.

`kernels.block_writer` cuts rows into blocks; the builder seals the blocks and adds filters, index, statistics and
footer. A WAL file differs in four points: rows are in commit order, blocks have 64 KiB, the index has sequence numbers
instead of keys, and there are neither filters nor statistics.

The bytes go to a sink as soon as a few blocks are finished: a file may be larger than memory. What the builder holds
until the end of a file is its index, its statistics, and eight bytes of hash per key.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Final, Protocol

from flagstone.errors import InvalidRequest
from flagstone.format.codec import CHECKSUM_BYTES, Codec, seal, seal_parts
from flagstone.format.filter import DEFAULT_MIN_FILTER_KEYS, BloomPolicy, FilterBuilder, encode_filters
from flagstone.format.sst import BLOCK_SIZES, DEFAULT_BLOCK_BYTES, FORMAT_V2, BlockIndex
from flagstone.format.sst_info import SsTableInfo, SstType
from flagstone.kernels import block_writer, bloom, sealing, whole_blocks
from flagstone.sst.footer import encode_tail
from flagstone.types import EntryTuple

RowColumns = tuple[int, memoryview, memoryview, memoryview, memoryview, memoryview, memoryview, memoryview]
"""How many rows, then the columns of `BlockWriter.write_columns`, from the offsets of keys on."""

WAL_BLOCK_BYTES: Final = 64 * 1024
"""SlateDB writes its WAL in blocks of this size whatever other SSTs use: a WAL file is read from end to end."""

SST_STEP_BYTES: Final = 256 * 1024
"""How many bytes of blocks the kernel finishes before the builder takes them."""

BLOCKS_PER_SHORT_ONE: Final = 8
"""How many other blocks an SST has for each one that was closed early, to take over the blocks behind it."""


@dataclass(frozen=True, slots=True)
class SstOptions:
    """How SSTs are made. All of it may differ from file to file: each describes itself."""

    block_bytes: int = DEFAULT_BLOCK_BYTES
    codec: Codec = Codec.NONE
    min_filter_keys: int = DEFAULT_MIN_FILTER_KEYS
    filters: tuple[BloomPolicy, ...] = (BloomPolicy(),)

    def __post_init__(self) -> None:
        if self.block_bytes not in BLOCK_SIZES:
            choices = ", ".join(str(size) for size in BLOCK_SIZES)
            raise InvalidRequest(f"block_bytes is {self.block_bytes}; choose one of {choices}")


class Sink(Protocol):
    """Where the bytes of an SST go."""

    def write(self, piece: bytes | memoryview, /) -> object:
        """Append bytes. The builder uses their memory again."""
        ...


class SourceBlocks(Protocol):
    """Blocks of an SST that follow each other, raw and as they are stored.

    `bounds` has begin and end of each in `data`. The first one is number `first_block` of the SST's `index`, and
    `stored` begins with it.
    """

    @property
    def index(self) -> BlockIndex: ...
    @property
    def first_block(self) -> int: ...
    @property
    def data(self) -> bytes | memoryview: ...
    @property
    def bounds(self) -> array[int]: ...
    @property
    def stored(self) -> bytes | memoryview: ...


@dataclass(frozen=True, slots=True)
class BuiltSst:
    """A finished SST whose bytes are in its sink: the record for the manifest, and its size.

    `tail` is everything after the data blocks; the first read of an SST needs it.
    """

    info: SsTableInfo
    rows: int
    size: int
    tail: bytes
    format_version: int = FORMAT_V2


@dataclass(frozen=True, slots=True)
class EncodedSst:
    """A small SST in memory: its bytes, and the record that goes into the manifest beside it."""

    data: bytes
    info: SsTableInfo
    rows: int
    format_version: int = FORMAT_V2


def encode_sst(
    rows: Iterable[EntryTuple], options: SstOptions | None = None, *, sst_type: SstType = SstType.COMPACTED
) -> EncodedSst:
    """One SST with these rows, in memory. Raises as `SstBuilder.add_rows` and `SstBuilder.finish` do."""
    data = BytesIO()
    builder = SstBuilder(options, open_sink=lambda: data, sst_type=sst_type)
    builder.add_rows(list(rows))
    built = builder.finish()
    return EncodedSst(data.getvalue(), built.info, built.rows)


class SstBuilder:
    """Builds SSTs from rows, one after the other.

    A compacted SST takes rows sorted by key, then by descending sequence number, and refuses others. A WAL file takes
    them in commit order. `full` means that more than `max_bytes` of blocks are finished; `finish` ends the SST and
    begins another. After an error the builder is of no further use.

    `open_sink` is called when the first blocks of an SST are finished. Rows up to `resume`, the key and sequence number
    with which an interrupted run ended, are not written again. `step_bytes` of blocks are finished at a time. For a
    WAL file that is one block by default, because most are small.
    """

    def __init__(
        self,
        options: SstOptions | None = None,
        *,
        open_sink: Callable[[], Sink],
        sst_type: SstType = SstType.COMPACTED,
        max_bytes: int = sys.maxsize,
        resume: tuple[bytes, int] | None = None,
        step_bytes: int | None = None,
    ) -> None:
        self.options: SstOptions = options or SstOptions()
        self.sst_type = sst_type
        self._compacted = sst_type is SstType.COMPACTED
        self._policies = self.options.filters if self._compacted else ()
        self._max_bytes = max_bytes
        # A kernel adds the checksums of many blocks at once. Compressed blocks get theirs one by one.
        self._stamped = self.options.codec is Codec.NONE
        self._resuming = resume is not None
        resume_key, resume_seq = resume or (b"", 0)
        self._want_hashes = any(policy.extractor is None for policy in self._policies)
        self._want_keys = any(policy.extractor is not None for policy in self._policies)
        self._writer = block_writer.BlockWriter(
            self.options.block_bytes if self._compacted else WAL_BLOCK_BYTES,
            CHECKSUM_BYTES if self._stamped else 0,
            ordered=self._compacted,
            want_hashes=self._want_hashes,
            want_keys=self._want_keys,
            resume_key=resume_key,
            resume_seq=resume_seq,
            soft_limit=step_bytes or (SST_STEP_BYTES if self._compacted else WAL_BLOCK_BYTES),
        )
        self._open_sink = open_sink
        self._begin()

    def _begin(self) -> None:
        self._sink: Sink | None = None
        self._size = 0
        self._offsets: list[int] = []
        self._index_keys: list[bytes] = []
        self._counts: list[int] = []
        self._hashes = array("Q")
        self._filters = [FilterBuilder(policy) for policy in self._policies if policy.extractor]
        self._since_short = BLOCKS_PER_SHORT_ONE

    @property
    def full(self) -> bool:
        """Whether more than the allowed bytes of blocks are finished."""
        return self._size > self._max_bytes

    @property
    def finished_bytes(self) -> int:
        """The size of the blocks finished so far: what a size limit is compared with."""
        return self._size

    @property
    def rows(self) -> int:
        """How many rows the SST has so far."""
        return self._writer.row_count()

    def add_rows(self, rows: list[EntryTuple]) -> None:
        """Append entry tuples. Raises `InvalidRequest` for what is no row, and for rows out of order."""
        self._writer.add_rows(rows)
        if self._writer.finished():
            self._collect()

    def add_row(self, row: EntryTuple) -> None:
        """Append one row that a merge gave out. Raises `CorruptData` when it is out of order, as `write` does."""
        self._writer.add_row(row)
        if self._writer.finished():
            self._collect()

    def write(self, stream: bytes | memoryview, start: int = 0) -> int:
        """Append rows of a stream of a merge or a memtable; returns where it stopped, at the end or because it is full.

        Raises `CorruptData` when rows are out of order.
        """
        at = start
        size = len(stream)
        while at < size and self._size <= self._max_bytes:
            at = self._writer.write(stream, at, self._max_bytes - self._size)
            if self._writer.finished():
                self._collect()
        return at

    def write_columns(self, columns: RowColumns, start: int, *, seq: int, created_ms: int) -> int:
        """Append rows of columns from number `start` on; returns where it stopped, at the end or because it is full."""
        at = start
        while at < columns[0] and not self.full:
            at = self._writer.write_columns(at, *columns, seq, created_ms, self._max_bytes - self._size)
            self._collect()
        return at

    def choose_blocks(
        self, *, min_seq: int, clock_ms: int, keep_tombstones: bool
    ) -> whole_blocks.WholeBlocks:
        """What decides for `take_blocks` which blocks stay as they are, under a retention policy."""
        return whole_blocks.WholeBlocks(
            self.options.block_bytes,
            min_seq=min_seq,
            clock_ms=clock_ms,
            keep_tombstones=keep_tombstones,
            want_hashes=self._want_hashes,
            want_keys=self._want_keys,
        )

    def take_blocks(
        self, choice: whole_blocks.WholeBlocks, source: SourceBlocks, first: int, stop: int
    ) -> int:
        """Append the blocks `first` to `stop` - 1 of `source` as they are stored; returns how many it took.

        It stops at the first block that must be merged, and when it is full. The blocks have the builder's codec and
        valid checksums, all their keys are above those so far, and another block of `source` follows them.
        """
        if not self._may_close():
            return 0
        previous = self._writer.last_key()
        if self._resuming and not previous:
            # The rows that an interrupted run has written are still to be passed over.
            return 0
        index, base = source.index, source.first_block
        begin = index.offsets[base + first]
        allowed = begin + max(self._max_bytes - self._size, 0)
        stop = min(stop, bisect_right(index.stops, allowed, base + first, base + stop - 1) + 1 - base)
        taken = choice.read(source.data, source.bounds, first, stop, previous, self.rows == 0)
        if not taken:
            return 0
        size, rows = self._writer.open_block()
        if rows:
            if not whole_blocks.is_full(size, rows, self.options.block_bytes):
                self._since_short = -1
            self._writer.close_block()
            self._collect()
        index_keys, counts, hashes, keys, *totals = choice.take()
        self._writer.count_blocks(taken, *totals)
        numbers = slice(base + first, base + first + taken)
        self._offsets += [self._size + offset - begin for offset in index.offsets[numbers]]
        end = index.stops[numbers.stop - 1]
        origin = index.offsets[base]
        with memoryview(source.stored) as stored:
            self._write(stored[begin - origin : end - origin])
        self._size += end - begin
        self._add_notes(index_keys, counts, hashes, keys)
        return taken

    def _may_close(self) -> bool:
        """Whether the open block may be closed now: it is full, or there are few short ones."""
        size, rows = self._writer.open_block()
        return (
            rows == 0
            or self._since_short >= BLOCKS_PER_SHORT_ONE
            or whole_blocks.is_full(size, rows, self.options.block_bytes)
        )

    def finish(self) -> BuiltSst:
        """The finished SST. Raises `InvalidRequest` without a row: an empty SST has no form."""
        built = self.finish_if_any()
        if built is None:
            raise InvalidRequest("an SST needs at least one row")
        return built

    def finish_if_any(self) -> BuiltSst | None:
        """The finished SST, or None without a row."""
        rows, key_bytes, value_bytes, first_entry, last_key = self._writer.finish_sst()
        self._collect()
        if not rows:
            return None
        info, parts = encode_tail(
            data_bytes=self._size,
            offsets=self._offsets,
            index_keys=self._index_keys,
            counts=self._counts,
            key_bytes=key_bytes,
            value_bytes=value_bytes,
            first_entry=first_entry,
            last_entry=last_key if self._compacted else None,
            filters=self._filter_block(rows),
            codec=self.options.codec,
            sst_type=self.sst_type,
        )
        tail = b"".join(parts)
        self._write(tail)
        built = BuiltSst(info, rows, self._size + len(tail), tail)
        self._begin()
        return built

    def _collect(self) -> None:
        """Take over the blocks that are finished."""
        data, bounds, offsets, index_keys, counts, hashes, keys = self._writer.take(self._size)
        if self._stamped:
            sealing.stamp(data, bounds)
            self._write(data)
            self._offsets += offsets
            self._size += len(data)
        else:
            pieces: list[bytes] = []
            for at in range(0, len(bounds), 2):
                sealed = seal_parts(bytes(data[bounds[at] : bounds[at + 1]]), self.options.codec)
                pieces += sealed
                self._offsets.append(self._size)
                self._size += len(sealed[0]) + CHECKSUM_BYTES
            self._write(b"".join(pieces))
        self._add_notes(index_keys, counts, hashes, keys)

    def _add_notes(
        self, index_keys: list[bytes], counts: list[int], hashes: bytes, keys: list[bytes]
    ) -> None:
        self._since_short += len(index_keys)
        self._index_keys += index_keys
        self._counts += counts
        if hashes:
            self._hashes.frombytes(hashes)
        for builder in self._filters:
            builder.add_keys(keys)

    def _write(self, piece: bytes | memoryview) -> None:
        if len(piece):
            if self._sink is None:
                self._sink = self._open_sink()
            self._sink.write(piece)

    def _filter_block(self, rows: int) -> bytes:
        if not self._policies or rows < self.options.min_filter_keys:
            return b""
        with_prefixes = iter(self._filters)
        named = [
            (policy.name, self._bloom(policy) if policy.extractor is None else next(with_prefixes).finish())
            for policy in self._policies
        ]
        return seal(encode_filters(named), self.options.codec)

    def _bloom(self, policy: BloomPolicy) -> bytes:
        size = (len(self._hashes) * policy.bits_per_key + 7) // 8
        bits = bloom.build(self._hashes, size, policy.probes)
        return struct.pack(">H", policy.probes) + bits
