"""Bulk loads in the manifest: where their SSTs go, and how long their rows are kept for consumers of changes. Pure.

A load is newer than everything before it, so its SSTs become the newest sorted run. Reads search L0 first, so L0 must
not stay above the load: every SST of L0 becomes a sorted run of its own, in its order, below the load and above all
older runs. No byte is rewritten, L0 is empty afterwards, and no writer waits for a compaction.

Only the compactor adds sorted runs. A running coordinator remembers the runs, and would write its next manifest without
the load. So the manifest with the load also takes the compactor's role, and a running coordinator finds that out with
its next manifest.

The rows of a load are in SSTs and never were in the WAL. The manifest that adds a load also has its load record, a
checkpoint of that same manifest: consumers of changes find the load by it, and no garbage collector deletes the SSTs.
A load record lives for fifteen minutes, for consumers without a retention checkpoint, and as long as there is a
retention checkpoint whose consumer has not passed the load. So every manifest that adds a load, or that sets, moves
or releases a retention checkpoint, also settles the load records (`settle_load_records`): there is no manifest in
which a needed record is missing.

A load that replaces all data cannot be delivered as changes: the keys that it removed are unknown.

A range delete (`flagstone.loads.range_delete`) has such a record, too, but no rows to keep. While a consumer needs the
record, its checkpoint names the manifest of the retention checkpoints, which keeps no SST.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, NamedTuple

from flagstone.lsm.system_rows import visible_ranges
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.annotations import (
    RETENTION_MANIFEST_ID,
    HeldLoad,
    HeldRetention,
    LoadPosition,
    LoadRecord,
    Position,
    encode_load,
    held_loads,
    held_retentions,
    load_prefix_of,
)
from flagstone.metadata.manifest import (
    NO_WAL,
    Manifest,
    Segment,
    SsTable,
    add_checkpoint,
    drop_empty_segments,
    remove_checkpoint,
    replace_trees,
)
from flagstone.metadata.sequenced import Versioned
from flagstone.types import KeyRange, ManifestId, RunId, Seq, Ulid, WalId

RECORD_LIFETIME_S: Final = 15 * 60
"""How long the rows of a load, or what it replaced, are kept when no consumer needs them: as after a compaction."""

_SPARE_RECORDS: Final = 16
"""How many records stay that no consumer needs: a stream into a database adds one with each micro-batch."""


@dataclass(frozen=True, slots=True)
class Load:
    """The SSTs of one load in key order; all rows have one sequence number and one time.

    `marker` is stamped a millisecond after the SSTs; see `apply_load`. `snapshot_min_seq` is the oldest sequence number
    at which a snapshot of the writer reads, if there is one. In a database with segments, `prefixes` has the segment of
    each SST. The load is added only if each key of `expects` then has that value, where None is no row, and with
    `only_if_new` only into a database without any earlier write.
    """

    ssts: tuple[SsTable, ...]
    seq: Seq
    created_ms: int
    marker: Ulid
    replaces_all: bool = False
    snapshot_min_seq: Seq | None = None
    prefixes: tuple[bytes, ...] = ()
    expects: tuple[tuple[bytes, bytes | None], ...] = ()
    only_if_new: bool = False

    def by_segment(self) -> dict[bytes, tuple[SsTable, ...]]:
        """The SSTs of each segment in key order; without segments, all of them under b""."""
        if not self.prefixes:
            return {b"": self.ssts} if self.ssts else {}
        grouped: dict[bytes, tuple[SsTable, ...]] = {}
        for prefix, sst in zip(self.prefixes, self.ssts, strict=True):
            grouped[prefix] = (*grouped.get(prefix, ()), sst)
        return grouped

    @property
    def key_ranges(self) -> list[KeyRange]:
        """The keys that the load may change."""
        if self.replaces_all:
            return [KeyRange()]
        return [SstView.whole(sst.id).effective_range(sst.info) for sst in self.ssts]


# -- adding a load ------------------------------------------------------------------------------------------


def is_applied(manifest: Manifest, load: Load) -> bool:
    """Whether the manifest, or one before it, already has the load."""
    return manifest.last_l0_seq >= load.seq


def apply_load(manifest: Manifest, load: Load) -> Manifest:
    """The manifest with the load. Applied a second time it changes nothing.

    The marker of the last compacted L0 moves to one that is newer than every SST of the load: the SSTs of failed tasks
    are then known to be garbage, and the next flush makes a newer SST anyway.
    """
    if is_applied(manifest, load):
        return manifest
    return replace(
        _with_load(manifest, load),
        compactor_epoch=manifest.compactor_epoch + 1,
        last_l0_seq=load.seq,
        last_l0_clock_tick=max(manifest.last_l0_clock_tick, load.created_ms),
        recent_snapshot_min_seq=max(
            manifest.recent_snapshot_min_seq,
            load.seq if load.snapshot_min_seq is None else load.snapshot_min_seq,
        ),
        sequence_tracker=manifest.sequence_tracker.record(load.seq, load.created_ms // 1000),
    )


def apply_recorded_load(
    now: Versioned[Manifest], load: Load, held: HeldLoad, *, now_s: int, last_wal_id: WalId = NO_WAL
) -> Manifest:
    """The manifest after `now` with the load and its record in the state `done`; `now` itself if it has the load.

    Everything before the load is in SSTs, and in the WAL up to `last_wal_id` or to the last WAL file in the manifest.
    The record's checkpoint names the manifest that this becomes, in which the load is the newest run. If the load
    replaces data, the checkpoint names the manifest before, for readers of the replaced data.
    """
    before = now.value
    if is_applied(before, load):
        return before
    replaces = load.replaces_all and not before.tree.empty
    position = LoadPosition(
        before.last_l0_seq, max(last_wal_id, before.wal_id_last_seen, before.replay_after_wal_id)
    )
    record = replace(held.record, state="done", position=position, replaces=replaces)
    entry = replace(
        held.checkpoint,
        manifest_id=ManifestId(now.id if replaces else now.next_id),
        created_s=now_s,
        expires_s=None,  # settled below
        name=encode_load(record),
    )
    return settle_load_records(add_checkpoint(apply_load(before, load), entry), now_s=now_s)


def _with_load(manifest: Manifest, load: Load) -> Manifest:
    segmented = bool(manifest.segments or load.prefixes)
    held = [Segment(b"", manifest.tree)] if not segmented else manifest.segments
    trees, grouped = {segment.prefix: segment.tree for segment in held}, load.by_segment()
    newest = manifest.newest_l0
    # A writer that was alive during the load may have made newer SSTs.
    marker = load.marker if newest is None else max(load.marker, newest)
    run_ids = count(max(manifest.run_ids, default=-1) + 1)
    for prefix in sorted({*trees, *grouped}):
        if prefix in grouped or load.replaces_all or not segmented:
            tree = trees.get(prefix, Tree())
            trees[prefix] = _stacked(tree, grouped.get(prefix, ()), run_ids, marker, load)
    if not segmented:
        return replace_trees(manifest, tree=trees[b""], added=load.ssts)
    segments = [Segment(prefix, tree) for prefix, tree in trees.items()]
    return drop_empty_segments(replace_trees(manifest, segments=segments, added=load.ssts))


def _stacked(tree: Tree, ssts: Sequence[SsTable], run_ids: Iterator[int], marker: Ulid, load: Load) -> Tree:
    sources: list[tuple[SstView, ...]] = [] if load.replaces_all else [(view,) for view in reversed(tree.l0)]
    if ssts:
        sources.append(tuple(SstView.whole(sst.id) for sst in ssts))
    stacked = [SortedRun(RunId(run_id), views) for views, run_id in zip(sources, run_ids, strict=False)]
    older = () if load.replaces_all else tree.runs
    return Tree(l0=(), runs=(*reversed(stacked), *older), last_compacted_l0=marker)


# -- keeping load records -----------------------------------------------------------------------------------


def settle_load_records(manifest: Manifest, *, now_s: int) -> Manifest:
    """The manifest whose `done` records live as long as a consumer may need them. Applied twice it changes nothing."""
    retentions = held_retentions(manifest)
    spare: list[HeldLoad] = []
    for held in held_loads(manifest):
        if held.record.state != "done":
            continue
        entry, needed_s = held.checkpoint, _needed_until(held.record, retentions)
        expires_s = None if needed_s is None else max(needed_s, entry.created_s + RECORD_LIFETIME_S)
        # A record that has expired is never prolonged: its SSTs may be deleted.
        if _is_over(entry.expires_s, now_s) or _is_over(expires_s, now_s):
            manifest = remove_checkpoint(manifest, entry.id)
            continue
        if held.record.deleted is not None and needed_s != 0:
            # There is a retention checkpoint, so this manifest exists.
            entry = replace(entry, manifest_id=RETENTION_MANIFEST_ID)
        manifest = add_checkpoint(manifest, replace(entry, expires_s=expires_s))
        if needed_s == 0 and (not held.record.replaces or held.record.deleted is not None):
            spare.append(held)
    for held in sorted(spare, key=lambda held: held.record.seq)[:-_SPARE_RECORDS]:
        manifest = remove_checkpoint(manifest, held.checkpoint.id)
    return manifest


def _needed_until(record: LoadRecord, retentions: Sequence[HeldRetention]) -> int | None:
    """Until when consumers need the load: None without an end, 0 not at all."""
    position = record.position
    if position is None or (record.replaces and record.deleted is None):
        return 0
    ends = [held.checkpoint.expires_s for held in retentions if is_ahead(held.position, record.seq, position)]
    known = [end for end in ends if end is not None]
    return None if len(known) < len(ends) else max(known, default=0)


def _is_over(expires_s: int | None, now_s: int) -> bool:
    return expires_s is not None and expires_s <= now_s


# -- finding loads among the changes ------------------------------------------------------------------------


class VisibleLoad(NamedTuple):
    """A load that consumers of changes can find: its sequence number, its position, and the manifest with its SSTs.

    A range delete has no SSTs; `deleted` are its keys, and `created_ms` is its time.
    """

    seq: Seq
    position: LoadPosition
    manifest_id: ManifestId
    replaces: bool
    id_prefix: int | None = None
    deleted: KeyRange | None = None
    created_ms: int | None = None

    @property
    def deleted_ranges(self) -> tuple[KeyRange, ...]:
        """The ranges that a range delete removed, in ascending order: its keys without those of system rows."""
        return () if self.deleted is None else visible_ranges(self.deleted)

    def owns(self, sst_id: Ulid) -> bool:
        """Whether the SST is one of the load, for a load whose SST ids have a tag."""
        return self.id_prefix == load_prefix_of(sst_id)


def is_ahead(consumer: Position, seq: int, load: LoadPosition) -> bool:
    """Whether a consumer has not passed the load with that sequence number and position.

    A consumer that starts at WAL file N receives the loads placed after file N-1.
    """
    if consumer.after_seq >= 0:
        return seq > consumer.after_seq
    return load.wal_id >= consumer.next_id - 1


def loads_ahead(manifest: Manifest, position: Position) -> list[VisibleLoad]:
    """The loads that a consumer has not passed, in commit order."""
    return sorted(load for load in _visible(manifest) if is_ahead(position, load.seq, load.position))


def next_load(manifest: Manifest, position: Position) -> VisibleLoad | None:
    """The first load that a consumer has not passed."""
    ahead = loads_ahead(manifest, position)
    return ahead[0] if ahead else None


def find_load(manifest: Manifest, seq: int) -> VisibleLoad | None:
    """The load with that sequence number; None when its record is gone."""
    return next((load for load in _visible(manifest) if load.seq == seq), None)


def _visible(manifest: Manifest) -> Iterator[VisibleLoad]:
    for checkpoint, record in held_loads(manifest):
        if record.state == "done" and record.position is not None:
            yield VisibleLoad(
                record.seq,
                record.position,
                checkpoint.manifest_id,
                record.replaces and record.deleted is None,
                record.id_prefix,
                record.deleted,
                None if record.deleted is None else record.id_ms,
            )
