"""The manifest after a repair. Pure: an edit of the state that the plan starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from flagstone.lsm import tree as trees
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import SstView, Tree
from flagstone.maintenance.repair.findings import CLOCK_TOLERANCE_MS
from flagstone.maintenance.repair.plan import RepairPlan
from flagstone.metadata.manifest import Manifest, SsTable, edit_tree, replace_trees
from flagstone.runtime.ids import ulid_ms
from flagstone.types import Seq, Ulid, WalId


def apply_repair(
    base: Manifest,
    plan: RepairPlan,
    *,
    fence_id: WalId,
    added: Iterable[tuple[bytes, SsTable]] = (),
    replaced: Mapping[Ulid, SsTable] | None = None,
) -> Manifest:
    """The manifest that makes the plan true.

    `fence_id` ends the old WAL. `added` are the SSTs of its rows by segment, oldest first. `replaced` are the
    SSTs that stand in the place of others: copies under a new id, or made again from the WAL.
    """
    edited = _edit_trees(base, plan, replaced or {})
    for prefix, table in added:
        view = SstView.whole(table.id)
        edited = edit_tree(edited, prefix, partial(trees.apply_flush, view=view), added=(table,))
    edited = replace(
        edited,
        writer_epoch=plan.writer_epoch,
        compactor_epoch=plan.compactor_epoch,
        wal_id_last_seen=max(base.wal_id_last_seen, fence_id),
        checkpoints=tuple(entry for entry in base.checkpoints if entry.id not in plan.lost_checkpoints),
        external_dbs=tuple(
            entry for entry in edited.external_dbs if entry.path not in plan.gone_lenders or entry.sst_ids
        ),
    )
    if plan.log is not None:
        times = [row[4] for row in plan.log.rows if row[4] is not None]
        edited = replace(
            edited,
            replay_after_wal_id=fence_id,
            last_l0_seq=Seq(max(base.last_l0_seq, plan.log.last_seq)),
            recent_snapshot_min_seq=Seq(max(base.last_l0_seq, plan.log.last_seq)),
            last_l0_clock_tick=max([base.last_l0_clock_tick, *times]),
        )
    if plan.reset_clock_ms is not None:
        edited = _reset_clock(edited, plan.reset_clock_ms)
    return edited


def _edit_trees(base: Manifest, plan: RepairPlan, replaced: Mapping[Ulid, SsTable]) -> Manifest:
    def renamed(view: SstView) -> SstView:
        new = replaced.get(view.sst_id)
        if new is None:
            return view
        return replace(view, id=new.id if view.id == view.sst_id else view.id, sst_id=new.id)

    def edit(tree: Tree) -> Tree:
        runs = (
            replace(
                run, views=tuple(renamed(view) for view in run.views if view.sst_id not in plan.lost_ssts)
            )
            for run in tree.runs
        )
        return replace(
            tree,
            l0=tuple(renamed(view) for view in tree.l0 if view.sst_id not in plan.lost_ssts),
            runs=tuple(run for run in runs if run.views),
        )

    return replace_trees(
        base,
        tree=edit(base.tree),
        segments=[replace(segment, tree=edit(segment.tree)) for segment in base.segments],
        added=list(replaced.values()),
    )


def _reset_clock(manifest: Manifest, now_ms: int) -> Manifest:
    """The manifest without any time that a writer of now would have to wait for."""
    tracker = manifest.sequence_tracker
    limit_s = now_ms // 1000
    points = [point for point in zip(tracker.sequences, tracker.seconds, strict=True) if point[1] <= limit_s]

    def marked(tree: Tree) -> Tree:
        marker = tree.last_compacted_l0
        if marker is None or ulid_ms(marker) <= now_ms + CLOCK_TOLERANCE_MS:
            return tree
        return replace(tree, last_compacted_l0=Ulid((now_ms << 80) | (marker & ((1 << 80) - 1))))

    return replace(
        manifest,
        tree=marked(manifest.tree),
        segments=tuple(replace(segment, tree=marked(segment.tree)) for segment in manifest.segments),
        last_l0_clock_tick=min(manifest.last_l0_clock_tick, now_ms),
        sequence_tracker=SequenceTracker(
            tuple(point[0] for point in points), tuple(point[1] for point in points)
        ),
    )
