"""The shape of the data: which SSTs there are and in which order they shadow each other.

A tree is read from new to old: L0 views in list order, then sorted runs in list order. Everything here is a
value; edits return a new tree.
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
    """How one end of a range treats its key. Stored: never renumber."""

    UNBOUNDED = 1
    INCLUDED = 2
    EXCLUDED = 3


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range; `key` is None exactly when the end is unbounded."""

    kind: BoundKind
    key: bytes | None = None

    def __post_init__(self) -> None:
        if (self.kind is BoundKind.UNBOUNDED) != (self.key is None):
            raise CorruptData(f"a range bound of kind {self.kind.name.lower()} with key {self.key!r}")


UNBOUNDED: Final = Bound(BoundKind.UNBOUNDED)


@dataclass(frozen=True, slots=True)
class BytesRange:
    """A range exactly as stored. Reading code wants `keys`, which says the same with a half-open range."""

    start: Bound = UNBOUNDED
    end: Bound = UNBOUNDED

    @property
    def keys(self) -> KeyRange:
        """The same keys as a half-open range. The successor of a key is the key followed by a zero byte."""
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
    """One SST as a tree sees it: all of it, or only the keys in `visible_range`.

    `id` names this appearance. It equals `sst_id` except in databases made by union or projection, where
    one SST may appear several times.
    """

    id: Ulid
    sst_id: Ulid
    visible_range: BytesRange | None = None

    @classmethod
    def whole(cls, sst_id: Ulid) -> SstView:
        """The view of a freshly written SST: all of it, under its own id."""
        return cls(sst_id, sst_id)

    def effective_range(self, info: SsTableInfo) -> KeyRange:
        """The keys this view can hold: those of its SST that are visible."""
        stop = None if info.last_entry is None else info.last_entry + b"\0"
        own = KeyRange(info.first_entry, stop)
        return own if self.visible_range is None else own.intersect(self.visible_range.keys)


@dataclass(frozen=True, slots=True)
class SortedRun:
    """Views in ascending key order. Neighbours may share one key whose versions straddle their border."""

    id: RunId
    views: tuple[SstView, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """L0 views newest first, then runs by strictly descending id.

    `last_compacted_l0` is the newest L0 view that compaction has already taken: whoever still holds it or an
    older one in a list of its own must drop them.
    """

    l0: tuple[SstView, ...] = ()
    runs: tuple[SortedRun, ...] = ()
    last_compacted_l0: Ulid | None = None

    @property
    def empty(self) -> bool:
        return not self.l0 and not self.runs

    @property
    def views(self) -> Iterator[SstView]:
        """Every view, from new to old; within a run by key."""
        yield from self.l0
        for run in self.runs:
            yield from run.views

    @property
    def newest_l0(self) -> Ulid | None:
        """The id no younger L0 may fall behind: the greatest live L0 SST, or what compaction took last."""
        return max((view.sst_id for view in self.l0), default=self.last_compacted_l0)


def newest_l0(trees: Iterable[Tree]) -> Ulid | None:
    """The greatest `newest_l0` of several trees; a new L0 id must not be stamped earlier than it."""
    return max((newest for tree in trees if (newest := tree.newest_l0) is not None), default=None)


def apply_flush(tree: Tree, view: SstView) -> Tree:
    """The tree with a new L0 in front. Adding the newest L0 a second time changes nothing."""
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
    """The tree after a job: its sources are gone, `output` is run `destination` (None: no run).

    `l0` are view ids in any order; the marker moves to the newest of them. Sources that are not in the tree mean
    that the job was decided on another tree, and raise InternalError; so does a destination that exists without
    being a source. An empty output leaves no run behind.
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
    """The views newer than the one compaction took last; all of them when that one is not in the list."""
    for position, view in enumerate(l0):
        if view.id == last_compacted:
            return l0[:position]
    return l0
