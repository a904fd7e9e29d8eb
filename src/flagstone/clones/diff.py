"""The SSTs that two states of a database do not share: only their rows can differ. Pure.

If a key is in no SST that only one of the states has, and in neither state's WAL, all its versions are in SSTs that
both states have; so it has the same value in both. Only the keys of the other SSTs can differ. It does not matter
whether an SST is in L0 or in a run: its rows are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest
from flagstone.types import KeyRange, Ulid

_Shown = tuple[Ulid, KeyRange]


@dataclass(frozen=True, slots=True)
class DiffPlan:
    """Both states reduced to the SSTs that the other one lacks.

    With `sparse` those are the smaller part: then it is cheaper to get their keys from both states than to scan both.
    """

    before: Manifest
    after: Manifest
    sparse: bool


def plan_diff(before: Manifest, after: Manifest, keys: KeyRange) -> DiffPlan:
    """The SSTs to compare, of those that have keys in `keys`."""
    shared = set(_shown(before)) & set(_shown(after))
    reduced = (_without(before, shared, keys), _without(after, shared, keys))
    different = sum(_bytes(manifest) for manifest in reduced)
    everything = sum(_bytes(_without(manifest, set(), keys)) for manifest in (before, after))
    return DiffPlan(*reduced, sparse=2 * different <= everything)


def _shown(manifest: Manifest) -> Iterator[_Shown]:
    for view in manifest.views:
        yield _what(manifest, view)


def _what(manifest: Manifest, view: SstView) -> _Shown:
    return view.sst_id, view.effective_range(manifest.sst(view).info)


def _without(manifest: Manifest, shared: set[_Shown], keys: KeyRange) -> Manifest:
    """The manifest without the shared SSTs and those outside the range. It must not be stored."""

    def differs(view: SstView) -> bool:
        shown = _what(manifest, view)
        return shown not in shared and not shown[1].intersect(keys).empty

    def reduced(tree: Tree) -> Tree:
        runs = (SortedRun(run.id, tuple(filter(differs, run.views))) for run in tree.runs)
        return Tree(tuple(filter(differs, tree.l0)), tuple(run for run in runs if run.views))

    return replace(
        manifest,
        tree=reduced(manifest.tree),
        segments=tuple(replace(segment, tree=reduced(segment.tree)) for segment in manifest.segments),
    )


def _bytes(manifest: Manifest) -> int:
    infos = (manifest.sst(view).info for view in manifest.views)
    return sum(info.index_offset + info.index_len for info in infos)
