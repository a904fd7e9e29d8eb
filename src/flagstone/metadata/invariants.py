"""What must hold between one metadata version and the next, checked before every commit.

A rule that fails is a bug on our side: it raises InternalError, names itself and the ids, and nothing is
written. `current` is None for the very first version.
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
from flagstone.lsm.tree import BytesRange, SstView
from flagstone.metadata.compactions import Compactions, may_follow
from flagstone.metadata.destruction import check_destroyed, is_vacant, mark_entries
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.runtime.ids import ulid_ms, ulid_text
from flagstone.types import Ulid

N = TypeVar("N", bound=int)


def check_manifest(following: Manifest, current: Manifest | None) -> None:
    """Raise InternalError unless `following` may be committed after `current`.

    Raises `Closed` when `current` is the manifest of a destroyed database. The first manifest of a new database at a
    vacant path follows that of the vacancy, with which it has nothing but numbers in common.
    """
    if current is not None and not is_vacant(current):
        check_destroyed(following, current)
    _check_step(following, current)


def check_stored(following: Manifest, current: Manifest | None) -> None:
    """Raise InternalError unless two stored versions may follow each other, whichever process wrote them."""
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
    """The rules for the destroyer, which marks a database and erases it: numbers grow, the data may vanish."""
    for state_rule in _MANIFEST_STATE_RULES:
        state_rule(following)
    if current is not None:
        for name in ("writer_epoch", "compactor_epoch", "replay_after_wal_id", "last_l0_seq"):
            before, after = getattr(current, name), getattr(following, name)
            if after < before:
                _broken(check_destruction, f"{name} from {before} to {after}")


def check_replaced_state(following: Manifest, current: Manifest | None) -> None:
    """The rules when an older state is made the current one again: the tables of L0 may be any, all else holds."""
    for state_rule in _MANIFEST_STATE_RULES:
        state_rule(following)
    view_ids_unique(following, current)
    if current is not None:
        check_destroyed(following, current)
        for step_rule in (counters_grow, stays_initialized, tracker_not_ahead):
            step_rule(following, current)


def check_repaired_state(following: Manifest, current: Manifest | None) -> None:
    """The rules when a damaged state is repaired: as for a replaced one, but a clock that ran ahead is set back."""
    for state_rule in _MANIFEST_STATE_RULES:
        state_rule(following)
    view_ids_unique(following, current)
    if current is not None:
        clock_kept = replace(following, last_l0_clock_tick=current.last_l0_clock_tick)
        for step_rule in (counters_grow, stays_initialized, tracker_not_ahead):
            step_rule(clock_kept, current)


def check_compactions(following: Compactions, current: Compactions | None) -> None:
    """Raise InternalError unless `following` may be committed after `current`."""
    for state_rule in _COMPACTIONS_STATE_RULES:
        state_rule(following)
    if current is not None:
        for step_rule in _COMPACTIONS_STEP_RULES:
            step_rule(following, current)


def check_stored_manifest(manifest: Manifest) -> None:
    """Raise CorruptData if a manifest that was read cannot have been written so: for files without a checksum."""
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
    for table in manifest.ssts.values():
        check_record(table)
    repeated = _repeated(checkpoint.id.int for checkpoint in manifest.checkpoints)
    if repeated:
        raise CorruptData("two checkpoints have one id", offset=0)


def check_stored_compactions(compactions: Compactions) -> None:
    """Raise CorruptData if a compactions file that was read cannot have been written so."""
    try:
        job_ids_ascend(compactions)
    except InternalError as error:
        raise CorruptData(f"no coordinator makes such a file: {error}", offset=0) from None
    for job in compactions.jobs:
        parts = job.context.subcompactions if job.context else ()
        for table in (*job.output_ssts, *(table for part in parts for table in part.output_ssts)):
            check_record(table)


def check_record(table: SsTable) -> None:
    """Raise CorruptData unless an SST can have the parts that its record describes, and keys in their order."""
    info = table.info
    try:
        check_layout(info)
    except CorruptData as error:
        raise CorruptData(f"SST {ulid_text(table.id)}: {error.problem}", offset=0) from None
    first, last = info.first_entry, info.last_entry
    wrong_keys = not first or (last is not None and last < first)
    if wrong_keys or info.sst_type is not SstType.COMPACTED or table.format_version not in (1, 2):
        raise CorruptData(
            f"SST {ulid_text(table.id)} of type {info.sst_type.name} and format version {table.format_version} has "
            f"keys from {first!r} to {last!r}",
            offset=0,
        )


def run_ids_descend(following: Manifest) -> None:
    """Run ids strictly descend within a tree: their order is the order in which they shadow each other."""
    for tree in following.trees:
        for newer, older in pairwise(tree.runs):
            if newer.id <= older.id:
                _broken(run_ids_descend, f"run {newer.id} stands before run {older.id}")


def run_ids_unique(following: Manifest) -> None:
    """No run id occurs twice, in all segments together."""
    repeated = _repeated(following.run_ids)
    if repeated:
        _broken(run_ids_unique, ", ".join(map(str, sorted(repeated))))


def view_ids_unique(following: Manifest, current: Manifest | None) -> None:
    """No view id occurs twice, unless it already did: SlateDB's union leaves repeated ids behind."""
    known = set() if current is None else _repeated(view.id for view in current.views)
    repeated = _repeated(view.id for view in following.views) - known
    if repeated:
        _broken(view_ids_unique, _texts(sorted(repeated)))


def ssts_are_those_referenced(following: Manifest) -> None:
    """The manifest describes exactly the SSTs its views refer to, each under its own id."""
    referenced = {view.sst_id for view in following.views}
    odd = referenced ^ following.ssts.keys()
    odd |= {sst_id for sst_id, table in following.ssts.items() if table.id != sst_id}
    if odd:
        _broken(ssts_are_those_referenced, _texts(odd))


