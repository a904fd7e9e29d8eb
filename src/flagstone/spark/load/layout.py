"""Tables of tasks whose keys overlap, merged into ones that do not.

`df.write` hands over partitions as they are, so two tasks may hold rows of the same range. Then the driver merges
their tables before the commit; `bulk_load`, which lets Spark partition by key first, never comes here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from flagstone.compaction.inputs import Part, Source, SstFetcher
from flagstone.compaction.merging import merge_sources
from flagstone.errors import InvalidRequest
from flagstone.lsm.retention import RetentionPolicy
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import open_store
from flagstone.spark.load.plan import LoadPlan, MadeSst, new_sst_id
from flagstone.spark.options import WriteOptions
from flagstone.sst.builder import EncodedSst, SpareBuffers, SstBuilder
from flagstone.types import KeyRange

_FETCH_BYTES: Final = 2 * 1024 * 1024
_LONG_AGO: Final = -(2**63)


def plan_layers(made: Sequence[MadeSst]) -> list[list[MadeSst]]:
    """The tables in as few layers as possible, each in key order and without overlaps. Pure."""
    layers: list[list[MadeSst]] = []
    ends: list[tuple[bytes, int]] = []
    for each in sorted(made, key=_first):
        first, last = _first(each), _last(each)
        if ends and ends[0][0] < first:
            _, layer = heapq.heapreplace(ends, (last, ends[0][1]))
            layers[layer].append(each)
        else:
            heapq.heappush(ends, (last, len(layers)))
            layers.append([each])
    return layers


def plan_ordered_layers(made: Sequence[MadeSst]) -> list[list[MadeSst]]:
    """The tables in layers, maybe more of them: of two that overlap the later one is in the earlier layer. Pure."""
    layers: list[list[MadeSst]] = []
    for each in reversed(made):
        at = 1 + max((at for at, layer in enumerate(layers) if _overlap(layer, each)), default=-1)
        if at == len(layers):
            layers.append([])
        insort(layers[at], each, key=_first)
    return layers


def merge_overlaps(plan: LoadPlan, options: WriteOptions, made: Sequence[MadeSst]) -> list[MadeSst]:
    """The same rows in tables without overlaps; the tables themselves where they have none.

    A crash leaves tables that nobody refers to.

    Raises:
        InvalidRequest: a key is in two of the tables, and duplicates are refused or one is a merge.

    """
    # Of rows with one key and one number the merger keeps that of the earliest source.
    layers = plan_ordered_layers(made) if options.in_order else plan_layers(made)
    if len(layers) <= 1:
        return list(made)
    store, paths = open_store(plan.address)
    fetcher, merged = SstFetcher(store), list[MadeSst]()

    def upload(encoded: EncodedSst) -> None:
        table = SsTable(new_sst_id(plan), encoded.info, encoded.format_version)
        store.put(paths.table(table.id), encoded.data)
        merged.append(MadeSst(table, encoded.rows, len(encoded.data), has_merges=False))

    sources = [
        Source(
            [Part(each.sst, paths.table(each.sst.id), KeyRange()) for each in layer],
            fetcher,
            pool=shared_pool(),
            bytes_to_fetch=_FETCH_BYTES,
            max_fetch_tasks=1,
        )
        for layer in layers
    ]
    buffers = SpareBuffers()
    output = SstBuilder(
        options.sst_options, max_bytes=options.max_sst_bytes, buffer=buffers.take(), resume=None
    )
    try:
        merge_sources(
            sources,
            output,
            # Nothing is dropped but further rows of a key: all have one number, and what lies below is not known.
            policy=RetentionPolicy(
                min_seq=plan.seq, clock_ms=_LONG_AGO, keep_tombstones=True, keep_unfoldable=True
            ),
            chosen=None,
            common=0,
            finished=upload,
            check=lambda: None,
        )
    finally:
        for source in sources:
            source.close()
    _check_nothing_lost(made, merged, options)
    return merged


def _first(each: MadeSst) -> bytes:
    return each.sst.info.first_entry or b""


def _last(each: MadeSst) -> bytes:
    return each.sst.info.last_entry or b""


def _overlap(layer: Sequence[MadeSst], table: MadeSst) -> bool:
    """Whether a table shares keys with one of a layer, which is in order and has no overlaps itself."""
    at = bisect_right(layer, _last(table), key=_first)
    return at > 0 and _last(layer[at - 1]) >= _first(table)


def _check_nothing_lost(made: Sequence[MadeSst], merged: Sequence[MadeSst], options: WriteOptions) -> None:
    repeated = sum(each.rows for each in made) - sum(each.rows for each in merged)
    if repeated and options.duplicates == "error":
        raise InvalidRequest(f"{repeated} keys occur more than once, and duplicates='error' was asked for")
    if repeated and any(each.has_merges for each in made):
        raise InvalidRequest(
            f"{repeated} keys occur more than once, and some rows are merges: one load holds one row per key. Fold the "
            "rows of a key before loading them"
        )


def order_ssts(tables: Sequence[SsTable]) -> tuple[SsTable, ...]:
    """The tables by key. Raises `InvalidRequest` when two share keys: the rows were not partitioned by key."""
    ordered = sorted(tables, key=lambda table: table.info.first_entry or b"")
    for one, following in pairwise(ordered):
        if (one.info.last_entry or b"") >= (following.info.first_entry or b""):
            raise InvalidRequest(
                f"two tasks wrote overlapping keys: one up to {one.info.last_entry!r}, another from "
                f"{following.info.first_entry!r}. Partition the rows by key range: use flagstone.spark.bulk_load, or "
                'df.repartitionByRange("key").sortWithinPartitions("key") before write'
            )
    return tuple(ordered)


def check_writable(tables: Sequence[SsTable], ranges: Sequence[KeyRange] | None) -> None:
    """Raise `InvalidRequest` for a table with keys that a clone of a range does not take."""
    for table in tables if ranges is not None else ():
        first, last = table.info.first_entry or b"", table.info.last_entry or b""
        if not any(first in keys and last in keys for keys in ranges or ()):
            raise InvalidRequest(
                f"the keys from {first!r} to {last!r} are not all within what this clone was cut out for; "
                "load them into the database that holds their range"
            )
