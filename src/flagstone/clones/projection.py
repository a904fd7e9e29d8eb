"""Projection: the part of a database in one key range. Pure.

No SST is rewritten. Each view shows only the keys that are in its SST and in the range, and SSTs without such keys are
left out. A reader finds no other rows, as if they had been deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flagstone.errors import InvalidRequest
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, replace_trees
from flagstone.metadata.range_cut import narrow
from flagstone.types import KeyRange


def project(manifest: Manifest, keys: KeyRange) -> Manifest:
    """The manifest restricted to `keys`. Run ids stay, so that a union can join the parts again.

    Lenders whose SSTs are all left out are removed.
    """
    if keys.empty or keys.stop == b"":
        raise InvalidRequest(
            f"the range from {keys.start!r} to {keys.stop!r} holds no key; start must be below stop"
        )
    segments = (replace(s, tree=_project_tree(s.tree, manifest, keys)) for s in manifest.segments)
    projected = replace_trees(
        manifest,
        tree=_project_tree(manifest.tree, manifest, keys),
        segments=[segment for segment in segments if not segment.tree.empty],
    )
    return replace(projected, external_dbs=tuple(db for db in projected.external_dbs if db.sst_ids))


def shown_ranges(views: Iterable[SstView], manifest: Manifest) -> list[KeyRange]:
    """The keys that each view of a run can hold.

    SSTs of old releases do not record their last key; then the start of the next SST is the end.
    """
    held = list(views)
    ranges = [view.effective_range(manifest.sst(view).info) for view in held]
    for at, keys in enumerate(ranges[:-1]):
        if keys.stop is None:
            ranges[at] = replace(keys, stop=ranges[at + 1].start)
    return ranges


def _project_tree(tree: Tree, manifest: Manifest, keys: KeyRange) -> Tree:
    l0 = [kept for view in tree.l0 for kept in _project_views((view,), manifest, keys)]
    runs = [SortedRun(run.id, tuple(_project_views(run.views, manifest, keys))) for run in tree.runs]
    return replace(tree, l0=tuple(l0), runs=tuple(run for run in runs if run.views))


def _project_views(views: Iterable[SstView], manifest: Manifest, keys: KeyRange) -> list[SstView]:
    held = list(views)
    kept = []
    for view, whole in zip(held, shown_ranges(held, manifest), strict=True):
        shown = whole.intersect(keys)
        if not shown.empty:
            kept.append(narrow(view, shown, manifest))
    return kept
