"""The destruction mark, which the manifest of a destroyed database carries, and what a vacant path keeps.

The mark is a checkpoint with an encoded name (`annotations`). It is part of the manifest, so it is set by the same
compare-and-swap that every other edit must win: an edit either comes before the mark, and the destroyer reads it, or it
is based on a manifest with the mark, and `check_destroyed` refuses it. No edit falls between the two.

A mark has two states:

    pending   the database is destroyed; its objects still exist. Edits may only give something up.
    erased    the manifest refers to nothing any more, and the objects are deleted. The path is vacant.

The manifest of a vacant path stays, and with it everything that proves which ids were used: manifest ids go on above
it, WAL ids above its `replay_after_wal_id`, epochs above its epochs, sequence numbers above its `last_l0_seq`. A
database that is created there continues these counters, and keeps the erased mark. The mark names the manifest of the
vacancy, so a process that has read only older manifests detects that this is another database (`incarnation`).

SlateDB treats marks as checkpoints. Its writer opens a vacant path as an empty database and raises the writer epoch; a
raised epoch is how a vacancy ends (`is_vacant`).
"""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from flagstone.errors import Closed, InvalidRequest
from flagstone.metadata.annotations import Destroyed, MarkEntry, encode_mark, mark_entries
from flagstone.metadata.manifest import (
    NO_WAL,
    SEQ_GAP,
    Checkpoint,
    Manifest,
    add_checkpoint,
    remove_checkpoint,
)
from flagstone.types import ManifestId, Seq, WalId


def find_mark(manifest: Manifest) -> MarkEntry | None:
    """The mark of a destroyed database; None for a live one.

    An erased mark counts only as long as no writer has claimed the path since.
    """
    for held in mark_entries(manifest):
        if not held.mark.erased or manifest.writer_epoch <= held.mark.writer_epoch:
            return held
    return None


def is_vacant(manifest: Manifest) -> bool:
    """Whether there is no database at the path any more: the last one was destroyed and erased."""
    held = find_mark(manifest)
    return held is not None and held.mark.erased


def incarnation(manifest: Manifest) -> int:
    """The manifest id above which the manifests of this database are; 0 for the first database at a path."""
    return max(
        (held.checkpoint.manifest_id for held in mark_entries(manifest) if held.mark.erased), default=0
    )


def wal_shift(manifest: Manifest) -> int:
    """By how much the WAL ids of this clone are higher than those of its source."""
    return max((held.mark.wal_shift for held in mark_entries(manifest) if held.mark.erased), default=0)


# -- edits ------------------------------------------------------------------------------------------------


