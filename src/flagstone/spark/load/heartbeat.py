"""Signs of life of a bulk load: its driver and its tasks renew its load record while they work.

A load record lives for minutes. `bulk_load` renews it from a thread. The tasks of a plain `df.write` renew it as well:
each looks at the record once it may be older than half its life, at a random moment, so that one of them renews it and
the others find that done. A task that starts after the record has lapsed adds it again, unless the load was cancelled.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final
from uuid import UUID

from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.loads.lifetime import LIFETIME_S, add_record, find_load_record, renew_record
from flagstone.metadata.annotations import LOAD_TAG_BITS, HeldLoad, LoadRecord
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.spark.address import DatabaseAddress, open_manifests
from flagstone.spark.load.plan import LoadPlan

_log = logging.getLogger("flagstone.spark")

_EARLIEST_S: Final = LIFETIME_S / 3
_LATEST_S: Final = LIFETIME_S / 2
_RETRY_S: Final = LIFETIME_S / 30


class LoadRenewal:
    """A background service that renews the record of a load, from before the record exists until it is stopped.

    Cutting it off leaves a record that expires.
    """

    name = "load-renewal"

    def __init__(self, address: DatabaseAddress, record_id: UUID) -> None:
        self._address = address
        self._record_id = record_id
        self._manifests: ManifestStore | None = None

    def run_once(self) -> float | None:
        """Renew the record if it is older than half its life. Failures are left to the next step and to the tasks."""
        try:
            if self._manifests is None:
                self._manifests = open_manifests(self._address)
            if self._manifests.latest() is not None:
                renew(self._manifests, self._record_id, self._address)
        except FlagstoneError as error:
            _log.info("cannot renew the record of a load error=%s", error)
            return _RETRY_S
        return self._address.ids.uniform(_EARLIEST_S / 2, _EARLIEST_S)


def renew(manifests: ManifestStore, record_id: UUID, address: DatabaseAddress) -> Manifest:
    """Renew an open load record that is older than half its life; returns the newest manifest."""
    now_s = address.clock.now_ms() // 1000
    return manifests.update(lambda now: renew_record(now.value, record_id, now_s=now_s)).value


class Heartbeat:
    """Renews the record of a load from a task or a commit, whose loop calls `touch`. For one thread."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._manifests: ManifestStore | None = None
        self._due = self._next(plan.began_ms)

    def touch(self) -> None:
        """Renew the record if it may need that; usually this only reads the clock.

        Raises:
            Closed: the load was cancelled, or its record has lapsed.

        """
        latest = self.renew()
        if latest is None:
            return
        held = find_load_record(latest, self._plan.record_id)
        if held is None or not held.record.open or held.record.tag != self._plan.tag:
            raise lapsed(held)

    def renew(self) -> Manifest | None:
        """As `touch`, for a load that was offered: it may be over. Returns the newest manifest if it was read."""
        clock = self._plan.address.clock
        if clock.now_ms() < self._due:
            return None
        try:
            latest = renew(self._open(), self._plan.record_id, self._plan.address)
        except Unavailable as error:
            _log.info("cannot renew the record of a load error=%s", error)
            self._due = clock.now_ms() + int(1000 * _RETRY_S)
            return None
        self._due = self._next(clock.now_ms())
        return latest

    def _open(self) -> ManifestStore:
        if self._manifests is None:
            self._manifests = open_manifests(self._plan.address)
        return self._manifests

    def _next(self, since_ms: int) -> int:
        return since_ms + int(1000 * self._plan.address.ids.uniform(_EARLIEST_S, _LATEST_S))


def confirm_plan(plan: LoadPlan, manifests: ManifestStore | None = None) -> LoadPlan:
    """The plan for a task that starts now. If the record of the load has lapsed, it is added again with another tag.

    Raises:
        Closed: the load was cancelled; or it lapsed, and is a micro-batch, of which a later run may have begun.

    """
    address = plan.address
    now_ms = address.clock.now_ms()
    if manifests is None and 0 <= now_ms - plan.began_ms < int(1000 * _LATEST_S):
        return plan
    found = open_manifests(address) if manifests is None else manifests
    tag = int(address.ids.uuid()) & ((1 << LOAD_TAG_BITS) - 1)

    def keep(now: Versioned[Manifest]) -> Manifest | None:
        held = find_load_record(now.value, plan.record_id)
        if held is not None:
            return renew_record(now.value, plan.record_id, now_s=now_ms // 1000)
        if plan.owner:
            return None
        # Other loads may have passed the number meanwhile, or have it: then one of them is overtaken at its commit.
        record = LoadRecord("loading", plan.seq, plan.id_ms, tag=tag)
        return add_record(now, plan.record_id, record, now_s=now_ms // 1000)

    held = find_load_record(found.update(keep).value, plan.record_id)
    if held is None or not held.record.open or held.record.tag is None:
        raise lapsed(held)
    return replace(plan, tag=held.record.tag, began_ms=now_ms)


def lapsed(held: HeldLoad | None) -> Closed:
    """The error for a load whose record is gone, or is not open."""
    if held is not None and not held.record.open:
        return Closed("the load was cancelled. None of it is visible", reason="fenced")
    return Closed(
        "the load was cancelled: another run of the same query began, or its record lapsed because neither the driver "
        f"nor a task renewed it for {LIFETIME_S // 60} minutes. None of it is visible; load again",
        reason="fenced",
    )
