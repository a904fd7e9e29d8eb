"""The garbage collector as operators run it: it also deletes what was destroyed, once its time has come.

Inside an open database the collector does without: a database that was destroyed cannot be opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from flagstone.config.settings import GarbageCollectorOptions
from flagstone.maintenance.gc.collector import Collector, Remains
from flagstone.maintenance.gc.options import KindOptions, requested_options
from flagstone.maintenance.gc.plan import Kind
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.views.destroy import Verdict, collect_destroyed, why_kept


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
    """A collector for the database at `paths`; nothing is contacted yet."""
    logs = store if wal_store is None else wal_store

    def bury(*, dry_run: bool) -> Remains | None:
        done = collect_destroyed(store, paths, wal_store=logs, clock=clock, ids=ids, dry_run=dry_run)
        if done.verdict is Verdict.DUE:
            return Remains(deleted=done.deleted)
        reasons = why_kept(done)
        return Remains(waits_for=reasons) if reasons else None

    return Collector(
        store, paths, options, wal_store=logs, boundary_files=boundary_files, clock=clock, bury=bury
    )


def make_room(store: ObjectStore, paths: DbPaths, *, wal_store: ObjectStore, clock: Clock, ids: Ids) -> None:
    """Delete the WAL files and SSTs that no manifest needs, whatever their age. Writes no byte to a folder."""
    options = requested_options(GarbageCollectorOptions(), ("wal", "compacted"), timedelta())
    open_collector(store, paths, options, wal_store=wal_store, clock=clock, ids=ids).collect()
