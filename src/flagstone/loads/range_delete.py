"""A range delete in the manifest: the rows of a key range disappear with one edit, whatever the range holds. Pure.

Every row up to the sequence number of the delete is in SSTs. The edit cuts the range out of their views
(`flagstone.metadata.range_cut`). A crash before the manifest leaves all rows, one after it leaves none. The manifest
also says that the WAL so far needs no replay, so no opening brings rows back from it.

Like a bulk load, a range delete has a sequence number of its own that is not in the WAL, and a load record at its
position among the changes. A consumer that does not find the record sees the gap and ends with an error. And it takes
the compactor's role: a running coordinator of SlateDB remembers the sorted runs, and would write them back.

Nothing in the new manifest shows the deleted rows, at any sequence number: `recent_snapshot_min_seq` becomes the
sequence number of the delete, so `as_of` and open snapshots look for older rows in older manifests only. A checkpoint
of the manifest before keeps the SSTs of that state for a while, as after a compaction.

System rows are not deleted. A range with their keys in it is cut out in two parts, before and after them, by the same
manifest. The record has the range as it was given, and consumers divide it in the same way
(`VisibleLoad.deleted_ranges`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from uuid import UUID

from flagstone.errors import InternalError
from flagstone.loads.edit import RECORD_LIFETIME_S, settle_load_records
from flagstone.lsm.system_rows import visible_ranges
from flagstone.metadata.annotations import LoadPosition, LoadRecord, encode_load
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint
from flagstone.metadata.range_cut import NewId, cut_range
from flagstone.metadata.sequenced import Versioned
from flagstone.types import KeyRange, ManifestId, Seq, WalId


@dataclass(frozen=True, slots=True)
class RangeDelete:
    """The keys, the sequence number and the time of a range delete, and the ids of its two checkpoints.

    `job_run` is the highest run id that a compaction job named before the delete.
    """

    keys: KeyRange
    seq: Seq
    created_ms: int
    record_id: UUID
    former_id: UUID
    job_run: int

    @property
    def parts(self) -> tuple[KeyRange, ...]:
        """The ranges that are cut out: system rows stay."""
        return visible_ranges(self.keys)


def is_deleted(manifest: Manifest, delete: RangeDelete) -> bool:
    """Whether the manifest, or one before it, already has the range delete."""
    return manifest.last_l0_seq >= delete.seq


def apply_range_delete(
    now: Versioned[Manifest], delete: RangeDelete, *, last_wal_id: WalId, lifetime_s: int, new_id: NewId
) -> Manifest:
    """The manifest after `now` without the keys of the range; that of `now` if it has the delete already.

    Every write before the delete is in SSTs, and in the WAL up to `last_wal_id`. The SSTs of the former state are kept
    for `lifetime_s`.
    """
    before = now.value
    if is_deleted(before, delete):
        return before
    if before.last_l0_seq != delete.seq - 1:
        raise InternalError(
            f"the range delete {delete.seq} follows {before.last_l0_seq}: not every row before it is in an SST"
        )
    now_s = delete.created_ms // 1000
    last_wal_id = max(last_wal_id, before.wal_id_last_seen, before.replay_after_wal_id)
    cut = before
    for keys in delete.parts:
        cut = cut_range(cut, keys, new_id, job_run=delete.job_run)
    cut = replace(
        cut,
        compactor_epoch=before.compactor_epoch + 1,
        replay_after_wal_id=last_wal_id,
        wal_id_last_seen=last_wal_id,
        last_l0_seq=delete.seq,
        last_l0_clock_tick=max(before.last_l0_clock_tick, delete.created_ms),
        recent_snapshot_min_seq=delete.seq,
        sequence_tracker=before.sequence_tracker.record(delete.seq, now_s),
    )
    record = LoadRecord(
        "done",
        delete.seq,
        delete.created_ms,
        position=LoadPosition(before.last_l0_seq, last_wal_id),
        replaces=True,
        deleted=delete.keys,
    )
    former = Checkpoint(delete.former_id, ManifestId(now.id), now_s, now_s + lifetime_s)
    kept = Checkpoint(
        delete.record_id, ManifestId(now.id), now_s, now_s + RECORD_LIFETIME_S, encode_load(record)
    )
    return settle_load_records(add_checkpoint(add_checkpoint(cut, former), kept), now_s=now_s)
