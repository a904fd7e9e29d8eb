"""From a job to what has to be read for it. Pure."""

from __future__ import annotations

from flagstone.errors import InvalidRequest
from flagstone.lsm.tree import SstView, Tree
from flagstone.maintenance.compaction.inputs import Part
from flagstone.metadata.compactions import TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import ulid_text
from flagstone.store.paths import DbPaths


def plan_sources(manifest: Manifest, spec: TieredSpec, paths: DbPaths) -> list[list[Part]]:
    """The sources of a job, newest first; of each the tables in key order with the keys that are visible in them.

    Raises `InvalidRequest` when the manifest lacks one: the job was decided on another tree.
    """
    tree = _tree(manifest, spec)
    l0 = {view.id: view for view in tree.l0}
    runs = {run.id: run for run in tree.runs}
    missing = [f"L0 {ulid_text(view_id)}" for view_id in spec.l0_view_ids if view_id not in l0]
    missing += [f"run {run_id}" for run_id in spec.sorted_runs if run_id not in runs]
    if missing:
        raise InvalidRequest(f"the manifest has no {', '.join(missing)}: this compaction is out of date")
    groups: list[tuple[SstView, ...]] = [(l0[view_id],) for view_id in spec.l0_view_ids]
    groups += [runs[run_id].views for run_id in spec.sorted_runs]
    return [[_part(manifest, view, paths) for view in group] for group in groups]


def is_last_run(manifest: Manifest, spec: TieredSpec) -> bool:
    """Whether no older data of the same keys lies below the output, so that tombstones have nothing to hide."""
    runs = _tree(manifest, spec).runs
    return not runs or runs[-1].id == spec.destination


def _tree(manifest: Manifest, spec: TieredSpec) -> Tree:
    tree = manifest.tree_of(spec.segment)
    if tree is None:
        raise InvalidRequest(f"the manifest has no segment {spec.segment!r}: this compaction is out of date")
    return tree


def _part(manifest: Manifest, view: SstView, paths: DbPaths) -> Part:
    table = manifest.table(view)
    owner = manifest.path_of_owner(view.sst_id)
    path = (paths if owner is None else DbPaths(owner)).table(view.sst_id)
    return Part(table, path, view.effective_range(table.info))
