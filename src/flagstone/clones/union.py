"""Union: several databases that hold different keys, as one. Pure.

No SST is rewritten; the new database borrows them all. Views of one SST that a split has separated become one view
again, and so do runs, so that a split and a union give the original manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

from flagstone.clones.origin import CheckpointedSource, merge_lenders
from flagstone.clones.projection import shown_ranges
from flagstone.errors import InternalError, InvalidRequest
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import (
    Manifest,
    Segment,
    SsTable,
    renew_repeated_view_ids,
    replace_trees,
)
from flagstone.metadata.range_cut import narrow
from flagstone.types import KeyRange, RunId, Seq, Ulid


@dataclass(frozen=True, slots=True)
class _Shown:
    """One view of one source, and the keys it shows."""

    view: SstView
    keys: KeyRange
    source: int


def unite(sources: Sequence[CheckpointedSource]) -> Manifest:
    """The manifest of all sources together, not initialized, its lenders without final checkpoints yet.

    Epochs, WAL ids and the sequence tracker start from the beginning. Sequence numbers continue after the greatest of
    all sources, and so does the clock.

    Raises:
        InvalidRequest: two sources hold keys of one range, or have different segment extractors.

    """
    extractors = {source.manifest.segment_extractor_name for source in sources}
    if len(extractors) > 1:
        named = ", ".join(f"{s.path!r}: {s.manifest.segment_extractor_name!r}" for s in sources)
        raise InvalidRequest(
            f"the databases have different segment extractors ({named}) and cannot be united"
        )
    check_disjoint(sources)
    ssts = _ssts(sources)
    whole = Manifest(
        ssts=ssts,
        external_dbs=merge_lenders(chain.from_iterable(source.lenders for source in sources)),
    )
    trees = _unite_trees(sources, whole)
    united = replace_trees(
        replace(
            whole,
            initialized=False,
            segment_extractor_name=next(iter(extractors)),
            last_l0_seq=max((source.manifest.last_l0_seq for source in sources), default=Seq(0)),
            last_l0_clock_tick=max(source.manifest.last_l0_clock_tick for source in sources),
        ),
        tree=trees.pop(None, Tree()),
        segments=[
            Segment(prefix, tree) for prefix, tree in trees.items() if prefix is not None and not tree.empty
        ],
    )
    return renew_repeated_view_ids(united)


def check_disjoint(sources: Sequence[CheckpointedSource]) -> None:
    """Raise `InvalidRequest`, with both databases and their ranges, if two sources show keys of one range."""
    shown = sorted(
        ((keys, number) for number, source in enumerate(sources) for keys in _all_shown(source.manifest)),
        key=lambda entry: entry[0].start or b"",
    )
    reach: tuple[KeyRange, int] | None = None
    for keys, number in shown:
        if reach is not None and number != reach[1] and not reach[0].intersect(keys).empty:
            one, other = sources[reach[1]].path, sources[number].path
            raise InvalidRequest(
                f"{one!r} and {other!r} overlap: {one!r} shows keys of {_text(reach[0])}, {other!r} of {_text(keys)}; "
                "only databases with separate keys can be united, so clone each with a range first"
            )
        # Ranges ascend by their start, so only the one with the greatest end can overlap the next.
        if reach is None or keys.stop is None or (reach[0].stop is not None and keys.stop > reach[0].stop):
            reach = (keys, number)


def check_adjacent(sources: Sequence[CheckpointedSource], ranges: Sequence[KeyRange | None]) -> None:
    """Raise `InvalidRequest`, with the gap or overlap, unless the ranges that were given for sources are adjacent.

    A source without a range may fill the gap between two ranges: then it must hold keys there.
    """
    given = sorted(
        ((keys, source) for keys, source in zip(ranges, sources, strict=True) if keys is not None),
        key=lambda entry: entry[0].start or b"",
    )
    others = [
        keys
        for asked, source in zip(ranges, sources, strict=True)
        if asked is None
        for keys in _all_shown(source.manifest)
    ]
    for (keys, one), (following, other) in pairwise(given):
        named = f"{one.path!r} with {_text(keys)} and {other.path!r} with {_text(following)}"
        if keys.stop is None or keys.stop > (following.start or b""):
            both = _text(keys.intersect(following))
            raise InvalidRequest(
                f"the ranges given for {named} overlap in {both}; the ranges of a union are adjacent, so each begins "
                "where the one before it ends"
            )
        gap = KeyRange(keys.stop, following.start)
        if not gap.empty and all(gap.intersect(held).empty for held in others):
            raise InvalidRequest(
                f"the ranges given for {named} leave the gap {_text(gap)}; the ranges of a union are adjacent, so "
                "each begins where the one before it ends"
            )


def find_collisions(sources: Sequence[CheckpointedSource]) -> list[tuple[int, Ulid]]:
    """SSTs that have the id of another SST in an earlier source: (index of the source, id).

    Ids are random, so only copied files collide. A manifest identifies an SST by its id alone, so such an SST needs
    another id, and with it a copy in the new database.
    """
    owners: dict[Ulid, str] = {}
    found = []
    for number, source in enumerate(sources):
        for sst_id in source.manifest.ssts:
            owner = source.owner_of(sst_id)
            if owners.setdefault(sst_id, owner) != owner:
                found.append((number, sst_id))
    return found


def rename_ssts(manifest: Manifest, renamed: Mapping[Ulid, Ulid]) -> Manifest:
    """The manifest with other ids for some SSTs, which were copied, so that no database lends them."""

    def views(held: Iterable[SstView]) -> tuple[SstView, ...]:
        return tuple(replace(view, sst_id=renamed.get(view.sst_id, view.sst_id)) for view in held)

    def tree(held: Tree) -> Tree:
        runs = tuple(replace(run, views=views(run.views)) for run in held.runs)
        return replace(held, l0=views(held.l0), runs=runs)

    copies = [replace(manifest.ssts[old], id=new) for old, new in renamed.items()]
    return replace_trees(
        manifest,
        tree=tree(manifest.tree),
        segments=[replace(segment, tree=tree(segment.tree)) for segment in manifest.segments],
        added=copies,
    )


def _ssts(sources: Sequence[CheckpointedSource]) -> dict[Ulid, SsTable]:
    if find_collisions(sources):
        raise InternalError("two SSTs of one id: those of a later source must be copied first")
    return {sst_id: sst for source in sources for sst_id, sst in source.manifest.ssts.items()}


def _all_shown(manifest: Manifest) -> Iterator[KeyRange]:
    for tree in manifest.trees:
        for view in tree.l0:
            yield from shown_ranges((view,), manifest)
        for run in tree.runs:
            yield from shown_ranges(run.views, manifest)


# -- trees ------------------------------------------------------------------------------------------------


def _unite_trees(sources: Sequence[CheckpointedSource], whole: Manifest) -> dict[bytes | None, Tree]:
    """The trees by segment prefix; None is the root tree."""
    by_prefix: dict[bytes | None, list[tuple[int, Tree]]] = {}
    for number, source in enumerate(sources):
        by_prefix.setdefault(None, []).append((number, source.manifest.tree))
        for segment in source.manifest.segments:
            by_prefix.setdefault(segment.prefix, []).append((number, segment.tree))
    runs: dict[tuple[RunId, bytes | None], list[_Shown]] = {}
    for prefix, trees in by_prefix.items():
        for number, tree in trees:
            for run in tree.runs:
                runs.setdefault((run.id, prefix), []).extend(_shown(run.views, whole, number))
    # Runs keep their order within each tree, and get new ids, because run ids are unique over all trees.
    order = sorted(runs, key=lambda key: (key[0], key[1] or b""))
    united: dict[bytes | None, Tree] = {}
    for prefix, trees in by_prefix.items():
        l0 = _unite_l0([_shown_l0(tree, whole, number) for number, tree in trees], whole)
        renumbered = [
            SortedRun(RunId(number), _joined(_in_key_order(runs[key]), whole))
            for number, key in enumerate(order)
            if key[1] == prefix
        ]
        united[prefix] = Tree(l0, tuple(reversed(renumbered)))
    return united


def _shown(views: Iterable[SstView], whole: Manifest, source: int) -> list[_Shown]:
    held = list(views)
    return [_Shown(view, keys, source) for view, keys in zip(held, shown_ranges(held, whole), strict=True)]


def _shown_l0(tree: Tree, whole: Manifest, source: int) -> list[list[_Shown]]:
    """The L0 of one source, newest first; neighbouring views of one SST are grouped."""
    shown = [entry for view in tree.l0 for entry in _shown((view,), whole, source)]
    return [list(group) for _, group in groupby(shown, key=lambda entry: entry.view.sst_id)]


def _unite_l0(lists: Sequence[list[list[_Shown]]], whole: Manifest) -> tuple[SstView, ...]:
    """The L0 lists as one. Each keeps its order, and views of one SST become neighbours if the orders allow it.

    An SST is taken once it is at the head of every list that still has it. If lists have two SSTs in different orders,
    which only unions of unions have, one of the SSTs appears in two places.
    """
    waiting = [list(reversed(groups)) for groups in lists if groups]
    united: list[SstView] = []
    while waiting:
        heads = {groups[-1][0].view.sst_id for groups in waiting}
        later = {group[0].view.sst_id for groups in waiting for group in groups[:-1]}
        chosen = max(heads - later or heads)
        taken = [groups.pop() for groups in waiting if groups[-1][0].view.sst_id == chosen]
        united += _joined(_in_key_order(chain.from_iterable(taken)), whole)
        waiting = [groups for groups in waiting if groups]
    return tuple(united)


def _in_key_order(shown: Iterable[_Shown]) -> list[_Shown]:
    """By key. Neighbours of one run that share a key stay in their order, because sorting is stable."""
    return sorted(shown, key=lambda entry: entry.keys.start or b"")


def _joined(shown: Sequence[_Shown], whole: Manifest) -> tuple[SstView, ...]:
    """The views; those of one SST with adjacent ranges become one. A gap between two ranges is deleted data."""
    joined: list[_Shown] = []
    for entry in shown:
        last = joined[-1] if joined else None
        if last is not None and last.view.sst_id == entry.view.sst_id and last.keys.stop == entry.keys.start:
            joined[-1] = replace(last, keys=KeyRange(last.keys.start, entry.keys.stop))
        else:
            joined.append(entry)
    return tuple(_whole_or_narrow(entry, whole) for entry in joined)


def _whole_or_narrow(entry: _Shown, whole: Manifest) -> SstView:
    unrestricted = replace(entry.view, visible_range=None)
    if unrestricted.effective_range(whole.sst(entry.view).info) == entry.keys:
        return unrestricted
    return narrow(entry.view, entry.keys, whole)


def _text(keys: KeyRange) -> str:
    start = "start" if keys.start is None else repr(keys.start)
    stop = "end" if keys.stop is None else repr(keys.stop)
    return f"[{start}, {stop})"
