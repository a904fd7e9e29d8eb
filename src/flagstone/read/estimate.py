"""The estimated number of rows in a key range, from the statistics of SSTs and the memtables.

Each SST has counts of its rows, in all and per block. The estimate goes through the sources from old to new: each adds
its rows, and its tombstones remove rows. An SST of L0 has all versions of a key, so its tombstones may remove rows of
its own; of a memtable only the newest versions are counted. So a row that was overwritten counts once for each version,
until compaction merges them, and expired rows count, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from flagstone.format.sst import BlockIndex
from flagstone.read.view import Memtable, ReadView
from flagstone.sst.reader import INDEX, Sst
from flagstone.sst.requests import need_index
from flagstone.sst.store import SstStore
from flagstone.types import TOMBSTONE, KeyRange

MAX_SSTS_READ: Final = 256
"""The statistics of more SSTs are not read: the rest is estimated by size."""

_ROWS_AT_ONCE: Final = 4096
_ROWS_OF_A_BLOCK: Final = 100
"""Assumed for an SST without statistics."""


class Part(NamedTuple):
    """The keys of one SST that are in the range; `whole` if these are all of its keys."""

    layer: int
    sst: Sst
    keys: KeyRange
    whole: bool


class Counts(NamedTuple):
    """How many rows one source has, and how many tombstones."""

    rows: float
    tombstones: float


def estimate_rows(ssts: SstStore, view: ReadView, keys: KeyRange, max_seq: int) -> int:
    """The estimated number of rows of `view` in `keys`.

    Makes one request for each of up to 256 SSTs, and another one where the range ends inside an SST. Raises `SstGone`
    if an SST was deleted.
    """
    if keys.empty:
        return 0
    parts = list(parts_of(view, keys))
    chosen = spread(parts, MAX_SSTS_READ)
    counted = ssts.pool.map_ordered(lambda part: _counts_of(ssts, part), chosen)
    unread = sum(map(_size, parts)) / max(1, sum(map(_size, chosen)))
    layers: dict[int, Counts] = {}
    for part, (rows, tombstones) in zip(chosen, counted, strict=True):
        before = layers.get(part.layer, Counts(0, 0))
        layers[part.layer] = Counts(before.rows + rows * unread, before.tombstones + tombstones * unread)
    total = 0.0
    for _, (rows, tombstones) in sorted(layers.items(), reverse=True):
        total = max(0.0, total + rows - tombstones)
    for memtable in reversed(view.memtables):
        rows, tombstones = _counts_in_memory(memtable, keys, max_seq)
        total = max(0.0, total - tombstones) + rows
    return round(total)


def parts_of(view: ReadView, keys: KeyRange) -> Iterator[Part]:
    """The SSTs of a view that have keys in the range, with the number of their layer from new to old."""
    for number, layer in enumerate(view.forest.scan_layers):
        for start, stop, sst in zip(*layer.parts(), strict=True):
            inside = KeyRange(start or None, stop).intersect(keys)
            if not inside.empty:
                last = sst.info.last_entry
                own = KeyRange(sst.info.first_entry, None if last is None else last + b"\0")
                yield Part(number, sst, inside, inside.intersect(own) == own)


def spread(parts: list[Part], most: int) -> list[Part]:
    """At most `most` of the parts, from all over the list."""
    if len(parts) <= most:
        return parts
    return [parts[number * len(parts) // most] for number in range(most)]


def _size(part: Part) -> int:
    return part.sst.info.estimated_size


def _counts_of(ssts: SstStore, part: Part) -> Counts:
    stats = ssts.fetch_stats(part.sst)
    if part.whole and stats is not None:
        return Counts(stats.num_puts + stats.num_merges, stats.num_deletes)
    index = _index_of(ssts, part.sst)
    first, end = blocks_of(index, part.keys)
    if stats is None:
        return Counts(_ROWS_OF_A_BLOCK * (end - first), 0)
    if len(stats.blocks) == len(index):
        blocks = stats.blocks[first:end]
        return Counts(
            sum(block.num_puts + block.num_merges for block in blocks),
            sum(block.num_deletes for block in blocks),
        )
    share = (end - first) / max(1, len(index))
    return Counts((stats.num_puts + stats.num_merges) * share, stats.num_deletes * share)


def blocks_of(index: BlockIndex, keys: KeyRange) -> tuple[int, int]:
    """The numbers of the blocks that may have keys of the range: the first one, and the one after the last."""
    first_keys = index.first_keys
    first = 0 if keys.start is None else max(0, bisect_right(first_keys, keys.start) - 1)
    end = len(first_keys) if keys.stop is None else bisect_left(first_keys, keys.stop)
    return first, max(first, end)


def _index_of(ssts: SstStore, sst: Sst) -> BlockIndex:
    index: BlockIndex = sst.use_index() or ssts.fetch([need_index(sst)])[sst, INDEX]
    return index


def _counts_in_memory(memtable: Memtable, keys: KeyRange, max_seq: int) -> Counts:
    rows = tombstones = 0
    newest: bytes | None = None
    cursor = memtable.scan(keys.start, keys.stop, max_seq, False)
    while found := cursor.next_rows(_ROWS_AT_ONCE):
        for row in found:
            if row[0] != newest:
                newest = row[0]
                if row[2] == TOMBSTONE:
                    tombstones += 1
                else:
                    rows += 1
    return Counts(rows, tombstones)
