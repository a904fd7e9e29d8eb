"""Tables of tasks whose keys overlap, merged into ones that do not.

`df.write` hands over partitions as they are, so two tasks may hold rows of the same range. Then the driver merges
their tables before the commit; `bulk_load`, which lets Spark partition by key first, never comes here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.lsm.retention import RetentionPolicy
from flagstone.maintenance.compaction.inputs import Part, Source, TableFetcher
from flagstone.maintenance.compaction.merging import merge_sources
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.pool import shared_pool
from flagstone.spark.options import WriteOptions
from flagstone.spark.plan import LoadPlan, MadeTable, new_table_id, open_store
from flagstone.table.builder import EncodedTable
from flagstone.table.output import OutputWriter, SpareBuffers
from flagstone.types import KeyRange

_FETCH_BYTES: Final = 2 * 1024 * 1024
_LONG_AGO: Final = -(2**63)


def plan_layers(made: Sequence[MadeTable]) -> list[list[MadeTable]]:
    """The tables in as few layers as possible, each in key order and without overlaps. Pure."""
    layers: list[list[MadeTable]] = []
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


def plan_ordered_layers(made: Sequence[MadeTable]) -> list[list[MadeTable]]:
    """The tables in layers, maybe more of them: of two that overlap the later one is in the earlier layer. Pure."""
    layers: list[list[MadeTable]] = []
    for each in reversed(made):
        at = 1 + max((at for at, layer in enumerate(layers) if _overlap(layer, each)), default=-1)
        if at == len(layers):
            layers.append([])
        insort(layers[at], each, key=_first)
    return layers


def merge_overlaps(plan: LoadPlan, options: WriteOptions, made: Sequence[MadeTable]) -> list[MadeTable]:
    """The same rows in tables without overlaps; the tables themselves where they have none.

    A crash leaves tables that nobody refers to.

    Raises:
        InvalidRequest: a key is in two of the tables, and duplicates are refused or one is a merge.

    """
    # Of rows with one key and one number the merger keeps that of the earliest source.
    layers = plan_ordered_layers(made) if options.in_order else plan_layers(made)
    if len(layers) <= 1:
        return list(made)
    store, paths = open_store(plan.place)
    fetcher, merged = TableFetcher(store), list[MadeTable]()

    def upload(encoded: EncodedTable) -> None:
        table = SsTable(new_table_id(plan), encoded.info, encoded.format_version)
        store.put(paths.table(table.id), encoded.data)
        merged.append(MadeTable(table, encoded.rows, len(encoded.data), has_merges=False))

    sources = [
        Source(
            [Part(each.table, paths.table(each.table.id), KeyRange()) for each in layer],
            fetcher,
            pool=shared_pool(),
            bytes_to_fetch=_FETCH_BYTES,
            max_fetch_tasks=1,
        )
        for layer in layers
    ]
    buffers = SpareBuffers()
    output = OutputWriter(options.table, max_bytes=options.max_sst_bytes, buffer=buffers.take(), resume=None)
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


def _first(each: MadeTable) -> bytes:
    return each.table.info.first_entry or b""


def _last(each: MadeTable) -> bytes:
    return each.table.info.last_entry or b""


def _overlap(layer: Sequence[MadeTable], table: MadeTable) -> bool:
    """Whether a table shares keys with one of a layer, which is in order and has no overlaps itself."""
    at = bisect_right(layer, _last(table), key=_first)
    return at > 0 and _last(layer[at - 1]) >= _first(table)


def _check_nothing_lost(
    made: Sequence[MadeTable], merged: Sequence[MadeTable], options: WriteOptions
) -> None:
    repeated = sum(each.rows for each in made) - sum(each.rows for each in merged)
    if repeated and options.duplicates == "error":
        raise InvalidRequest(f"{repeated} keys occur more than once, and duplicates='error' was asked for")
    if repeated and any(each.has_merges for each in made):
        raise InvalidRequest(
            f"{repeated} keys occur more than once, and some rows are merges: one load holds one row per key. Fold the "
            "rows of a key before loading them"
        )
