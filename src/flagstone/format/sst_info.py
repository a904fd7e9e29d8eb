"""The FlatBuffers records of one SST: `SsTableInfo`, which locates its parts, and its statistics.

The footer of the SST holds `SsTableInfo`, and the manifest repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, Final, NamedTuple

from flagstone.errors import CorruptData
from flagstone.format import flat
from flagstone.format.codec import Codec
from flagstone.kernels import index as index_kernel


class SstType(IntEnum):
    """What the rows of an SST are ordered by. Stored: never renumber."""

    COMPACTED = 0
    WAL = 1


class FilterFormat(IntEnum):
    """How the filter block is framed. Stored: never renumber."""

    LEGACY = 0
    COMPOSITE = 1


@dataclass(frozen=True, slots=True)
class SsTableInfo:
    """Offsets and lengths (which include the checksums) of the parts of one SST.

    `first_entry` is the first key, in WAL files the first sequence number as 8 bytes. `last_entry` is the
    last key; WAL files and files of old releases have none. A part with length 0 does not exist.
    """

    first_entry: bytes | None
    last_entry: bytes | None
    index_offset: int
    index_len: int
    filter_offset: int
    filter_len: int
    codec: Codec = Codec.NONE
    sst_type: SstType = SstType.COMPACTED
    stats_offset: int = 0
    stats_len: int = 0
    filter_format: FilterFormat = FilterFormat.COMPOSITE

    @property
    def estimated_size(self) -> int:
        """The size by which the compaction scheduler counts an SST."""
        return self.index_offset + self.index_len


def encode_info(info: SsTableInfo) -> bytes:
    """The bytes of the record, without checksum."""
    return flat.encode(SST_INFO, info)


def decode_info(data: bytes | memoryview) -> SsTableInfo:
    """The record in `data`, which must not include the checksum. Raises CorruptData."""
    return flat.decode(SST_INFO, data)


def _make_info(values: list[Any]) -> SsTableInfo:
    first_entry, index_offset, index_len, filter_offset, filter_len, codec, sst_type, *rest = values
    last_entry, stats_offset, stats_len, filter_format = rest
    known_codec, known_type, known_filter = (
        _CODECS.get(codec),
        _TYPES.get(sst_type),
        _FILTERS.get(filter_format),
    )
    if known_codec is None or known_type is None or known_filter is None:
        raise CorruptData(f"unknown codec {codec}, SST type {sst_type} or filter format {filter_format}")
    return SsTableInfo(
        first_entry,
        last_entry,
        index_offset,
        index_len,
        filter_offset,
        filter_len,
        known_codec,
        known_type,
        stats_offset,
        stats_len,
        known_filter,
    )


def _take_info(info: SsTableInfo) -> tuple[object, ...]:
    return (
        info.first_entry,
        info.index_offset,
        info.index_len,
        info.filter_offset,
        info.filter_len,
        info.codec,
        info.sst_type,
        info.last_entry,
        info.stats_offset,
        info.stats_len,
        info.filter_format,
    )


_CODECS: Final = {codec.value: codec for codec in Codec}
_TYPES: Final = {kind.value: kind for kind in SstType}
_FILTERS: Final = {kind.value: kind for kind in FilterFormat}

SST_INFO: Final = flat.Shape(
    "SsTableInfo",
    flat.Bytes(),
    flat.U64,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.I8,
    flat.I8,
    flat.Bytes(),
    flat.U64,
    flat.U64,
    flat.I8,
    make=_make_info,
    take=_take_info,
)


class BlockStats(NamedTuple):
    """How many rows of each kind one block holds."""

    num_puts: int
    num_deletes: int
    num_merges: int


@dataclass(frozen=True, slots=True)
class SstStats:
    """Counts over all rows of an SST; `blocks` has one entry per data block, in order."""

    num_puts: int = 0
    num_deletes: int = 0
    num_merges: int = 0
    raw_key_size: int = 0
    raw_val_size: int = 0
    blocks: tuple[BlockStats, ...] = ()


def encode_stats(stats: SstStats) -> bytes:
    """The bytes of the stats block, neither compressed nor with a checksum."""
    totals = (stats.num_puts, stats.num_deletes, stats.num_merges, stats.raw_key_size, stats.raw_val_size)
    return index_kernel.encode_stats(totals, [*chain.from_iterable(stats.blocks)])


def decode_stats(data: bytes | memoryview) -> SstStats:
    """The statistics in an uncompressed stats block without its checksum. Raises CorruptData."""
    return flat.decode(SST_STATS, data)


def _make_stats(values: list[Any]) -> SstStats:
    num_puts, num_deletes, num_merges, raw_key_size, raw_val_size, blocks = values
    return SstStats(num_puts, num_deletes, num_merges, raw_key_size, raw_val_size, blocks or ())


BLOCK_STATS: Final = flat.Shape(
    "BlockStats", flat.U16, flat.U16, flat.U16, make=BlockStats._make, take=lambda stats: stats
)
SST_STATS: Final = flat.Shape(
    "SstStats",
    flat.U64,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.Children(BLOCK_STATS),
    make=_make_stats,
    take=lambda stats: (
        stats.num_puts,
        stats.num_deletes,
        stats.num_merges,
        stats.raw_key_size,
        stats.raw_val_size,
        stats.blocks,
    ),
)
