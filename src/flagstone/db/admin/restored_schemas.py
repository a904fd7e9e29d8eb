"""The schema rows that a restore writes, because the schemas since its checkpoint are given up with their rows.

A consumer of changes may not have read these rows yet, and reads them after the restore. So the restored schemas keep
the given up ones as former schemas, and no version gets a number that one of them had.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from flagstone.clones.restore import restore
from flagstone.config import ReaderSettings
from flagstone.db.reader.pinned import find_state, open_pinned
from flagstone.db.reader.reader import open_reader
from flagstone.db.reader.schemas import read_schemas
from flagstone.errors import FlagstoneError
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.schema import schema_key
from flagstone.schema.history import after_restore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore

_log = logging.getLogger("flagstone.db")
_SETTINGS = ReaderSettings(block_cache_bytes=0)


def restore_with_schemas(
    store: ObjectStore,
    paths: DbPaths,
    checkpoint: UUID,
    *,
    wal_store: ObjectStore,
    clock: Clock,
    ids: Ids,
    segment_extractor: SegmentExtractor | None,
) -> Versioned[Manifest]:
    """`flagstone.clones.restore.restore`, which also writes these rows. Raises and leaves behind what that does."""
    arguments: dict[str, Any] = {
        "store": store,
        "store_options": None,
        "wal_store": None if wal_store is store else wal_store,
        "clock": clock,
        "ids": ids,
    }
    manifests = ManifestStore(store, paths)
    return restore(
        store,
        paths,
        checkpoint,
        wal_store=wal_store,
        clock=clock,
        ids=ids,
        segment_extractor=segment_extractor,
        system_rows=lambda: schemas_to_restore(manifests, store, wal_store, checkpoint, arguments),
    )


def schemas_to_restore(
    manifests: ManifestStore,
    store: ObjectStore,
    wal_store: ObjectStore,
    checkpoint: UUID,
    arguments: Mapping[str, Any],
) -> list[tuple[bytes, bytes]]:
    """The keys and values of these rows; none if all schemas are those of the checkpoint.

    `arguments` name the stores, clock and ids. A present state that is too damaged to be read has no schemas: it must
    not prevent the restore of a sound one.
    """
    path = manifests.paths.root
    try:
        with open_reader(path, **arguments, checkpoint=checkpoint, settings=_SETTINGS) as reader:
            restored = read_schemas(reader, retired=True)
        state, _ = find_state(manifests, store, wal_store)
        with open_pinned(path, state, arguments=arguments, merge_operator=None, settings=_SETTINGS) as reader:
            given_up = read_schemas(reader, retired=True)
    except FlagstoneError as error:
        _log.warning("a restore cannot read the schemas that it gives up: %s", error)
        return []
    return [
        (schema_key(prefix), after_restore(restored.get(prefix), table).encode())
        for prefix, table in sorted(given_up.items())
        if table != restored.get(prefix)
    ]
