"""The layout of an SST: data blocks, the other parts, the record that locates them, and a footer of ten bytes.

    data block* | filter? | index | stats? | SsTableInfo + crc | offset of SsTableInfo (u64 BE) | version (u16 BE)

There is no magic number. An empty WAL file is a fence; a WAL file without a block, from releases before 0.14, is one
too. Data blocks have two formats. Both engines write version 2; its encoder and decoder are kernels. Version 1 is
only read, and rare.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from flagstone.errors import CorruptData
from flagstone.format.codec import CHECKSUM_BYTES, seal, unseal
from flagstone.format.filter import Filters, decode_filters
from flagstone.format.sst_info import SsTableInfo, SstStats, SstType, decode_info, decode_stats, encode_info
from flagstone.kernels import block_reader
from flagstone.kernels import index as index_kernel
from flagstone.types import EntryTuple

FORMAT_V1: Final = 1
FORMAT_V2: Final = 2
DEFAULT_BLOCK_BYTES: Final = 4096
BLOCK_SIZES: Final = tuple(1024 << power for power in range(7))
"""The sizes that SlateDB's builder offers. Restart points are 16-bit, so no larger size can work."""

_TIMED_TAIL_BYTES: Final = 8 + 1 + 8 + 8
"""Sequence number, flags and both times of a row."""

FOOTER_BYTES: Final = 10
_LONGEST_FILE: Final = 2**62
"""Larger offsets are damage; system calls do not accept them."""

_FOOTER: Final = struct.Struct(">QH")


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """For each block its start, its end, and a key that is <= its first key and > all keys before it.

    In WAL files the keys are first sequence numbers, 8 bytes big endian.
    """

    offsets: list[int]
    stops: list[int]
    first_keys: list[bytes]

    def __len__(self) -> int:
        return len(self.offsets)


def encode_footer(info: SsTableInfo, info_offset: int, version: int = FORMAT_V2) -> bytes:
    """Everything from SsTableInfo to the end of the file."""
    return seal(encode_info(info)) + _FOOTER.pack(info_offset, version)


def footer_range(info: SsTableInfo, version: int) -> tuple[int, int]:
    """The byte range of the footer of a file with this record, as SlateDB and Flagstone write it.

    Raises `CorruptData` when the record fits no file.
    """
    start = check_layout(info)
    return start, start + len(encode_footer(info, start, version))


def decode_footer(tail: bytes, object_bytes: int) -> tuple[SsTableInfo, int, int] | int:
    """The info, the format version and the info's offset, from the last bytes of a file of `object_bytes`.

    Returns the number of bytes needed when `tail` is too short. Offsets in errors count from the start of the file.
    """
    if object_bytes <= FOOTER_BYTES:
        raise CorruptData(f"file of {object_bytes} bytes is too short for an SST", offset=0)
    if len(tail) < min(FOOTER_BYTES, object_bytes):
        raise CorruptData(f"{len(tail)} bytes where a file of {object_bytes} bytes should end", offset=0)
    info_offset: int
    info_offset, version = _FOOTER.unpack(tail[-FOOTER_BYTES:])
    if version not in (FORMAT_V1, FORMAT_V2):
        raise CorruptData(
            f"SST format version {version}; versions 1 and 2 are known", offset=object_bytes - 2
        )
    if info_offset + CHECKSUM_BYTES > object_bytes - FOOTER_BYTES:
        raise CorruptData(
            f"footer places SsTableInfo at {info_offset} in a file of {object_bytes} bytes",
            offset=object_bytes - FOOTER_BYTES,
        )
    needed = object_bytes - info_offset
    if needed > len(tail):
        return needed
    try:
        info = decode_info(unseal(tail[-needed:-FOOTER_BYTES]))
        end = check_layout(info)
    except CorruptData as error:
        raise error.within(None, info_offset) from None
    if end != info_offset:
        raise CorruptData(f"parts end at {end}, but SsTableInfo begins at {info_offset}", offset=info_offset)
    return info, version, info_offset


def decode_index(stored: bytes, info: SsTableInfo) -> BlockIndex:
    """The index from its stored form, with the order of its offsets checked."""
    offsets, first_keys = index_kernel.decode_index(unseal(stored, info.codec))
    data_end = info.filter_offset if info.filter_len else info.index_offset
    if not offsets:
        # Releases before 0.14 wrote such WAL files as fences. Every other SST has a block.
        if data_end or info.sst_type is not SstType.WAL:
            raise CorruptData(f"index without a block for {data_end} bytes of blocks", offset=0)
        return BlockIndex([], [], [])
    stops = [*offsets[1:], data_end]
    for number, (start, stop) in enumerate(zip(offsets, stops, strict=True)):
        if start + CHECKSUM_BYTES >= stop or (number == 0 and start != 0):
            raise CorruptData(f"index places block {number} at bytes {start} to {stop}", offset=0)
    return BlockIndex(offsets, stops, first_keys)


