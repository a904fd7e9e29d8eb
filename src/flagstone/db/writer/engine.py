"""A database open for writing: its state, its background services, and how it is closed.

Four services work for a writer: the WAL writer, the flusher, the manifest follower and the scan checkpoints. When one
of them fails for good, writes stop and every waiting caller gets the error. Reads continue with what is known, unless
a newer writer has taken over.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from flagstone.config import CompactorOptions
from flagstone.db.exit import abandon_in_children, renew_lock
from flagstone.db.recovery import Opened
from flagstone.db.writer.background import Maintenance
from flagstone.db.writer.environment import Environment
from flagstone.db.writer.manifest_follower import LoadAdoption, ManifestFollower
from flagstone.db.writer.range_deletes import RangeDeletes
from flagstone.db.writer.scan_checkpoints import ScanCheckpoints
from flagstone.errors import Closed, FlagstoneError
from flagstone.metadata.parallel_wal import forget_parallel_wal
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ViewBuilder
from flagstone.runtime.service import Supervisor
from flagstone.runtime.sync import Lock
from flagstone.wal.writer import Ownership, WalOptions, WalWriter, trusted_s
from flagstone.write.flusher import Flusher, FlushOptions
from flagstone.write.key_check import KeyRanges
from flagstone.write.manifest import WriterManifest
from flagstone.write.writer_state import WriterState

_log = logging.getLogger("flagstone.db")

_STOP_TIMEOUT_S: Final = 60.0


class Services:
    """The background services of a writer. The state wakes them (`flagstone.write.writer_state.Wake`)."""

    def __init__(
        self, env: Environment, state: WriterState, manifest: WriterManifest, maintenance: Maintenance
    ) -> None:
        settings = env.settings
        self._wal_enabled = settings.wal_enabled
        self.supervisor: Supervisor = Supervisor(clock=env.clock)
        interval, hedge = settings.flush_interval, settings.wal_hedge_after
        self.wal: WalWriter = WalWriter(
            env.wal_store,
            env.paths,
            state,
            Ownership(manifest, clock=env.clock, limit_s=trusted_s(settings)),
            WalOptions(
                codec=env.sst_options.codec,
                flush_interval_s=None if interval is None else interval.total_seconds(),
                max_retries=settings.object_store_max_retries,
                parallel=settings.max_parallel_wal_writes,
                hedge_after_s=None if hedge is None else hedge.total_seconds(),
            ),
            clock=env.clock,
            ids=env.ids,
            metrics=env.metrics,
            supervisor=self.supervisor,
        )
        self.memtable_flusher: Flusher = Flusher(
            state,
            manifest,
            FlushOptions(
                settings=settings,
                sst=env.sst_options,
                merge_operator=env.counted_operator("flush"),
                extractor=env.extractor,
                memory=env.memory,
                on_disk=env.store.url.startswith("file:"),
            ),
            clock=env.clock,
            ids=env.ids,
            metrics=env.metrics,
            supervisor=self.supervisor,
        )
        self.loads: LoadAdoption = LoadAdoption(env, state, manifest, maintenance)
        self.range_deletes: RangeDeletes = RangeDeletes(
            env,
            state,
            manifest,
            self.memtable_flusher,
            maintenance,
            wake=lambda: self.supervisor.wake(self.manifest_follower),
        )
        self.manifest_follower: ManifestFollower = ManifestFollower(
            state,
            manifest,
            self.memtable_flusher,
            self.loads,
            self.range_deletes,
            interval_s=settings.manifest_poll_interval.total_seconds(),
            supervisor=self.supervisor,
        )
        self.scan_checkpoints: ScanCheckpoints = ScanCheckpoints(
            manifest,
            lifetime=(settings.compactor_options or CompactorOptions()).checkpoint_lifetime,
            clock=env.clock,
            ids=env.ids,
            supervisor=self.supervisor,
        )

    def start(self) -> None:
        if self._wal_enabled:
            self.supervisor.start(self.wal)
        self.supervisor.start(self.memtable_flusher)
        self.supervisor.start(self.manifest_follower)
        self.supervisor.start(self.scan_checkpoints)

    def stop(self) -> None:
        """End the services. May be called again."""
        try:
            self.supervisor.stop(_STOP_TIMEOUT_S)
        finally:
            self.wal.close()
            self.memtable_flusher.close()

    def wal_soon(self) -> None:
        self.wal.arm()

    def wal_now(self) -> None:
        self.wal.request()

    def write_wal(self) -> None:
        self.wal.write_now()

    def flusher(self) -> None:
        self.supervisor.wake(self.memtable_flusher)

    def follower(self) -> None:
        self.manifest_follower.hurry()


class Engine:
    """A database open for writing. `db.open` makes it; `Db` and `AsyncDb` call it."""

    def __init__(
        self, env: Environment, manifests: ManifestStore, opened: Opened, views: ViewBuilder
    ) -> None:
        self.env = env
        self.key_ranges: KeyRanges | None = opened.key_ranges
        recovered = opened.recovered
        view = views.build(recovered.manifest.value).with_memtables(recovered.memtables.newest_first())
        self.state: WriterState = WriterState(
            recovered,
            view,
            settings=env.settings,
            clock=env.clock,
            merge_operator=env.merge_operator,
            metrics=env.metrics,
        )
        self.manifest: WriterManifest = WriterManifest(
            manifests, opened.fence, self.state, views, metrics=env.metrics
        )
        self.maintenance: Maintenance = Maintenance(env, self.manifest)
        self.services: Services = Services(env, self.state, self.manifest, self.maintenance)
        self.state.wake = self.services
        if env.memory is not None:
            self.state.draw_from(env.memory)
        self.services.scan_checkpoints.track(recovered.manifest, view.forest)
        self.manifest.listeners = (
            self.services.scan_checkpoints,
            self.services.manifest_follower,
            self.maintenance,
        )
        # Taken for the whole of `close`. A second caller waits here and finds the work done.
        self._closing = Lock()
        self._clean: bool | None = None
        self._close_done = False
        self._forked = False
        abandon_in_children(self)

    def start(self) -> None:
        """Start the background services."""
        manifest = self.manifest.current
        _log.info(
            "opened path=%s store=%s epoch=%d manifest=%d last_seq=%d replayed_rows=%d",
            self.env.paths.root,
            self.env.store.url,
            self.manifest.fence.epoch,
            manifest.id,
            self.state.last_seq,
            self.state.now.memtables.rows,
        )
        self.services.supervisor.on_failure(self._on_failure)
        self.services.start()
        self.maintenance.start()
        if self.state.now.memtables.frozen:
            self.services.flusher()

    def flush_wal(self) -> None:
        """Wait until every write so far is on the store."""
        self.state.wait_durable(self.state.last_seq)

    def flush_all(self) -> None:
        """Wait until every write so far is in SSTs, or, if L0 has no room, in the WAL for the next opening."""
        wal_enabled = self.env.settings.wal_enabled
        flusher = self.services.memtable_flusher
        self.state.flush_memtables(unless=lambda: wal_enabled and flusher.pause is not None)
        if wal_enabled:
            self.flush_wal()

    def close(self) -> None:
        """Flush, stop the services and write a last manifest. Afterwards every call raises `Closed`.

        A crash halfway loses nothing that was durable: the next opening replays the WAL. After an interrupt (Ctrl-C)
        writes are refused, and another `close` continues where this one stopped.
        """
        if self._forked:
            return
        with self._closing:
            if self._close_done:
                return
            if self._clean is None:
                self._clean = self.state.now.status == "open"
            self._close(clean=self._clean)
            self._close_done = True
            _log.info(
                "closed path=%s clean=%s last_seq=%d durable_seq=%d manifest=%d",
                self.env.paths.root,
                self._clean,
                self.state.last_seq,
                self.state.durable_seq,
                self.manifest.current.id,
            )

    def _close(self, *, clean: bool) -> None:
        reason = Closed("the database was closed; open it again")
        # Writes are refused before the flush: every write that was accepted is then flushed, or its loss is reported.
        self.state.refuse(reason)
        try:
            if clean and self.state.now.status == "open":
                self.flush_all()
        except Exception:
            # There is no second try: the loss is reported here, and the services are stopped all the same.
            self._clean = False
            self._stop(reason)
            # Last: a close that is interrupted before this continues with stopping the services.
            self._close_done = True
            raise
        self._stop(reason)
        if clean:
            # Every row is durable. A newer writer, or the destruction of the database, makes the rest unnecessary.
            with suppress(Closed):
                self._write_last_manifest()

    def _write_last_manifest(self) -> None:
        last_wal_id = self.state.last_wal_id
        self.manifest.commit(
            lambda now: replace(
                forget_parallel_wal(self.services.scan_checkpoints.without_checkpoints(now.value)),
                wal_id_last_seen=max(now.value.wal_id_last_seen, last_wal_id),
            )
        )
        self.services.loads.retract()

    def _stop(self, reason: Closed) -> None:
        """End the services. Every call that waits for them raises the reason. May be called again."""
        self.state.fail(reason)
        self.maintenance.stop()
        self.services.stop()
        self.state.release_memory()
        self.manifest.views.ssts.close()

    def _on_failure(self, error: FlagstoneError) -> None:
        """A service failed for good: nothing more becomes durable."""
        self.state.fail(error)
        self.maintenance.halt()

    def abandon_in_child(self, reason: Closed) -> None:
        """In a forked child, which has none of the threads, every call raises `Closed` and none hangs."""
        renew_lock(self.state.lock)
        self.manifest.abandon_in_child(renew_lock)
        renew_lock(self._closing)
        self._forked = True
        self._on_failure(reason)

    def status(self) -> dict[str, Any]:
        """The state of writes, flushes and SSTs, as plain values."""
        state, manifest = self.state, self.manifest.current
        now, pause = state.now, self.services.memtable_flusher.pause
        return {
            "path": self.env.paths.root,
            "store": self.env.store.url,
            "state": "read-only" if now.status == "failed" else now.status,
            "failure": None if now.failure is None else str(now.failure),
            "manifest_id": manifest.id,
            "writer_epoch": self.manifest.fence.epoch,
            "last_seq": state.last_seq,
            "committed_seq": state.committed_seq,
            "durable_seq": state.durable_seq,
            "last_l0_seq": manifest.value.last_l0_seq,
            "unflushed_bytes": now.memtables.unflushed_bytes,
            "frozen_memtables": len(now.memtables.frozen),
            "writers_paused": state.paused,
            "upload_paused": None if pause is None else pause.message,
            "l0_tables": sum(len(tree.l0) for tree in manifest.value.trees),
            "sorted_runs": sum(len(tree.runs) for tree in manifest.value.trees),
            "pinned_for_long_reads": self.services.scan_checkpoints.count,
            "memory": None if self.env.memory is None else self.env.memory.usage(),
            "compactor": self.maintenance.status(),
            "garbage_collector": self.maintenance.garbage_status(),
        }
