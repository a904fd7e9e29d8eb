"""A load from begin to commit: who may write, which sequence number, and one manifest version that shows it all.

1. `begin_load` claims the database as its writer and puts what the log holds into tables. From then on the next
   sequence number is the load's: nobody else can use it without claiming the database again. Where a writer has
   the database open and takes loads in, it stays the writer: see `flagstone.spark.load.request`.
2. Tasks build tables with that number inside, under ids of their own (`flagstone.spark.load.task`).
3. `commit_load` adds them all with one manifest version, on condition that the claim still stands.

Whatever fails before the third step leaves the database as it was, and tables that nobody refers to. Garbage
collection spares them until then: their ids are not older than the newest L0, like those of a flush under way, and
nobody can make a newer L0 without claiming the database. Once somebody has, or the load is committed, what
nobody refers to is collected.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from flagstone.clones.origin import load_origin
from flagstone.compaction.coordinator import release_taken_role
from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.loads.edit import Load, apply_recorded_load, is_applied
from flagstone.metadata.annotations import HeldLoad, LoadRecord
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import SYSTEM_IDS, ulid_ms
from flagstone.spark.address import DatabaseAddress, open_store
from flagstone.spark.load.overlaps import check_writable, merge_overlaps, order_ssts
from flagstone.spark.load.plan import LoadPlan, LoadReport, MadeSst, stamped
from flagstone.spark.load.request import (
    UNLIMITED_L0,
    abort_hand_over,
    begin_hand_over,
    commit_hand_over,
    without_marks_of,
)
from flagstone.spark.options import WriteOptions
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import ManifestId, Seq, Ulid

_log = logging.getLogger("flagstone.spark")

_FENCES: Final = 16
"""How many files of the log that hold nothing are worth a version of the manifest."""


def begin_load(address: DatabaseAddress, *, create: bool = True, owner: str = "") -> LoadPlan:
    """Prepare for the hand-over to the writer that has the database open, or claim it, creating it if there is none.

    SlateDB's writers take no loads in: a live one is fenced. It learns so with its next durable write, and must open
    the database again when the load is over. All it had acknowledged is in the log, and so in the tables below the
    load. A crash afterwards costs an epoch, or a mark that expires. `owner` is the name of a query that loads again
    and again: what it began before cannot be committed any more.

    Raises:
        InvalidRequest: the database has segments, was destroyed, or is a clone that is not finished.
        Closed: somebody else claimed it at the same time.

    """
    handed_over = begin_hand_over(address, owner=owner)
    if handed_over is not None:
        return handed_over
    settings = Settings(
        compactor_options=None,
        garbage_collector_options=None,
        l0_max_ssts=UNLIMITED_L0,
        l0_max_ssts_per_key=UNLIMITED_L0,
    )
    with open_database(address.path, **address.arguments, settings=settings, create=create) as db:
        db.flush()
        epoch, committed = db.status()["writer_epoch"], db.status()["committed_seq"]
    store, paths = open_store(address)
    manifests, fence = ManifestStore(store, paths), Fence("writer", epoch)
    manifest = manifests.require_latest().value
    fence.check(manifest)
    if manifest.last_l0_seq < committed:
        raise Unavailable(
            f"the log of {paths.root!r} was not put into tables: they end at {manifest.last_l0_seq}, the log at "
            f"{committed}; try again"
        )
    if _tidied(manifest, owner) is not manifest:
        manifest = manifests.update(fence.guard(lambda now: _tidied(now.value, owner))).value
    now_ms, newest = SYSTEM_CLOCK.now_ms(), manifest.newest_l0
    return LoadPlan(
        address,
        epoch,
        Seq(manifest.last_l0_seq + 1),
        max(now_ms, manifest.last_l0_clock_tick),
        now_ms if newest is None else max(now_ms, ulid_ms(newest)),
    )


def _tidied(manifest: Manifest, owner: str) -> Manifest:
    """What a claim leaves of former ones; the manifest itself if there is nothing to do. Pure.

    What an earlier run of the owner left for a writer that is gone would be taken in by the next one. And loads that
    are never committed, such as micro-batches without rows, leave fences that every opening reads.
    """
    left = without_marks_of(manifest, owner)
    if left.wal_id_last_seen - left.replay_after_wal_id > _FENCES:
        return _log_behind(left)
    return left


def _log_behind(manifest: Manifest) -> Manifest:
    """The manifest of a claim, which put all of the log into tables, with nothing of it to replay."""
    return replace(manifest, replay_after_wal_id=max(manifest.replay_after_wal_id, manifest.wal_id_last_seen))


def commit_load(
    plan: LoadPlan, options: WriteOptions, made: Sequence[MadeSst], *, replaces_all: bool = False
) -> LoadReport:
    """Make all tables part of the database with one manifest version; without any, nothing changes.

    Tables with overlapping keys are merged first, unless the rows were said to be sorted.

    After `Unavailable` or a crash all of the load is visible, or none of it. With `replaces_all` everything that was
    there before goes with the same version.

    Raises:
        Closed: another writer has claimed the database since the load began, or the load was called off; nothing of it
            is visible.
        Unavailable: the store did not answer, or nobody took the load in.
        InvalidRequest: tasks wrote overlapping keys, or keys that this clone does not take.

    """
    store, paths = open_store(plan.address)
    manifests = ManifestStore(store, paths)
    settled = list(made) if options.presorted else merge_overlaps(plan, options, made)
    tables = order_ssts([each.sst for each in settled])
    origin = load_origin(store, paths)
    check_writable(tables, None if origin is None else origin.writable)
    load = Load(tables, plan.seq, plan.created_ms, stamped(plan.id_ms + 1), replaces_all)
    if not tables and not replaces_all:
        latest = manifests.require_latest()
        if plan.mark is not None:
            abort_hand_over(manifests, plan.mark)
    elif plan.mark is not None:
        latest = commit_hand_over(plan, plan.mark, load, patience_s=options.hand_over_timeout.total_seconds())
    else:
        latest = _commit_claimed(manifests, CompactionsStore(store, paths), load, plan.epoch)
    _delete_merged(store, paths, {each.sst.id for each in made}.difference(table.id for table in tables))
    report = LoadReport(
        rows=sum(each.rows for each in settled),
        tables=len(tables),
        bytes=sum(each.bytes for each in settled),
        seq=plan.seq,
        manifest_id=latest.id,
    )
    _log.info("loaded rows=%d tables=%d seq=%d", report.rows, report.tables, report.seq)
    return report


def _commit_claimed(
    manifests: ManifestStore, compactions: CompactionsStore, load: Load, epoch: int
) -> Versioned[Manifest]:
    """Add the load as the writer of the database, with the mark that consumers of changes find it by."""
    fence = Fence("writer", epoch)
    mark_id, now_ms = SYSTEM_IDS.uuid(), SYSTEM_CLOCK.now_ms()
    new = False

    def add(now: Versioned[Manifest]) -> Manifest:
        nonlocal new
        new = not is_applied(now.value, load)
        mark = LoadRecord("done", load.seq, load.created_ms)
        held = HeldLoad(Checkpoint(mark_id, ManifestId(now.next_id), now_ms // 1000), mark)
        told = apply_recorded_load(now, load, held, now_s=now_ms // 1000)
        return _log_behind(told)

    try:
        latest = manifests.update(fence.guard(add))
    except Closed as fenced:
        raise Closed(
            f"{fenced}: the database was opened while it was being loaded. Nothing of the load is visible; "
            "repeat it when nobody writes",
            reason="fenced",
        ) from fenced
    if new:
        release_taken_role(
            compactions, latest.value.compactor_epoch, ids=SYSTEM_IDS, now_ms=SYSTEM_CLOCK.now_ms()
        )
    return latest


def _delete_merged(store: ObjectStore, paths: DbPaths, table_ids: Collection[Ulid]) -> None:
    """Delete what went into a merge before the commit: no manifest ever referred to it."""
    # The load is committed: what is left is garbage, and collected as such.
    with suppress(FlagstoneError):
        store.delete_many([paths.table(table_id) for table_id in sorted(table_ids)])


def abort_load(plan: LoadPlan, made: Iterable[MadeSst]) -> int:
    """Delete the tables of a load that failed; returns how many. What cannot be told for certain is left to GC.

    The commit itself may be what failed, with an answer that got lost. So claim or mark are given up first, with a
    version of the manifest that no delayed commit can follow, and tables are deleted only if none came before it.
    """
    ids = {each.sst.id for each in made}
    if not ids and plan.mark is None:
        return 0
    store, paths = open_store(plan.address)
    manifests = ManifestStore(store, paths)
    ours = False

    def give_up(now: Versioned[Manifest]) -> Manifest | None:
        nonlocal ours
        # Not by its tables: they may be compacted by now, and still be what a checkpoint reads.
        ours = now.value.writer_epoch == plan.epoch and now.value.last_l0_seq < plan.seq
        return replace(now.value, writer_epoch=plan.epoch + 1) if ours else None

    try:
        if plan.mark is not None:
            ours = abort_hand_over(manifests, plan.mark)
        else:
            manifests.update(give_up)
        if not ours:
            return 0
        store.delete_many([paths.table(table_id) for table_id in sorted(ids)])
    except FlagstoneError as error:
        _log.info("tables of an aborted load are left to garbage collection: %s", error)
        return 0
    return len(ids)
