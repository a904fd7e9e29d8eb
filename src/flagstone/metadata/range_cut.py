"""Cuts a key range out of the SSTs of a manifest, without rewriting one. Pure.

A view of an SST shows the keys in its visible range. A range is cut out by replacing each view that overlaps it: by
nothing, by the part before the range, by the part after it, or by both. An SST without a view leaves the manifest.

L0 gets no more views than it had, because too many stop writers: from the newest SST of L0 on that is cut in two, every
SST of L0 becomes a sorted run of its own, in its order.

A compaction that read the old views must not bring the rows back. Its result names its sources by id: views of L0, and
sorted runs. So every part of a view gets a new id, and so does every run from the oldest one that has changed up to the
newest. They are above all run ids of the manifest, which keeps the order of the runs, and above those of all compaction
jobs: a job whose run was cut away altogether must not find another one under its id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.compactions import Compactions, TieredSpec
from flagstone.metadata.manifest import Manifest, Segment, SsTable, replace_trees
from flagstone.types import KeyRange, RunId, Ulid

NewId = Callable[[int], Ulid]
"""A new id with the given time in milliseconds, and random bits that no other id has."""

_TIME_SHIFT = 80


def overlaps(manifest: Manifest, keys: KeyRange) -> bool:
    """Whether a view may show a key of the range."""
    return next(_overlapping(manifest, keys), None) is not None


def overlapping_ssts(manifest: Manifest, keys: KeyRange) -> list[SsTable]:
    """The SSTs of which a view may show a key of the range."""
    return [manifest.ssts[sst_id] for sst_id in dict.fromkeys(_overlapping(manifest, keys))]


def _overlapping(manifest: Manifest, keys: KeyRange) -> Iterator[Ulid]:
    for views in _ordered_lists(manifest):
        for view, shown in zip(views, _shown_ranges(views, manifest), strict=True):
            if not shown.intersect(keys).empty:
                yield view.sst_id


def highest_run(jobs: Compactions) -> int:
    """The highest run id that a job names; -1 without one."""
    named = [run_id for job in jobs.jobs for run_id in job.spec.sorted_runs]
    named += [job.spec.destination for job in jobs.jobs if isinstance(job.spec, TieredSpec)]
    return max(named, default=-1)


def cut_range(manifest: Manifest, keys: KeyRange, new_id: NewId, *, job_run: int = -1) -> Manifest:
    """The manifest without the keys of the range. Nothing else is changed: no counter, no checkpoint.

    `job_run` is the highest run id that a compaction job names.

    A segment that has lost all of its SSTs stays until the next flush, because it holds the marker of L0.
    """
    run_ids = map(RunId, count(max([job_run, *manifest.run_ids]) + 1))
    return replace_trees(
        manifest,
        tree=_cut_tree(manifest.tree, manifest, keys, new_id, run_ids),
        segments=[
            Segment(segment.prefix, _cut_tree(segment.tree, manifest, keys, new_id, run_ids))
            for segment in manifest.segments
        ],
    )


def _cut_tree(
    tree: Tree, manifest: Manifest, keys: KeyRange, new_id: NewId, run_ids: Iterator[RunId]
) -> Tree:
    cut_runs = [replace(run, views=_cut_views(run.views, manifest, keys, new_id)) for run in tree.runs]
    runs = _renumbered(tree.runs, cut_runs, run_ids)
    cut_l0 = [_cut_views((view,), manifest, keys, new_id) for view in tree.l0]
    kept = next((at for at, parts in enumerate(cut_l0) if len(parts) > 1), len(cut_l0))
    l0 = tuple(part for parts in cut_l0[:kept] for part in parts)
    moved = [parts for parts in cut_l0[kept:] if parts]
    stacked = [SortedRun(next(run_ids), parts) for parts in reversed(moved)]
    last_compacted = tree.last_compacted_l0 if not moved else tree.l0[kept].id
    newest = tree.newest_l0
    if tree.l0 and not l0 and newest is not None:
        # Behind every SST that was in L0: garbage collection knows then that no flush is about to add them.
        last_compacted = new_id((newest >> _TIME_SHIFT) + 1)
    return Tree(l0, (*reversed(stacked), *runs), last_compacted)


def _renumbered(
    before: tuple[SortedRun, ...], after: list[SortedRun], run_ids: Iterator[RunId]
) -> tuple[SortedRun, ...]:
    oldest = max(
        (at for at, (was, now) in enumerate(zip(before, after, strict=True)) if was.views != now.views),
        default=None,
    )
    if oldest is None:
        return before
    newer = [run for run in after[: oldest + 1] if run.views]
    renamed = [replace(run, id=next(run_ids)) for run in reversed(newer)]
    return (*reversed(renamed), *after[oldest + 1 :])


def _cut_views(
    views: tuple[SstView, ...], manifest: Manifest, keys: KeyRange, new_id: NewId
) -> tuple[SstView, ...]:
    left: list[SstView] = []
    for view, shown in zip(views, _shown_ranges(views, manifest), strict=True):
        if shown.empty or shown.intersect(keys).empty:
            left.append(view)
            continue
        for part in outside(shown, keys):
            renamed = replace(view, id=new_id(view.id >> _TIME_SHIFT))
            left.append(narrow(renamed, part, manifest))
    return tuple(left)


def outside(shown: KeyRange, keys: KeyRange) -> list[KeyRange]:
    """The parts of a range before and after `keys`, which overlap it; without empty ones."""
    parts = []
    if keys.start is not None:
        parts.append(KeyRange(shown.start, keys.start))
    if keys.stop is not None:
        parts.append(KeyRange(keys.stop, shown.stop))
    return [part for part in parts if not part.empty]


def _shown_ranges(views: tuple[SstView, ...], manifest: Manifest) -> list[KeyRange]:
    """The keys that each view of a run may show.

    SSTs of old releases do not record their last key. It may be the first key of the next SST, which has older
    versions of it then.
    """
    ranges = [view.effective_range(manifest.sst(view).info) for view in views]
    for at, keys in enumerate(ranges[:-1]):
        following = ranges[at + 1].start
        if keys.stop is None and following is not None:
            ranges[at] = replace(keys, stop=following + b"\0")
    return ranges


def _ordered_lists(manifest: Manifest) -> Iterator[tuple[SstView, ...]]:
    """Lists of views in key order: each view of L0 alone, and the runs."""
    for tree in manifest.trees:
        for view in tree.l0:
            yield (view,)
        for run in tree.runs:
            yield run.views


def narrow(view: SstView, shown: KeyRange, manifest: Manifest) -> SstView:
    """The view restricted to `shown`, which is within its current range.

    The end is stored as SlateDB stores it: the SST's last key, inclusive, unless the range ends before it.
    """
    last = manifest.sst(view).info.last_entry
    stored = BytesRange.of(shown)
    if last is not None and shown.stop == last + b"\0":
        stored = replace(stored, end=Bound(BoundKind.INCLUDED, last))
    return replace(view, visible_range=stored)
