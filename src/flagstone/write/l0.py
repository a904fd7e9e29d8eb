"""From a frozen memtable to the L0 tables it becomes: one, or one per segment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, groupby
from typing import Any, Final

from flagstone.kernels import memtable as kernel
from flagstone.lsm.retention import RetentionPolicy, apply_retention
from flagstone.lsm.segments import SegmentExtractor, route
from flagstone.sst.builder import EncodedSst, SstBuilder, SstOptions
from flagstone.types import EntryTuple

_STREAM_BYTES: Final = 1 << 19
"""A step fills half of it."""

SortedKeys = tuple[Any, ...]
"""What `Memtable.sort_completely` gives: the table's keys in order, as the kernel keeps them."""


def build_tables(
    table: kernel.Memtable,
    *,
    options: SstOptions,
    policy: RetentionPolicy,
    extractor: SegmentExtractor | None = None,
) -> list[tuple[bytes, EncodedSst]]:
    """The tables, by segment prefix (b"" without segments), in key order; none when retention leaves no row.

    Works in small steps, between which other threads get their turn.
    """
    while table.sort_some():
        pass
    run = table.sort_completely()
    if extractor is not None:
        by_segment = _rows_by_segment(table, run, policy, extractor)
        built = [(prefix, _table_of(rows, options)) for prefix, rows in by_segment]
    else:
        built = [(b"", _one_table(table, run, options, policy))]
    return [(prefix, encoded) for prefix, encoded in built if encoded is not None]


def _one_table(
    table: kernel.Memtable, run: SortedKeys, options: SstOptions, policy: RetentionPolicy
) -> EncodedSst | None:
    output = SstBuilder(options)
    # One for all steps: fresh memory costs more than what is done with it.
    stream = bytearray(_STREAM_BYTES)
    at, total = 0, len(run[0])
    while at < total:
        at, used = table.sorted_stream(run, at, stream, policy.min_seq, policy.clock_ms)
        if used:
            with memoryview(stream)[:used] as rows:
                output.write(rows)
        elif at < total:
            # It stopped at a key with merge operands, which only the operator can fold.
            for row in apply_retention(table.versions_at(run, at), policy):
                output.add_row(row)
            at += 1
    return output.finish_if_any()


def _rows_by_segment(
    table: kernel.Memtable, run: SortedKeys, policy: RetentionPolicy, extractor: SegmentExtractor
) -> Iterator[tuple[bytes, Iterator[EntryTuple]]]:
    """Keys in order come segment by segment, because a segment is a prefix."""
    every_key = (table.versions_at(run, index) for index in range(len(run[0])))
    for prefix, keys in groupby(every_key, key=lambda versions: route(extractor, versions[0][0])):
        yield prefix, chain.from_iterable(apply_retention(versions, policy) for versions in keys)


def _table_of(rows: Iterator[EntryTuple], options: SstOptions) -> EncodedSst | None:
    output = SstBuilder(options)
    for row in rows:
        output.add_row(row)
    return output.finish_if_any()