def segments_ordered_and_disjoint(following: Manifest) -> None:
    """Segments ascend by prefix, and no prefix starts with another one."""
    for one, next_one in pairwise(segment.prefix for segment in following.segments):
        # In ascending order a prefix of any later entry is a prefix of the next one as well.
        if one >= next_one or next_one.startswith(one):
            _broken(segments_ordered_and_disjoint, f"{one!r} before {next_one!r}")


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
            _broken(counters_grow, f"{name} from {before} to {after}")


def stays_initialized(following: Manifest, current: Manifest) -> None:
    """A finished database does not become a clone under construction again."""
    if current.initialized and not following.initialized:
        _broken(stays_initialized, "initialized went back to false")


def tracker_not_ahead(following: Manifest, current: Manifest) -> None:
    """No sequence number is tracked before it is flushed: the next flush would seem to go back in time.

    The official writer aborts on such a manifest.
    """
    tracked, before = following.sequence_tracker.sequences, current.sequence_tracker.sequences
    if tracked[-1:] != before[-1:] and tracked and tracked[-1] > following.last_l0_seq:
        _broken(tracker_not_ahead, f"{tracked[-1]} is tracked, {following.last_l0_seq} was flushed")


def new_l0_not_older(following: Manifest, current: Manifest) -> None:
    """A new L0 is not stamped earlier than the newest one before it; equal milliseconds are fine."""
    newest = current.newest_l0
    if newest is None:
        return
    for sst_id, _ in _l0_tables(following) - _l0_tables(current):
        if ulid_ms(sst_id) < ulid_ms(newest):
            _broken(new_l0_not_older, f"{ulid_text(sst_id)} after {ulid_text(newest)}")


def l0_order_kept(following: Manifest, current: Manifest) -> None:
    """New L0 views stand before the old ones, and the old ones keep their order."""
    trees_before = {segment.prefix: segment.tree for segment in current.segments}
    pairs = [(following.tree, current.tree)]
    pairs += [
        (segment.tree, trees_before[segment.prefix])
        for segment in following.segments
        if segment.prefix in trees_before
    ]
    for after, before in pairs:
        place = {_shown(view): position for position, view in enumerate(before.l0)}
        places = [place.get(_shown(view), -1) for view in after.l0]
        if places != sorted(places):
            _broken(l0_order_kept, _texts(view.id for view in after.l0))


def job_ids_ascend(following: Compactions) -> None:
    """Jobs are listed once each, ascending by id."""
    for one, next_one in pairwise(job.id for job in following.jobs):
        if one >= next_one:
            _broken(job_ids_ascend, f"{ulid_text(one)} before {ulid_text(next_one)}")


def outputs_not_older_than_job(following: Compactions) -> None:
    """No output of a job is stamped earlier than the job itself."""
    for job in following.jobs:
        parts = job.context.subcompactions if job.context else ()
        outputs = [*job.output_ssts, *(table for part in parts for table in part.output_ssts)]
        early = [table.id for table in outputs if ulid_ms(table.id) < ulid_ms(job.id)]
        if early:
            _broken(outputs_not_older_than_job, f"{_texts(early)} of job {ulid_text(job.id)}")


def coordinator_epoch_grows(following: Compactions, current: Compactions) -> None:
    """The epoch of the compactions file never goes back."""
    if following.compactor_epoch < current.compactor_epoch:
        _broken(coordinator_epoch_grows, f"from {current.compactor_epoch} to {following.compactor_epoch}")


def new_job_not_older(following: Compactions, current: Compactions) -> None:
    """A new job is not stamped earlier than the newest one before it; equal milliseconds are fine."""
    newest = current.newest_job
    for job in following.jobs:
        if newest is not None and current.job(job.id) is None and ulid_ms(job.id) < ulid_ms(newest):
            _broken(new_job_not_older, f"{ulid_text(job.id)} after {ulid_text(newest)}")


def jobs_follow_life_cycle(following: Compactions, current: Compactions) -> None:
    """A job's status changes only along its life cycle."""
    for job in following.jobs:
        before = current.job(job.id)
        if before is not None and not may_follow(before.status, job.status):
            _broken(
                jobs_follow_life_cycle,
                f"job {ulid_text(job.id)} from {before.status.name} to {job.status.name}",
            )


_MANIFEST_STATE_RULES = (
    run_ids_descend,
    run_ids_unique,
    ssts_are_those_referenced,
    segments_ordered_and_disjoint,
)
_MANIFEST_STEP_RULES = (counters_grow, stays_initialized, tracker_not_ahead, new_l0_not_older, l0_order_kept)
_COMPACTIONS_STATE_RULES = (job_ids_ascend, outputs_not_older_than_job)
_COMPACTIONS_STEP_RULES = (coordinator_epoch_grows, new_job_not_older, jobs_follow_life_cycle)


def _shown(view: SstView) -> tuple[Ulid, BytesRange | None]:
    """What a view shows, under whichever id."""
    return view.sst_id, view.visible_range


def _l0_tables(manifest: Manifest) -> set[tuple[Ulid, BytesRange | None]]:
    return {_shown(view) for tree in manifest.trees for view in tree.l0}


def _repeated(ids: Iterable[N]) -> set[N]:
    return {number for number, count in Counter(ids).items() if count > 1}


def _texts(ids: Iterable[Ulid]) -> str:
    return ", ".join(ulid_text(number) for number in ids)


def _broken(rule: Callable[..., None], detail: str) -> None:
    raise InternalError(f"rule {rule.__name__} would be broken: {detail}")
