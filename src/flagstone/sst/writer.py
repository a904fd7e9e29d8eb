"""Assembles the tables that a flush, a merge or a bulk load writes, from the blocks of `kernels.row_writer`.

The result equals what `sst.builder.SstBuilder` makes of the same rows, byte for byte. A table under
construction is in memory only: a crash loses nothing but work.
"""

from __future__ import annotations

import struct
from array import array
from io import SEEK_END, BytesIO
from typing import Final

from flagstone.format.codec import CHECKSUM_BYTES, Codec, seal
from flagstone.format.filter import BloomPolicy, FilterBuilder, encode_filters
from flagstone.format.sst_info import SstType
from flagstone.kernels import bloom, row_writer, sealing
from flagstone.runtime.sync import Lock
from flagstone.sst.builder import EncodedSst, SstOptions
from flagstone.sst.footer import encode_tail
from flagstone.types import EntryTuple

RowColumns = tuple[int, memoryview, memoryview, memoryview, memoryview, memoryview, memoryview, memoryview]
"""How many rows, then the columns of `RowWriter.write_columns`, from the offsets of keys on."""

SPARE_BYTES: Final = 64 * 1024 * 1024
"""How much memory an idle executor keeps."""


class SpareBuffers:
    """Memory that tables were built in and others will be. Safe to use from many threads.

    Fresh memory is handed out by the system page by page, which takes a third of the time of a merge.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._spare: list[tuple[BytesIO, int]] = []

    def take(self) -> BytesIO:
        """A buffer with something or nothing in it, at its beginning."""
        with self._lock:
            return self._spare.pop()[0] if self._spare else BytesIO()

    def give_back(self, buffer: BytesIO) -> None:
        """Keep as much of it as there is room for."""
        size = buffer.seek(0, SEEK_END)
        with self._lock:
            room = SPARE_BYTES - sum(size for _, size in self._spare)
            if room > 0:
                size = buffer.truncate(min(size, room))
                buffer.seek(0)
                self._spare.append((buffer, size))


class OutputWriter:
    """Turns a stream of rows into tables, one after the other.

    `write` and `add_row` append; `full` says that the limit was passed; `finish` gives the table and begins another.
    """

    def __init__(
        self,
        options: SstOptions,
        *,
        max_bytes: int,
        buffer: BytesIO | None = None,
        resume: tuple[bytes, int] | None = None,
    ) -> None:
        self._options = options
        self._max_bytes = max_bytes
        self._stored_as_written = options.codec is Codec.NONE
        self._needs_keys = any(policy.extractor is not None for policy in options.filters)
        resume_key, resume_seq = resume or (b"", 0)
        self._writer = row_writer.RowWriter(
            options.block_bytes,
            CHECKSUM_BYTES if self._stored_as_written else 0,
            want_keys=self._needs_keys,
            resume_key=resume_key,
            resume_seq=resume_seq,
        )
        # Unlike joined pieces it never holds a table twice, and its memory serves one table after the other.
        self._data = BytesIO() if buffer is None else buffer
        self._begin()

    def _begin(self) -> None:
        self._data.seek(0)
        self._size = 0
        self._offsets: list[int] = []
        self._index_keys: list[bytes] = []
        self._counts: list[tuple[int, int, int]] = []
        self._hashes = array("Q")
        self._filters = [FilterBuilder(policy) for policy in self._options.filters if policy.extractor]

    @property
    def full(self) -> bool:
        """Whether more than the allowed bytes of blocks are finished."""
        return self._size > self._max_bytes

    def write(self, stream: bytes | memoryview, start: int) -> int:
        """Append rows of a stream of `kernels.merge`; returns where it stopped, at the end or because it is full."""
        at = start
        while at < len(stream) and not self.full:
            at = self._writer.write(stream, at, self._max_bytes - self._size)
            self._collect()
        return at

    def write_columns(self, columns: RowColumns, start: int, *, seq: int, created_ms: int) -> int:
        """Append rows of columns from number `start` on; returns where it stopped, at the end or because it is full."""
        at = start
        while at < columns[0] and not self.full:
            at = self._writer.write_columns(at, *columns, seq, created_ms, self._max_bytes - self._size)
            self._collect()
        return at

    def add_row(self, row: EntryTuple) -> None:
        """Append one entry tuple."""
        self._writer.add_row(row)
        if self._writer.finished():
            self._collect()

    def finish(self) -> EncodedSst | None:
        """The finished table, or None without a row."""
        rows, key_bytes, value_bytes, first_key, last_key = self._writer.finish_table()
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
            first_entry=first_key,
            last_entry=last_key,
            filters=self._filter_block(rows),
            codec=self._options.codec,
            sst_type=SstType.COMPACTED,
        )
        self._data.writelines(parts)
        self._data.truncate()
        table = EncodedSst(self._data.getvalue(), info, rows)
        self._begin()
        return table

    def _collect(self) -> None:
        """Take over the blocks that are finished."""
        data, bounds, offsets, separators, counts, hashes, keys = self._writer.take(self._size)
        if self._stored_as_written:
            sealing.stamp(data, bounds)
            self._data.write(data)
            self._offsets += offsets
            self._size += len(data)
        else:
            for at in range(0, len(bounds), 2):
                stored = seal(bytes(data[bounds[at] : bounds[at + 1]]), self._options.codec)
                self._data.write(stored)
                self._offsets.append(self._size)
                self._size += len(stored)
        self._index_keys += separators
        self._counts += counts
        self._hashes.frombytes(hashes)
        for builder in self._filters:
            builder.add_keys(keys)

    def _filter_block(self, rows: int) -> bytes:
        policies = self._options.filters
        if not policies or rows < self._options.min_filter_keys:
            return b""
        with_prefixes = iter(self._filters)
        named = [
            (policy.name, self._bloom(policy) if policy.extractor is None else next(with_prefixes).finish())
            for policy in policies
        ]
        return seal(encode_filters(named), self._options.codec)

    def _bloom(self, policy: BloomPolicy) -> bytes:
        size = (len(self._hashes) * policy.bits_per_key + 7) // 8
        bits = bloom.build(self._hashes, size, policy.probes)
        return struct.pack(">H", policy.probes) + bits
