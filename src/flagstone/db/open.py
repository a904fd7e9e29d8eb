"""`flagstone.open`: from an address and options to an open database."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flagstone.compaction.extensions import Executor, Scheduler, check_compactor_parts
from flagstone.config import Settings
from flagstone.db.opening import suggests_options, warn_if_interpreted
from flagstone.db.recovery import open_for_writing
from flagstone.db.writer.background import CachePreload, plan_preload
from flagstone.db.writer.database import Db, ProjectedDb
from flagstone.db.writer.engine import Engine
from flagstone.db.writer.environment import Environment
from flagstone.errors import InvalidRequest
from flagstone.format.filter import PrefixExtractor
from flagstone.kernels import regions
from flagstone.lsm.compaction_filter import CompactionFilterFactory
from flagstone.lsm.merge_operator import MergeOperator, check_operator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ViewBuilder
from flagstone.runtime.budget import MemoryBudget, fit_settings, plan_shares, process_budget
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import shared_pool
from flagstone.sst.cache import SstCache
from flagstone.sst.store import SstStore
from flagstone.store.caching import CachingStore, cached_on_disk
from flagstone.store.counting import CountingStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.store.retrying import RetryingStore


@suggests_options("flagstone.open")
def open_database(
    path: str | os.PathLike[str],
    *,
    store: StoreLike | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: StoreLike | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    merge_operator: MergeOperator | None = None,
    segment_extractor: SegmentExtractor | None = None,
    prefix_extractor: PrefixExtractor | None = None,
    compaction_filter: CompactionFilterFactory | None = None,
    scheduler: Scheduler | None = None,
    executor: Executor | ThreadPoolExecutor | None = None,
    create: bool = True,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> Db:
    """Open a database for writing; any other writer is fenced off and learns it at its next durable write.

    `path` is a folder, `file://`, `memory://NAME/path`, `s3://bucket/path`, `gs://`, `az://`, or with `store` a path
    inside that store. `wal_store` is another store for the WAL, for instance one with lower latency. `settings` may be
    a mapping: `{"flush_interval": "10ms"}`.
    `prefix_extractor` adds the prefixes of keys to the filters of SSTs, so that `scan(prefix=…)` skips SSTs without
    that prefix; it never skips SSTs that were built with another prefix extractor or none. `compaction_filter` makes a
    filter for every compaction in this process. `scheduler` replaces the policy of the embedded
    compactor; proposals that are not possible are dropped with a warning. `executor` runs the compactions: an
    `Executor`, or a `ThreadPoolExecutor` for the built-in one, so that several databases share a limited number of
    threads. The caller shuts it down after closing the database.

    Raises:
        InvalidRequest: there is no database and `create` is False, or an argument does not fit it.
        Closed: another writer claimed the database at the same time, and owns it.
        Unavailable: the store did not answer.

    """
    warn_if_interpreted()
    found, root = resolve_database(path, store, store_options)
    if not root:
        raise InvalidRequest(f"{os.fspath(path)!r} names a whole store; a database needs a path inside it")
    check_operator(merge_operator)
    settings, memory = _within_budget(Settings.of(settings))
    merging, threads = check_compactor_parts(settings, scheduler, executor)
    metrics, paths, pool = Metrics(), DbPaths(root), shared_pool()
    main = _with_retries_and_metrics(found, metrics, clock, ids)
    on_disk = cached_on_disk(main, settings.object_store_cache_options, metrics=metrics)
    env = Environment(
        store=main,
        wal_store=main
        if wal_store is None
        else _with_retries_and_metrics(
            resolve_wal_store(wal_store, main, store_options), metrics, clock, ids, "wal"
        ),
        disk_cache=on_disk if isinstance(on_disk, CachingStore) else None,
        paths=paths,
        settings=settings,
        clock=clock,
        ids=ids,
        metrics=metrics,
        pool=pool,
        merge_operator=merge_operator,
        extractor=segment_extractor,
        prefix_extractor=prefix_extractor,
        compaction_filter=compaction_filter,
        scheduler=scheduler,
        executor=merging,
        compaction_pool=threads,
        memory=memory,
    )
    manifests = ManifestStore(env.store, paths, metrics=metrics, clock=clock, ids=ids)
    opened = open_for_writing(env, manifests, create=create)
    own = SstCache(capacity_bytes=settings.block_cache_bytes + settings.meta_cache_bytes, metrics=metrics)
    cache = own if memory is None else memory.share_cache(own)
    ssts = SstStore(on_disk, paths, cache=cache, pool=pool, metrics=metrics, memory=memory)
    engine = Engine(env, manifests, opened, ViewBuilder(ssts))
    engine.start()
    preload = settings.object_store_cache_options.preload_disk_cache_on_startup
    if preload is not None and env.disk_cache is not None:
        wanted = plan_preload(opened.recovered.manifest.value, paths, preload)
        engine.services.supervisor.start(CachePreload(env.disk_cache, wanted))
    return Db(engine) if opened.key_ranges is None else ProjectedDb(engine)


def _within_budget(settings: Settings) -> tuple[Settings, MemoryBudget | None]:
    """The memory budget of this process, and the settings with limits that fit into it."""
    if settings.memory_budget is None:
        return settings, None
    memory = process_budget(settings.memory_budget)
    regions.SHARED.keep_none()
    return fit_settings(settings, plan_shares(memory.total_bytes)), memory


def _with_retries_and_metrics(
    store: ObjectStore, metrics: Metrics, clock: Clock, ids: Ids, store_type: str = "main"
) -> ObjectStore:
    """The store with retries and counters; a store that has retries already keeps its own."""
    retrying = (
        store
        if isinstance(store, RetryingStore)
        else RetryingStore(store, clock=clock, ids=ids, metrics=metrics)
    )
    return CountingStore(retrying, component="db", store_type=store_type, metrics=metrics)