def mark_destroyed(
    manifest: Manifest, *, mark_id: UUID, at_ms: int, grace_ms: int, manifest_id: ManifestId
) -> Manifest:
    """The manifest with a pending mark and both roles claimed; a former pending mark is replaced."""
    edited = replace(
        manifest,
        writer_epoch=manifest.writer_epoch + 1,
        compactor_epoch=manifest.compactor_epoch + 1,
    )
    mark = Destroyed(at_ms, grace_ms, edited.writer_epoch, edited.compactor_epoch)
    for held in mark_entries(manifest):
        if not held.mark.erased:
            edited = remove_checkpoint(edited, held.checkpoint.id)
    return add_checkpoint(edited, Checkpoint(mark_id, manifest_id, at_ms // 1000, None, encode_mark(mark)))


def note_fence(manifest: Manifest, fence_id: WalId) -> Manifest:
    """The manifest whose pending mark names the WAL file that fences every former writer."""
    held = find_mark(manifest)
    if held is None or held.mark.erased:
        return manifest
    return add_checkpoint(
        manifest, replace(held.checkpoint, name=encode_mark(replace(held.mark, fence_id=fence_id)))
    )


def erase(
    manifest: Manifest, held: MarkEntry, *, manifest_id: ManifestId, wal_end: WalId = NO_WAL
) -> Manifest:
    """The manifest of a vacant path: no data, only the mark, and every counter at least as high as before.

    `wal_end` is the highest WAL file. The lenders of the destroyed database stay listed until their checkpoints are
    released.
    """
    end = WalId(
        max(wal_end, held.mark.fence_id or 0, manifest.wal_id_last_seen, manifest.replay_after_wal_id)
    )
    # Rows that only the WAL holds have higher sequence numbers than the last flush; the gap is above all of them.
    last_seq = manifest.last_l0_seq if held.mark.erased else Seq(manifest.last_l0_seq + SEQ_GAP)
    mark = replace(
        held.mark, erased=True, writer_epoch=manifest.writer_epoch, compactor_epoch=manifest.compactor_epoch
    )
    entry = replace(held.checkpoint, manifest_id=manifest_id, expires_s=None, name=encode_mark(mark))
    return Manifest(
        writer_epoch=manifest.writer_epoch,
        compactor_epoch=manifest.compactor_epoch,
        replay_after_wal_id=end,
        wal_id_last_seen=end,
        last_l0_seq=last_seq,
        recent_snapshot_min_seq=last_seq,
        checkpoints=(entry,),
        external_dbs=tuple(replace(lender, sst_ids=()) for lender in manifest.external_dbs),
    )


def settle_at(first: Manifest, vacant: Manifest) -> Manifest:
    """The first manifest of a new database at a vacant path: the counters continue, the mark stays.

    A clone brings rows with sequence numbers of their own, so its sequence numbers stay as they are.
    """
    held = mark_entries(vacant)[-1]
    shift = max(0, vacant.replay_after_wal_id - first.replay_after_wal_id)
    brings_rows = bool(first.external_dbs or first.last_l0_seq)
    entry = replace(held.checkpoint, name=encode_mark(replace(held.mark, wal_shift=shift)))
    return replace(
        first,
        writer_epoch=max(first.writer_epoch, vacant.writer_epoch + 1),
        compactor_epoch=max(first.compactor_epoch, vacant.compactor_epoch),
        replay_after_wal_id=WalId(first.replay_after_wal_id + shift),
        wal_id_last_seen=WalId(first.wal_id_last_seen + shift),
        last_l0_seq=first.last_l0_seq if brings_rows else vacant.last_l0_seq,
        recent_snapshot_min_seq=first.recent_snapshot_min_seq if brings_rows else vacant.last_l0_seq,
        checkpoints=(*first.checkpoints, entry),
        external_dbs=(*first.external_dbs, *vacant.external_dbs),
    )


# -- rules ------------------------------------------------------------------------------------------------


def check_destroyed(following: Manifest, current: Manifest) -> None:
    """Refuse an edit of a destroyed database, unless it only gives something up, and one that removes a mark.

    Raises:
        Closed: the database is destroyed, and the edit claims, adds or prolongs something.
        InvalidRequest: the edit removes a mark.

    """
    if any(following.checkpoint(held.checkpoint.id) != held.checkpoint for held in mark_entries(current)):
        raise InvalidRequest(
            "a checkpoint of this name records that a database was destroyed at this path, and keeps its ids from "
            "being used again; it cannot be changed or deleted"
        )
    if find_mark(current) is not None and not _only_gives_up(following, current):
        raise gone(current)


def require_not_destroyed(manifest: Manifest) -> None:
    """Raise `Closed` when the manifest has the mark of a destroyed database."""
    if find_mark(manifest) is not None:
        raise gone(manifest)


def gone(manifest: Manifest) -> Closed:
    """The error for a process that still works on a destroyed database."""
    held = find_mark(manifest)
    at = "" if held is None else f" (mark {held.checkpoint.id})"
    return Closed(
        f"the database was destroyed{at} and is going to be deleted; nothing can be added to it any more",
        reason="fenced",
    )


def another_database(path: str) -> Closed:
    """The error for a process whose database is gone, and which finds another one, or none, at the path."""
    return Closed(
        f"the database at {path!r} was destroyed; what is at this path now is another database, or none: open it again",
        reason="fenced",
    )


def _only_gives_up(following: Manifest, current: Manifest) -> bool:
    """Whether an edit only removes checkpoints and lenders, or lets checkpoints end earlier."""
    if replace(following, checkpoints=current.checkpoints, external_dbs=current.external_dbs) != current:
        return False
    return set(following.external_dbs) <= set(current.external_dbs) and all(
        (before := current.checkpoint(entry.id)) is not None
        and replace(entry, expires_s=before.expires_s) == before
        and _ends(entry) <= _ends(before)
        for entry in following.checkpoints
    )


def _ends(checkpoint: Checkpoint) -> float:
    return float("inf") if checkpoint.expires_s is None else checkpoint.expires_s
