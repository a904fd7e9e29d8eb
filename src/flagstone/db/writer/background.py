"""The background maintenance of an open database: the embedded compactor, the garbage collector, the cache preload.

Every manifest that the writer adopts goes to the compactor, and the writer adopts every manifest that a compaction
writes. Failures here appear in `Db.status()`, the metrics and the Python log. They never stop a write; if nothing is
compacted for long, the limits on L0 do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Literal

from flagstone.compaction.compactor import Compactor
from flagstone.compaction.coordinator import release_taken_role
from flagstone.compaction.executor import LocalExecutor, Merging
from flagstone.compaction.extensions import Executor, PooledExecutor
from flagstone.compaction.policy import new_survey
from flagstone.compaction.shared_state import Board
from flagstone.config import CompactionWorkerOptions
from flagstone.db.writer.environment import Environment
from flagstone.errors import Closed, Unavailable
from flagstone.format.sst import footer_range
from flagstone.gc.collector import Collector, GarbageCollection
from flagstone.gc.plan import kind_options
from flagstone.gc.report import GarbageReport
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.service import Supervisor
from flagstone.store.caching import CachingStore
from flagstone.store.counting import attributed
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing
from flagstone.write.manifest import WriterManifest

_log = logging.getLogger("flagstone.db")

_STOP_TIMEOUT_S: Final = 30.0


class Maintenance:
    """Background services of one open database, in threads of their own."""

    def __init__(self, env: Environment, manifest: WriterManifest) -> None:
        self._env = env
        self._manifest = manifest
        self._compactor = _compactor(env, manifest.store, self._adopt)
        self._manifest_id = 0
        self._garbage = _garbage_collection(env, lambda: self._manifest_id, self._on_collected)
        self._supervisor = Supervisor(clock=env.clock)

    def start(self) -> None:
        """Start the services. They send no request before there is work, or some time has passed."""
        self.after_adoption(self._manifest.current)
        if self._compactor is not None:
            self._compactor.start()
        if self._garbage is not None:
            self._supervisor.start(self._garbage)

    def before_adoption(self, latest: Versioned[Manifest], forest: Any) -> None:
        """Nothing to do."""

    def after_adoption(self, latest: Versioned[Manifest]) -> None:
        """There may be something to compact, and something to collect."""
        self._manifest_id = latest.id
        if self._compactor is not None:
            self._compactor.board.note_manifest(latest)

    def note_load(self, manifest: Manifest) -> None:
        """Release the compactor's role, which this process took to add a bulk load."""
        if self._compactor is not None:
            self._compactor.claim_back()
            return
        env = self._env
        release_taken_role(
            _compactions_store(env), manifest.compactor_epoch, ids=env.ids, now_ms=env.clock.now_ms()
        )

    def fetch_jobs(self) -> Compactions | None:
        """The newest compactions file; None without one."""
        latest = _compactions_store(self._env).latest()
        return None if latest is None else latest.value

    def halt(self) -> None:
        """Start no further work, without waiting."""
        if self._garbage is not None:
            self._garbage.halt()
        if self._compactor is not None:
            self._compactor.halt()

    def stop(self) -> None:
        """Stop the services and release unfinished jobs: the next opening or another worker continues them."""
        if self._garbage is not None:
            self._garbage.halt()
        try:
            self._supervisor.stop(_STOP_TIMEOUT_S)
        except Unavailable as stuck:
            # The next garbage collection deletes the rest.
            _log.warning("left the garbage collector running: %s", stuck)
        try:
            if self._compactor is not None:
                self._compactor.stop()
        except Unavailable as stuck:
            # Its claims on jobs expire; closing must not fail for that.
            _log.warning("left the compactor running: %s", stuck)

    def status(self) -> dict[str, Any] | None:
        """What the compactor does, as plain values; None when it is switched off."""
        return None if self._compactor is None else self._compactor.status()

    def garbage_status(self) -> dict[str, Any] | None:
        """What the garbage collector does, as plain values; None when it is switched off."""
        return None if self._garbage is None else self._garbage.status()

    def _on_collected(self, report: GarbageReport) -> None:
        # The collector read a newer manifest than the last poll, and may have deleted older ones.
        if report.manifest_id > self._manifest_id:
            self._manifest.refresh()

    def _adopt(self, written: Versioned[Manifest]) -> None:
        # A newer writer may own the manifest that our compaction was applied to: then we must not adopt it.
        with suppress(Closed):
            self._manifest.fence.check(written.value)
            self._manifest.adopt(written)


