"""Reads what the manifest does not say about the runs: how much a view shows, its tombstones, when its rows expire.

A manifest has the key range and the size of each SST. The statistics of an SST count rows and tombstones, and its index
tells which blocks a view shows. No part of an SST records when its rows expire, so a few blocks are read as a sample.
That is enough to choose what to compact first, and never to drop an SST unread.

An SST does not change, so each view is read once per process: one request for index and statistics, and one for each of
up to four blocks. Of a run with more than 64 whole SSTs, 64 are read, and stand for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from flagstone.compaction.dead_rows import ViewStats
from flagstone.compaction.inputs import Part, part_of
from flagstone.errors import CorruptData, FlagstoneError
from flagstone.format.sst import BlockIndex, decode_rows, open_block, open_index, open_stats
from flagstone.format.sst_info import SstStats
from flagstone.lsm.tree import SortedRun, SstView
from flagstone.metadata.manifest import Manifest
from flagstone.read.estimate import blocks_of
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.caching import read_checked
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import TOMBSTONE, EntryTuple

_log = logging.getLogger("flagstone.compaction")

_VIEWS_AT_ONCE: Final = 16
_SAMPLED_VIEWS: Final = 64
_SAMPLED_BLOCKS: Final = 4
_SAMPLED_ROWS: Final = 32


class Survey:
    """What this process knows of the views in the runs of a database. For one thread.

    A view that cannot be read stays unknown.
    """

    def __init__(self, store: ObjectStore, paths: DbPaths, *, pool: IoPool | None = None) -> None:
        self._store = store
        self._paths = paths
        self._pool = pool or shared_pool()
        self._complete: Manifest | None = None
        self._unreadable: set[SstView] = set()
        self.stats: dict[SstView, ViewStats] = {}

    def read(self, manifest: Manifest) -> bool:
        """Read some of the views of `manifest` that are not known yet, and forget others; whether there are more.

        If the store does not answer, the views stay unknown, and the next call tries again.
        """
        if manifest is self._complete:
            return False
        views = {view for tree in manifest.trees for run in tree.runs for view in sample_views(run)}
        for gone in self.stats.keys() - views:
            del self.stats[gone]
        self._unreadable &= views
        missing = sorted(views - self.stats.keys() - self._unreadable, key=lambda view: view.id)
        chosen = missing[:_VIEWS_AT_ONCE]
        try:
            found = self._pool.map_ordered(lambda view: self._read_view(manifest, view), chosen)
        except FlagstoneError as error:
            _log.debug("cannot read the statistics of SSTs error=%s", error)
            return False
        for view, stats in zip(chosen, found, strict=True):
            if stats is None:
                self._unreadable.add(view)
            else:
                self.stats[view] = stats
        if len(chosen) == len(missing):
            self._complete = manifest
            return False
        return True

    def _read_view(self, manifest: Manifest, view: SstView) -> ViewStats | None:
        part = part_of(manifest, view, self._paths)
        if part.keys.empty:
            return ViewStats(0, 0, 0)
        try:
            return self._read_part(part)
        except (ObjectMissing, CorruptData) as error:
            # Merged and collected meanwhile, or damaged: reads and merges report damage.
            _log.debug("cannot read the statistics of an SST path=%s error=%s", part.path, error)
            return None

    def _read_part(self, part: Part) -> ViewStats:
        index, stats = self._read_meta(part)
        first, end = blocks_of(index, part.keys)
        rows = [row for number in _spread(first, end) for row in self._read_block(part, index, number)]
        inside = [row for row in rows if row[0] in part.keys]
        return summarize(index, stats, first, end, inside, blocks=min(end - first, _SAMPLED_BLOCKS))

    def _read_meta(self, part: Part) -> tuple[BlockIndex, SstStats | None]:
        info, path = part.sst.info, part.path
        start, middle = info.index_offset, info.index_offset + info.index_len

        def decode(stored: bytes) -> tuple[BlockIndex, SstStats | None]:
            index = open_index(stored[: middle - start], info, path)
            stats = open_stats(stored[middle - start :], info, path) if info.stats_len else None
            return index, stats

        # The statistics follow the index without a gap.
        return read_checked(self._store, path, start, middle + info.stats_len, decode)

    def _read_block(self, part: Part, index: BlockIndex, number: int) -> list[EntryTuple]:
        start, stop = index.offsets[number], index.stops[number]
        version = part.sst.format_version

        def decode(stored: bytes) -> list[EntryTuple]:
            raw = open_block(stored, part.sst.info, part.path, start, version=version)
            return decode_rows(raw, version)

        return read_checked(self._store, part.path, start, stop, decode)


def sample_views(run: SortedRun) -> list[SstView]:
    """The views of a run to read: all that show a part of their SST, and up to 64 others from all over the run."""
    cut = [view for view in run.views if view.visible_range is not None]
    whole = [view for view in run.views if view.visible_range is None]
    return cut + whole[:: max(1, -(-len(whole) // _SAMPLED_VIEWS))]


def summarize(
    index: BlockIndex,
    stats: SstStats | None,
    first: int,
    end: int,
    sample: Sequence[EntryTuple],
    *,
    blocks: int,
) -> ViewStats:
    """What is known of the blocks `first` to `end` of an SST, of which `blocks` were read as a sample.

    Without statistics by block, rows and tombstones are those of the sample, scaled to all blocks.
    """
    shown = sum(index.stops[number] - index.offsets[number] for number in range(first, end))
    if stats is not None and len(stats.blocks) == len(index):
        counted = stats.blocks[first:end]
        tombstones = sum(block.num_deletes for block in counted)
        rows = tombstones + sum(block.num_puts + block.num_merges for block in counted)
    else:
        scale = (end - first) / max(1, blocks)
        rows = round(len(sample) * scale)
        tombstones = round(sum(row[2] == TOMBSTONE for row in sample) * scale)
    chosen = sample[:: max(1, -(-len(sample) // _SAMPLED_ROWS))]
    expiries = sorted(row[5] for row in chosen if row[5] is not None)
    return ViewStats(shown, rows, tombstones, len(chosen), tuple(expiries))


def _spread(first: int, end: int) -> list[int]:
    """Up to four numbers from the range, evenly spread."""
    count = min(end - first, _SAMPLED_BLOCKS)
    return [first + (end - first) * (2 * number + 1) // (2 * count) for number in range(count)]
