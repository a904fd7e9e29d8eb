"""Checkpoints whose time is over: they are removed before anything is judged, so that they keep nothing."""

from __future__ import annotations

from flagstone.metadata.manifest import Checkpoint, Manifest, remove_expired_checkpoints
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore


def plan_expired(manifest: Manifest, now_s: int) -> list[Checkpoint]:
    """The checkpoints that expired at or before `now_s`."""
    left = {checkpoint.id for checkpoint in remove_expired_checkpoints(manifest, now_s).checkpoints}
    return [checkpoint for checkpoint in manifest.checkpoints if checkpoint.id not in left]


def next_expiry_s(manifest: Manifest) -> int | None:
    """When the next checkpoint expires."""
    return min(
        (entry.expires_s for entry in manifest.checkpoints if entry.expires_s is not None), default=None
    )


def remove_expired(manifests: ManifestStore, now_s: int) -> Versioned[Manifest]:
    """Write a manifest without the expired checkpoints and return it.

    A checkpoint that its owner refreshed in the meantime stays. A crash before the write changes nothing.
    """
    return manifests.update(lambda now: remove_expired_checkpoints(now.value, now_s))
