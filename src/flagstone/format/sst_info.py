"""The FlatBuffers records of one SST: `SsTableInfo`, which locates its parts, and its statistics.

The footer of the SST holds `SsTableInfo`, and the manifest repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, Final, NamedTuple

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


SST_INFO: Final = flat.Shape(
    "SsTableInfo",
    flat.Bytes(),
    flat.U64,
    flat.U64,
    flat.U64,
    flat.U64,
    flat.Choice("codec", Codec),
    flat.Choice("SST type", SstType),
    flat.Bytes(),
    flat.U64,
    flat.U64,
    flat.Choice("filter format", FilterFormat),
    record=SsTableInfo,
    members=(
        "first_entry",
        "index_offset",
        "index_len",
        "filter_offset",
        "filter_len",
        "codec",
        "sst_type",
        "last_entry",
        "stats_offset",
        "stats_len",
        "filter_format",
    ),
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
