"""Merges the SSTs of tasks whose keys overlap into SSTs that do not overlap.

`df.write` uses the partitions of the DataFrame, so two tasks may have rows of the same key range. Then the driver
merges their SSTs before the commit. `bulk_load` needs no merge: it lets Spark partition the rows by key first.
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
from flagstone.spark.load.heartbeat import Heartbeat
from flagstone.spark.load.plan import LoadPlan, MadeSst, commit_sst, load_output
from flagstone.spark.options import WriteOptions
from flagstone.sst.builder import SstBuilder
from flagstone.types import KeyRange

_FETCH_BYTES: Final = 2 * 1024 * 1024
_LONG_AGO: Final = -(2**63)


def plan_layers(made: Sequence[MadeSst]) -> list[list[MadeSst]]:
    """The SSTs in as few layers as possible, each in key order and without overlaps. Pure."""
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
    """The SSTs in layers, maybe more of them: of two that overlap the later one is in the earlier layer. Pure."""
    layers: list[list[MadeSst]] = []
    for each in reversed(made):
        at = 1 + max((at for at, layer in enumerate(layers) if _overlap(layer, each)), default=-1)
        if at == len(layers):
            layers.append([])
        insort(layers[at], each, key=_first)
    return layers


def merge_overlaps(plan: LoadPlan, options: WriteOptions, made: Sequence[MadeSst]) -> list[MadeSst]:
    """The same rows in SSTs without overlaps; the SSTs themselves if none overlap.

    A crash leaves SSTs without a reference, which garbage collection deletes.

    Raises:
        InvalidRequest: a key is in two SSTs, and duplicates are refused or one of the rows is a merge.

    """
    # Of rows with the same key and sequence number the merge keeps the one from the first source.
    layers = plan_ordered_layers(made) if options.in_order else plan_layers(made)
    if len(layers) <= 1:
        return list(made)
    store, paths = open_store(plan.address)
    fetcher, merged, heartbeat = SstFetcher(store), list[MadeSst](), Heartbeat(plan)
    sources = [
        Source(
            [Part(each.sst, paths.sst(each.sst.id), KeyRange()) for each in layer],
            fetcher,
            pool=shared_pool(),
            bytes_to_fetch=_FETCH_BYTES,
            max_fetch_tasks=1,
        )
        for layer in layers
    ]
    try:
        with load_output(store, paths, plan) as output:
            merge_sources(
                sources,
                SstBuilder(options.sst_options, open_sink=output.open, max_bytes=options.max_sst_bytes),
                # Drops only repeated rows of a key: all rows have one sequence number, and older data is unknown here.
                policy=RetentionPolicy(
                    min_seq=plan.seq, clock_ms=_LONG_AGO, keep_tombstones=True, keep_unfoldable=True
                ),
                chosen=None,
                common=0,
                finished=lambda built: merged.append(commit_sst(output, built)),
                check=heartbeat.touch,
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


def _overlap(layer: Sequence[MadeSst], sst: MadeSst) -> bool:
    """Whether an SST overlaps one of a layer, which is in key order and has no overlaps itself."""
    at = bisect_right(layer, _last(sst), key=_first)
    return at > 0 and _last(layer[at - 1]) >= _first(sst)


def _check_nothing_lost(made: Sequence[MadeSst], merged: Sequence[MadeSst], options: WriteOptions) -> None:
    repeated = sum(each.rows for each in made) - sum(each.rows for each in merged)
    if repeated and options.duplicates == "error":
        raise InvalidRequest(f"{repeated} keys occur more than once; remove them, or use duplicates='last'")
    if repeated and any(each.has_merges for each in made):
        raise InvalidRequest(
            f"{repeated} keys occur more than once, and some rows are merges: one load holds one row per key. Fold the "
            "rows of a key before loading them"
        )


def order_ssts(ssts: Sequence[SsTable]) -> tuple[SsTable, ...]:
    """The SSTs in key order. Raises `InvalidRequest` if two overlap: the rows were not partitioned by key."""
    ordered = sorted(ssts, key=lambda sst: sst.info.first_entry or b"")
    for one, following in pairwise(ordered):
        if (one.info.last_entry or b"") >= (following.info.first_entry or b""):
            raise InvalidRequest(
                f"two tasks wrote overlapping keys: one up to {one.info.last_entry!r}, another from "
                f"{following.info.first_entry!r}. Partition the rows by key range: use flagstone.spark.bulk_load, or "
                'df.repartitionByRange("key").sortWithinPartitions("key") before write'
            )
    return tuple(ordered)


def check_writable(ssts: Sequence[SsTable], ranges: Sequence[KeyRange] | None) -> None:
    """Raise `InvalidRequest` for an SST with keys outside the writable range of a clone; None allows all keys."""
    for sst in ssts if ranges is not None else ():
        first, last = sst.info.first_entry or b"", sst.info.last_entry or b""
        if not any(first in keys and last in keys for keys in ranges or ()):
            raise InvalidRequest(
                f"the keys from {first!r} to {last!r} are not all in the writable range of this clone; "
                "load them into the database that holds their range"
            )
