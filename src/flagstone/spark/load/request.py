"""Beginning and giving up a bulk load: its record in the manifest (ADR 19 and 33).

The load record is in the manifest before the first task runs, whether or not a writer has the database open, and the
load is over when the record says `done`. No role is claimed: other processes open and write the database meanwhile. If
the driver crashes, its record expires after minutes, and everything the load wrote becomes garbage.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final
from uuid import UUID

from flagstone.db.reader.reader import open_reader
from flagstone.db.recovery import find_or_create
from flagstone.errors import FlagstoneError, InvalidRequest, Unavailable
from flagstone.loads.lifetime import add_record, dead_loads, find_load_record, open_loads_of, without_loads
from flagstone.loads.request import delete_load, delete_stale_requests, plan_seq
from flagstone.lsm.segments import SegmentExtractor, check_extractor
from flagstone.metadata.annotations import LOAD_TAG_BITS, HeldLoad, LoadRecord
from flagstone.metadata.manifest import Manifest, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.ids import ulid_ms
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import DatabaseAddress, open_manifests, open_store
from flagstone.spark.load.plan import LoadPlan

_log = logging.getLogger("flagstone.spark")


def begin_load(
    address: DatabaseAddress,
    *,
    create: bool = True,
    owner: str = "",
    record_id: UUID | None = None,
    segment_extractor: SegmentExtractor | None = None,
    only_if_new: bool = False,
) -> LoadPlan:
    """Begin a load: create the database if there is none, and add the load record.

    The same manifest removes the records of loads that died, and the other open loads of `owner`, unless `owner` is
    empty: of two runs of one query only the later can commit. A crash afterwards leaves a record that expires.

    Raises:
        InvalidRequest: the database has other segments, was destroyed, or is a clone that is not finished; or it was
            written to before, and the load is `only_if_new`.

    """
    store, paths = open_store(address)
    manifests = open_manifests(address)
    current, _ = find_or_create(
        store, paths, manifests, create=create, extractor=segment_extractor, pool=shared_pool()
    )
    check_extractor(
        segment_extractor,
        stored_name=current.value.segment_extractor_name,
        prefixes=(segment.prefix for segment in current.value.segments),
    )
    if only_if_new and _was_written(address, current.value):
        raise written_before(address)
    record_id, now_ms = record_id or address.ids.uuid(), address.clock.now_ms()
    tag = int(address.ids.uuid()) & ((1 << LOAD_TAG_BITS) - 1)
    ended: list[HeldLoad] = []

    def add(now: Versioned[Manifest]) -> Manifest:
        ended[:] = [*dead_loads(now.value, now_ms // 1000), *open_loads_of(now.value, owner)]
        left = without_loads(now.value, ended)
        newest = left.newest_l0
        # Not older than the newest L0, for SlateDB's collector, which knows no load records.
        id_ms = now_ms if newest is None else max(now_ms, ulid_ms(newest))
        record = LoadRecord("loading", plan_seq(left, stream=bool(owner)), id_ms, owner=owner, tag=tag)
        return add_record(Versioned(now.id, left), record_id, record, now_s=now_ms // 1000)

    written = manifests.update(add).value
    # Garbage collection deletes what this call leaves.
    with suppress(FlagstoneError):
        for former in ended:
            delete_load(store, paths, former)
        if not owner:  # a stream would list for each of its batches
            delete_stale_requests(store, paths, written)
    held = find_load_record(written, record_id)
    if held is None:
        raise Unavailable(
            "the load was cancelled before it began: another load of the same query has begun since"
        )
    return LoadPlan(
        address,
        record_id,
        written.writer_epoch,
        held.record.seq,
        max(now_ms, written.last_l0_clock_tick),
        held.record.id_ms,
        tag,
        now_ms,
        owner,
    )


def _was_written(address: DatabaseAddress, manifest: Manifest) -> bool:
    if manifest.last_l0_seq > 0:
        return True
    with open_reader(address.path, **address.arguments, mode="latest") as reader:
        return bool(reader.status()["last_seq"] > 0)


WRITTEN_BEFORE: Final = "has been written to before"


def written_before(address: DatabaseAddress) -> InvalidRequest:
    """The error of a load that is `only_if_new`."""
    return InvalidRequest(
        f"the database {address.name!r} {WRITTEN_BEFORE}; load with mode='append' or 'overwrite', or into another one"
    )


def cancel_request(manifests: ManifestStore, record_id: UUID) -> HeldLoad | None:
    """Remove the record of a load and return it; None if a writer may have adopted the load."""
    cancelled: HeldLoad | None = None

    def remove(now: Versioned[Manifest]) -> Manifest | None:
        nonlocal cancelled
        held = find_load_record(now.value, record_id)
        # Without a record: a writer may have adopted the load long ago.
        cancelled = None if held is None or held.record.state == "done" else held
        return None if cancelled is None else remove_checkpoint(now.value, record_id)

    manifests.update(remove)
    return cancelled


def abort_load(plan: LoadPlan) -> int:
    """Give up a load and delete its SSTs; returns how many, 0 if it may be committed: then garbage collection decides.

    The commit itself may have failed after its effect, with a lost reply. So a manifest first removes the load record,
    which no delayed commit can follow. The SSTs are deleted only if no commit came before it.
    """
    store, paths = open_store(plan.address)
    try:
        held = cancel_request(open_manifests(plan.address), plan.record_id)
        return 0 if held is None else delete_load(store, paths, held)
    except FlagstoneError as error:
        _log.info("SSTs of an aborted load are left to garbage collection: %s", error)
        return 0
