"""Builds the L0 SSTs of a frozen memtable: one, or one per segment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, groupby
from typing import Any, Final

from flagstone.kernels import memtable as kernel
from flagstone.lsm.retention import RetentionPolicy, apply_retention
from flagstone.lsm.segments import SegmentExtractor, route
from flagstone.sst.builder import EncodedSst, SstOptions
from flagstone.sst.writer import OutputWriter
from flagstone.types import EntryTuple

_STREAM_BYTES: Final = 1 << 19
"""One step fills half of the buffer."""

SortedKeys = tuple[Any, ...]
"""The result of `Memtable.sort_completely`: the keys of the memtable in order, as the kernel keeps them."""


def build_ssts(
    memtable: kernel.Memtable,
    *,
    options: SstOptions,
    policy: RetentionPolicy,
    extractor: SegmentExtractor | None = None,
) -> list[tuple[bytes, EncodedSst]]:
    """The SSTs by segment prefix (b"" without segments), in key order; none if retention leaves no row.

    Works in small steps: other threads run between them.
    """
    while memtable.sort_some():
        pass
    run = memtable.sort_completely()
    if extractor is not None:
        by_segment = _rows_by_segment(memtable, run, policy, extractor)
        built = [(prefix, _sst_of(rows, options)) for prefix, rows in by_segment]
    else:
        built = [(b"", _one_sst(memtable, run, options, policy))]
    return [(prefix, encoded) for prefix, encoded in built if encoded is not None]


def _one_sst(
    memtable: kernel.Memtable, run: SortedKeys, options: SstOptions, policy: RetentionPolicy
) -> EncodedSst | None:
    output = _unlimited(options)
    # One buffer for all steps: allocating it costs more than filling it.
    stream = bytearray(_STREAM_BYTES)
    at, total = 0, len(run[0])
    while at < total:
        at, used = memtable.sorted_stream(run, at, stream, policy.min_seq, policy.clock_ms)
        if used:
            with memoryview(stream)[:used] as rows:
                output.write(rows, 0)
        elif at < total:
            # The stream stops at a key with merge operands: only the operator can fold them.
            for row in apply_retention(memtable.versions_at(run, at), policy):
                output.add_row(row)
            at += 1
    return output.finish()


def _rows_by_segment(
    memtable: kernel.Memtable, run: SortedKeys, policy: RetentionPolicy, extractor: SegmentExtractor
) -> Iterator[tuple[bytes, Iterator[EntryTuple]]]:
    """The retained rows of each segment. Sorted keys are grouped by segment, because a segment is a prefix."""
    every_key = (memtable.versions_at(run, index) for index in range(len(run[0])))
    for prefix, keys in groupby(every_key, key=lambda versions: route(extractor, versions[0][0])):
        yield prefix, chain.from_iterable(apply_retention(versions, policy) for versions in keys)


def _sst_of(rows: Iterator[EntryTuple], options: SstOptions) -> EncodedSst | None:
    output = _unlimited(options)
    for row in rows:
        output.add_row(row)
    return output.finish()


def _unlimited(options: SstOptions) -> OutputWriter:
    """A writer that never splits: a memtable becomes one SST, however large."""
    return OutputWriter(options, max_bytes=sys.maxsize)
