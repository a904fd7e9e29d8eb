"""Checkpoints: entries in the manifest that keep one version, and all it refers to, from being collected.

Each change is one manifest version, made by whoever wants it: the writer, a reader, an operator. A crash between
wanting and writing leaves nothing behind.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from flagstone.errors import InvalidRequest
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.types import ManifestId

_SHORTEST: timedelta = timedelta(seconds=1)


def create_checkpoint(
    manifests: ManifestStore,
    *,
    clock: Clock,
    ids: Ids,
    lifetime: timedelta | None = None,
    name: str | None = None,
    source: UUID | None = None,
) -> tuple[Checkpoint, Versioned[Manifest]]:
    """Pin the current state, or what the checkpoint `source` pins; returns it with the manifest it is in.

    A checkpoint of the current state refers to the very manifest that brings it. Without a lifetime it stays
    until it is deleted.

    Raises:
        InvalidRequest: the lifetime is shorter than a second, or there is no checkpoint `source`.

    """
    checkpoint_id = ids.uuid()

    def edit(now: Versioned[Manifest]) -> Manifest:
        manifest_id = ManifestId(now.next_id)
        if source is not None:
            manifest_id = require_checkpoint(now.value, source).manifest_id
        now_s = clock.now_ms() // 1000
        created = Checkpoint(checkpoint_id, manifest_id, now_s, expiry(now_s, lifetime), name)
        return add_checkpoint(now.value, created)

    written = manifests.update(edit)
    return require_checkpoint(written.value, checkpoint_id), written


def refresh_checkpoint(
    manifests: ManifestStore, checkpoint_id: UUID, *, clock: Clock, lifetime: timedelta | None = None
) -> Checkpoint:
    """Let the checkpoint live `lifetime` from now on, or for ever."""

    def edit(now: Versioned[Manifest]) -> Manifest:
        held = require_checkpoint(now.value, checkpoint_id)
        renewed = Checkpoint(
            held.id, held.manifest_id, held.created_s, expiry(clock.now_ms() // 1000, lifetime), held.name
        )
        return add_checkpoint(now.value, renewed)

    return require_checkpoint(manifests.update(edit).value, checkpoint_id)


def delete_checkpoint(manifests: ManifestStore, checkpoint_id: UUID) -> None:
    """Release what the checkpoint pins. One that is gone already is fine."""
    manifests.update(lambda now: remove_checkpoint(now.value, checkpoint_id))


def replace_checkpoint(
    manifests: ManifestStore,
    old: UUID,
    *,
    clock: Clock,
    ids: Ids,
    lifetime: timedelta,
) -> tuple[Checkpoint, Versioned[Manifest]]:
    """Move a reader's pin to the current state in one manifest version: the old one goes, a new one comes."""
    checkpoint_id = ids.uuid()

    def edit(now: Versioned[Manifest]) -> Manifest:
        now_s = clock.now_ms() // 1000
        created = Checkpoint(checkpoint_id, ManifestId(now.next_id), now_s, expiry(now_s, lifetime))
        return add_checkpoint(remove_checkpoint(now.value, old), created)

    written = manifests.update(edit)
    return require_checkpoint(written.value, checkpoint_id), written


def require_checkpoint(manifest: Manifest, checkpoint_id: UUID) -> Checkpoint:
    """The checkpoint of that id; raises `InvalidRequest` when the manifest has none."""
    found = manifest.checkpoint(checkpoint_id)
    if found is None:
        raise InvalidRequest(f"no checkpoint {checkpoint_id}: it was deleted, or expired and was collected")
    return found


def expiry(now_s: int, lifetime: timedelta | None) -> int | None:
    """When a checkpoint of that lifetime expires, in whole seconds."""
    if lifetime is None:
        return None
    if lifetime < _SHORTEST:
        raise InvalidRequest(f"a checkpoint lives at least one second, not {lifetime}; None means for ever")
    return now_s + int(lifetime.total_seconds())
