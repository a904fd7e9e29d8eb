"""Where the tables of a bulk load go in the tree. Pure.

A load is newer than everything before it, so its tables become the newest sorted run. Reads ask L0 first, so what is
in L0 must not stay above it: every table of L0 becomes a run of its own, in its order, below the load and above all
older runs. No byte of them is rewritten, L0 is empty afterwards, and no writer has to wait for a compaction.

Adding runs is the right of the compactor: one that runs remembers the runs, and would write its manifest without ours.
So the version with the load also takes the compactor's role, and whoever had it finds that out with its next manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from flagstone.errors import InternalError
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, SsTable, replace_trees
from flagstone.types import KeyRange, RunId, Seq, Ulid

SEQ_GAP: Final = 1 << 36
"""How far ahead of a database the number of a load is: as much as its writer may write meanwhile."""


@dataclass(frozen=True, slots=True)
class Load:
    """The tables of one load in key order, all rows with one sequence number and one time.

    `marker` is stamped a millisecond after the tables; see `apply_load`. `snapshot_min_seq` is the oldest number that
    a snapshot of the writer reads at, if there is one.
    """

    tables: tuple[SsTable, ...]
    seq: Seq
    created_ms: int
    marker: Ulid
    replaces_all: bool = False
    snapshot_min_seq: Seq | None = None

    @property
    def key_ranges(self) -> list[KeyRange]:
        """The keys that it may have touched."""
        if self.replaces_all:
            return [KeyRange()]
        return [SstView.whole(table.id).effective_range(table.info) for table in self.tables]


def is_applied(manifest: Manifest, load: Load) -> bool:
    """Whether the manifest, or one before it, already has the load."""
    return manifest.last_l0_seq >= load.seq


def apply_load(manifest: Manifest, load: Load) -> Manifest:
    """The manifest with the load. Applied a second time it changes nothing.

    The marker of the last compacted L0 moves to one that is newer than every table of the load: what failed tasks
    left behind is then known to be garbage, and the next flush makes a newer table anyway.
    """
    if is_applied(manifest, load):
        return manifest
    if manifest.segments or manifest.segment_extractor_name is not None:
        raise InternalError("a load into a database with segments was not refused when it began")
    return replace(
        replace_trees(manifest, tree=_stacked(manifest.tree, load), added=load.tables),
        compactor_epoch=manifest.compactor_epoch + 1,
        last_l0_seq=load.seq,
        last_l0_clock_tick=max(manifest.last_l0_clock_tick, load.created_ms),
        recent_snapshot_min_seq=load.seq if load.snapshot_min_seq is None else load.snapshot_min_seq,
        sequence_tracker=manifest.sequence_tracker.record(load.seq, load.created_ms // 1000),
    )


def _stacked(tree: Tree, load: Load) -> Tree:
    newest = max((run.id for run in tree.runs), default=-1)
    sources: list[tuple[SstView, ...]] = [] if load.replaces_all else [(view,) for view in reversed(tree.l0)]
    if load.tables:
        sources.append(tuple(SstView.whole(table.id) for table in load.tables))
    stacked = [SortedRun(RunId(newest + 1 + at), views) for at, views in enumerate(sources)]
    older = () if load.replaces_all else tree.runs
    # A writer that was alive during the load may have made newer tables.
    marker = max(load.marker, tree.newest_l0 or load.marker)
    return Tree(l0=(), runs=(*reversed(stacked), *older), last_compacted_l0=marker)
