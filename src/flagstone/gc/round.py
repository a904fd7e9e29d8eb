"""One round of garbage collection: read, plan, then delete.

The order of reading is part of the rules (see `ssts.py`): first the listings, then the compactions file, then the
manifest, then the manifests that checkpoints name. Each kind is planned on its own, and a failure of one does not stop
the others.

Deleting is safe to repeat and to interrupt. A crash leaves some garbage behind, and at most a boundary that is higher
than necessary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from flagstone.errors import FlagstoneError, Unavailable
from flagstone.gc.metadata import (
    CheckpointedManifests,
    Reach,
    checkpointed_ids,
    drop_entry,
    next_expiry_s,
    plan_boundary,
    plan_detach,
    plan_expired,
    plan_versions,
    remove_expired,
)
from flagstone.gc.plan import Kind, KindOptions, Plan, Verdict, apply_age
from flagstone.gc.report import GarbageReport, KindReport
from flagstone.gc.ssts import SstObject, compacted_l0, plan_ssts, sst_cutoff
from flagstone.gc.wal import WalObject, kept_ranges, plan_wal
from flagstone.loads.lifetime import removed_loads
from flagstone.metadata.annotations import LoadRecord, held_loads
from flagstone.metadata.borrowing import release_final
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Manifest, remove_expired_checkpoints
from flagstone.metadata.sequenced import SequencedObject, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore, find_inside
from flagstone.store.two_phase import TwoPhaseStore

_BATCH: Final = 1000
_LONGEST_UPLOAD_MS: Final = 60 * 60 * 1000
"""No upload to a folder pauses for longer; one that does fails with an error."""

_log = logging.getLogger("flagstone.gc")

_REACHING: Final[frozenset[Kind]] = frozenset(["wal", "wal_fence", "compacted", "detach"])
"""Kinds that need the manifests that checkpoints name."""


@dataclass(slots=True, kw_only=True)
class Target:
    """The database whose garbage is collected, and how. Once `halted` is True nothing more is deleted."""

    store: ObjectStore
    wal_store: ObjectStore
    paths: DbPaths
    manifests: CheckpointedManifests
    options: Mapping[Kind, KindOptions]
    boundary_files: bool
    clock: Clock
    ids: Ids
    metrics: Metrics
    halted: bool = False


class Round:
    """The state of one round; lives as long as `Collector.collect`."""

    def __init__(
        self, target: Target, report: GarbageReport, kinds: Sequence[Kind], *, dry_run: bool
    ) -> None:
        self._target = target
        self._report = report
        self._kinds = kinds
        self._dry_run = dry_run
        # New for every round, so that they list: the manifest they remember might be followed by a gap, made by a
        # collector without boundaries, and be taken for the latest.
        self._manifests = self._manifests_of(target.paths)
        self._compactions = CompactionsStore(
            target.store, target.paths, clock=target.clock, ids=target.ids, metrics=target.metrics
        )
        self._dead_loads: list[LoadRecord] = []
        self._main_clock = StoreClock(target.store, target.paths.clock_probe)
        self._wal_clock = (
            self._main_clock
            if target.wal_store is target.store
            else StoreClock(target.wal_store, target.paths.clock_probe)
        )

    def run(self) -> None:
        target, report = self._target, self._report
        for kind in self._kinds:
            report.of(kind).dry_run = self._dry_run or target.options[kind].dry_run
        # The plans are safe because of the order of the next four steps.
        listed = self._list_all()
        compactions = self._read_compactions(listed)
        found = self._manifests.require_latest()
        latest = self._remove_expired(found)
        self._dead_loads = removed_loads(found.value, latest.value)
        reach = self._find_reach(latest)
        report.manifest_id = latest.id if reach is None else reach.latest.id
        # WAL and SSTs first: deleting them writes nothing, so a full disk has room before a boundary is written.
        if reach is not None:
            self._collect_reached(reach, listed, compactions)
        with self._recording_errors("manifest"):
            plan = plan_versions(
                "manifest",
                listed.get("manifest", ()),
                latest=latest.id,
                checkpointed=checkpointed_ids(latest.value),
            )
            self._delete_versions(self._manifests, plan)
        if compactions is not None:
            with self._recording_errors("compactions"):
                plan = plan_versions("compactions", listed.get("compactions", ()), latest=compactions.id)
                self._delete_versions(self._compactions, plan)
        self._collect_two_phase()

    # -- reading ------------------------------------------------------------------------------------------

    def _list_all(self) -> dict[Kind, Sequence[Any]]:
        target, paths = self._target, self._target.paths
        folders: dict[Kind, Callable[[], Sequence[Any]]] = {
            "manifest": self._manifests.list,
            "compactions": self._compactions.list,
            "compacted": lambda: _parsed(target.store, paths.sst_folder, paths.parse_sst, SstObject),
        }
        listed: dict[Kind, Sequence[Any]] = {}
        for kind, list_folder in folders.items():
            if kind in self._kinds:
                with self._recording_errors(kind):
                    listed[kind] = list_folder()
        wal_kinds: list[Kind] = [kind for kind in self._kinds if kind in ("wal", "wal_fence")]
        if wal_kinds:
            with self._recording_errors(wal_kinds[0]):
                files = _parsed(target.wal_store, paths.wal_folder, paths.parse_wal, WalObject)
                listed.update(dict.fromkeys(wal_kinds, files))
        return listed

    def _read_compactions(self, listed: dict[Kind, Sequence[Any]]) -> Versioned[Compactions] | None:
        """The compactions file; None if there is none, or no kind of this round needs it.

        If it exists and cannot be read, the kinds that depend on it are not collected.
        """
        depending: list[Kind] = [kind for kind in ("compactions", "compacted") if kind in listed]
        if not depending:
            return None
        try:
            return self._compactions.latest()
        except FlagstoneError as error:
            for kind in depending:
                del listed[kind]
                self._report.of(kind).errors.append(f"{type(error).__name__}: {error}")
            return None

    def _remove_expired(self, latest: Versioned[Manifest]) -> Versioned[Manifest]:
        """The latest manifest, without the checkpoints that have expired by this machine's and the store's clock.

        If no new manifest can be written, because the store is full or for another reason, the checkpoints stay: they
        keep more than they should, and the rest of the round goes on.
        """
        now_s = self._target.clock.now_ms() // 1000
        if plan_expired(latest.value, now_s):
            entry = self._report.of("checkpoint")
            entry.dry_run = self._dry_run
            try:
                now_s = min(now_s, self._main_clock.now_ms() // 1000)
                expired = plan_expired(latest.value, now_s)
                if expired and self._dry_run:
                    latest = Versioned(latest.id, remove_expired_checkpoints(latest.value, now_s))
                elif expired:
                    latest = remove_expired(self._manifests, now_s)
            except Unavailable as error:
                entry.errors.append(f"{type(error).__name__}: {error}")
            else:
                for checkpoint in expired:
                    entry.count_unplanned(str(checkpoint.id), "expired")
        expiry_s = next_expiry_s(latest.value)
        if expiry_s is not None:
            self._report.revisit_within(max(0, 1000 * (expiry_s - now_s)))
        return latest

    def _find_reach(self, latest: Versioned[Manifest]) -> Reach | None:
        affected = [kind for kind in self._kinds if kind in _REACHING]
        if not affected:
            return None
        try:
            return self._target.manifests.reach(self._manifests, latest)
        except FlagstoneError as error:
            for kind in affected:
                self._report.of(kind).errors.append(f"{type(error).__name__}: {error}")
            return None

    # -- acting -------------------------------------------------------------------------------------------

    def _collect_reached(
        self, reach: Reach, listed: Mapping[Kind, Sequence[Any]], compactions: Versioned[Compactions] | None
    ) -> None:
        target, latest = self._target, reach.latest.value
        kept = kept_ranges(latest, reach.checkpointed.values())
        for kind in ("wal", "wal_fence"):
            with self._recording_errors(kind):
                if kind in listed:
                    self._delete(target.wal_store, self._wal_clock, plan_wal(kind, listed[kind], kept))
        with self._recording_errors("compacted"):
            if "compacted" in listed:
                cutoff = sst_cutoff(latest, None if compactions is None else compactions.value)
                plan = plan_ssts(
                    listed["compacted"],
                    referenced=reach.ssts,
                    cutoff=cutoff,
                    compacted=compacted_l0(latest),
                    loads=[held.record for held in held_loads(latest) if held.record.open],
                    dead=self._dead_loads,
                )
                self._delete(target.store, self._main_clock, plan)
                self._sweep_uploads()
        with self._recording_errors("detach"):
            if "detach" in self._kinds:
                self._detach(reach)

    def _delete_versions(self, versions: SequencedObject[Any], plan: Plan) -> None:
        if plan.kind not in self._kinds:
            return
        bounded = self._target.boundary_files

        def remove(deletions: Sequence[Verdict]) -> None:
            versions.delete([verdict.id for verdict in deletions], bounded=bounded)

        aged = self._aged(plan, self._main_clock)
        boundary = plan_boundary(aged)
        if boundary is not None and bounded and not self._report.of(plan.kind).dry_run:
            # Before any delete: a process that creates one of these ids again must fail.
            versions.advance_boundary(boundary)
        self._carry_out(aged, remove)

    def _delete(self, store: ObjectStore, clock: StoreClock, plan: Plan) -> None:
        def remove(deletions: Sequence[Verdict]) -> None:
            store.delete_many([verdict.meta.path for verdict in deletions])

        self._carry_out(self._aged(plan, clock), remove)

    def _aged(self, plan: Plan, clock: StoreClock) -> Plan:
        """The plan without objects that are too young. The clock is read only if the plan has deletions."""
        min_age_ms = self._target.options[plan.kind].min_age_ms
        if min_age_ms == 0 or not plan.deletions:
            return plan
        now_ms = clock.now_ms()
        aged = apply_age(plan, now_ms=now_ms, min_age_ms=min_age_ms)
        if aged.youngest_due_ms is not None:
            self._report.revisit_within(max(0, aged.youngest_due_ms + min_age_ms - now_ms))
        return aged

    def _carry_out(self, plan: Plan, remove: Callable[[Sequence[Verdict]], None]) -> None:
        entry = self._report.of(plan.kind)
        entry.count_plan(plan)
        deletions = plan.deletions
        for start in range(0, len(deletions), _BATCH):
            batch = deletions[start : start + _BATCH]
            if self._target.halted:
                entry.errors.append("stopped before all garbage was deleted")
                return
            if not entry.dry_run:
                remove(batch)
            for verdict in batch:
                entry.count_deleted(verdict.meta.path, verdict.meta.size)

    def _sweep_uploads(self) -> None:
        """Remove the unfinished uploads of killed processes. Only folders keep such files."""
        target, entry = self._target, self._report.of("compacted")
        age_ms = max(target.options["compacted"].min_age_ms, _LONGEST_UPLOAD_MS)
        for store in dict.fromkeys(
            find_inside(each, LocalStore) for each in (target.store, target.wal_store)
        ):
            if store is not None:
                for path in store.sweep_staging(age_ms, folder=target.paths.root, dry_run=entry.dry_run):
                    entry.count_unplanned(path, "upload of a process that died")

    def _detach(self, reach: Reach) -> None:
        entry = self._report.of("detach")
        unused = plan_detach(reach.latest.value, reach.checkpointed.values())
        entry.examined += len(reach.latest.value.external_dbs) - len(unused)
        if entry.examined:
            entry.reasons["in use"] = entry.examined
        for database in unused:
            if not entry.dry_run:
                parents = self._manifests_of(DbPaths(database.path))
                borrower = self._target.paths.root
                final = database.final_checkpoint_id
                released = release_final(self._target.store, parents, final, borrower=borrower)
                if released.kept is not None:
                    _log.warning(
                        "a checkpoint of a lender is kept path=%s reason=%s", borrower, released.kept
                    )
                if released.kept is not None and not released.foreign:
                    # The entry stays: a later round may be able to prove which clone the checkpoint belongs to.
                    entry.examined += 1
                    entry.reasons[released.kept] += 1
                    continue
                self._report.manifest_id = drop_entry(self._manifests, database).id
            entry.count_unplanned(database.path, "no SST of it is used")

    def _collect_two_phase(self) -> None:
        target = self._target
        if "two_phase" not in self._kinds:
            return
        entry, root = self._report.of("two_phase"), target.paths.root
        for store in dict.fromkeys(map(find_two_phase, (target.store, target.wal_store))):
            if store is not None:
                with self._recording_errors("two_phase"):
                    min_age_ms = target.options["two_phase"].min_age_ms
                    collect_leftovers(store, root, entry, min_age_ms=min_age_ms, dry_run=entry.dry_run)

    def _manifests_of(self, paths: DbPaths) -> ManifestStore:
        target = self._target
        return ManifestStore(target.store, paths, clock=target.clock, ids=target.ids, metrics=target.metrics)

    @contextmanager
    def _recording_errors(self, kind: Kind) -> Iterator[None]:
        try:
            yield
        except FlagstoneError as error:
            self._report.of(kind).errors.append(f"{type(error).__name__}: {error}")


def _parsed(
    store: ObjectStore, folder: str, parse: Callable[[str], Any], make: Callable[[Any, Any], Any]
) -> list[Any]:
    """The objects of a folder whose names belong to the database; all others are ignored and never deleted."""
    return [
        make(object_id, meta) for meta in store.list(folder) if (object_id := parse(meta.path)) is not None
    ]


def find_two_phase(store: ObjectStore) -> TwoPhaseStore | None:
    """The two-phase store inside the wrappers of `store`, if there is one."""
    return find_inside(store, TwoPhaseStore)


def collect_leftovers(
    store: TwoPhaseStore, folder: str, report: KindReport, *, min_age_ms: int, dry_run: bool
) -> None:
    """Complete interrupted writes below `folder`, then delete the leftovers of the two-phase protocol.

    May run beside writers. A crash half-way loses nothing: any process may repeat each step. Stores with conditional
    writes of their own have no leftovers.

    The record of a deleted object makes a stalled creator fail. Once the record is deleted the path is free again, and
    the boundary (for metadata) or the writer's read of the manifest (for the WAL) refuses the late create, as on any
    other store.
    """
    broken: list[str] = []
    if not dry_run:
        recovered = store.recover(folder)
        broken = recovered.broken
        for path in recovered.cleaned:
            report.count_unplanned(path, "temporary of a finished write")
    removed = store.collect_garbage(prefix=folder, min_age_ms=min_age_ms, dry_run=dry_run)
    report.errors += [
        f"{path}: a decided write cannot be carried out, its temporary is gone"
        for path in broken
        if path not in removed.void
    ]
    for path in removed.void:
        report.count_unplanned(path, "create that was decided after its temporary had been collected")
    for path in removed.temporaries:
        report.count_unplanned(path, "temporary without a decision")
    for path in removed.records:
        report.count_unplanned(path, "record of a deleted object")


_ATTEMPTS: Final = 5


class StoreClock:
    """The clock of `store`, read at most once: `now_ms` may be in the past, but never in the future.

    The age of objects is measured by the store's clock, because this machine's clock may be hours off, and fresh
    objects would look old. So the collector writes the small object `path`, reads its time, and deletes it. After a
    crash the object stays, empty and harmless, until the next use. A folder needs no request: its files carry this
    machine's time, and it may be so full that nothing can be written.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store = store
        self._path = path
        self._now_ms: int | None = None

    def now_ms(self) -> int:
        """The time, in milliseconds since the epoch. Three small requests the first time, none later."""
        if self._now_ms is None:
            folder = find_inside(self._store, LocalStore)
            self._now_ms = self._ask() if folder is None else folder.now_ms()
        return self._now_ms

    def _ask(self) -> int:
        for _ in range(_ATTEMPTS):
            self._store.put(self._path, b"")
            # Another collector may have deleted it, because both use the same path.
            with suppress(ObjectMissing):
                now_ms = self._store.head(self._path).last_modified_ms
                self._store.delete(self._path)
                return now_ms
        raise Unavailable(f"{self._path} disappears as soon as it is written; is another collector running?")
