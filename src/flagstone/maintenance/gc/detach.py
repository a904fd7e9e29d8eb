"""Letting go of the databases a clone was made from, once it uses none of their tables any more.

The final checkpoint that the clone holds in the other database goes first, the clone's own entry second: a crash in
between leaves an entry whose checkpoint is gone, which the next round drops. In the other order the checkpoint would
have no owner and stay for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flagstone.metadata.manifest import ExternalDb, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore

Identity = tuple[object, ...]


def plan_detach(latest: Manifest, pinned: Iterable[Manifest]) -> list[ExternalDb]:
    """The entries from which neither the latest manifest nor any that a checkpoint pins uses a table.

    Lists of borrowed tables only ever shrink, so an entry that is unused now stays unused. A clone that is still being
    made has not placed its checkpoints yet; nothing is detached from it.
    """
    if not latest.initialized:
        return []
    used = {
        _identity(entry)
        for manifest in (latest, *pinned)
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
