"""A bulk load from begin to commit: the claim, the sequence number, and the manifest that adds all SSTs.

1. `begin_load` claims the database as its writer and flushes the rows of the WAL to SSTs. From then on the load owns
   the next sequence number: another writer can use it only after it has claimed the database. If a writer has the
   database open and adopts loads, it stays the writer: see `flagstone.spark.load.request`.
2. Tasks build SSTs whose rows have that sequence number (`flagstone.spark.load.task`).
3. `commit_load` adds all SSTs with one manifest, on condition that the claim is still the newest.

A failure before the third step leaves the database unchanged, and SSTs without a reference. Garbage collection keeps
the SSTs during the load: like the SST of a running flush, they are not older than the newest L0, and a newer L0 takes
another claim. After another claim, or after the commit, it deletes SSTs without a reference.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import pyarrow as pa

from flagstone.clones.origin import load_origin
from flagstone.compaction.coordinator import release_taken_role
from flagstone.db.open import open_database
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.loads.edit import ExpectedRow, Load, apply_recorded_load, is_applied
from flagstone.metadata.annotations import HeldLoad, LoadRecord
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.ids import ulid_ms
from flagstone.spark.address import DatabaseAddress, open_manifests, open_store
from flagstone.spark.load.overlaps import check_writable, merge_overlaps, order_ssts
from flagstone.spark.load.plan import LoadPlan, LoadReport, MadeSst, ulid_at
from flagstone.spark.load.request import (
    LOADER_SETTINGS,
    begin_request,
    cancel_request,
    commit_request,
    without_open_loads_of,
)
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.spark.stored_schema import settle_schema
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import ManifestId, Seq, Ulid

_log = logging.getLogger("flagstone.spark")

_FENCES: Final = 16
"""With more empty WAL files than this, a claim writes a manifest, so that later recoveries skip them."""


def begin_load(address: DatabaseAddress, *, create: bool = True, owner: str = "") -> LoadPlan:
    """Begin a load request if a writer has the database open; otherwise claim the database, and create it if needed.

    SlateDB's writers adopt no loads: a running one is fenced. It gets the error with its next durable write, and must
    be opened again after the load. All its acknowledged rows are in the WAL, and so in the SSTs below the load. A crash
    afterwards leaves an epoch that was used up, or a load record that expires. `owner` is the name of a query that
    loads repeatedly: its earlier loads that are still open cannot be committed any more.

    Raises:
        InvalidRequest: the database has segments, was destroyed, or is a clone that is not finished.
        Closed: another writer claimed the database at the same time.

    """
    requested = begin_request(address, owner=owner)
    if requested is not None:
        return requested
    with open_database(address.path, **address.arguments, settings=LOADER_SETTINGS, create=create) as db:
        db.flush()
        epoch, committed = db.status()["writer_epoch"], db.status()["committed_seq"]
    manifests, fence = open_manifests(address), Fence("writer", epoch)
    manifest = manifests.require_latest().value
    fence.check(manifest)
    if manifest.last_l0_seq < committed:
        raise Unavailable(
            f"the WAL of {manifests.paths.root!r} was not flushed to SSTs: they end at sequence number "
            f"{manifest.last_l0_seq}, the WAL at {committed}; try again"
        )
    if _without_leftovers(manifest, owner) is not manifest:
        manifest = manifests.update(fence.guard(lambda now: _without_leftovers(now.value, owner))).value
    now_ms, newest = address.clock.now_ms(), manifest.newest_l0
    return LoadPlan(
        address,
        epoch,
        Seq(manifest.last_l0_seq + 1),
        max(now_ms, manifest.last_l0_clock_tick),
        now_ms if newest is None else max(now_ms, ulid_ms(newest)),
    )


def _without_leftovers(manifest: Manifest, owner: str) -> Manifest:
    """The manifest without what earlier claims left; the manifest itself if there is nothing to do. Pure.

    The next writer would adopt a load request that an earlier run of the owner left for a crashed writer. Loads that
    are never committed, such as micro-batches without rows, leave fences, which every recovery reads.
    """
    left = without_open_loads_of(manifest, owner)
    if left.wal_id_last_seen - left.replay_after_wal_id > _FENCES:
        return _without_replay(left)
    return left


def _without_replay(manifest: Manifest) -> Manifest:
    """The manifest with no WAL file to replay: the claim has flushed all of them to SSTs."""
    return replace(manifest, replay_after_wal_id=max(manifest.replay_after_wal_id, manifest.wal_id_last_seen))


def commit_load(
    plan: LoadPlan, options: WriteOptions, made: Sequence[MadeSst], *, replaces_all: bool = False
) -> LoadReport:
    """Add all SSTs to the database with one manifest; a load without SSTs changes nothing.

    SSTs with overlapping keys are merged first, unless the rows are declared as sorted.

    After `Unavailable` or a crash all of the load is visible, or none of it. With `replaces_all` the same manifest
    removes all older data.

    Raises:
        Closed: another writer has claimed the database since the load began, or the load was cancelled; none of it is
            visible.
        TransactionConflict: another commit has changed the schema since the load was planned; none of it is visible.
        Unavailable: the store did not answer, or no writer adopted the load.
        InvalidRequest: tasks wrote overlapping keys, or keys outside the writable range of the clone.

    """
    address = plan.address
    store, paths = open_store(address)
    manifests = open_manifests(address)
    settled = list(made) if options.presorted else merge_overlaps(plan, options, made)
    rows = sum(each.rows for each in settled)
    expected: tuple[ExpectedRow, ...] = ()
    if options.planned_schema is not None:
        row, relied = settle_schema(address, options.planned_schema)
        expected = (relied,)
        if row is not None:
            order_ssts([each.sst for each in settled])
            batch = pa.RecordBatch.from_pydict({"key": [relied.key], "value": [row]})
            own = write_ssts([batch], plan, WriteOptions(address, sst_options=options.sst_options))
            settled = merge_overlaps(plan, replace(options, presorted=False, in_order=True), [*settled, *own])
    ssts = order_ssts([each.sst for each in settled])
    origin = load_origin(store, paths)
    check_writable(ssts, None if origin is None else origin.writable)
    load = Load(
        ssts,
        plan.seq,
        plan.created_ms,
        ulid_at(plan.id_ms + 1, address.ids),
        replaces_all,
        expected=expected,
    )
    if not ssts and not replaces_all:
        latest = manifests.require_latest()
        if plan.record_id is not None:
            cancel_request(manifests, plan.record_id)
    elif plan.record_id is not None:
        latest = commit_request(
            plan, plan.record_id, load, timeout_s=options.hand_over_timeout.total_seconds()
        )
    else:
        compactions = CompactionsStore(store, paths, clock=address.clock, ids=address.ids)
        latest = _commit_claimed(plan, manifests, compactions, load)
    _delete_merged(store, paths, {each.sst.id for each in made}.difference(sst.id for sst in ssts))
    report = LoadReport(
        rows=rows,
        tables=len(ssts),
        bytes=sum(each.bytes for each in settled),
        seq=plan.seq,
        manifest_id=latest.id,
    )
    _log.info("loaded rows=%d tables=%d seq=%d", report.rows, report.tables, report.seq)
    return report


def _commit_claimed(
    plan: LoadPlan, manifests: ManifestStore, compactions: CompactionsStore, load: Load
) -> Versioned[Manifest]:
    """Add the load as the writer of the database, with the load record by which consumers of changes find it."""
    clock, ids, fence = plan.address.clock, plan.address.ids, Fence("writer", plan.epoch)
    record_id, now_ms = ids.uuid(), clock.now_ms()
    new = False

    def add(now: Versioned[Manifest]) -> Manifest:
        nonlocal new
        new = not is_applied(now.value, load)
        record = LoadRecord("done", load.seq, load.created_ms)
        held = HeldLoad(Checkpoint(record_id, ManifestId(now.next_id), now_ms // 1000), record)
        return _without_replay(apply_recorded_load(now, load, held, now_s=now_ms // 1000))

    try:
        latest = manifests.update(fence.guard(add))
    except Closed as fenced:
        raise Closed(
            f"{fenced}: the database was opened while it was being loaded. Nothing of the load is visible; "
            "repeat it when no other process writes",
            reason="fenced",
        ) from fenced
    if new:
        release_taken_role(compactions, latest.value.compactor_epoch, ids=ids, now_ms=clock.now_ms())
    return latest


def _delete_merged(store: ObjectStore, paths: DbPaths, sst_ids: Collection[Ulid]) -> None:
    """Delete the SSTs that were merged before the commit: no manifest ever referred to them."""
    # The load is committed. Garbage collection deletes what this call leaves.
    with suppress(FlagstoneError):
        store.delete_many([paths.sst(sst_id) for sst_id in sorted(sst_ids)])


def abort_load(plan: LoadPlan, made: Iterable[MadeSst]) -> int:
    """Delete the SSTs of a failed load and return their number; 0 if they may be committed: then GC decides.

    The commit itself may have failed after its effect, with a lost reply. So a manifest first gives up the claim or
    removes the load record, which no delayed commit can follow. The SSTs are deleted only if no commit came before it.
    """
    ids = {each.sst.id for each in made}
    if not ids and plan.record_id is None:
        return 0
    store, paths = open_store(plan.address)
    manifests = open_manifests(plan.address)
    ours = False

    def give_up(now: Versioned[Manifest]) -> Manifest | None:
        nonlocal ours
        # Not by the SSTs: a compaction may have replaced them already, while a checkpoint still needs them.
        ours = now.value.writer_epoch == plan.epoch and now.value.last_l0_seq < plan.seq
        return replace(now.value, writer_epoch=plan.epoch + 1) if ours else None

    try:
        if plan.record_id is not None:
            ours = cancel_request(manifests, plan.record_id)
        else:
            manifests.update(give_up)
        if not ours:
            return 0
        store.delete_many([paths.sst(sst_id) for sst_id in sorted(ids)])
    except FlagstoneError as error:
        _log.info("SSTs of an aborted load are left to garbage collection: %s", error)
        return 0
    return len(ids)
