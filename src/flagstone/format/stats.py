"""Row counts and raw sizes of one SST and of each of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from flagstone.format import flat
from flagstone.kernels import index as index_kernel


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
    return index_kernel.encode_stats(totals, list(stats.blocks))


def decode_stats(data: bytes | memoryview) -> SstStats:
    """The statistics in an uncompressed stats block without its checksum. Raises CorruptData."""
    return flat.decode(SST_STATS, data)


def _make(values: list[Any]) -> SstStats:
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
    make=_make,
    take=lambda stats: (
        stats.num_puts,
        stats.num_deletes,
        stats.num_merges,
        stats.raw_key_size,
        stats.raw_val_size,
        stats.blocks,
    ),
)
