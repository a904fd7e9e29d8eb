"""A state of a database without a checkpoint: one manifest, and the WAL up to one file.

Finding and reading it writes nothing, so read-only access to the store is enough. Garbage collection does not know of
it: a reader that is slower than its minimum age finds the manifest or an SST deleted, and raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from flagstone.clones.checkpoint import require_initialized
from flagstone.clones.origin import refuse_destroyed
from flagstone.config import ReaderSettings
from flagstone.db.reader.reader import DbReader, prepare_reader
from flagstone.db.reader.reader_checkpoint import FormerCheckpoint
from flagstone.errors import InvalidRequest, Unavailable
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.pool import shared_pool
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import ManifestId, WalId
from flagstone.wal.frontier import find_frontier


class PinnedState(NamedTuple):
    """The newest manifest at some moment, and the last WAL file that existed then."""

    manifest_id: ManifestId
    last_wal_id: WalId

    def __str__(self) -> str:
        return f"{self.manifest_id}:{self.last_wal_id}"

    @classmethod
    def parse(cls, text: str) -> PinnedState:
        """The state that `str` wrote. Raises `InvalidRequest` for other text."""
        manifest, _, wal = text.partition(":")
        if not (manifest.isdigit() and wal.isdigit()):
            raise InvalidRequest("write the ids of a manifest and of a WAL file, as in 17:230")
        return cls(ManifestId(int(manifest)), WalId(int(wal)))


def find_state(
    manifests: ManifestStore, store: ObjectStore, wal_store: ObjectStore
) -> tuple[PinnedState, Manifest]:
    """What is on the store now, and its manifest. Writes nothing.

    Raises:
        InvalidRequest: there is no database, or it is a clone that is not finished.
        Closed: the database was destroyed.

    """
    paths = manifests.paths
    latest = manifests.latest()
    if latest is None:
        raise InvalidRequest(
            f"no database at {paths.root!r} in {store.url}; check the path, or create it first"
        )
    refuse_destroyed(latest.value, store, paths)
    require_initialized(latest.value)
    frontier = find_frontier(wal_store, paths, latest.value, pool=shared_pool())
    last = max(frontier, latest.value.wal_id_last_seen)
    return PinnedState(ManifestId(latest.id), WalId(last)), latest.value


def open_pinned(
    path: str,
    state: PinnedState,
    *,
    arguments: Mapping[str, Any],
    merge_operator: MergeOperator | None,
    settings: ReaderSettings,
) -> DbReader:
    """A reader of that state, which does not follow the database. `arguments` name the stores, clock and ids.

    Raises:
        Unavailable: garbage collection has deleted the manifest, or the store did not answer.

    """
    parts = prepare_reader(
        path, **arguments, merge_operator=merge_operator, segment_extractor=None, settings=settings
    )
    try:
        manifest = parts.manifests.load(state.manifest_id)
    except ObjectMissing:
        raise Unavailable(
            f"garbage collection has deleted manifest {state.manifest_id}, which this read shows: no checkpoint kept "
            "it. Read again; or read with a checkpoint, or raise the minimum age of garbage collection"
        ) from None
    shown = FormerCheckpoint(
        parts.manifests,
        Versioned(state.manifest_id, replace(manifest, wal_id_last_seen=state.last_wal_id)),
        None,
        mode="latest",
        lifetime=None,
        clock=parts.clock,
    )
    follower = parts.follow(shown, None if settings.skip_wal_replay else parts.tail, polls=False)
    follower.start()
    return DbReader(follower, parts)
