"""One look at a database: its manifest, those its checkpoints pin, its jobs, and a list of its objects.

No table is read and nothing is written. What changes while we look is shown as it was at one moment or the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flagstone.errors import InvalidRequest
from flagstone.inspector.overview import Overview, overview
from flagstone.inspector.text import time_text
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look found, and when."""

    url: str
    root: str
    manifest: Versioned[Manifest]
    compactions: Compactions | None
    overview: Overview
    now_s: int

    @property
    def expired(self) -> list[Checkpoint]:
        """Checkpoints that the next garbage collection removes."""
        held = self.manifest.value.checkpoints
        return [entry for entry in held if entry.expires_s is not None and entry.expires_s <= self.now_s]

    def facts(self) -> dict[str, Any]:
        """What the manifest says, as plain values."""
        manifest = self.manifest.value
        stamped = manifest.last_l0_clock_tick if manifest.last_l0_clock_tick > 0 else None
        return {
            "path": self.root,
            "store": self.url,
            "manifest_id": self.manifest.id,
            "initialized": manifest.initialized,
            "writer_epoch": manifest.writer_epoch,
            "compactor_epoch": manifest.compactor_epoch,
            "last_l0_seq": manifest.last_l0_seq,
            "last_l0_time": time_text(None if stamped is None else stamped / 1000),
            "checkpoints": {
                "total": len(manifest.checkpoints),
                "named": sum(1 for entry in manifest.checkpoints if entry.name),
                "permanent": sum(1 for entry in manifest.checkpoints if entry.expires_s is None),
                "expired": len(self.expired),
            },
        }


def look(store: ObjectStore, wal_store: ObjectStore | None, root: str, *, jobs: bool = False) -> Seen:
    """Look once; at the compactions file only with `jobs`.

    Raises:
        InvalidRequest: there is no database.

    """
    paths = DbPaths(root)
    manifests = ManifestStore(store, paths)
    latest = manifests.latest()
    if latest is None:
        raise InvalidRequest(f"no database at {root!r} in {store.url}; check the path")

    def load(manifest_id: int) -> Manifest | None:
        try:
            return manifests.load(manifest_id)
        except ObjectMissing:
            return None  # its checkpoint expired, and collection has been there

    wanted = sorted({checkpoint.manifest_id for checkpoint in latest.value.checkpoints} - {latest.id})
    pinned = [found for found in shared_pool().map_ordered(load, wanted) if found is not None]
    everything = list(store.list(root))
    log = [meta for meta in everything if meta.path.startswith(f"{paths.wal_folder}/")]
    objects = [meta for meta in everything if not meta.path.startswith(f"{paths.wal_folder}/")]
    if wal_store is not None:
        log += wal_store.list(paths.wal_folder)
    decided = CompactionsStore(store, paths).latest() if jobs else None
    return Seen(
        store.url,
        root,
        latest,
        None if decided is None else decided.value,
        overview(latest.value, pinned, paths, objects, log),
        SYSTEM_CLOCK.now_ms() // 1000,
    )
