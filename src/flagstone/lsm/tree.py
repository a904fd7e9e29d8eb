"""The LSM tree: which SSTs there are, and in which order they shadow each other.

A read goes from new to old: L0 views in list order, then sorted runs in list order. Everything here is immutable; edits
return a new tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from flagstone.errors import CorruptData, InternalError
from flagstone.format.sst_info import SsTableInfo
from flagstone.types import KeyRange, RunId, Ulid


class BoundKind(IntEnum):
    """Whether a range includes the key at its end. Stored in manifests: the numbers never change."""

    UNBOUNDED = 1
    INCLUDED = 2
    EXCLUDED = 3


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range; `key` is None if and only if the end is unbounded."""

    kind: BoundKind
    key: bytes | None = None

    def __post_init__(self) -> None:
        if (self.kind is BoundKind.UNBOUNDED) != (self.key is None):
            raise CorruptData(f"a range bound of kind {self.kind.name.lower()} with key {self.key!r}")


UNBOUNDED: Final = Bound(BoundKind.UNBOUNDED)


@dataclass(frozen=True, slots=True)
class BytesRange:
    """A range as it is stored. Reads use `keys`, the same range in half-open form."""

    start: Bound = UNBOUNDED
    end: Bound = UNBOUNDED

    @property
    def keys(self) -> KeyRange:
        """The same keys as a half-open range. The successor of a key is the key with a zero byte appended."""
        start, stop = self.start.key, self.end.key
        if start is not None and self.start.kind is BoundKind.EXCLUDED:
            start += b"\0"
        if stop is not None and self.end.kind is BoundKind.INCLUDED:
            stop += b"\0"
        return KeyRange(start, stop)

    @classmethod
    def of(cls, keys: KeyRange) -> BytesRange:
        """The half-open range in its stored form: start included, end excluded."""
        start = UNBOUNDED if keys.start is None else Bound(BoundKind.INCLUDED, keys.start)
        end = UNBOUNDED if keys.stop is None else Bound(BoundKind.EXCLUDED, keys.stop)
        return cls(start, end)


@dataclass(frozen=True, slots=True)
class SstView:
    """An SST in a tree: all of it, or only the keys in `visible_range`.

    `id` identifies the view. It equals `sst_id` except in unions and projections, where one SST may have several views.
    """

    id: Ulid
    sst_id: Ulid
    visible_range: BytesRange | None = None

    @classmethod
    def whole(cls, sst_id: Ulid) -> SstView:
        """The view of a new SST: all of it, under its own id."""
        return cls(sst_id, sst_id)

    def effective_range(self, info: SsTableInfo) -> KeyRange:
        """The keys that this view can hold: the visible keys of its SST."""
        stop = None if info.last_entry is None else info.last_entry + b"\0"
        own = KeyRange(info.first_entry, stop)
        return own if self.visible_range is None else own.intersect(self.visible_range.keys)


@dataclass(frozen=True, slots=True)
class SortedRun:
    """Views in ascending key order. The versions of one key may be in two neighbours."""

    id: RunId
    views: tuple[SstView, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """L0 views newest first, then runs by strictly descending id.

    `last_compacted_l0` is the newest L0 view that was compacted. A writer that still lists it, or an older view, drops
    them.
    """

    l0: tuple[SstView, ...] = ()
    runs: tuple[SortedRun, ...] = ()
    last_compacted_l0: Ulid | None = None

    @property
    def empty(self) -> bool:
        return not self.l0 and not self.runs

    @property
    def views(self) -> Iterator[SstView]:
        """Every view, from new to old; within a run in key order."""
        yield from self.l0
        for run in self.runs:
            yield from run.views

    @property
    def newest_l0(self) -> Ulid | None:
        """The greatest id of an L0 SST; without L0 the last one that was compacted."""
        return max((view.sst_id for view in self.l0), default=self.last_compacted_l0)


def newest_l0(trees: Iterable[Tree]) -> Ulid | None:
    """The greatest `newest_l0` of several trees. The time in the id of a new L0 SST must not be before it."""
    return max((newest for tree in trees if (newest := tree.newest_l0) is not None), default=None)


def apply_flush(tree: Tree, view: SstView) -> Tree:
    """The tree with a new L0 view in front. Adding the newest L0 view again changes nothing."""
    if tree.l0 and tree.l0[0] == view:
        return tree
    return replace(tree, l0=(view, *tree.l0))


def apply_compaction(
    tree: Tree,
    *,
    l0: Collection[Ulid],
    runs: Collection[RunId],
    destination: RunId | None,
    output: tuple[SstView, ...] = (),
) -> Tree:
    """The tree after a compaction job: without its sources, and with `output` as run `destination` (None: no run).

    `l0` are view ids in any order; `last_compacted_l0` becomes the newest of them. Raises `InternalError` if a source
    is not in the tree, because the job was then planned on another tree, or if the destination is a run that is not
    a source. An empty output adds no run.
    """
    held_l0, held_runs = {view.id for view in tree.l0}, {run.id for run in tree.runs}
    if not held_l0.issuperset(l0) or not held_runs.issuperset(runs):
        raise InternalError(f"compaction sources l0={sorted(l0)} runs={sorted(runs)} are not all in the tree")
    if destination in held_runs and destination not in runs:
        raise InternalError(f"compaction would replace run {destination}, which is not one of its sources")
    kept = [run for run in tree.runs if run.id not in runs]
    if destination is not None and output:
        kept.append(SortedRun(destination, output))
        kept.sort(key=lambda run: -run.id)
    return Tree(
        tuple(view for view in tree.l0 if view.id not in l0),
        tuple(kept),
        next((view.id for view in tree.l0 if view.id in l0), tree.last_compacted_l0),
    )


def cut_l0(l0: tuple[SstView, ...], last_compacted: Ulid | None) -> tuple[SstView, ...]:
    """The views newer than `last_compacted`; all of them if it is not in the list."""
    for position, view in enumerate(l0):
        if view.id == last_compacted:
            return l0[:position]
    return l0
