"""The end of a bulk load: offer it, and wait until a writer has adopted it (ADR 33).

A Flagstone writer that has the database open adopts the load. If none has, or if it has crashed, the driver opens the
database itself, adopts its own load as any writer does, and closes the database. Only that moment fences another
process, for instance one in which SlateDB has opened the database.

If the database has passed the sequence number of the load, the driver copies the SSTs with another number, further
ahead each time, and offers the load again. So a load fails only if it was cancelled, if its condition does not hold, or
if the store fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, Literal

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.errors import Closed, Unavailable
from flagstone.loads.edit import Load
from flagstone.loads.lifetime import CANCELLED, find_load_record
from flagstone.loads.notice import Notice, load_notice
from flagstone.loads.request import (
    CONDITION_FAILED,
    OVERTAKEN,
    apply_renumbering,
    load_request,
    load_ssts,
    move_load,
    save_request,
)
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.spark.address import open_store
from flagstone.spark.load.heartbeat import Heartbeat, lapsed
from flagstone.spark.load.plan import LoadPlan
from flagstone.spark.load.renumber import renumber_load
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import Seq

_log = logging.getLogger("flagstone.spark")

_RENUMBERINGS: Final = 5
"""After so many, 2^48 sequence numbers were free for other loads and writes the last time."""

_OPENINGS: Final = 8
_FIRST_POLL_S: Final = 0.01
_POLL_S: Final = 0.2
_OWN_TIMEOUT_S: Final = 120.0
_NOTICE_EVERY_S: Final = 1.0
_GRACE_S: Final = 5.0
"""How long a process that has claimed the database gets to announce that it adopts loads."""

_UNLIMITED_L0: Final = 1_000_000
LOADER_SETTINGS: Final = Settings(
    compactor_options=None,
    garbage_collector_options=None,
    l0_max_ssts=_UNLIMITED_L0,
    l0_max_ssts_per_key=_UNLIMITED_L0,
    manifest_poll_interval=timedelta(seconds=_POLL_S),
)
"""For a driver that opens the database itself: no services, and no flush that waits for a compaction."""


class ConditionFailed(Closed):
    """The condition of a load did not hold when it was about to be added. None of it is visible."""

    def __init__(self) -> None:
        super().__init__("the condition of the load does not hold. None of it is visible", reason="fenced")


class LoadOffer:
    """Offers one load until it is adopted. `load` is the load as it is offered: renumbering replaces it."""

    def __init__(
        self,
        plan: LoadPlan,
        load: Load,
        *,
        manifests: ManifestStore,
        timeout_s: float,
        extractor: SegmentExtractor | None = None,
        offered: Callable[[Seq], None] = lambda _: None,
    ) -> None:
        self.load: Load = load
        self._plan = plan
        self._timeout_s = timeout_s
        self._extractor = extractor
        self._offered = offered
        self._store, self._paths = open_store(plan.address)
        self._manifests = manifests
        self._heartbeat = Heartbeat(plan)
        self._openings = 0

    def commit(self) -> Versioned[Manifest]:
        """Offer the load until it is adopted; returns a manifest after the one that added it.

        After `Unavailable` or a crash all of the load is visible, or none of it. While its record says `ready`, a
        writer may still adopt it.

        Raises:
            Closed: the load was cancelled, or its record lapsed.
            ConditionFailed: its condition does not hold.
            Unavailable: no writer adopted it, or the store did not answer.

        """
        self._resume()
        for _ in range(_RENUMBERINGS):
            self._make_ready()
            added = self._await()
            if added is not None:
                return added
            self._renumber()
        raise Unavailable(
            f"the load was overtaken {_RENUMBERINGS} times while its SSTs were copied with another sequence number. "
            "None of it is visible; load again when fewer loads run at once"
        )

    def _resume(self) -> None:
        """Continue where an earlier commit of the same load has stopped."""
        held = find_load_record(self._manifests.poll().value, self._plan.record_id)
        if held is None or not held.record.open or held.record.seq == self.load.seq:
            return
        if held.record.state == "ready":
            self.load = load_request(self._store, self._paths, self._plan.record_id)
        else:
            self.load = renumber_load(self._plan, self.load, held.record.seq, self._heartbeat)

    def _make_ready(self) -> None:
        plan, load = self._plan, self.load
        self._offered(load.seq)
        save_request(self._store, self._paths, plan.record_id, load)

        def make_ready(now: Versioned[Manifest]) -> Manifest | None:
            held = find_load_record(now.value, plan.record_id)
            if held is None or held.record.state != "loading" or held.record.seq != load.seq:
                return None
            if held.record.tag != plan.tag:
                raise lapsed(None)
            return move_load(now.value, held, "ready")

        latest = self._manifests.update(make_ready)
        held = find_load_record(latest.value, plan.record_id)
        if held is not None and held.record.open and latest.value.writer_epoch != plan.epoch:
            # SlateDB's collector knows no load records, and may have run in the process that opened the database.
            found = {sst_id for sst_id, _ in load_ssts(self._store, self._paths, held)}
            missing = [sst.id for sst in load.ssts if sst.id not in found]
            if missing:
                raise Unavailable(
                    f"{len(missing)} SSTs of the load are gone: a garbage collector of SlateDB deleted them. Set its "
                    "minimum age above the duration of a load, and load again. None of it is visible"
                )

    def _renumber(self) -> None:
        plan = self._plan

        def renumbering(now: Versioned[Manifest]) -> Manifest | None:
            held = find_load_record(now.value, plan.record_id)
            overtaken = held is not None and (held.record.state, held.record.reason) == ("refused", OVERTAKEN)
            return apply_renumbering(now.value, held) if held is not None and overtaken else None

        held = find_load_record(self._manifests.update(renumbering).value, plan.record_id)
        if held is None or held.record.state != "loading":
            raise lapsed(held)
        _log.info("load %s was overtaken: copying %d SSTs", plan.record_id, len(self.load.ssts))
        former = self.load
        self.load = renumber_load(plan, former, held.record.seq, self._heartbeat)
        self._store.delete_many([self._paths.sst(sst.id) for sst in former.ssts])

    def _await(self) -> Versioned[Manifest] | None:
        """The manifest that shows the load; None if it was overtaken."""
        plan, clock = self._plan, self._plan.address.clock
        patience = _Patience(self._store, self._paths, clock, epoch=plan.epoch, timeout_s=self._timeout_s)
        pause_s = _FIRST_POLL_S
        while True:
            latest = self._manifests.poll()
            match self._verdict(latest):
                case "added":
                    return latest
                case "overtaken":
                    return None
                case "waits":
                    pass
            if patience.is_over(latest.value):
                self._adopt_here()
                patience = _Patience(
                    self._store, self._paths, clock, epoch=plan.epoch, timeout_s=self._timeout_s
                )
                continue
            self._heartbeat.renew()
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)

    def _verdict(self, latest: Versioned[Manifest]) -> Verdict:
        return judge(latest.value, self._plan, self.load.ssts, self.load.seq)

    def _adopt_here(self) -> None:
        """Open the database, which adopts the load, and close it again."""
        address, clock = self._plan.address, self._plan.address.clock
        self._openings += 1
        if self._openings > _OPENINGS:
            raise Unavailable(
                f"no writer adopted the load request {self._plan.record_id} yet, and {_OPENINGS} times another process "
                "opened the database when the load did; the next Flagstone writer adopts the load, within minutes"
            )
        try:
            with open_database(
                address.path,
                **address.arguments,
                settings=LOADER_SETTINGS,
                create=False,
                segment_extractor=self._extractor,
            ):
                deadline, pause_s = clock.monotonic() + _OWN_TIMEOUT_S, _FIRST_POLL_S
                while self._verdict(self._manifests.poll()) == "waits":
                    if clock.monotonic() > deadline:
                        return
                    clock.sleep(pause_s)
                    pause_s = min(2 * pause_s, _POLL_S)
        except Closed:
            # A newer writer has opened the database meanwhile, perhaps the driver of another load; it adopts this one.
            clock.sleep(address.ids.uniform(0, self._openings * _POLL_S))


Verdict = Literal["added", "overtaken", "waits"]


def judge(manifest: Manifest, plan: LoadPlan, ssts: Sequence[SsTable], seq: Seq) -> Verdict:
    """What has become of a load with these SSTs and that sequence number. Pure.

    Raises:
        Closed: it was cancelled.
        ConditionFailed: its condition does not hold.
        Unavailable: it was refused, or its record is gone and it is not known why.

    """
    held = find_load_record(manifest, plan.record_id)
    if held is None:
        match judge_without_record(manifest, ssts, seq):
            case "added":
                return "added"
            case "cancelled":
                raise lapsed(None)
            case "unknown":
                raise Unavailable(
                    f"the record of the load {plan.record_id} is gone, so it is not known whether a writer has added "
                    "the load: all of it is visible, or none; read a row of it before loading again"
                )
    match held.record.state, held.record.reason:
        case "done", _:
            return "added"
        case "refused", reason if reason == OVERTAKEN:
            return "overtaken"
        case "refused", reason if reason == CANCELLED:
            raise lapsed(held)
        case "refused", reason if reason == CONDITION_FAILED:
            raise ConditionFailed
        case "refused", reason:
            raise Unavailable(f"the writer of the database refused the load: {reason}")
        case _:
            return "waits"


def judge_without_record(
    manifest: Manifest, ssts: Sequence[SsTable], seq: Seq
) -> Literal["added", "cancelled", "unknown"]:
    """What became of a load whose record is gone. Pure.

    A record goes when the load is cancelled or the record expires, and also some time after a writer has added the
    load, when no consumer of changes needs it any more. Compaction may have replaced the SSTs by then.
    """
    if any(sst.id in manifest.ssts for sst in ssts):
        return "added"
    # The manifest that adds a load raises this number to that of the load.
    return "cancelled" if manifest.last_l0_seq < seq else "unknown"


class _Patience:
    """Decides when the driver stops waiting for a writer, and opens the database itself.

    At once if no process that adopts loads has the database open. After a few seconds if a process has opened it since
    the load began and has not announced itself, as SlateDB does not. If the writer gives no sign of life, when its
    notice says so; and always after `timeout_s`.
    """

    def __init__(
        self, store: ObjectStore, paths: DbPaths, clock: Clock, *, epoch: int, timeout_s: float
    ) -> None:
        self._store = store
        self._paths = paths
        self._clock = clock
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._began_at = self._claimed_at = self._heard_at = clock.monotonic()
        self._notice: Notice | None = None
        self._read_at = 0.0
        self._opened_since = False

    def is_over(self, manifest: Manifest) -> bool:
        now, epoch = self._clock.monotonic(), manifest.writer_epoch
        if self._notice is None or now - self._read_at >= _NOTICE_EVERY_S or epoch != self._epoch:
            notice = load_notice(self._store, self._paths)
            self._read_at = now
            if notice != self._notice:
                self._notice, self._heard_at = notice, now
        notice = self._notice
        if epoch != self._epoch:
            self._epoch, self._claimed_at = epoch, now
            self._opened_since = True
        if notice.closed == epoch:
            return True
        if notice.epoch != epoch:
            return not self._opened_since or now - self._claimed_at >= _GRACE_S
        silence_s = notice.silence_s
        silent = silence_s is not None and now - self._heard_at >= silence_s
        return silent or now - self._began_at >= self._timeout_s