@dataclass(frozen=True, slots=True)
class SstImage:
    """A whole SST in memory with its footer and index decoded. Blocks are decoded on request."""

    path: str
    data: bytes
    info: SsTableInfo
    version: int
    index: BlockIndex

    def block(self, number: int) -> bytes:
        """The raw bytes of a block. Raises `CorruptData` with object and offset."""
        start, stop = self.index.offsets[number], self.index.stops[number]
        return open_block(self.data[start:stop], self.info, self.path, start, version=self.version)

    def rows(self) -> Iterator[list[EntryTuple]]:
        """The rows, block by block."""
        for number, offset in enumerate(self.index.offsets):
            raw = self.block(number)
            try:
                yield decode_rows(raw, self.version)
            except CorruptData as error:
                raise damaged_block(error, number, object=self.path, offset=offset) from None

    def filters(self) -> Filters | None:
        info = self.info
        stored = self.data[info.filter_offset : info.filter_offset + info.filter_len]
        return open_filters(stored, info, self.path)

    def stats(self) -> SstStats | None:
        info = self.info
        if not info.stats_len:
            return None
        stored = self.data[info.stats_offset : info.stats_offset + info.stats_len]
        return open_stats(stored, info, self.path)


def open_part(stored: bytes, info: SsTableInfo, path: str, offset: int) -> bytes:
    """The decompressed part at `offset` of the object. Raises `CorruptData` with both."""
    try:
        return unseal(stored, info.codec)
    except CorruptData as error:
        raise error.within(path, offset) from None


def open_block(stored: bytes, info: SsTableInfo, path: str, offset: int, *, version: int) -> bytes:
    """The decompressed data block at `offset` of the object. Raises `CorruptData` with both."""
    try:
        return unseal(stored, info.codec, lambda head: declared_bytes(head, version))
    except CorruptData as error:
        raise error.within(path, offset) from None


def open_index(stored: bytes, info: SsTableInfo, path: str) -> BlockIndex:
    """The index of an object from its stored form. Raises `CorruptData` with object and offset."""
    try:
        return decode_index(stored, info)
    except CorruptData as error:
        raise CorruptData(f"index: {error.problem}", object=path, offset=info.index_offset) from None


def open_filters(stored: bytes, info: SsTableInfo, path: str) -> Filters | None:
    """The filters of an object from their stored form, if it has any. Raises `CorruptData` with object and offset."""
    if not info.filter_len:
        return None
    raw = open_part(stored, info, path, info.filter_offset)
    try:
        return decode_filters(raw, info.filter_format)
    except CorruptData as error:
        raise CorruptData(f"filter: {error.problem}", object=path, offset=info.filter_offset) from None


def open_stats(stored: bytes, info: SsTableInfo, path: str) -> SstStats:
    """The statistics of an object from their stored form. Raises `CorruptData` with object and offset."""
    raw = open_part(stored, info, path, info.stats_offset)
    try:
        return decode_stats(raw)
    except CorruptData as error:
        raise CorruptData(f"stats: {error.problem}", object=path, offset=info.stats_offset) from None


def damaged_block(
    error: CorruptData,
    number: int,
    *,
    object: str,  # noqa: A002
    offset: int | None,
) -> CorruptData:
    """The damage inside a block as damage of its object; the block's number locates it, as it may be compressed."""
    return CorruptData(
        f"block {number}: {error.problem} (byte {error.offset} of the block)", object=object, offset=offset
    )


def decode_sst(data: bytes, path: str) -> SstImage:
    """A whole SST file. Raises `CorruptData` with object and offset."""
    try:
        decoded = decode_footer(data, len(data))
        assert not isinstance(decoded, int), "the whole file reaches back far enough"
        info, version, _ = decoded
    except CorruptData as error:
        raise error.within(path) from None
    index = open_index(data[info.index_offset : info.index_offset + info.index_len], info, path)
    return SstImage(path, data, info, version, index)


