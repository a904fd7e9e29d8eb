"""From a frozen memtable to the L0 tables it becomes: one, or one per segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flagstone.kernels import memtable as kernel
from flagstone.lsm.retention import RetentionPolicy, apply_retention
from flagstone.lsm.segments import SegmentExtractor, route
from flagstone.table.builder import EncodedTable, TableBuilder, TableOptions

_COLUMN_BYTES: Final = 1 << 18


def build_tables(
    table: kernel.Memtable,
    *,
    options: TableOptions,
    policy: RetentionPolicy,
    extractor: SegmentExtractor | None = None,
) -> list[tuple[bytes, EncodedTable]]:
    """The tables, by segment prefix (b"" without segments), in key order; none when retention leaves no row.

    Works in small steps, between which other threads get their turn.
    """
    while table.sort_some():
        pass
    total = table.sort_completely()
    if extractor is not None:
        return [
            (prefix, builder.finish())
            for prefix, builder in _by_segment(table, total, options, policy, extractor)
            if builder.rows
        ]
    builder = TableBuilder(options)
    at = 0
    while at < total:
        at, columns = table.sorted_columns(at, _COLUMN_BYTES, policy.min_seq, policy.clock_ms)
        if columns[0]:
            builder.add_columns(columns)
        elif at < total:
            # It stopped at a key with merge operands, which only the operator can fold.
            builder.add_rows(list(apply_retention(table.versions_at(at), policy)))
            at += 1
    return [(b"", builder.finish())] if builder.rows else []


def _by_segment(
    table: kernel.Memtable,
    total: int,
    options: TableOptions,
    policy: RetentionPolicy,
    extractor: SegmentExtractor,
) -> Iterator[tuple[bytes, TableBuilder]]:
    """Keys in order come segment by segment, because a segment is a prefix."""
    prefix: bytes | None = None
    builder = TableBuilder(options)
    for index in range(total):
        versions = table.versions_at(index)
        segment = route(extractor, versions[0][0])
        if segment != prefix:
            if prefix is not None:
                yield prefix, builder
            prefix, builder = segment, TableBuilder(options)
        builder.add_rows(list(apply_retention(versions, policy)))
    if prefix is not None:
        yield prefix, builder
