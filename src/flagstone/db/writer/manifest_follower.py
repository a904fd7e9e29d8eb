"""How an open database follows other processes: a compactor, an operator, a newer writer, a bulk load.

The manifest follower polls for manifests of other processes. If a manifest announces a bulk load that another process
built (`flagstone.loads.request`), the writer adopts it.

The rows of a load are in SSTs already, under a sequence number far ahead. To adopt it, the writer makes writes wait,
flushes its memtables, adds the load with one manifest edit, and continues after the load's sequence number. So every
earlier write is older than the load, every later one newer, and no reader ever sees half of it. Writes wait for one
flush and one manifest. Of several loads that are ready it adopts the one with the lowest sequence number first, so that
none is overtaken without need.

While a load is under way, the writer renews its notice: drivers find out within seconds that it has crashed.

A crash before that manifest leaves the load request for the next writer. After it, all of the load is there. The same
manifest records for consumers of changes where the load belongs (`flagstone.loads.edit`).

If the store does not answer that edit, the load is in doubt: the manifest may have been written. The next row needs a
sequence number below the load's if it was not written, and above if it was. So writes wait until the store answers.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from flagstone.db.writer.background import Maintenance
from flagstone.db.writer.environment import Environment
from flagstone.db.writer.range_deletes import RangeDeletes
from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.loads.edit import Load, apply_recorded_load, is_applied
from flagstone.loads.lifetime import find_load_record
from flagstone.loads.notice import Notice, save_notice
from flagstone.loads.request import CONDITION_FAILED, OVERTAKEN, load_request, move_load
from flagstone.metadata.annotations import held_loads
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.read.drivers import get_newest_first, visible_row
from flagstone.runtime.service import Supervisor
from flagstone.store.port import ObjectMissing
from flagstone.types import Seq
from flagstone.write.flusher import Flusher
from flagstone.write.manifest import WriterManifest
from flagstone.write.writer_state import WriterState

_log = logging.getLogger("flagstone.db")

_SLOWDOWN: Final = 10
_SLOWEST_S: Final = 10.0
_LONGEST_HOLD_S: Final = 10.0
_BEAT_S: Final = 5.0
"""How often the notice is renewed while a bulk load is under way."""


class LoadAdoption:
    """Finds load requests that are ready, and adopts them. For one thread at a time."""

    def __init__(
        self, env: Environment, state: WriterState, manifest: WriterManifest, maintenance: Maintenance
    ) -> None:
        self._env = env
        self._state = state
        self._manifest = manifest
        self._maintenance = maintenance
        self._doubtful: tuple[UUID, Load] | None = None
        """The load that may be in the newest manifest. Writers wait while there is one."""
        interval_s = env.settings.manifest_poll_interval.total_seconds()
        self._notice = Notice(manifest.fence.epoch, beat_s=max(_BEAT_S, 2 * interval_s))
        self._announced_at: float | None = None

    def announce(self) -> None:
        """Announce this writer to bulk loads, again while one is under way. If the store fails, the next call tries
        again.
        """
        at, beat_s = self._announced_at, self._notice.beat_s
        if at is None or (self.expected and self._env.clock.monotonic() - at >= (beat_s or _BEAT_S)):
            self._announce(adopting=False)

    def _announce(self, *, adopting: bool) -> None:
        notice = replace(self._notice, beat=self._notice.beat + 1, adopting=adopting)
        try:
            save_notice(self._env.store, self._env.paths, notice)
        except Unavailable as error:
            _log.warning("cannot announce this writer to bulk loads error=%s", error)
            return
        self._notice, self._announced_at = notice, self._env.clock.monotonic()

    def retract(self) -> None:
        """Withdraw the announcement: this writer has closed the database."""
        if self._announced_at is not None:
            try:
                save_notice(self._env.store, self._env.paths, Notice(None, closed=self._manifest.fence.epoch))
            except Unavailable as error:
                _log.warning("cannot withdraw the announcement of this writer error=%s", error)

    @property
    def expected(self) -> bool:
        """Whether a bulk load is being built, or waits for this writer."""
        waiting = any(held.record.open for held in held_loads(self._manifest.current.value))
        return waiting or self.in_doubt

    @property
    def in_doubt(self) -> bool:
        """Whether it is unknown if the last load was added."""
        return self._doubtful is not None

    def run(self) -> None:
        """Adopt the load requests that are ready.

        Raises:
            Closed: a newer writer owns the database.

        """
        try:
            self._settle()
            loads = sorted(held_loads(self._manifest.current.value), key=lambda held: held.record.seq)
            for held in loads:
                if held.record.state == "ready":
                    self._take(held.checkpoint.id)
        except Unavailable as error:
            # The request stays, and the next poll tries again.
            _log.warning("cannot adopt a bulk load yet error=%s", error)

    def _take(self, load_id: UUID) -> None:
        state = self._state
        try:
            load = load_request(self._env.store, self._env.paths, load_id)
        except (ObjectMissing, CorruptData) as error:
            self._refuse(load_id, f"its request cannot be read: {error}")
            return
        refusal = self._check_segments(load)
        if refusal is not None:
            self._refuse(load_id, refusal)
            return
        self._announce(adopting=True)
        # The long flush comes before writes have to wait.
        state.flush_memtables(timeout_s=_LONGEST_HOLD_S)
        state.hold()
        try:
            state.flush_memtables(timeout_s=_LONGEST_HOLD_S)
            last_seq = state.last_seq
            # Without a WAL, rows are in SSTs a moment before they count as durable.
            state.wait_durable(last_seq, _LONGEST_HOLD_S)
            if last_seq >= load.seq:
                self._refuse(load_id, OVERTAKEN)
                return
            refusal = self._check_condition(load)
            if refusal is not None:
                self._refuse(load_id, refusal)
                return
            self._doubtful = load_id, load
            self._settle()
        finally:
            if self._doubtful is None:
                state.release()

    def _check_segments(self, load: Load) -> str | None:
        """Why the segments of the load do not fit this database; None if they do."""
        extractor = self._env.extractor
        if extractor is None:
            return "it has segments and the database has none" if load.prefixes else None
        if len(load.prefixes) != len(load.ssts):
            return "the database has segments and the load has none"
        for prefix in set(load.prefixes):
            if extractor.prefix(prefix) != prefix:
                return f"the segment extractor {extractor.name!r} does not give its segment {prefix!r}"
        return None

    def _check_condition(self, load: Load) -> str | None:
        """Why the load is not wanted any more; None if its condition holds, and still does when the load is added."""
        try:
            return None if self._holds(load) else CONDITION_FAILED
        except (CorruptData, InvalidRequest) as error:
            return f"its condition cannot be checked: {error}"

    def _holds(self, load: Load) -> bool:
        state, now_ms = self._state, self._env.clock.now_ms()
        ssts, view, seq = self._manifest.views.ssts, self._manifest.view, state.last_seq
        if load.only_if_new and seq > 0:
            return False
        for key, value in load.expects:
            row = visible_row(
                get_newest_first(ssts, view, key, seq),
                max_seq=seq,
                now_ms=now_ms,
                merge_operator=self._env.merge_operator,
            )
            if (None if row is None else row.value) != value:
                return False
        return True

    def _settle(self) -> None:
        """Add the load in doubt to the manifest, unless it was added or cancelled. Then let writers go on."""
        if self._doubtful is None:
            return
        load_id, load = self._doubtful
        # An answer ends the doubt: an earlier attempt has written its manifest by now, or never will.
        written = self._commit(load_id, load)
        if is_applied(written.value, load):
            # First the view, then the number: a read at the number of the load must find its rows.
            self._manifest.adopt(written)
            self._state.skip_to(load.seq, load.key_ranges)
            self._maintenance.note_load(written.value)
            _log.info("adopted a bulk load id=%s seq=%d ssts=%d", load_id, load.seq, len(load.ssts))
        self._doubtful = None
        self._state.release()

    def _commit(self, load_id: UUID, load: Load) -> Versioned[Manifest]:
        now_ms = self._env.clock.now_ms()
        oldest_read = self._state.min_active_seq()
        placed = replace(
            load,
            # The clock of the loading process may be ahead of ours, which gives later rows their times.
            created_ms=min(load.created_ms, now_ms),
            snapshot_min_seq=Seq(load.seq if oldest_read is None else min(oldest_read, load.seq)),
        )

        def add(now: Versioned[Manifest]) -> Manifest | None:
            held = find_load_record(now.value, load_id)
            if held is None or held.record.state != "ready":
                return None
            # Writers wait, and all their rows are in the WAL: the load belongs after its last file.
            last_wal_id = self._state.last_wal_id
            added = apply_recorded_load(now, placed, held, now_s=now_ms // 1000, last_wal_id=last_wal_id)
            # And in SSTs: the next opening has nothing to replay, not even the fence of this writer.
            return replace(
                added,
                replay_after_wal_id=max(added.replay_after_wal_id, last_wal_id),
                wal_id_last_seen=max(added.wal_id_last_seen, last_wal_id),
            )

        return self._manifest.commit(
            add, timeout_s=min(_LONGEST_HOLD_S, self._env.settings.manifest_update_timeout.total_seconds())
        )

    def _refuse(self, load_id: UUID, reason: str) -> None:
        _log.warning("refused a bulk load id=%s reason=%s", load_id, reason)

        def edit(now: Versioned[Manifest]) -> Manifest | None:
            held = find_load_record(now.value, load_id)
            return (
                None
                if held is None or held.record.state != "ready"
                else move_load(now.value, held, "refused", reason=reason)
            )

        self._manifest.update(edit)


class ManifestFollower:
    """Polls for manifests of other processes, adopts bulk loads, and ends snapshots past their deadline.

    It also does the range deletes of this writer: they and the adoption of loads exclude each other.

    It polls once per interval while this writer or another process writes, or while a write waits for another
    process. Otherwise it polls less and less often: a sole writer would pay for thousands of equal answers a day.
    Nothing urgent depends on it: a replaced writer is refused at its next WAL file, and one that only reads notices
    within ten seconds. A flush reads the newest manifest anyway.
    """

    name = "manifest-follower"

    def __init__(
        self,
        state: WriterState,
        manifest: WriterManifest,
        flusher: Flusher,
        loads: LoadAdoption,
        range_deletes: RangeDeletes,
        *,
        interval_s: float,
        supervisor: Supervisor,
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._flusher = flusher
        self._loads = loads
        self._range_deletes = range_deletes
        self._interval_s = interval_s
        self._supervisor = supervisor
        self._quiet = 0
        self._last_seq = state.last_seq
        self._just_opened = True
        self._hurries = False

    def run_once(self) -> float | None:
        """Poll once. If the store does not answer, the next step tries again."""
        if not self._loads.in_doubt:
            self._range_deletes.run()
        self._loads.announce()
        if self._just_opened:
            self._just_opened = False
            if self._loads.expected:
                self._hurries = True
                if not self._range_deletes.in_doubt:
                    self._loads.run()
            return self._interval_s
        self._state.expire_reads()
        try:
            newer = self._manifest.poll()
            if not self._range_deletes.in_doubt:
                self._loads.run()
        except Unavailable as error:
            _log.warning("cannot poll for a newer manifest error=%s", error)
            newer = True
        last_seq, self._last_seq = self._last_seq, self._state.last_seq
        waited_for = self._loads.expected or self._range_deletes.expected
        self._hurries = self._flusher.pause is not None or waited_for
        busy = newer or self._hurries or last_seq != self._last_seq
        self._quiet = 0 if busy else self._quiet + 1
        return plan_delay(self._interval_s, self._quiet)

    def hurry(self) -> None:
        """Poll now, and then once per interval while the writer waits for another process."""
        if not self._hurries:
            self._hurries = True
            self._supervisor.wake(self)

    def before_adoption(self, latest: Versioned[Manifest], forest: Any) -> None:
        """Nothing to do."""

    def after_adoption(self, latest: Versioned[Manifest]) -> None:  # noqa: ARG002 - it is the current one
        """Hurry if the manifest announces a bulk load."""
        if not self._hurries and self._loads.expected:
            self.hurry()


def plan_delay(interval_s: float, quiet: int) -> float:
    """Seconds until the next poll after `quiet` polls without news: the interval, doubling up to ten intervals.

    At most ten seconds, the interval of a reader, unless the interval itself is longer.
    """
    slowed_s = interval_s * min(1 << min(quiet, 8), _SLOWDOWN)
    return min(slowed_s, max(interval_s, _SLOWEST_S))
