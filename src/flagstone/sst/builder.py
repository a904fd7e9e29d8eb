"""Rows in order, one SST out: a compacted table or a WAL file.

Pure: the result is bytes and the record that describes them; uploading is somebody else's business, so a
crash here loses nothing but work. Rows come in any number of calls; memory is bounded by the finished blocks plus
the rows of the one still open. Where tables are large and rows many, `sst.writer` makes the same bytes sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.format.codec import CHECKSUM_BYTES, Codec, seal, seal_parts
from flagstone.format.filter import DEFAULT_MIN_FILTER_KEYS, BloomPolicy, FilterBuilder, encode_filters
from flagstone.format.sst import BLOCK_SIZES, DEFAULT_BLOCK_BYTES, FORMAT_V2
from flagstone.format.sst_info import SsTableInfo, SstType
from flagstone.kernels import block_writer
from flagstone.kernels import index as index_kernel
from flagstone.sst.footer import encode_tail
from flagstone.types import EntryTuple

WAL_BLOCK_BYTES: Final = 64 * 1024
"""SlateDB writes its log in blocks of this size whatever the tables use: a log is read from end to end."""


@dataclass(frozen=True, slots=True)
class SstOptions:
    """How SSTs are made. All of it may differ from file to file: each says what it is."""

    block_bytes: int = DEFAULT_BLOCK_BYTES
    codec: Codec = Codec.NONE
    min_filter_keys: int = DEFAULT_MIN_FILTER_KEYS
    filters: tuple[BloomPolicy, ...] = (BloomPolicy(),)

    def __post_init__(self) -> None:
        if self.block_bytes not in BLOCK_SIZES:
            choices = ", ".join(str(size) for size in BLOCK_SIZES)
            raise InvalidRequest(f"block_bytes is {self.block_bytes}; choose one of {choices}")


@dataclass(frozen=True, slots=True)
class EncodedSst:
    """One finished SST: its bytes, and the record that goes into the manifest beside it."""

    data: bytes
    info: SsTableInfo
    rows: int
    format_version: int = FORMAT_V2


class SstBuilder:
    """Builds one SST.

    A compacted SST takes rows sorted by key, then by descending sequence number, and refuses others. A WAL
    file takes them in commit order, has neither filter nor stats, and is indexed by sequence number.
    """

    def __init__(self, options: SstOptions | None = None, *, sst_type: SstType = SstType.COMPACTED) -> None:
        self.options: SstOptions = options or SstOptions()
        self.sst_type = sst_type
        block_bytes = self.options.block_bytes if self._compacted else WAL_BLOCK_BYTES
        self._writer = block_writer.BlockWriter(block_bytes, self._compacted)
        self._filters = [FilterBuilder(policy) for policy in self.options.filters] if self._compacted else []
        # Grows in place and gives its bytes away without a copy: joining blocks at the end would need twice the memory.
        self._data = BytesIO()
        self._offsets: list[int] = []
        self._index_keys: list[bytes] = []
        self._block_counts: list[tuple[int, int, int]] = []
        self._first: bytes | None = None
        self._last: bytes | None = None
        self._bytes = 0

    @property
    def finished_bytes(self) -> int:
        """The size of the blocks finished so far: what a size limit is compared with."""
        return self._bytes

    @property
    def rows(self) -> int:
        """How many rows were added so far."""
        rows: int = self._writer.totals()[0]
        return rows

    def add_rows(self, rows: list[EntryTuple]) -> None:
        """Append rows. After `InvalidRequest` (rows out of order) the builder is of no further use."""
        self._writer.add_rows(rows)
        if self._filters:
            keys = [row[0] for row in rows]
            for builder in self._filters:
                builder.add_keys(keys)
        self._collect(self._writer.take())

    def add_log_rows(self, stream: memoryview) -> None:
        """Append rows to a log file as a memtable hands them out (`Memtable.wal_stream`)."""
        self._writer.add_stream(stream)
        self._collect(self._writer.take())

    def finish(self) -> EncodedSst:
        """The finished SST. Raises `InvalidRequest` when there is no row: an empty table has no form."""
        self._collect(self._writer.finish())
        if self._first is None:
            raise InvalidRequest("an SST needs at least one row")
        _, key_bytes, value_bytes = self._writer.totals()
        info, parts = encode_tail(
            data_bytes=self._bytes,
            offsets=self._offsets,
            index_keys=self._index_keys,
            counts=self._block_counts,
            key_bytes=key_bytes,
            value_bytes=value_bytes,
            first_entry=self._first,
            last_entry=self._last if self._compacted else None,
            filters=self._filter_block(),
            codec=self.options.codec,
            sst_type=self.sst_type,
        )
        self._data.writelines(parts)
        return EncodedSst(self._data.getvalue(), info, self.rows)

    @property
    def _compacted(self) -> bool:
        return self.sst_type is SstType.COMPACTED

    def _collect(self, blocks: list[tuple[bytes, bytes, bytes, int, int, int, int]]) -> None:
        codec, data, last = self.options.codec, self._data, self._last
        for raw, first_key, last_key, first_seq, puts, deletes, merges in blocks:
            if not self._compacted:
                index_key = first_seq.to_bytes(8, "big")
            elif last is None:
                index_key = b""
            else:
                index_key = index_kernel.separator(last, first_key)
            if self._first is None:
                self._first = first_key if self._compacted else index_key
            stored, checksum = seal_parts(raw, codec)
            data.write(stored)
            data.write(checksum)
            self._offsets.append(self._bytes)
            self._index_keys.append(index_key)
            self._block_counts.append((puts, deletes, merges))
            self._bytes += len(stored) + CHECKSUM_BYTES
            last = last_key
        self._last = last

    def _filter_block(self) -> bytes:
        if not self._filters or self.rows < self.options.min_filter_keys:
            return b""
        named = [(builder.policy.name, builder.finish()) for builder in self._filters]
        return seal(encode_filters(named), self.options.codec)
