"""Load requests: a bulk load into a database that a writer has open, which adopts the load (ADR 0019).

The load record is in the manifest before the first task runs, and the load is over when the record says `done`. If the
driver crashes, its load record expires after a day, and everything the load wrote becomes garbage. If the writer
crashes, the driver waits for its timeout and opens the database itself: a writer adopts waiting loads when it opens.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from typing import Final, Literal
from uuid import UUID

from flagstone.clones.checkpoint import expiry
from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.errors import Closed, InvalidRequest, Unavailable
from flagstone.loads.edit import Load
from flagstone.loads.request import (
    ROWS_CHANGED,
    delete_stale_requests,
    find_load_record,
    is_writer_announced,
    move_load,
    plan_seq,
    save_request,
)
from flagstone.metadata.annotations import LoadRecord, encode_load, held_loads
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.schema import SchemaChanged
from flagstone.spark.address import DatabaseAddress, open_manifests, open_store
from flagstone.spark.load.plan import LoadPlan
from flagstone.types import ManifestId

_log = logging.getLogger("flagstone.spark")

_LIFETIME: Final = timedelta(days=1)
"""How long a load may take, and how long the load record of a crashed driver stays."""

_POLL_S: Final = 0.2
_OWN_TIMEOUT_S: Final = 120.0
_UNLIMITED_L0: Final = 1_000_000
LOADER_SETTINGS: Final = Settings(
    compactor_options=None,
    garbage_collector_options=None,
    l0_max_ssts=_UNLIMITED_L0,
    l0_max_ssts_per_key=_UNLIMITED_L0,
)
"""For a driver that opens the database itself: no services, and no flush that waits for a compaction."""


def begin_request(address: DatabaseAddress, *, owner: str = "") -> LoadPlan | None:
    """Add the load record of a load that the writer shall adopt; None if no writer that adopts loads is open.

    The same manifest cancels the other open loads of `owner`, unless `owner` is empty: of two runs of one query the
    writer adopts only the later.
    """
    store, paths = open_store(address)
    manifests = open_manifests(address)
    latest = manifests.latest()
    if latest is None or not is_writer_announced(store, paths, latest.value):
        return None
    if latest.value.segments or latest.value.segment_extractor_name is not None:
        raise InvalidRequest(f"the database at {paths.root!r} has segments; it cannot be loaded in bulk")
    record_id, now_ms = address.ids.uuid(), address.clock.now_ms()

    def add(now: Versioned[Manifest]) -> Manifest:
        left = without_open_loads_of(now.value, owner)
        record = LoadRecord("loading", plan_seq(now.value), now_ms, owner=owner)
        until_s = expiry(now_ms // 1000, _LIFETIME)
        return add_checkpoint(
            left, Checkpoint(record_id, ManifestId(now.next_id), now_ms // 1000, until_s, encode_load(record))
        )

    written = manifests.update(add).value
    delete_stale_requests(store, paths, written)
    held = find_load_record(written, record_id)
    if held is None:
        raise Unavailable(
            "the load was cancelled before it began: another load of the same query has begun since"
        )
    created_ms = max(now_ms, written.last_l0_clock_tick)
    return LoadPlan(address, written.writer_epoch, held.record.seq, created_ms, held.record.id_ms, record_id)


def without_open_loads_of(manifest: Manifest, owner: str) -> Manifest:
    """The manifest without the open loads of that owner; the manifest itself if there are none. Pure."""
    for held in held_loads(manifest):
        if owner and held.record.open and held.record.owner == owner:
            manifest = remove_checkpoint(manifest, held.checkpoint.id)
    return manifest


def commit_request(plan: LoadPlan, record_id: UUID, load: Load, *, timeout_s: float) -> Versioned[Manifest]:
    """Write the load request, wait until the writer adopts it, and return the manifest with the load.

    After `Unavailable` or a crash all of the load is visible, or none of it. While its record says `ready`, a writer
    may still adopt it.

    Raises:
        Closed: the load was cancelled by another run of the same query, or its record expired.
        Unavailable: the writer refused the load, or no writer adopted it.

    """
    address = plan.address
    store, paths = open_store(address)
    manifests = open_manifests(address)
    save_request(store, paths, record_id, load)

    def make_ready(now: Versioned[Manifest]) -> Manifest | None:
        held = find_load_record(now.value, record_id)
        return None if held is None or held.record.state != "loading" else move_load(now.value, held, "ready")

    latest = manifests.update(make_ready)
    wait = partial(_await, manifests, record_id=record_id, load=load, clock=address.clock)
    shown = wait(latest, timeout_s=timeout_s)
    if shown is None:
        _log.warning("no writer adopted the load within %s s: opening the database to adopt it", timeout_s)
        settings = LOADER_SETTINGS.replace(manifest_poll_interval=timedelta(seconds=_POLL_S))
        try:
            with open_database(address.path, **address.arguments, settings=settings, create=False):
                shown = wait(manifests.poll(), timeout_s=_OWN_TIMEOUT_S)
        except Closed:
            # A newer writer has opened the database meanwhile, which adopts the load; or the load was cancelled.
            shown = wait(manifests.poll(), timeout_s=_OWN_TIMEOUT_S)
    if shown is None:
        raise Unavailable(
            f"no writer adopted the load request {record_id} yet; the next writer that opens the database adopts it, "
            f"within {_LIFETIME}"
        )
    return shown


def cancel_request(manifests: ManifestStore, record_id: UUID) -> bool:
    """Remove the load record of an open load; False if a writer may have adopted the load."""
    cancelled = False

    def remove(now: Versioned[Manifest]) -> Manifest | None:
        nonlocal cancelled
        held = find_load_record(now.value, record_id)
        # Without a record: a writer may have adopted the load long ago.
        cancelled = held is not None and held.record.state != "done"
        return remove_checkpoint(now.value, record_id) if cancelled else None

    manifests.update(remove)
    return cancelled


def judge_without_record(manifest: Manifest, load: Load) -> Literal["added", "cancelled", "unknown"]:
    """What became of a load whose record is gone. Pure.

    A record goes when the load is cancelled or the record expires, and also some time after a writer has added the
    load, when no consumer of changes needs it any more. Compaction may have replaced the SSTs by then.
    """
    if any(sst.id in manifest.ssts for sst in load.ssts):
        return "added"
    # The manifest that adds a load raises this number to that of the load.
    return "cancelled" if manifest.last_l0_seq < load.seq else "unknown"


def _await(
    manifests: ManifestStore,
    latest: Versioned[Manifest],
    *,
    record_id: UUID,
    load: Load,
    timeout_s: float,
    clock: Clock,
) -> Versioned[Manifest] | None:
    """The manifest that shows the load; None if no writer has adopted it within `timeout_s`."""
    deadline = clock.monotonic() + timeout_s
    while True:
        held = find_load_record(latest.value, record_id)
        if held is None:
            match judge_without_record(latest.value, load):
                case "added":
                    return latest
                case "cancelled":
                    raise Closed(
                        "the load was cancelled: another run of the same query began, or it took longer than "
                        f"{_LIFETIME}. None of it is visible",
                        reason="fenced",
                    )
                case "unknown":
                    raise Unavailable(
                        f"the record of the load {record_id} is gone, so it is not known whether a writer has added "
                        "the load: all of it is visible, or none; read a row of it before loading again"
                    )
        match held.record.state:
            case "done":
                return latest
            case "refused" if held.record.reason.startswith(ROWS_CHANGED):
                raise SchemaChanged(f"the writer of the database refused the load: {held.record.reason}")
            case "refused":
                raise Unavailable(f"the writer of the database refused the load: {held.record.reason}")
            case "loading" | "ready":
                if clock.monotonic() > deadline:
                    return None
        clock.sleep(_POLL_S)
        latest = manifests.poll()
