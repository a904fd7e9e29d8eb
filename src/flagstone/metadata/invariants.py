"""Rules between one manifest and the next, checked before every commit.

A rule that fails is a bug on our side: it raises InternalError, names itself and the ids, and nothing is written.
`current` is None for the very first manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from flagstone.errors import CorruptData, InternalError
from flagstone.format.sst import check_layout
from flagstone.format.sst_info import SstType
from flagstone.lsm.tree import SstView
from flagstone.metadata.annotations import mark_entries
from flagstone.metadata.destruction import check_destroyed, is_vacant
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.runtime.ids import ulid_ms, ulid_text
from flagstone.types import KeyRange, Ulid

N = TypeVar("N", bound=int)


def check_manifest(following: Manifest, current: Manifest | None) -> None:
    """Raise InternalError unless `following` may be committed after `current`.

    Raises `Closed` when `current` is the manifest of a destroyed database. The first manifest of a new database at a
    vacant path follows that of the vacancy, with which it shares only the counters.
    """
    if current is not None and not is_vacant(current):
        check_destroyed(following, current)
    _check_step(following, current)


def check_stored(following: Manifest, current: Manifest | None) -> None:
    """Raise InternalError unless two stored manifests may follow each other, whichever process wrote them."""
    if current is not None and mark_entries(following) != mark_entries(current) and not is_vacant(current):
        check_destruction(following, current)
    else:
        _check_step(following, current)


def _check_step(following: Manifest, current: Manifest | None) -> None:
    for state_rule in _MANIFEST_STATE_RULES:
        state_rule(following)
    view_ids_unique(following, current)
    if current is not None and not is_vacant(current):
        for step_rule in _MANIFEST_STEP_RULES:
            step_rule(following, current)


def check_destruction(following: Manifest, current: Manifest | None) -> None:
    """The rules for the destroyer, which marks a database and erases it: counters grow, the data may vanish."""
    for state_rule in _MANIFEST_STATE_RULES:
        state_rule(following)
    if current is not None:
        for name in ("writer_epoch", "compactor_epoch", "replay_after_wal_id", "last_l0_seq"):
            before, after = getattr(current, name), getattr(following, name)
            if after < before:
                broken(check_destruction, f"{name} from {before} to {after}")


def check_replaced_state(following: Manifest, current: Manifest | None) -> None:
    """The rules for restoring an older state: the SSTs of L0 may be any, all other rules hold."""
    for state_rule in _MANIFEST_STATE_RULES:
        state_rule(following)
    view_ids_unique(following, current)
    if current is not None:
        check_destroyed(following, current)
        for step_rule in (counters_grow, stays_initialized, tracker_not_ahead):
            step_rule(following, current)


def check_repaired_state(following: Manifest, current: Manifest | None) -> None:
    """The rules for repairing a damaged state: as for a restored one, but a clock that ran ahead is set back."""
    for state_rule in _MANIFEST_STATE_RULES:
        state_rule(following)
    view_ids_unique(following, current)
    if current is not None:
        clock_kept = replace(following, last_l0_clock_tick=current.last_l0_clock_tick)
        for step_rule in (counters_grow, stays_initialized, tracker_not_ahead):
            step_rule(clock_kept, current)


def check_stored_manifest(manifest: Manifest) -> None:
    """Raise CorruptData if no writer can have written this manifest. For files without a checksum."""
    try:
        for rule in (
            run_ids_descend,
            run_ids_unique,
            ssts_are_those_referenced,
            segments_ordered_and_disjoint,
        ):
            rule(manifest)
    except InternalError as error:
        raise CorruptData(f"no writer makes such a manifest: {error}", offset=0) from None
    for sst in manifest.ssts.values():
        check_record(sst)
    repeated = _repeated(checkpoint.id.int for checkpoint in manifest.checkpoints)
    if repeated:
        raise CorruptData("two checkpoints have one id", offset=0)


def check_record(sst: SsTable) -> None:
    """Raise CorruptData unless an SST can have the parts that its record describes, and ordered keys."""
    info = sst.info
    try:
        check_layout(info)
    except CorruptData as error:
        raise CorruptData(f"SST {ulid_text(sst.id)}: {error.problem}", offset=0) from None
    first, last = info.first_entry, info.last_entry
    wrong_keys = not first or (last is not None and last < first)
    if wrong_keys or info.sst_type is not SstType.COMPACTED or sst.format_version not in (1, 2):
        raise CorruptData(
            f"SST {ulid_text(sst.id)} of type {info.sst_type.name} and format version {sst.format_version} has "
            f"keys from {first!r} to {last!r}",
            offset=0,
        )


def run_ids_descend(following: Manifest) -> None:
    """Run ids strictly descend within a tree: a run shadows the runs after it."""
    for tree in following.trees:
        for newer, older in pairwise(tree.runs):
            if newer.id <= older.id:
                broken(run_ids_descend, f"run {newer.id} before run {older.id}")


def run_ids_unique(following: Manifest) -> None:
    """No run id occurs twice in the segments of a manifest."""
    repeated = _repeated(following.run_ids)
    if repeated:
        broken(run_ids_unique, ", ".join(map(str, sorted(repeated))))


def view_ids_unique(following: Manifest, current: Manifest | None) -> None:
    """No view id occurs twice, unless it already did: SlateDB's union leaves repeated ids behind."""
    ids = [view.id for views in following.lists_of_views for view in views]
    if len(set(ids)) == len(ids):
        return
    known = set() if current is None else _repeated(view.id for view in current.views)
    repeated = _repeated(ids) - known
    if repeated:
        broken(view_ids_unique, ulid_texts(sorted(repeated)))


