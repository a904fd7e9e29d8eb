"""The garbage collector that operators run: it also deletes a destroyed database when its grace period is over.

The collector inside an open database does not need that: a destroyed database cannot be opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from flagstone.clones.destroy import Verdict, collect_destroyed, why_kept
from flagstone.config.settings import GarbageCollectorOptions
from flagstone.gc.collector import Collector, Remains
from flagstone.gc.plan import Kind, KindOptions, requested_options
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore


def open_collector(
    store: ObjectStore,
    paths: DbPaths,
    options: Mapping[Kind, KindOptions],
    *,
    wal_store: ObjectStore | None = None,
    boundary_files: bool = True,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> Collector:
    """A collector for the database at `paths`. Makes no request yet."""
    wal_store = store if wal_store is None else wal_store

    def delete_destroyed(*, dry_run: bool) -> Remains | None:
        done = collect_destroyed(store, paths, wal_store=wal_store, clock=clock, ids=ids, dry_run=dry_run)
        if done.verdict is Verdict.DUE:
            return Remains(deleted=done.deleted)
        reasons = why_kept(done)
        return Remains(waits_for=reasons) if reasons else None

    return Collector(
        store,
        paths,
        options,
        wal_store=wal_store,
        boundary_files=boundary_files,
        clock=clock,
        ids=ids,
        delete_destroyed=delete_destroyed,
    )


def make_room(store: ObjectStore, paths: DbPaths, *, wal_store: ObjectStore, clock: Clock, ids: Ids) -> None:
    """Delete the WAL files and SSTs that no manifest needs, whatever their age. Writes nothing to a local folder."""
    options = requested_options(GarbageCollectorOptions(), ("wal", "compacted"), timedelta())
    open_collector(store, paths, options, wal_store=wal_store, clock=clock, ids=ids).collect()
