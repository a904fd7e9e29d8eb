"""What a manifest records about writers that send several WAL files at once: the edits of this record. Pure.

A writer with `max_parallel_wal_writes` above 1 may leave files behind a hole when it dies or is replaced. The next
writer must know how many ids are in doubt, and which files were there before. The record says it:

    limit          no writer since `through` had more WAL files under way
    through        the WAL is in order up to this file: the fences of the last takeover end here
    settled_epoch  the writer that completed that takeover
    epoch          the last claim of Flagstone; another engine has claimed the database if the manifest has a newer one

A claim raises `limit`, so that a claimant that crashes loses no knowledge. A takeover that is complete replaces the
record, or removes it if the new writer sends one file at a time. A clean close removes it.

The record is the name of a checkpoint (`annotations`). Its checkpoint names the manifest of the last flush, so it keeps
no SST for long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from uuid import UUID

from flagstone.metadata.annotations import ParallelWal, decode_parallel_wal, encode_parallel_wal
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.types import ManifestId, WalId

RECORD_ID: Final = UUID("b81a9d3c-6d5f-4c0e-9f43-57414c000001")
"""The id of the checkpoint: a manifest has one record at most."""


def find_parallel_wal(manifest: Manifest) -> ParallelWal | None:
    """The record of a manifest; None if every writer since the last clean close sends one file at a time."""
    checkpoint = manifest.checkpoint(RECORD_ID)
    return None if checkpoint is None else decode_parallel_wal(checkpoint)


def settled_end(manifest: Manifest) -> WalId | None:
    """The file after which an empty file means that a takeover is under way; None if no file has that meaning."""
    record = find_parallel_wal(manifest)
    return None if record is None else record.through


def allowed_hole(manifest: Manifest) -> int:
    """How many ids after the end of the WAL may be missing before files that exist."""
    record = find_parallel_wal(manifest)
    return 0 if record is None else record.limit - 1


def note_claim(before: Manifest, claimed: Manifest, *, limit: int, manifest_id: ManifestId) -> Manifest:
    """`claimed` follows `before` with a higher epoch. Its writer will send up to `limit` files at once."""
    record = find_parallel_wal(before)
    if record is None:
        if limit == 1:
            return claimed
        record = ParallelWal(limit, None, claimed.writer_epoch, claimed.writer_epoch)
    elif record.epoch != before.writer_epoch:
        # Another engine has fenced the WAL since: which files came after a hole is no longer known.
        record = replace(record, through=None)
    raised = replace(record, limit=max(record.limit, limit), epoch=claimed.writer_epoch)
    return _with_record(claimed, raised, manifest_id)


def note_settled(manifest: Manifest, *, limit: int, through: WalId, manifest_id: ManifestId) -> Manifest:
    """The takeover of the present writer is complete up to the fence `through`."""
    if limit == 1:
        return remove_checkpoint(manifest, RECORD_ID)
    epoch = manifest.writer_epoch
    return _with_record(manifest, ParallelWal(limit, through, epoch, epoch), manifest_id)


def forget_parallel_wal(manifest: Manifest) -> Manifest:
    """The manifest of a writer that has closed in order: all its files are on the store."""
    return remove_checkpoint(manifest, RECORD_ID)


def renew_record(manifest: Manifest, manifest_id: ManifestId) -> Manifest:
    """The manifest `manifest_id`; its record, if it has one, keeps no older manifest."""
    record = find_parallel_wal(manifest)
    return manifest if record is None else _with_record(manifest, record, manifest_id)


def _with_record(manifest: Manifest, record: ParallelWal, manifest_id: ManifestId) -> Manifest:
    entry = manifest.checkpoint(RECORD_ID)
    created_s = 0 if entry is None else entry.created_s
    return add_checkpoint(
        manifest, Checkpoint(RECORD_ID, manifest_id, created_s, None, encode_parallel_wal(record))
    )