def ssts_are_those_referenced(following: Manifest) -> None:
    """The manifest describes exactly the SSTs its views refer to, each under its own id."""
    referenced = {view.sst_id for views in following.lists_of_views for view in views}
    described = [sst.id for sst in following.ssts.values()]
    if referenced == following.ssts.keys() and described == list(following.ssts):
        return
    odd = referenced ^ following.ssts.keys()
    odd |= {sst_id for sst_id, sst in following.ssts.items() if sst.id != sst_id}
    broken(ssts_are_those_referenced, ulid_texts(odd))


def segments_ordered_and_disjoint(following: Manifest) -> None:
    """Segments ascend by prefix, and no prefix starts with another one."""
    for one, next_one in pairwise(segment.prefix for segment in following.segments):
        # In ascending order a prefix of any later entry is a prefix of the next one as well.
        if one >= next_one or next_one.startswith(one):
            broken(segments_ordered_and_disjoint, f"{one!r} before {next_one!r}")


def counters_grow(following: Manifest, current: Manifest) -> None:
    """Epochs, WAL ids, sequence numbers and the clock never go back."""
    for name in (
        "writer_epoch",
        "compactor_epoch",
        "replay_after_wal_id",
        "wal_id_last_seen",
        "last_l0_seq",
        "last_l0_clock_tick",
    ):
        before, after = getattr(current, name), getattr(following, name)
        if after < before:
            broken(counters_grow, f"{name} from {before} to {after}")


def stays_initialized(following: Manifest, current: Manifest) -> None:
    """A finished database does not become a clone under construction again."""
    if current.initialized and not following.initialized:
        broken(stays_initialized, "initialized went back to false")


def tracker_not_ahead(following: Manifest, current: Manifest) -> None:
    """No sequence number is tracked before it is flushed: the next flush would go back in time.

    SlateDB's writer aborts on such a manifest.
    """
    tracked, before = following.sequence_tracker.sequences, current.sequence_tracker.sequences
    if tracked[-1:] != before[-1:] and tracked and tracked[-1] > following.last_l0_seq:
        broken(tracker_not_ahead, f"{tracked[-1]} is tracked, {following.last_l0_seq} was flushed")


def new_l0_not_older(following: Manifest, current: Manifest) -> None:
    """A new L0 is not stamped earlier than the newest one before it; equal milliseconds are fine."""
    newest = current.newest_l0
    if newest is None:
        return
    for sst_id in _l0_ssts(following) - _l0_ssts(current):
        if ulid_ms(sst_id) < ulid_ms(newest):
            broken(new_l0_not_older, f"{ulid_text(sst_id)} after {ulid_text(newest)}")


def l0_order_kept(following: Manifest, current: Manifest) -> None:
    """New L0 views come before the old ones, and the old ones keep their order. A view may become several parts."""
    trees_before = {segment.prefix: segment.tree for segment in current.segments}
    pairs = [(following.tree, current.tree)]
    pairs += [
        (segment.tree, trees_before[segment.prefix])
        for segment in following.segments
        if segment.prefix in trees_before
    ]
    for after, before in pairs:
        held: dict[Ulid, list[tuple[int, SstView]]] = {}
        for position, view in enumerate(before.l0):
            held.setdefault(view.sst_id, []).append((position, view))
        positions = [_former_position(view, held.get(view.sst_id, ())) for view in after.l0]
        if positions != sorted(positions):
            broken(l0_order_kept, ulid_texts(view.id for view in after.l0))


_MANIFEST_STATE_RULES = (
    run_ids_descend,
    run_ids_unique,
    ssts_are_those_referenced,
    segments_ordered_and_disjoint,
)
_MANIFEST_STEP_RULES = (counters_grow, stays_initialized, tracker_not_ahead, new_l0_not_older, l0_order_kept)


def _former_position(view: SstView, before: Iterable[tuple[int, SstView]]) -> int:
    """The position of the view that showed all keys of this one; -1 for a new view."""
    keys = _visible(view)
    return next((position for position, former in before if keys == keys.intersect(_visible(former))), -1)


def _visible(view: SstView) -> KeyRange:
    return KeyRange() if view.visible_range is None else view.visible_range.keys


def _l0_ssts(manifest: Manifest) -> set[Ulid]:
    return {view.sst_id for tree in manifest.trees for view in tree.l0}


def _repeated(ids: Iterable[N]) -> set[N]:
    return {number for number, count in Counter(ids).items() if count > 1}


def ulid_texts(ids: Iterable[Ulid]) -> str:
    return ", ".join(ulid_text(number) for number in ids)


def broken(rule: Callable[..., None], detail: str) -> None:
    raise InternalError(f"rule {rule.__name__} would be broken: {detail}")