def _compactions_store(env: Environment) -> CompactionsStore:
    store = attributed(env.store, "compaction")
    return CompactionsStore(store, env.paths, metrics=env.metrics, clock=env.clock, ids=env.ids)


def local_executor(env: Environment, options: CompactionWorkerOptions) -> LocalExecutor:
    """An executor for compaction jobs in this process, which writes SSTs as the database does."""
    return LocalExecutor(
        attributed(env.store, "compaction"),
        env.paths,
        Merging(
            work=options,
            sst=env.sst_options,
            merge_operator=env.counted_operator("compact"),
            compaction_filter=env.compaction_filter,
        ),
        cache=env.disk_cache if env.settings.object_store_cache_options.cache_on_compaction else None,
        pool=env.pool,
        ids=env.ids,
        metrics=env.metrics,
        memory=env.memory,
    )


def _executor(env: Environment, options: CompactionWorkerOptions) -> Executor:
    """The executor of the user, or ours, possibly in threads of the user."""
    if env.executor is not None:
        return env.executor
    merging = local_executor(env, options)
    return merging if env.compaction_pool is None else PooledExecutor(merging, env.compaction_pool)


def _compactor(
    env: Environment, manifests: ManifestStore, publish: Callable[[Versioned[Manifest]], None]
) -> Compactor | None:
    options = env.settings.compactor_options
    if options is None:
        return None
    limit = env.settings.l0_max_ssts
    if limit < options.scheduler_options.min_compaction_sources:
        _log.warning(
            "l0_max_ssts is %d, but compaction waits for %d SSTs (min_compaction_sources): writes will stop",
            limit,
            options.scheduler_options.min_compaction_sources,
        )
    board = Board(
        manifests,
        _compactions_store(env),
        clock=env.clock,
        ids=env.ids,
        metrics=env.metrics,
        publish=publish,
        update_timeout_s=options.manifest_update_timeout.total_seconds(),
    )
    store = attributed(env.store, "compaction")
    survey = None if env.scheduler is not None else new_survey(options, store, env.paths, pool=env.pool)
    return Compactor(
        board,
        coordinate=options,
        work=options.worker,
        executor=None if options.worker is None else _executor(env, options.worker),
        scheduler=env.scheduler,
        survey=survey,
        embedded=True,
        stalled=lambda manifest: any(len(tree.l0) >= limit for tree in manifest.trees),
    )


def _garbage_collection(
    env: Environment, current_manifest: Callable[[], int], collected: Callable[[GarbageReport], None]
) -> GarbageCollection | None:
    options = env.settings.garbage_collector_options
    if options is None:
        return None
    kinds = kind_options(options)
    collector = Collector(
        attributed(env.store, "gc"),
        env.paths,
        kinds,
        wal_store=attributed(env.wal_store, "gc"),
        boundary_files=options.boundary_files_enabled,
        clock=env.clock,
        ids=env.ids,
        metrics=env.metrics,
    )
    return GarbageCollection(
        collector, kinds, clock=env.clock, current_manifest=current_manifest, collected=collected
    )


class CachePreload:
    """A background service that fetches the SSTs of a database into the disk cache, one after the other, and ends.

    It stops before the cache would have to evict, and when the store does not answer: the cache promises speed only.
    Cutting it off loses nothing.
    """

    name = "cache-preload"

    def __init__(self, cache: CachingStore, ssts: Iterable[tuple[str, int]]) -> None:
        self._cache = cache
        self._ssts = iter(ssts)

    def run_once(self) -> float | None:
        """Fetch what the cache lacks of one SST."""
        found = next(self._ssts, None)
        if found is None:
            return None
        path, size = found
        try:
            return 0.0 if self._cache.preload(path, size) else None
        except ObjectMissing:
            return 0.0  # compacted and collected since
        except Unavailable as error:
            _log.warning("stopped filling the disk cache path=%s error=%s", path, error)
            return None


def plan_preload(
    manifest: Manifest, paths: DbPaths, which: Literal["L0Sst", "AllSst"]
) -> list[tuple[str, int]]:
    """The SSTs to fetch with their sizes: L0 first, newest first, then the sorted runs."""
    views = [view for tree in manifest.trees for view in tree.l0]
    if which == "AllSst":
        views += [view for tree in manifest.trees for run in tree.runs for view in run.views]
    chosen: dict[str, int] = {}
    for view in views:
        sst = manifest.sst(view)
        owner = manifest.path_of_owner(sst.id)
        path = (paths if owner is None else DbPaths(owner)).sst(sst.id)
        chosen.setdefault(path, footer_range(sst.info, sst.format_version)[1])
    return list(chosen.items())
