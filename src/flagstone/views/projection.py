"""Projection: the part of a database that lies in one key range. Pure.

No table is rewritten. Each view shows only the keys that are both in its table and in the range, and tables with
none are left out; to a reader it is as if all other rows had been deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flagstone.errors import InvalidRequest
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, replace_trees
from flagstone.types import KeyRange


def project(manifest: Manifest, keys: KeyRange) -> Manifest:
    """The manifest as far as it lies in `keys`. Run ids stay, so that a union can put the parts together again.

    Databases whose tables are all left out are not borrowed from any more.
    """
    if keys.empty or keys.stop == b"":
        raise InvalidRequest(
            f"the range from {keys.start!r} to {keys.stop!r} holds no key; start lies below stop"
        )
    segments = (replace(s, tree=_project_tree(s.tree, manifest, keys)) for s in manifest.segments)
    projected = replace_trees(
        manifest,
        tree=_project_tree(manifest.tree, manifest, keys),
        segments=[segment for segment in segments if not segment.tree.empty],
    )
    return replace(projected, external_dbs=tuple(db for db in projected.external_dbs if db.sst_ids))


def shown_ranges(views: Iterable[SstView], manifest: Manifest) -> list[KeyRange]:
    """The keys each view of a run can hold.

    Tables of old releases do not say where they end; then the next one's beginning does.
    """
    held = list(views)
    ranges = [view.effective_range(manifest.table(view).info) for view in held]
    for at, keys in enumerate(ranges[:-1]):
        if keys.stop is None:
            ranges[at] = replace(keys, stop=ranges[at + 1].start)
    return ranges


def narrow(view: SstView, shown: KeyRange, manifest: Manifest) -> SstView:
    """The view restricted to `shown`, which lies within what it shows now.

    The end is written as SlateDB does: the table's last key included, where nothing else cuts it off.
    """
    last = manifest.table(view).info.last_entry
    stored = BytesRange.of(shown)
    if last is not None and shown.stop == last + b"\0":
        stored = replace(stored, end=Bound(BoundKind.INCLUDED, last))
    return replace(view, visible_range=stored)


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
