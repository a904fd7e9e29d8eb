"""The maintenance an open database does in the background: it compacts itself and collects its garbage.

It lives on what the engine tells it: every manifest the engine learns of is passed on, and every one a compaction
writes is the engine's at once. What goes wrong here shows in `Db.status()`, the metrics and the log, and never stops a
write; when nothing is compacted for long, the limits on L0 do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from flagstone.config import CompactionWorkerOptions
from flagstone.db.environment import Environment
from flagstone.errors import Closed, Unavailable
from flagstone.maintenance.compaction.board import Board
from flagstone.maintenance.compaction.compactor import Compactor
from flagstone.maintenance.compaction.executor import LocalExecutor
from flagstone.maintenance.compaction.pooled import PooledExecutor
from flagstone.maintenance.compaction.role import release_taken_role
from flagstone.maintenance.compaction.task import Executor
from flagstone.maintenance.gc.collector import Collector
from flagstone.maintenance.gc.options import kind_options
from flagstone.maintenance.gc.report import GarbageReport
from flagstone.maintenance.gc.service import GarbageCollection
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.service import Supervisor

_log = logging.getLogger("flagstone.db")

_STOP_TIMEOUT_S: Final = 30.0


class Host(Protocol):
    """What it needs of the engine."""

    env: Environment
    manifests: ManifestStore
    fence: Fence

    def adopt(self, latest: Versioned[Manifest]) -> None: ...

    def refresh(self) -> None: ...


class Maintenance:
    """Background services of one open database, in threads of their own."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._compactor = _compactor(host, self._adopt)
        self._manifest_id = 0
        self._garbage = _garbage_collection(host, lambda: self._manifest_id, self._on_collected)
        self._supervisor = Supervisor(clock=host.env.clock)

    def start(self, manifest: Versioned[Manifest]) -> None:
        """Begin. The store is not asked for anything before there is work, or some time has passed."""
        self.note_manifest(manifest)
        if self._compactor is not None:
            self._compactor.start()
        if self._garbage is not None:
            self._supervisor.start(self._garbage)

    def note_manifest(self, manifest: Versioned[Manifest]) -> None:
        """The engine has a newer manifest: there may be something to compact, and something to collect."""
        self._manifest_id = manifest.id
        if self._compactor is not None:
            self._compactor.board.note_manifest(manifest)

    def note_load(self, manifest: Manifest) -> None:
        """Give the compactor's role back, which this process took to add a bulk load."""
        if self._compactor is not None:
            self._compactor.claim_back()
            return
        env = self._host.env
        compactions = CompactionsStore(
            env.store, env.paths, metrics=env.metrics, clock=env.clock, ids=env.ids
        )
        release_taken_role(compactions, manifest.compactor_epoch, ids=env.ids, now_ms=env.clock.now_ms())

    def halt(self) -> None:
        """Begin nothing more; does not wait."""
        if self._garbage is not None:
            self._garbage.halt()
        if self._compactor is not None:
            self._compactor.halt()

    def stop(self) -> None:
        """End the work and give unfinished jobs back, for the next opening or another worker to go on with."""
        if self._garbage is not None:
            self._garbage.halt()
        try:
            self._supervisor.stop(_STOP_TIMEOUT_S)
        except Unavailable as stuck:
            # Garbage is deleted by whoever comes next.
            _log.warning("left the garbage collector running: %s", stuck)
        try:
            if self._compactor is not None:
                self._compactor.stop()
        except Unavailable as stuck:
            # What it works on is nobody's until its claims lapse; closing must not fail for that.
            _log.warning("left the compactor running: %s", stuck)

    def status(self) -> dict[str, Any] | None:
        """What the compactor does, as plain values; None when it is switched off."""
        return None if self._compactor is None else self._compactor.status()

    def garbage_status(self) -> dict[str, Any] | None:
        """What the garbage collector does, as plain values; None when it is switched off."""
        return None if self._garbage is None else self._garbage.status()

    def _on_collected(self, report: GarbageReport) -> None:
        # What the collector read is newer than what was polled for, and older versions may be gone.
        if report.manifest_id > self._manifest_id:
            self._host.refresh()

    def _adopt(self, written: Versioned[Manifest]) -> None:
        # A newer writer may own the manifest that our compaction was applied to: that is not ours to show.
        with suppress(Closed):
            self._host.fence.check(written.value)
            self._host.adopt(written)


def local_executor(env: Environment, options: CompactionWorkerOptions) -> LocalExecutor:
    """Executes jobs in this process, and makes tables as the database does."""
    return LocalExecutor(
        env.store,
        env.paths,
        options=env.table_options,
        max_sst_bytes=options.max_sst_size,
        max_subcompactions=options.max_subcompactions,
        max_fetch_tasks=options.max_fetch_tasks,
        bytes_to_fetch=options.bytes_to_fetch,
        merge_operator=env.counted_operator("compact"),
        compaction_filter=env.compaction_filter,
        pool=env.pool,
        ids=env.ids,
        clock=env.clock,
        metrics=env.metrics,
    )


def _executor(env: Environment, options: CompactionWorkerOptions) -> Executor:
    """What merges: the one of the user, or ours, perhaps in threads of the user."""
    if env.executor is not None:
        return env.executor
    merging = local_executor(env, options)
    return merging if env.compaction_pool is None else PooledExecutor(merging, env.compaction_pool)


def _compactor(host: Host, publish: Callable[[Versioned[Manifest]], None]) -> Compactor | None:
    env = host.env
    options = env.settings.compactor_options
    if options is None:
        return None
    limit = env.settings.l0_max_ssts
    if limit < options.scheduler_options.min_compaction_sources:
        _log.warning(
            "l0_max_ssts is %d, but compaction waits for %d tables (min_compaction_sources): writes will stop",
            limit,
            options.scheduler_options.min_compaction_sources,
        )
    board = Board(
        host.manifests,
        CompactionsStore(env.store, env.paths, metrics=env.metrics, clock=env.clock, ids=env.ids),
        publish=publish,
        update_timeout_s=options.manifest_update_timeout.total_seconds(),
    )
    return Compactor(
        board,
        coordinate=options,
        work=options.worker,
        executor=None if options.worker is None else _executor(env, options.worker),
        scheduler=env.scheduler,
        clock=env.clock,
        ids=env.ids,
        metrics=env.metrics,
        embedded=True,
        stalled=lambda manifest: any(len(tree.l0) >= limit for tree in manifest.trees),
    )


def _garbage_collection(
    host: Host, current_manifest: Callable[[], int], collected: Callable[[GarbageReport], None]
) -> GarbageCollection | None:
    env = host.env
    options = env.settings.garbage_collector_options
    if options is None:
        return None
    kinds = kind_options(options)
    collector = Collector(
        env.store,
        env.paths,
        kinds,
        wal_store=env.wal_store,
        boundary_files=options.boundary_files_enabled,
        clock=env.clock,
        metrics=env.metrics,
    )
    return GarbageCollection(
        collector, kinds, clock=env.clock, current_manifest=current_manifest, collected=collected
    )
