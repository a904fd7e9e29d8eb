"""A load from begin to commit: who may write, which sequence number, and one manifest version that shows it all.

1. `begin_load` claims the database as its writer, which fences any other, and puts what the log holds into tables.
   From then on the next sequence number is the load's: nobody else can use it without claiming the database again.
2. Tasks build tables with that number inside, under ids of their own (`flagstone.spark.tables`).
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
from datetime import timedelta
from typing import Final

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.maintenance.compaction.lifecycle import release_role
from flagstone.metadata.fencing import Fence, claim_compactions
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import SYSTEM_IDS, ulid_ms
from flagstone.spark.layout import Load, apply_load, check_writable, is_applied, order_tables
from flagstone.spark.options import Place, WriteOptions
from flagstone.spark.overlaps import merge_overlaps
from flagstone.spark.plan import LoadPlan, MadeTable, open_store, stamped
from flagstone.spark.receipt import LoadReport
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import Seq, Ulid
from flagstone.views.checkpoint import create_checkpoint
from flagstone.views.marks import load_origin

_log = logging.getLogger("flagstone.spark")

_UNLIMITED: Final = 1_000_000
_REPLACED_LIFETIME: Final = timedelta(minutes=15)
"""How long readers of what an overwriting load replaced keep their tables, as after a compaction."""


def begin_load(place: Place, *, create: bool = True) -> LoadPlan:
    """Claim the database, creating it if there is none, and take its next sequence number.

    A live writer is fenced: it learns so with its next durable write, and must open the database again when the
    load is over. All it had acknowledged is in the log, and so in the tables below the load. A crash afterwards costs
    an epoch and nothing else.

    Raises:
        InvalidRequest: the database has segments, was destroyed, or is a clone that is not finished.
        Closed: somebody else claimed it at the same time.

    """
    settings = Settings(
        compactor_options=None,
        garbage_collector_options=None,
        l0_max_ssts=_UNLIMITED,
        l0_max_ssts_per_key=_UNLIMITED,
    )
    with open_database(place.path, **place.arguments, settings=settings, create=create) as db:
        db.flush()
        epoch, committed = db.status()["writer_epoch"], db.status()["committed_seq"]
    store, paths = open_store(place)
    manifest = ManifestStore(store, paths).require_latest().value
    Fence("writer", epoch).check(manifest)
    if manifest.last_l0_seq < committed:
        raise Unavailable(
            f"the log of {paths.root!r} was not put into tables: they end at {manifest.last_l0_seq}, the log at "
            f"{committed}; try again"
        )
    now_ms, newest = SYSTEM_CLOCK.now_ms(), manifest.newest_l0
    return LoadPlan(
        place,
        epoch,
        Seq(manifest.last_l0_seq + 1),
        max(now_ms, manifest.last_l0_clock_tick),
        now_ms if newest is None else max(now_ms, ulid_ms(newest)),
    )


def commit_load(
    plan: LoadPlan, options: WriteOptions, made: Sequence[MadeTable], *, replaces_all: bool = False
) -> LoadReport:
    """Make all tables part of the database with one manifest version; without any, nothing changes.

    Tables with overlapping keys are merged first, unless the rows were said to be sorted.

    After `Unavailable` or a crash all of the load is visible, or none of it. With `replaces_all` everything that was
    there before goes with the same version.

    Raises:
        Closed: another writer has claimed the database since the load began; nothing of the load is visible.
        InvalidRequest: tasks wrote overlapping keys, or keys that this clone does not take.

    """
    store, paths = open_store(plan.place)
    manifests = ManifestStore(store, paths)
    settled = list(made) if options.presorted else merge_overlaps(plan, options, made)
    tables = order_tables([each.table for each in settled])
    origin = load_origin(store, paths)
    check_writable(tables, None if origin is None else origin.writable)
    load = Load(tables, plan.seq, plan.created_ms, stamped(plan.id_ms + 1), replaces_all)
    fence = Fence("writer", plan.epoch)
    latest = manifests.require_latest()
    new = False

    def add(now: Versioned[Manifest]) -> Manifest:
        nonlocal new
        new = not is_applied(now.value, load)
        return apply_load(now.value, load)

    if tables or replaces_all:
        try:
            if replaces_all and not latest.value.tree.empty:
                fence.check(latest.value)
                create_checkpoint(manifests, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, lifetime=_REPLACED_LIFETIME)
            latest = manifests.update(fence.guard(add))
        except Closed as fenced:
            raise Closed(
                f"{fenced}: the database was opened while it was being loaded. Nothing of the load is visible; "
                "repeat it when nobody writes",
                reason="fenced",
            ) from fenced
        if new:
            _release_compactor(store, paths, latest)
    _delete_merged(store, paths, {each.table.id for each in made}.difference(table.id for table in tables))
    report = LoadReport(
        rows=sum(each.rows for each in settled),
        tables=len(tables),
        bytes=sum(each.bytes for each in settled),
        seq=plan.seq,
        manifest_id=latest.id,
    )
    _log.info("loaded rows=%d tables=%d seq=%d", report.rows, report.tables, report.seq)
    return report


def _delete_merged(store: ObjectStore, paths: DbPaths, table_ids: Collection[Ulid]) -> None:
    """Delete what went into a merge before the commit: no manifest ever referred to it."""
    # The load is committed: what is left is garbage, and collected as such.
    with suppress(FlagstoneError):
        store.delete_many([paths.table(table_id) for table_id in sorted(table_ids)])


def abort_load(plan: LoadPlan, made: Iterable[MadeTable]) -> int:
    """Delete the tables of a load that failed; returns how many. What cannot be told for certain is left to GC.

    The commit itself may be what failed, with an answer that got lost. So the claim is given up first, with a version
    of the manifest that no delayed commit can follow, and only what that version does not refer to is deleted.
    """
    ids = {each.table.id for each in made}
    if not ids:
        return 0
    store, paths = open_store(plan.place)
    manifests = ManifestStore(store, paths)
    ours = False

    def give_up(now: Versioned[Manifest]) -> Manifest | None:
        nonlocal ours
        ours = now.value.writer_epoch == plan.epoch and not ids & now.value.ssts.keys()
        return replace(now.value, writer_epoch=plan.epoch + 1) if ours else None

    try:
        manifests.update(give_up)
        if not ours:
            return 0
        store.delete_many([paths.table(table_id) for table_id in sorted(ids)])
    except FlagstoneError as error:
        _log.info("tables of an aborted load are left to garbage collection: %s", error)
        return 0
    return len(ids)


def _release_compactor(store: ObjectStore, paths: DbPaths, written: Versioned[Manifest]) -> None:
    """Say that the compactor's role is free, so that a coordinator that lost it to the load takes it back."""
    compactions = CompactionsStore(store, paths)
    # The load is committed: what goes wrong here costs a restart of that coordinator, not the load.
    with suppress(FlagstoneError):
        if compactions.latest() is not None:
            fence = Fence("compactor", written.value.compactor_epoch)
            claim_compactions(compactions, fence)
            compactions.update(fence.guard(lambda now: release_role(now.value, SYSTEM_CLOCK.now_ms())))
