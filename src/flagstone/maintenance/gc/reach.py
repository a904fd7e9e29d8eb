"""What the latest manifest and its checkpoints reach: the part of the database that stays."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from flagstone.errors import CorruptData, Unavailable
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.store.port import ObjectMissing
from flagstone.types import ManifestId, Ulid
from flagstone.wal.pins import PIN_MANIFEST_ID

_ATTEMPTS: Final = 50


@dataclass(frozen=True, slots=True)
class Reach:
    """The latest manifest with those that its checkpoints name, by id; the latest is not among them."""

    latest: Versioned[Manifest]
    pinned: dict[int, Manifest]

    @property
    def tables(self) -> Collection[Ulid]:
        """Every table that somebody may read."""
        found = set(self.latest.value.ssts)
        for manifest in self.pinned.values():
            found |= manifest.ssts.keys()
        return found


def pinned_ids(manifest: Manifest) -> set[int]:
    """The manifests that checkpoints name."""
    return {int(checkpoint.manifest_id) for checkpoint in manifest.checkpoints}


class PinnedManifests:
    """Loads the manifests that checkpoints name, each once: of all of them only the log pins' ever changes."""

    def __init__(self) -> None:
        self._loaded: dict[int, Manifest] = {}

    def reach(self, manifests: ManifestStore, latest: Versioned[Manifest]) -> Reach:
        """All that `latest`, or a manifest after it, reaches.

        Raises:
            CorruptData: a checkpoint names a manifest that is gone, so nobody knows what it needs.
            Unavailable: checkpoints come and go faster than they can be looked at; the next round tries again.

        """
        loaded = dict(self._loaded)
        gone: set[int] = set()
        for _ in range(_ATTEMPTS):
            wanted = pinned_ids(latest.value) - {latest.id}
            if lost := wanted & gone:
                raise CorruptData(
                    "missing, but a checkpoint names this manifest, so what it keeps is unknown; delete the "
                    "checkpoint (list-checkpoints shows it) or restore the object",
                    object=manifests.paths.manifest(ManifestId(min(lost))),
                )
            # Newest first: those are let go the soonest.
            for version in sorted(wanted - loaded.keys(), reverse=True):
                try:
                    loaded[version] = manifests.load(version)
                except ObjectMissing:
                    gone.add(version)
                    break
            else:
                pinned = {version: loaded[version] for version in wanted}
                self._loaded = {
                    version: value for version, value in pinned.items() if version != PIN_MANIFEST_ID
                }
                return Reach(latest, pinned)
            # Somebody may have deleted the checkpoint, and another collector the manifest, under our eyes.
            latest = manifests.require_latest()
        raise Unavailable(f"the checkpoints of {manifests.paths.root} change faster than they can be read")
