"""The open database: owns the state and the background services, and has no rules of its own.

Four services work for a writer: the log writer, the memtable flusher, the follower, which learns what others (a
compactor, an operator) did to the manifest, and the pins, which keep the tables of long reads. When one of them fails
for good, writes stop and every waiter hears why; reads go on with what is known, unless a newer writer has taken over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from flagstone.config import CompactorOptions
from flagstone.db.environment import Environment
from flagstone.db.forking import abandon_in_children, renew_lock
from flagstone.db.load_adoption import LoadAdoption
from flagstone.db.maintenance import Maintenance
from flagstone.db.manifest_follower import ManifestFollower
from flagstone.db.opening import Opened
from flagstone.db.read_pins import ReadPins
from flagstone.db.timeouts import elapsed_ms
from flagstone.db.views import Views
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Flush, Manifest, apply_flush, drop_empty_segments
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import HeldClock
from flagstone.runtime.service import Supervisor
from flagstone.runtime.sync import Lock
from flagstone.types import WalId
from flagstone.wal.ownership import Ownership, trusted_s
from flagstone.wal.writer import LogSource, WalWriter
from flagstone.write.backpressure import Pause
from flagstone.write.committer import Committer
from flagstone.write.conflicts import ConflictTracker
from flagstone.write.durability import DurabilityTracker
from flagstone.write.flusher import Flusher, FlushTarget
from flagstone.write.memtables import FrozenMemtable
from flagstone.write.range_gate import KeyRanges
from flagstone.write.state import State, WriterState

_STOP_TIMEOUT_S: Final = 60.0


class Engine:
    """A database open for writing. Made by `db.opening`; the faces in `database` and `async_database` call it."""

    def __init__(self, env: Environment, manifests: ManifestStore, opened: Opened, views: Views) -> None:
        settings = env.settings
        self.env = env
        self.manifests = manifests
        self.fence: Fence = opened.fence
        self.views = views
        self.key_ranges: KeyRanges | None = opened.key_ranges
        # Taken for the whole of `close`; a second caller waits here and finds the work done.
        self._closing = Lock()
        self._clean: bool | None = None
        self._close_done = False
        self._forked = False
        self.supervisor: Supervisor = Supervisor(clock=env.clock)
        self.durability: DurabilityTracker = DurabilityTracker(
            opened.last_seq,
            request_flush=self.request_durable,
            synchronous_commit=settings.synchronous_commit,
        )
        # The lock that orders writes also orders what readers see: one lock, no order of locks to get wrong.
        shown = self.views.prepare(opened.manifest.value).with_memtables(opened.memtables.tables())
        self.state: WriterState = WriterState(
            State(opened.manifest, opened.memtables, shown, settings.max_unflushed_bytes),
            self.durability.lock,
        )
        self.conflicts: ConflictTracker = ConflictTracker()
        self.committer: Committer = Committer(
            self.state,
            self.durability,
            self.conflicts,
            clock=env.clock
            if settings.on_clock_regression == "refuse"
            else HeldClock(env.clock, floor_ms=opened.last_tick_ms),
            last_tick_ms=opened.last_tick_ms,
            last_wal_id=opened.fence_id,
            freeze_bytes=settings.l0_sst_size_bytes,
            max_wal_bytes=settings.max_wal_bytes if settings.wal_enabled else None,
            default_ttl_ms=settings.default_ttl_millis,
            merge_operator=env.merge_operator,
            metrics=env.metrics,
            on_unlogged=self._on_unlogged,
            on_wal_full=self._on_wal_full,
            on_freeze=self._on_freeze,
            gate=opened.gate,
        )
        options = env.table_options
        interval = settings.flush_interval
        ownership = Ownership(self.refresh, clock=env.clock, limit_s=trusted_s(settings))
        self._wal = WalWriter(
            env.wal_store,
            env.paths,
            LogSource(self.committer.seal_log, self._on_logged, self._fenced, ownership.ensure),
            next_id=WalId(opened.fence_id + 1),
            codec=options.codec,
            flush_interval_s=None if interval is None else interval.total_seconds(),
            max_retries=settings.object_store_max_retries,
            clock=env.clock,
            ids=env.ids,
            metrics=env.metrics,
            wake=lambda: self.supervisor.wake(self._wal),
        )
        self._flusher = Flusher(
            self.committer,
            FlushTarget(
                upload=self.views.upload,
                commit=self._commit_flush,
                manifest=lambda: self.manifest.value,
                min_seq=self.min_active_seq,
                request_log=self._wal.request,
                paused=self._on_upload_paused,
            ),
            options=options,
            merge_operator=env.counted_operator("flush"),
            extractor=env.extractor,
            wal_enabled=settings.wal_enabled,
            l0_max_ssts=settings.l0_max_ssts,
            l0_max_ssts_per_key=settings.l0_max_ssts_per_key,
            parallelism=settings.l0_flush_parallelism,
            clock=env.clock,
            ids=env.ids,
            metrics=env.metrics,
            wake=lambda: self.supervisor.wake(self._flusher),
        )
        self._loads = LoadAdoption(self)
        self._follower = ManifestFollower(
            self, self._loads, interval_s=settings.manifest_poll_interval.total_seconds()
        )
        self._follower_hurries = False
        self._refreshes = env.metrics.counter("slatedb.memtable_flush.manifest_refresh_count")
        self._refreshes.add()  # the one that opened the database
        self._wal_at_freeze = opened.fence_id
        self._adopting = Lock()
        self.maintenance: Maintenance = Maintenance(self)
        self.read_pins: ReadPins = ReadPins(
            manifests,
            commit=self._commit_edit,
            lifetime=(settings.compactor_options or CompactorOptions()).checkpoint_lifetime,
            clock=env.clock,
            ids=env.ids,
        )
        self.read_pins.shown(shown.forest, opened.manifest)
        abandon_in_children(self)

    def start(self) -> None:
        """Begin the background work."""
        self.supervisor.on_failure(self._on_failure)
        if self.env.settings.wal_enabled:
            self.supervisor.start(self._wal)
        self.supervisor.start(self._flusher)
        self.supervisor.start(self._follower)
        self.supervisor.start(self.read_pins)
        self.maintenance.start(self.manifest)
        if self.committer.memtables.frozen:
            self._on_freeze()

    # -- state --------------------------------------------------------------------------------------------

    @property
    def manifest(self) -> Versioned[Manifest]:
        """The newest manifest this process knows."""
        return self.state.now.manifest

    @property
    def view(self) -> Any:
        """What a read that begins now sees."""
        return self.state.now.view

    @property
    def closed(self) -> Closed | None:
        return self.state.now.closed

    @property
    def upload_pause(self) -> Pause | None:
        """Why the oldest memtable is not being uploaded; None when nothing holds it up."""
        return self._flusher.pause

    def check_open(self) -> None:
        """Raise `Closed` when the database was closed or taken over."""
        closed = self.state.now.closed
        if closed is not None:
            raise Closed(str(closed), reason=closed.reason)

    def refresh(self) -> None:
        """Learn of manifests that others wrote. Raises `Closed` when a newer writer owns the database."""
        latest = self.manifests.require_latest()
        self.fence.check(latest.value)
        self.adopt(latest)

    def poll(self) -> bool:
        """`refresh` for whoever asks again and again; whether there was anything new."""
        latest = self.manifests.poll()
        self._refreshes.add()
        self.fence.check(latest.value)
        news = latest.id > self.manifest.id
        self.adopt(latest)
        return news

    def awaits_news(self) -> bool:
        """Whether others are expected to write: a compaction that makes room in L0, or a bulk load."""
        self._follower_hurries = self.upload_pause is not None or self._loads.expected
        return self._follower_hurries

    def adopt(self, latest: Versioned[Manifest], flushed: FrozenMemtable | None = None) -> None:
        """Make a manifest the current one, and forget the memtable whose rows it holds.

        What an exception cuts off is done by the next call: by a newer manifest, or by the same one.
        """
        with self._adopting:
            newer = latest.id > self.manifest.id
            if not newer and flushed is None:
                return
            prepared = None
            if newer:
                # The expensive part, outside the lock that writes need.
                prepared = self.views.prepare(latest.value)
                # Before reads begin to use these SSTs, so that none of them is missed.
                if self.read_pins.shown(prepared.forest, latest):
                    self.supervisor.wake(self.read_pins)
            self.state.update(lambda now: now.adopt(latest, prepared, flushed))
        self.supervisor.wake(self._flusher)
        if not self._follower_hurries and self._loads.expected:
            self._hurry_follower()
        self.maintenance.note_manifest(latest)

    # -- durability ---------------------------------------------------------------------------------------

    def request_durable(self, seq: int) -> None:
        """Make everything up to `seq` durable soon: through the log, or without one through L0."""
        if self.env.settings.wal_enabled:
            self._wal.request(seq)
        else:
            self.committer.freeze()

    def flush_log(self) -> None:
        """Wait until everything written so far is on the store."""
        self.durability.wait(self.durability.last_seq)

    def flush_memtables(
        self, unless: Callable[[], bool] = lambda: False, *, timeout_s: float | None = None
    ) -> None:
        """Wait until everything written so far is in tables, or `unless` says to wait no longer."""
        self.committer.freeze()
        last_seq = self.durability.last_seq
        done = self.state.changed.wait_for(
            lambda: self._flushed_through(last_seq) or self._stopped() or unless(), timeout=timeout_s
        )
        if not done:
            raise Unavailable(f"what was written is not in tables after {timeout_s} s")
        if not self._flushed_through(last_seq):
            self.durability.raise_failure()
            self.check_open()

    def _flushed_through(self, seq: int) -> bool:
        now = self.state.now
        pending = now.memtables.frozen
        return not pending or pending[-1].last_seq > seq or now.manifest.value.last_l0_seq >= seq

    def _stopped(self) -> bool:
        return self.closed is not None or self.durability.failure is not None

    # -- closing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, stop the services and write a last manifest. Afterwards every call raises `Closed`.

        A crash halfway loses nothing that was durable: the next opening replays the WAL. After an interrupt (Ctrl-C)
        writes are refused, and another `close` goes on where this one stopped.
        """
        if self._forked:
            return
        with self._closing:
            if self._close_done:
                return
            if self._clean is None:
                self._clean = not self._stopped()
            self._close(clean=self._clean)
            self._close_done = True

    def _close(self, *, clean: bool) -> None:
        reason = Closed("the database was closed; open it again")
        # Writers are turned away before the flush: what was taken is then flushed, or its loss is reported.
        self.committer.refuse(reason)
        try:
            if clean and not self._stopped():
                self.flush_all()
        except Exception:
            # There is no second try: the loss is reported here, and the services are given back all the same.
            self._clean = False
            self._stop(reason)
            # Last: a close that is interrupted before this goes on with ending the services.
            self._close_done = True
            raise
        self._stop(reason)
        if clean:
            # Every row is durable. A newer writer, or the destruction of the database, makes the rest unnecessary.
            with suppress(Closed):
                self._write_last_manifest()

    def _write_last_manifest(self) -> None:
        last_wal_id = self.committer.last_wal_id
        self.manifests.update(
            self.fence.guard(
                lambda now: replace(
                    self.read_pins.without_pins(now.value),
                    wal_id_last_seen=max(now.value.wal_id_last_seen, last_wal_id),
                )
            )
        )
        self._loads.retract()

    def flush_all(self) -> None:
        """Put everything into tables; where L0 has no room, the log keeps what the next opening replays."""
        wal_enabled = self.env.settings.wal_enabled
        self.flush_memtables(unless=lambda: wal_enabled and self.upload_pause is not None)
        if wal_enabled:
            self.flush_log()

    def _stop(self, reason: Closed) -> None:
        """End the services; every call that waits for them raises the reason. May be called again."""
        self._shut(reason)
        self.durability.fail(reason)
        self.maintenance.stop()
        try:
            self.supervisor.stop(_STOP_TIMEOUT_S)
        finally:
            self._flusher.close()

    def _shut(self, reason: Closed) -> None:
        def end(now: State) -> State:
            if now.closed is not None:
                return now
            refusal = now.refusal or reason
            return replace(now, closed=reason, view=self.views.closed(reason), refusal=refusal)

        self.state.update(end)

    def _on_failure(self, error: FlagstoneError) -> None:
        """A service failed for good: nothing more becomes durable, and all who wait must know."""
        # Refused first: a write that finds the failure has put its row into the memtable already.
        self.committer.refuse(error)
        if isinstance(error, Closed):
            self._shut(error)  # before waiters hear of it: they must not find the database open
        self.durability.fail(error)
        self.maintenance.halt()
        self._notify()

    def abandon_in_child(self, reason: Closed) -> None:
        """In a forked child, which has none of the threads: every call raises `Closed`, and none hangs."""
        renew_lock(self.durability.lock)
        renew_lock(self._adopting)
        renew_lock(self._closing)
        self._forked = True
        self._on_failure(reason)

    # -- what the services report -------------------------------------------------------------------------

    def _on_unlogged(self) -> None:
        if self.env.settings.wal_enabled:
            self._wal.arm()

    def _on_wal_full(self) -> None:
        self._wal.request()

    def _on_freeze(self) -> None:
        self._wal_at_freeze = self.committer.last_wal_id
        self.supervisor.wake(self._flusher)

    def _on_logged(self, wal_id: WalId, last_seq: int) -> None:
        self.committer.note_logged(wal_id)
        self.durability.advance_durable(last_seq)
        # Many small files make the next opening slow: a flush lets replay start behind them.
        if wal_id - self._wal_at_freeze >= self.env.settings.max_wal_flushes_before_l0_flush:
            self._wal_at_freeze = wal_id
            self.committer.freeze()
        if self.committer.memtables.frozen:
            self.supervisor.wake(self._flusher)

    def _on_upload_paused(self) -> None:
        if not self._follower_hurries:
            self._hurry_follower()
        self._notify()

    def _hurry_follower(self) -> None:
        self._follower_hurries = True
        self.supervisor.wake(self._follower)

    def _notify(self) -> None:
        with self.state.lock:
            self.state.changed.notify_all()

    def expire_read_points(self) -> None:
        """End the snapshots and transactions that nobody ended in time."""
        with self.durability.lock:
            self.conflicts.expire(elapsed_ms(self.env.clock))

    def min_active_seq(self) -> int | None:
        with self.durability.lock:
            return self.conflicts.min_active_seq()

    def _fenced(self) -> Closed:
        """Our place in the log was taken: find out by whom, or say so anyway."""
        try:
            self.fence.check(self.manifests.require_latest().value)
        except Closed as fenced:
            return fenced
        return Closed("another writer has taken this one's place in the log", reason="fenced")

    def _commit_edit(self, edit: Callable[[Versioned[Manifest]], Manifest | None]) -> Versioned[Manifest]:
        written = self.manifests.update(self.fence.guard(edit))
        self.adopt(written)
        return written

    def _commit_flush(self, flush: Flush, frozen: FrozenMemtable) -> None:
        written = self.manifests.update(
            self.fence.guard(lambda now: drop_empty_segments(apply_flush(now.value, flush))),
            timeout_s=self.env.settings.manifest_update_timeout.total_seconds(),
        )
        if not self.env.settings.wal_enabled:
            # Before reads lose sight of the memtable: it still has the versions that were visible until now.
            self.durability.advance_durable(frozen.last_seq)
        self.adopt(written, frozen)
