"""A load into a database that a writer has open: the tables are left for it, and it takes them in (ADR 0019).

The mark of the load stands in the manifest before the first task runs, and the load is over when it says `done`. A
driver that dies leaves a mark that expires after a day, and with it everything the load made becomes garbage. A writer
that dies is replaced: the driver's patience ends, it opens the database itself, and whoever opens it takes loads in.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final
from uuid import UUID

from flagstone.clones.checkpoint import expiry
from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.errors import Closed, InvalidRequest, Unavailable
from flagstone.loads.edit import Load
from flagstone.loads.request import (
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
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.spark.address import DatabaseAddress, open_store
from flagstone.spark.load.plan import LoadPlan
from flagstone.types import ManifestId

_log = logging.getLogger("flagstone.spark")

_LIFETIME: Final = timedelta(days=1)
"""How long a load may take, and how long one whose driver died is waited for."""

_LOOK_S: Final = 0.2
_TAKE_OVER_S: Final = 120.0
UNLIMITED_L0: Final = 1_000_000


def begin_hand_over(address: DatabaseAddress, *, owner: str = "") -> LoadPlan | None:
    """Mark the begin of a load in a database whose writer takes loads in; None where there is no such writer.

    Other loads under way of the same `owner`, if it has a name, are called off in the same step: of two runs of one
    query only the later one can still be taken in.
    """
    store, paths = open_store(address)
    manifests = ManifestStore(store, paths)
    latest = manifests.latest()
    if latest is None or not is_writer_announced(store, paths, latest.value):
        return None
    if latest.value.segments or latest.value.segment_extractor_name is not None:
        raise InvalidRequest(f"the database at {paths.root!r} has segments; it cannot be loaded in bulk")
    mark_id, now_ms = SYSTEM_IDS.uuid(), SYSTEM_CLOCK.now_ms()

    def add(now: Versioned[Manifest]) -> Manifest:
        left = without_marks_of(now.value, owner)
        mark = LoadRecord("loading", plan_seq(now.value), now_ms, owner=owner)
        until_s = expiry(now_ms // 1000, _LIFETIME)
        return add_checkpoint(
            left, Checkpoint(mark_id, ManifestId(now.next_id), now_ms // 1000, until_s, encode_load(mark))
        )

    written = manifests.update(add).value
    delete_stale_requests(store, paths, written)
    held = find_load_record(written, mark_id)
    if held is None:
        raise Unavailable(
            "the load was called off before it began: another one of the same query has begun since"
        )
    created_ms = max(now_ms, written.last_l0_clock_tick)
    return LoadPlan(address, written.writer_epoch, held.record.seq, created_ms, held.record.id_ms, mark_id)


def without_marks_of(manifest: Manifest, owner: str) -> Manifest:
    """The manifest with all loads under way of that owner called off; itself where there are none. Pure."""
    for held in held_loads(manifest):
        if owner and held.record.open and held.record.owner == owner:
            manifest = remove_checkpoint(manifest, held.checkpoint.id)
    return manifest


def commit_hand_over(plan: LoadPlan, mark_id: UUID, load: Load, *, patience_s: float) -> Versioned[Manifest]:
    """Leave the load for the writer and wait until it is part of the database; the manifest that shows it.

    After `Unavailable` or a crash it is all there, or none of it; while its mark says `ready` it may still come.

    Raises:
        Closed: it was called off, by another run of the same query or by a mark that expired.
        Unavailable: the writer refused it, or nobody took it in.

    """
    store, paths = open_store(plan.address)
    manifests = ManifestStore(store, paths)
    save_request(store, paths, mark_id, load)

    def make_ready(now: Versioned[Manifest]) -> Manifest | None:
        held = find_load_record(now.value, mark_id)
        return None if held is None or held.record.state != "loading" else move_load(now.value, held, "ready")

    latest = manifests.update(make_ready)
    shown = _await(manifests, latest, mark_id, patience_s)
    if shown is None:
        _log.warning("no writer took the load in within %s s: opening the database for it", patience_s)
        settings = Settings(
            compactor_options=None,
            garbage_collector_options=None,
            l0_max_ssts=UNLIMITED_L0,
            l0_max_ssts_per_key=UNLIMITED_L0,
            manifest_poll_interval=timedelta(seconds=_LOOK_S),
        )
        with open_database(plan.address.path, **plan.address.arguments, settings=settings, create=False):
            shown = _await(manifests, manifests.poll(), mark_id, _TAKE_OVER_S)
    if shown is None:
        raise Unavailable(
            f"the load waits as {mark_id} and was not taken in; the next writer that opens the database does, within "
            f"{_LIFETIME}"
        )
    return shown


def abort_hand_over(manifests: ManifestStore, mark_id: UUID) -> bool:
    """Call the load off; whether it can never become part of the database any more."""
    off = False

    def remove(now: Versioned[Manifest]) -> Manifest | None:
        nonlocal off
        held = find_load_record(now.value, mark_id)
        # One that has no mark may have been taken in long ago.
        off = held is not None and held.record.state != "done"
        return remove_checkpoint(now.value, mark_id) if off else None

    manifests.update(remove)
    return off


def _await(
    manifests: ManifestStore, latest: Versioned[Manifest], mark_id: UUID, timeout_s: float
) -> Versioned[Manifest] | None:
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    while True:
        held = find_load_record(latest.value, mark_id)
        if held is None:
            raise Closed(
                "the load was called off: another run of the same query began, or it took longer than "
                f"{_LIFETIME}. Nothing of it is visible",
                reason="fenced",
            )
        match held.record.state:
            case "done":
                return latest
            case "refused":
                raise Unavailable(f"the writer of the database refused the load: {held.record.reason}")
            case "loading" | "ready":
                if SYSTEM_CLOCK.monotonic() > deadline:
                    return None
        SYSTEM_CLOCK.sleep(_LOOK_S)
        latest = manifests.poll()
