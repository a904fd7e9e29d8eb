"""The frame of an SST: parts in order, then the record that locates them, then ten bytes of footer.

    data block* | filter? | index | stats? | SsTableInfo + crc | offset of SsTableInfo (u64 BE) | version (u16 BE)

There is no magic number. A WAL file without a byte is a fence; so is, from releases before 0.14, one without a block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from flagstone.errors import CorruptData
from flagstone.format.block import FORMAT_V1, FORMAT_V2, declared_bytes, decode_rows
from flagstone.format.checksum import CHECKSUM_BYTES, seal, unseal
from flagstone.format.filter import Filters, decode_filters
from flagstone.format.sst_info import SsTableInfo, SstType, decode_info, encode_info
from flagstone.format.stats import SstStats, decode_stats
from flagstone.kernels import index as index_kernel
from flagstone.types import EntryTuple

FOOTER_BYTES: Final = 10
_LONGEST_FILE: Final = 2**62
"""Offsets above this are damage, and no system call takes them."""

_FOOTER: Final = struct.Struct(">QH")


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Where each block begins, where it ends, and a key at or below its first and above all before it.

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
    """Where the footer of a file with this record lies, if the official writer or ours wrote it.

    Raises `CorruptData` when no file can have such a record.
    """
    start = check_layout(info)
    return start, start + len(encode_footer(info, start, version))


def decode_footer(tail: bytes, object_bytes: int) -> tuple[SsTableInfo, int, int] | int:
    """The info, the format version and the info's offset, from the last bytes of a file of `object_bytes`.

    Returns the number of bytes needed when `tail` does not reach back far enough. Offsets in errors count from
    the start of the file.
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
    """The index in its stored form, with the order of its offsets checked."""
    offsets, first_keys = index_kernel.decode_index(unseal(stored, info.codec))
    data_end = info.filter_offset if info.filter_len else info.index_offset
    if not offsets:
        # Releases before 0.14 wrote such files as fences of the WAL. Nothing else has no block.
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
    """A whole SST in memory, its footer and index decoded. Blocks are decoded as they are asked for."""

    path: str
    data: bytes
    info: SsTableInfo
    version: int
    index: BlockIndex

    def block(self, number: int) -> bytes:
        """The raw bytes of a block. Raises `CorruptData` naming object and offset."""
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
        raw = self._part(info.stats_offset, info.stats_offset + info.stats_len)
        try:
            return decode_stats(raw)
        except CorruptData as error:
            raise CorruptData(f"stats: {error.problem}", object=self.path, offset=info.stats_offset) from None

    def _part(self, start: int, stop: int) -> bytes:
        return open_part(self.data[start:stop], self.info, self.path, start)


def open_part(stored: bytes, info: SsTableInfo, path: str, offset: int) -> bytes:
    """A part that stood at `offset` of the object, unsealed. Raises `CorruptData` naming both."""
    try:
        return unseal(stored, info.codec)
    except CorruptData as error:
        raise error.within(path, offset) from None


def open_block(stored: bytes, info: SsTableInfo, path: str, offset: int, *, version: int) -> bytes:
    """A data block that stood at `offset` of the object, unsealed. Raises `CorruptData` naming both."""
    try:
        return unseal(stored, info.codec, lambda head: declared_bytes(head, version))
    except CorruptData as error:
        raise error.within(path, offset) from None


def open_index(stored: bytes, info: SsTableInfo, path: str) -> BlockIndex:
    """The index of an object from its stored form. Raises `CorruptData` naming object and offset."""
    try:
        return decode_index(stored, info)
    except CorruptData as error:
        raise CorruptData(f"index: {error.problem}", object=path, offset=info.index_offset) from None


def open_filters(stored: bytes, info: SsTableInfo, path: str) -> Filters | None:
    """The filters of an object from their stored form, if it has any. Raises `CorruptData` likewise."""
    if not info.filter_len:
        return None
    raw = open_part(stored, info, path, info.filter_offset)
    try:
        return decode_filters(raw, info.filter_format)
    except CorruptData as error:
        raise CorruptData(f"filter: {error.problem}", object=path, offset=info.filter_offset) from None


def damaged_block(
    error: CorruptData,
    number: int,
    *,
    object: str,  # noqa: A002
    offset: int | None,
) -> CorruptData:
    """What was found inside a block, told of the object: within a compressed block only its number has a meaning."""
    return CorruptData(
        f"block {number}: {error.problem} (byte {error.offset} of the block)", object=object, offset=offset
    )


def decode_sst(data: bytes, path: str) -> SstImage:
    """A whole SST file. Raises `CorruptData` naming object and offset."""
    try:
        decoded = decode_footer(data, len(data))
        assert not isinstance(decoded, int), "the whole file reaches back far enough"
        info, version, _ = decoded
    except CorruptData as error:
        raise error.within(path) from None
    index = open_index(data[info.index_offset : info.index_offset + info.index_len], info, path)
    return SstImage(path, data, info, version, index)


def check_layout(info: SsTableInfo) -> int:
    """Where SsTableInfo begins: behind the parts, which follow each other without gaps. Raises `CorruptData`."""
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
