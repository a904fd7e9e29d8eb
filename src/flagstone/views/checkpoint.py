"""Checkpoints: entries in the manifest that keep one version, and all it refers to, from being collected.

Each change is one manifest version, made by whoever wants it: the writer, a reader, an operator. A crash between
wanting and writing leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final
from uuid import UUID

from flagstone.config.durations import as_duration
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.store.port import ObjectMissing
from flagstone.types import ManifestId, WalId
from flagstone.wal.pins import decode_pin, settle_loads

_SHORTEST: Final = timedelta(seconds=1)
_LAST_SECOND: Final = 2**32 - 1


def create_checkpoint(
    manifests: ManifestStore,
    *,
    clock: Clock,
    ids: Ids,
    lifetime: timedelta | str | None = None,
    name: str | None = None,
    source: UUID | None = None,
    last_wal_id: WalId | None = None,
) -> tuple[Checkpoint, Versioned[Manifest]]:
    """Pin the current state, or what the checkpoint `source` pins; returns it with the manifest it is in.

    A checkpoint of the current state refers to the very manifest that brings it. It shows the log as far as
    that manifest knows it, so whoever knows of later files says so with `last_wal_id`. Without a lifetime it
    stays until it is deleted.

    Raises:
        InvalidRequest: the lifetime is shorter than a second, there is no checkpoint `source` or it has
            expired, or the database is a clone that is not finished.

    """
    checkpoint_id = ids.uuid()
    lifetime = check_lifetime(lifetime)

    def edit(now: Versioned[Manifest]) -> Manifest:
        now_s = clock.now_ms() // 1000
        require_initialized(now.value)
        if source is not None:
            manifest_id = require_live_checkpoint(now.value, source, now_s=now_s).manifest_id
            seen = now.value.wal_id_last_seen
        else:
            manifest_id = ManifestId(now.next_id)
            seen = max(now.value.wal_id_last_seen, last_wal_id or now.value.wal_id_last_seen)
        created = Checkpoint(checkpoint_id, manifest_id, now_s, expiry(now_s, lifetime), name)
        return add_checkpoint(replace(now.value, wal_id_last_seen=seen), created)

    written = manifests.update(edit)
    return require_checkpoint(written.value, checkpoint_id), written


def refresh_checkpoint(
    manifests: ManifestStore, checkpoint_id: UUID, *, clock: Clock, lifetime: timedelta | str | None = None
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

    def edit(now: Versioned[Manifest]) -> Manifest:
        held = now.value.checkpoint(checkpoint_id)
        left = remove_checkpoint(now.value, checkpoint_id)
        # Loads that were kept for that consumer alone get an end; those that are over are left to garbage collection.
        return left if held is None or decode_pin(held) is None else settle_loads(left, now_s=0)

    manifests.update(edit)


def replace_checkpoint(
    manifests: ManifestStore,
    old: UUID,
    *,
    clock: Clock,
    ids: Ids,
    lifetime: timedelta | None,
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


def require_live_checkpoint(manifest: Manifest, checkpoint_id: UUID, *, now_s: int) -> Checkpoint:
    """The checkpoint of that id, for those who want the state it pins.

    Raises `InvalidRequest` when there is none, when its time is over, or when it pins a part of the log only.
    """
    found = require_checkpoint(manifest, checkpoint_id)
    if not found.manifest_id:
        raise InvalidRequest(
            f"the checkpoint {checkpoint_id} keeps the log for a consumer of changes and pins no state; "
            "take another one"
        )
    if is_expired(found, now_s):
        raise InvalidRequest(
            f"the checkpoint {checkpoint_id} expired {now_s - (found.expires_s or 0)} s ago, so what it pins may be "
            "deleted at any moment; refresh it first, or take a newer one"
        )
    return found


def load_pinned(manifests: ManifestStore, checkpoint: Checkpoint) -> Versioned[Manifest]:
    """The manifest a checkpoint names. One that is missing is damage: the checkpoint should have kept it.

    Raises:
        InvalidRequest: it keeps the log for a consumer, and shows nothing.

    """
    consumer = decode_pin(checkpoint)
    if consumer is not None:
        raise InvalidRequest(
            f"the checkpoint {checkpoint.id} only keeps the log for the consumer {consumer.name!r}; it shows no state"
        )
    try:
        return Versioned(checkpoint.manifest_id, manifests.load(checkpoint.manifest_id))
    except ObjectMissing:
        raise CorruptData(
            f"missing, but the checkpoint {checkpoint.id} pins it",
            object=manifests.paths.manifest(checkpoint.manifest_id),
        ) from None


def is_expired(checkpoint: Checkpoint, now_s: int) -> bool:
    """Whether garbage collection may remove it."""
    return checkpoint.expires_s is not None and checkpoint.expires_s <= now_s


def require_initialized(manifest: Manifest, path: str | None = None) -> None:
    """Refuse a clone that is still being made: what it will refer to is not pinned yet."""
    if not manifest.initialized:
        where = "the database" if path is None else f"the database at {path!r}"
        raise InvalidRequest(
            f"{where} is a clone that is not finished; repeat the call that makes it, or destroy it"
        )


def parse_checkpoint_id(checkpoint: UUID | str) -> UUID:
    """The id itself, also from its text."""
    if isinstance(checkpoint, UUID):
        return checkpoint
    try:
        return UUID(checkpoint)
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f"a checkpoint is named by its UUID, not {checkpoint!r}") from None


def check_lifetime(lifetime: timedelta | str | None) -> timedelta | None:
    """The lifetime of a checkpoint, or None for ever. Raises `InvalidRequest` for anything else."""
    if lifetime is None:
        return None
    checked = as_duration(lifetime, "lifetime")
    if checked < _SHORTEST:
        raise InvalidRequest(f"a checkpoint lives at least one second, not {checked}; None means for ever")
    return checked


def expiry(now_s: int, lifetime: timedelta | str | None) -> int | None:
    """When a checkpoint of that lifetime expires, in whole seconds."""
    lifetime = check_lifetime(lifetime)
    if lifetime is None:
        return None
    expires_s = now_s + int(lifetime.total_seconds())
    if expires_s > _LAST_SECOND:
        raise InvalidRequest(f"a lifetime of {lifetime} ends after the year 2106; None means for ever")
    return expires_s