def check_layout(info: SsTableInfo) -> int:
    """The offset of SsTableInfo, after the parts, which must have no gaps. Raises `CorruptData`."""
    end = info.index_offset + info.index_len
    if max(end, info.stats_len) > _LONGEST_FILE:
        raise CorruptData(f"index at {info.index_offset}+{info.index_len} is beyond any file")
    if info.filter_offset + info.filter_len != info.index_offset or info.index_len < CHECKSUM_BYTES:
        raise CorruptData(
            f"filter at {info.filter_offset}+{info.filter_len} and index at {info.index_offset}+{info.index_len} "
            "do not join"
        )
    if not info.stats_len:
        return end
    if info.stats_offset != end:
        raise CorruptData(f"stats at {info.stats_offset}, but the index ends at {end}")
    return end + info.stats_len


def decode_rows(raw: bytes, version: int) -> list[EntryTuple]:
    """All rows of a block in stored order. Raises `CorruptData` with an offset inside the block."""
    return block_reader.decode_rows(raw) if version == FORMAT_V2 else _decode_rows_v1(raw)


def declared_bytes(head: bytes, version: int) -> int:
    """The size of a block of a single row (the row, an offset, a count), from the lengths in its first bytes.

    Only such a block is larger than 64 KiB, so a block that begins with a small row declares a small size.
    """
    at = 0

    def length() -> int:
        nonlocal at
        value = shift = 0
        while at < len(head) and shift < 35:
            byte = head[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        return 0

    if version == FORMAT_V2:
        length()  # the first key of a block shares no prefix
        sizes = length() + length()
        return at + sizes + _TIMED_TAIL_BYTES + 4
    suffix_size = int.from_bytes(head[2:4], "big")
    flags_at = 4 + suffix_size + 8
    flags = head[flags_at] if flags_at < len(head) else 0
    value_at = flags_at + 1 + 8 * ((flags >> 1 & 1) + (flags >> 2 & 1))
    return value_at + 4 + int.from_bytes(head[value_at : value_at + 4], "big") + 4


def lookup(raw: bytes, key: bytes, max_seq: int, version: int) -> EntryTuple | None:
    """The newest row of `key` with seq <= `max_seq` in this block, or None."""
    if version == FORMAT_V2:
        return block_reader.lookup(raw, key, max_seq)
    return next((row for row in _decode_rows_v1(raw) if row[0] == key and row[1] <= max_seq), None)


def _decode_rows_v1(raw: bytes) -> list[EntryTuple]:
    """Rows of the first format: `prefix_len suffix_len suffix seq flags [expire] [create] [value_len value]`.

    Prefixes refer to the first key of the block. The block ends with one offset per entry.
    """
    count = int.from_bytes(raw[-2:], "big") if len(raw) >= 2 else -1
    end = len(raw) - 2 - 2 * count
    if count < 0 or end < 0:
        raise CorruptData(f"block of {len(raw)} bytes cannot hold its {count} entry offsets", offset=0)
    if count == 0:
        raise CorruptData("block without a row", offset=0)
    rows: list[EntryTuple] = []
    first = b""
    at = 0
    for number in range(count):
        entry_at = at
        # Offsets are 16-bit; those after a very large entry wrap around.
        if int.from_bytes(raw[end + 2 * number : end + 2 * number + 2], "big") != at & 0xFFFF:
            raise CorruptData(f"entry {number} begins at {at}, not at its offset", offset=entry_at)

        def take(size: int, limit: int = end, entry_at: int = entry_at) -> bytes:
            nonlocal at
            if at + size > limit:
                raise CorruptData("a row runs past the entries of the block", offset=entry_at)
            at += size
            return raw[at - size : at]

        prefix_size = int.from_bytes(take(2), "big")
        suffix = take(int.from_bytes(take(2), "big"))
        if prefix_size > len(first):
            raise CorruptData(f"a key shares {prefix_size} bytes with one of {len(first)}", offset=entry_at)
        key = first[:prefix_size] + suffix
        seq = int.from_bytes(take(8), "big")
        flags = take(1)[0]
        if flags & 0xF0 or flags & 0x09 == 0x09:
            raise CorruptData(f"row flags 0x{flags:02x} are not a known combination", offset=at - 1)
        expires = int.from_bytes(take(8), "big", signed=True) if flags & 0x02 else None
        created = int.from_bytes(take(8), "big", signed=True) if flags & 0x04 else None
        value = b"" if flags & 0x01 else take(int.from_bytes(take(4), "big"))
        rows.append((key, seq, flags & 0x09, value, created, expires))
        if number == 0:
            first = key
    if at != end:
        raise CorruptData(f"{end - at} bytes after the last entry", offset=at)
    return rows
