"""Garbage of the metadata: old manifests and compactions files, expired checkpoints, and lenders of a clone.

The latest manifest and the manifests that its checkpoints name are kept, and so is the latest compactions file. A
manifest outside that set can never enter it again: a later checkpoint names its own manifest, or the manifest of a
checkpoint that exists. So a plan stays valid however long it takes to carry it out.

Expired checkpoints are removed before anything is planned, so that they keep nothing.

A clone detaches from a lender once it uses none of the lender's SSTs. The final checkpoint in the lender is deleted
first, the clone's own entry second: a crash in between leaves an entry whose checkpoint is gone, which the next round
drops. In the other order the checkpoint would have no owner and stay for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from flagstone.errors import CorruptData, Unavailable
from flagstone.gc.plan import Kind, Plan, Verdict, drop, keep
from flagstone.metadata.annotations import RETENTION_MANIFEST_ID
from flagstone.metadata.manifest import Checkpoint, ExternalDb, Manifest, remove_expired_checkpoints
from flagstone.metadata.sequenced import Listed, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.store.port import ObjectMissing
from flagstone.types import ManifestId, Ulid

_ATTEMPTS: Final = 50


@dataclass(frozen=True, slots=True)
class Reach:
    """The latest manifest, and by id the other manifests that its checkpoints name."""

    latest: Versioned[Manifest]
    checkpointed: dict[int, Manifest]

    @property
    def ssts(self) -> Collection[Ulid]:
        """Every SST that a process may read."""
        found = set(self.latest.value.ssts)
        for manifest in self.checkpointed.values():
            found |= manifest.ssts.keys()
        return found


def checkpointed_ids(manifest: Manifest) -> set[int]:
    """The ids of the manifests that checkpoints name."""
    return {int(checkpoint.manifest_id) for checkpoint in manifest.checkpoints}


class CheckpointedManifests:
    """Loads the manifests that checkpoints name, each once: only the one of retention checkpoints ever changes."""

    def __init__(self) -> None:
        self._loaded: dict[int, Manifest] = {}

    def reach(self, manifests: ManifestStore, latest: Versioned[Manifest]) -> Reach:
        """What `latest`, or a later manifest, refers to.

        Raises:
            CorruptData: a checkpoint names a manifest that is gone, so what it keeps is unknown.
            Unavailable: checkpoints change faster than they can be read; the next round tries again.

        """
        loaded = dict(self._loaded)
        gone: set[int] = set()
        for _ in range(_ATTEMPTS):
            wanted = checkpointed_ids(latest.value) - {latest.id}
            if lost := wanted & gone:
                raise CorruptData(
                    "missing, but a checkpoint names this manifest, so what it keeps is unknown; delete the "
                    "checkpoint (list-checkpoints shows it) or restore the object",
                    object=manifests.paths.manifest(ManifestId(min(lost))),
                )
            # Newest first: their checkpoints are deleted the soonest.
            for version in sorted(wanted - loaded.keys(), reverse=True):
                try:
                    loaded[version] = manifests.load(version)
                except ObjectMissing:
                    gone.add(version)
                    break
            else:
                found = {version: loaded[version] for version in wanted}
                self._loaded = {
                    version: value for version, value in found.items() if version != RETENTION_MANIFEST_ID
                }
                return Reach(latest, found)
            # Its checkpoint may have been deleted meanwhile, and another collector may have deleted the manifest.
            latest = manifests.require_latest()
        raise Unavailable(f"the checkpoints of {manifests.paths.root} change faster than they can be read")


def plan_versions(
    kind: Kind, listed: Iterable[Listed], *, latest: int, checkpointed: Collection[int] = ()
) -> Plan:
    """Plan all listed manifests or compactions files: older than `latest` and not `checkpointed` is garbage."""

    def judge(version: Listed) -> Verdict:
        if version.id == latest:
            return keep(version.meta, version.id, "the latest")
        if version.id > latest:
            return keep(version.meta, version.id, "newer than the latest that this round read")
        if version.id in checkpointed:
            return keep(version.meta, version.id, "named by a checkpoint")
        if kind == "manifest" and version.id == RETENTION_MANIFEST_ID:
            # A store may refuse the same name a second time, and then no retention checkpoint could be created.
            return keep(version.meta, version.id, "named by retention checkpoints")
        return drop(version.meta, version.id, "superseded")

    return Plan(kind, tuple(judge(version) for version in listed))


def plan_boundary(plan: Plan) -> int | None:
    """The id up to which the boundary must be advanced before the plan is carried out."""
    return max((verdict.id for verdict in plan.deletions), default=None)


def plan_expired(manifest: Manifest, now_s: int) -> list[Checkpoint]:
    """The checkpoints that expired at or before `now_s`."""
    left = {checkpoint.id for checkpoint in remove_expired_checkpoints(manifest, now_s).checkpoints}
    return [checkpoint for checkpoint in manifest.checkpoints if checkpoint.id not in left]


def next_expiry_s(manifest: Manifest) -> int | None:
    """When the next checkpoint expires; None if none does."""
    return min(
        (entry.expires_s for entry in manifest.checkpoints if entry.expires_s is not None), default=None
    )


def remove_expired(manifests: ManifestStore, now_s: int) -> Versioned[Manifest]:
    """Write a manifest without the expired checkpoints and return it.

    A checkpoint that its owner refreshed meanwhile stays. A crash before the write changes nothing.
    """
    return manifests.update(lambda now: remove_expired_checkpoints(now.value, now_s))


Identity = tuple[object, ...]


def plan_detach(latest: Manifest, checkpointed: Iterable[Manifest]) -> list[ExternalDb]:
    """The lenders of which neither the latest manifest nor one that a checkpoint names uses an SST.

    Lists of borrowed SSTs only ever shrink, so an entry that is unused now stays unused. A clone that is not finished
    has not placed its checkpoints yet; nothing is detached from it.
    """
    if not latest.initialized:
        return []
    used = {
        _identity(entry)
        for manifest in (latest, *checkpointed)
        for entry in manifest.external_dbs
        if entry.sst_ids or not manifest.initialized
    }
    return [entry for entry in latest.external_dbs if _identity(entry) not in used]


def drop_entry(manifests: ManifestStore, entry: ExternalDb) -> Versioned[Manifest]:
    """Write a manifest without the entry and return it."""
    return manifests.update(
        lambda now: replace(
            now.value,
            external_dbs=tuple(
                other for other in now.value.external_dbs if _identity(other) != _identity(entry)
            ),
        )
    )


def _identity(entry: ExternalDb) -> Identity:
    return (entry.path, entry.source_checkpoint_id, entry.final_checkpoint_id)
