"""The end of an SST after its data blocks: filters, index, statistics, and the record of where they are."""

from __future__ import annotations

from dataclasses import replace

from flagstone.format.codec import Codec, seal
from flagstone.format.sst import encode_footer
from flagstone.format.sst_info import FilterFormat, SsTableInfo, SstType
from flagstone.kernels import index as index_kernel


def encode_tail(
    *,
    data_bytes: int,
    offsets: list[int],
    index_keys: list[bytes],
    counts: list[int],
    key_bytes: int,
    value_bytes: int,
    first_entry: bytes,
    last_entry: bytes | None,
    filters: bytes,
    codec: Codec,
    sst_type: SstType,
) -> tuple[SsTableInfo, tuple[bytes, ...]]:
    """The record of an SST with `data_bytes` of blocks, and the parts after the blocks, in order.

    `offsets` and `index_keys` have one element per block, `counts` three: puts, deletes, merges. `filters` are sealed
    already. A WAL file has no statistics.
    """
    stats = b""
    if sst_type is SstType.COMPACTED:
        totals = (*(sum(counts[kind::3]) for kind in range(3)), key_bytes, value_bytes)
        stats = seal(index_kernel.encode_stats(totals, counts), codec)
    index = seal(index_kernel.encode_index(offsets, index_keys), codec)
    index_offset = data_bytes + len(filters)
    stats_offset = index_offset + len(index)
    info = SsTableInfo(
        first_entry=first_entry,
        last_entry=last_entry,
        index_offset=index_offset,
        index_len=len(index),
        filter_offset=data_bytes,
        filter_len=len(filters),
        codec=codec,
        sst_type=sst_type,
        stats_offset=stats_offset if stats else 0,
        stats_len=len(stats),
        filter_format=FilterFormat.COMPOSITE,
    )
    return info, (filters, index, stats, encode_footer(info, stats_offset + len(stats)))


def encode_moved_tail(
    info: SsTableInfo,
    *,
    data_bytes: int,
    offsets: list[int],
    index_keys: list[bytes],
    filters: bytes,
    stats: bytes,
) -> tuple[SsTableInfo, tuple[bytes, ...]]:
    """As `encode_tail` for an SST whose blocks have other sizes than those of `info`, and the same rows.

    `filters` and `stats` are the stored parts of the SST with the record `info`.
    """
    index = seal(index_kernel.encode_index(offsets, index_keys), info.codec)
    index_offset = data_bytes + len(filters)
    stats_offset = index_offset + len(index)
    moved = replace(
        info,
        index_offset=index_offset,
        index_len=len(index),
        filter_offset=data_bytes,
        stats_offset=stats_offset if stats else 0,
    )
    return moved, (filters, index, stats, encode_footer(moved, stats_offset + len(stats)))
