"""One round of garbage collection: look, plan, then delete.

The order of looking is part of the rules (see `tables.py`): first the listings, then the compactions file, then the
manifest, then the manifests that checkpoints name. Every kind is judged by itself, and one that fails does not keep
the others from being collected.

Deleting is safe to repeat and to interrupt. A crash leaves some garbage behind, and at most a boundary that is further
ahead than it had to be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from flagstone.errors import FlagstoneError, Unavailable
from flagstone.maintenance.gc import checkpoints, detach
from flagstone.maintenance.gc.metadata import plan_boundary, plan_versions
from flagstone.maintenance.gc.options import KindOptions
from flagstone.maintenance.gc.plan import Kind, Plan, Verdict, apply_age
from flagstone.maintenance.gc.reach import PinnedManifests, Reach, pinned_ids
from flagstone.maintenance.gc.report import GarbageReport
from flagstone.maintenance.gc.store_clock import StoreClock
from flagstone.maintenance.gc.tables import TableObject, compacted_l0, plan_tables, table_cutoff
from flagstone.maintenance.gc.two_phase import collect_leftovers, find_two_phase
from flagstone.maintenance.gc.wal import WalObject, kept_ranges, plan_wal
from flagstone.metadata.borrowing import release_final
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Manifest, remove_expired_checkpoints
from flagstone.metadata.sequenced import SequencedObject, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.metrics import Metrics
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore, find_inside

_BATCH: Final = 1000
_LONGEST_UPLOAD_MS: Final = 60 * 60 * 1000
"""No upload to a folder pauses for longer; one that does fails and says so."""

_log = logging.getLogger("flagstone.gc")

_REACHING: Final[frozenset[Kind]] = frozenset(["wal", "wal_fence", "compacted", "detach"])
"""Kinds that need to know what the manifests behind the checkpoints say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The database whose garbage is collected, and how."""

    store: ObjectStore
    wal_store: ObjectStore
    paths: DbPaths
    pinned: PinnedManifests
    options: Mapping[Kind, KindOptions]
    boundary_files: bool
    clock: Clock
    metrics: Metrics
    halted: Callable[[], bool]


class Round:
    """The state of one round; lives as long as `Collector.collect`."""

    def __init__(
        self, subject: Subject, report: GarbageReport, kinds: Sequence[Kind], *, dry_run: bool
    ) -> None:
        self._subject = subject
        self._report = report
        self._kinds = kinds
        self._dry_run = dry_run
        # Made anew for every round, so that they list: what they remembered might be followed by a gap that a
        # collector without boundaries has made, and look like the latest version.
        self._manifests = self._manifests_of(subject.paths)
        self._compactions = CompactionsStore(
            subject.store, subject.paths, clock=subject.clock, metrics=subject.metrics
        )
        self._main_clock = StoreClock(subject.store, f"{subject.paths.gc_folder}/clock")
        self._wal_clock = (
            self._main_clock
            if subject.wal_store is subject.store
            else StoreClock(subject.wal_store, f"{subject.paths.gc_folder}/clock")
        )

    def run(self) -> None:
        subject, report = self._subject, self._report
        for kind in self._kinds:
            report.of(kind).dry_run = self._dry_run or subject.options[kind].dry_run
        # The order of the next four is what makes the plans right.
        listed = self._list_all()
        compactions = self._read_compactions(listed)
        latest = self._remove_expired(self._manifests.require_latest())
        reach = self._find_reach(latest)
        report.manifest_id = latest.id if reach is None else reach.latest.id
        # Log and tables first: deleting them writes nothing, so a full disk gets room before a boundary needs it.
        if reach is not None:
            self._collect_reached(reach, listed, compactions)
        with self._failing_alone("manifest"):
            plan = plan_versions(
                "manifest", listed.get("manifest", ()), latest=latest.id, pinned=pinned_ids(latest.value)
            )
            self._delete_versions(self._manifests, plan)
        if compactions is not None:
            with self._failing_alone("compactions"):
                plan = plan_versions("compactions", listed.get("compactions", ()), latest=compactions.id)
                self._delete_versions(self._compactions, plan)
        self._collect_two_phase()

    # -- looking ------------------------------------------------------------------------------------------

    def _list_all(self) -> dict[Kind, Sequence[Any]]:
        subject, paths = self._subject, self._subject.paths
        folders: dict[Kind, Callable[[], Sequence[Any]]] = {
            "manifest": self._manifests.list,
            "compactions": self._compactions.list,
            "compacted": lambda: _parsed(subject.store, paths.table_folder, paths.parse_table, TableObject),
        }
        listed: dict[Kind, Sequence[Any]] = {}
        for kind, look in folders.items():
            if kind in self._kinds:
                with self._failing_alone(kind):
                    listed[kind] = look()
        log_kinds: list[Kind] = [kind for kind in self._kinds if kind in ("wal", "wal_fence")]
        if log_kinds:
            with self._failing_alone(log_kinds[0]):
                files = _parsed(subject.wal_store, paths.wal_folder, paths.parse_wal, WalObject)
                listed.update(dict.fromkeys(log_kinds, files))
        return listed

    def _read_compactions(self, listed: dict[Kind, Sequence[Any]]) -> Versioned[Compactions] | None:
        """The compactions file; None where there is none, or nobody needs it.

        One that cannot be read is not the same as none: then what depends on it is left alone.
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
        """The latest manifest, without the checkpoints that are over by both clocks, ours and the store's.

        Where the store takes no new manifest, because it is full or for another reason, the checkpoints stay: they keep
        more than they should, and the rest of the round goes on.
        """
        now_s = self._subject.clock.now_ms() // 1000
        if checkpoints.plan_expired(latest.value, now_s):
            entry = self._report.of("checkpoint")
            entry.dry_run = self._dry_run
            try:
                now_s = min(now_s, self._main_clock.now_ms() // 1000)
                expired = checkpoints.plan_expired(latest.value, now_s)
                if expired and self._dry_run:
                    latest = Versioned(latest.id, remove_expired_checkpoints(latest.value, now_s))
                elif expired:
                    latest = checkpoints.remove_expired(self._manifests, now_s)
            except Unavailable as error:
                entry.errors.append(f"{type(error).__name__}: {error}")
            else:
                for checkpoint in expired:
                    entry.act(str(checkpoint.id), "expired")
        expiry_s = checkpoints.next_expiry_s(latest.value)
        if expiry_s is not None:
            self._report.revisit_within(max(0, 1000 * (expiry_s - now_s)))
        return latest

    def _find_reach(self, latest: Versioned[Manifest]) -> Reach | None:
        affected = [kind for kind in self._kinds if kind in _REACHING]
        if not affected:
            return None
        try:
            return self._subject.pinned.reach(self._manifests, latest)
        except FlagstoneError as error:
            for kind in affected:
                self._report.of(kind).errors.append(f"{type(error).__name__}: {error}")
            return None

    # -- acting -------------------------------------------------------------------------------------------

    def _collect_reached(
        self, reach: Reach, listed: Mapping[Kind, Sequence[Any]], compactions: Versioned[Compactions] | None
    ) -> None:
        subject, latest = self._subject, reach.latest.value
        kept = kept_ranges(latest, reach.pinned.values())
        for kind in ("wal", "wal_fence"):
            with self._failing_alone(kind):
                if kind in listed:
                    self._delete(subject.wal_store, self._wal_clock, plan_wal(kind, listed[kind], kept))
        with self._failing_alone("compacted"):
            if "compacted" in listed:
                cutoff = table_cutoff(latest, None if compactions is None else compactions.value)
                plan = plan_tables(
                    listed["compacted"],
                    referenced=reach.tables,
                    cutoff=cutoff,
                    compacted=compacted_l0(latest),
                )
                self._delete(subject.store, self._main_clock, plan)
                self._sweep_uploads()
        with self._failing_alone("detach"):
            if "detach" in self._kinds:
                self._detach(reach)

    def _delete_versions(self, versions: SequencedObject[Any], plan: Plan) -> None:
        if plan.kind not in self._kinds:
            return
        bounded = self._subject.boundary_files

        def remove(doomed: Sequence[Verdict]) -> None:
            versions.delete([verdict.id for verdict in doomed], bounded=bounded)

        aged = self._aged(plan, self._main_clock)
        boundary = plan_boundary(aged)
        if boundary is not None and bounded and not self._report.of(plan.kind).dry_run:
            # Before any delete: whoever creates one of these numbers again must find out.
            versions.advance_boundary(boundary)
        self._carry_out(aged, remove)

    def _delete(self, store: ObjectStore, clock: StoreClock, plan: Plan) -> None:
        def remove(doomed: Sequence[Verdict]) -> None:
            store.delete_many([verdict.meta.path for verdict in doomed])

        self._carry_out(self._aged(plan, clock), remove)

    def _aged(self, plan: Plan, clock: StoreClock) -> Plan:
        """The plan without what is too young; the clock is asked only if there is something to ask about."""
        min_age_ms = self._subject.options[plan.kind].min_age_ms
        if min_age_ms == 0 or not plan.deletions:
            return plan
        now_ms = clock.now_ms()
        aged = apply_age(plan, now_ms=now_ms, min_age_ms=min_age_ms)
        if aged.youngest_due_ms is not None:
            self._report.revisit_within(max(0, aged.youngest_due_ms + min_age_ms - now_ms))
        return aged

    def _carry_out(self, plan: Plan, remove: Callable[[Sequence[Verdict]], None]) -> None:
        entry = self._report.of(plan.kind)
        entry.judge(plan)
        doomed = plan.deletions
        for start in range(0, len(doomed), _BATCH):
            batch = doomed[start : start + _BATCH]
            if self._subject.halted():
                entry.errors.append("told to stop before all was deleted")
                return
            if not entry.dry_run:
                remove(batch)
            for verdict in batch:
                entry.remove(verdict.meta.path, verdict.meta.size)

    def _sweep_uploads(self) -> None:
        """Remove what killed processes left of their uploads. Only folders keep such files."""
        subject, entry = self._subject, self._report.of("compacted")
        age_ms = max(subject.options["compacted"].min_age_ms, _LONGEST_UPLOAD_MS)
        for store in dict.fromkeys(
            find_inside(each, LocalStore) for each in (subject.store, subject.wal_store)
        ):
            if store is not None:
                for path in store.sweep_staging(age_ms, folder=subject.paths.root, dry_run=entry.dry_run):
                    entry.act(path, "upload of a process that died")

    def _detach(self, reach: Reach) -> None:
        entry = self._report.of("detach")
        unused = detach.plan_detach(reach.latest.value, reach.pinned.values())
        entry.examined += len(reach.latest.value.external_dbs) - len(unused)
        if entry.examined:
            entry.reasons["in use"] = entry.examined
        for database in unused:
            if not entry.dry_run:
                parents = self._manifests_of(DbPaths(database.path))
                borrower = self._subject.paths.root
                final = database.final_checkpoint_id
                released = release_final(self._subject.store, parents, final, borrower=borrower)
                if released.kept is not None:
                    _log.warning(
                        "a checkpoint of a lender is kept path=%s reason=%s", borrower, released.kept
                    )
                if released.kept is not None and not released.foreign:
                    # The entry stays: a later round may be able to prove whose checkpoint it is.
                    entry.examined += 1
                    entry.reasons[released.kept] += 1
                    continue
                self._report.manifest_id = detach.drop_entry(self._manifests, database).id
            entry.act(database.path, "no table of it is used")

    def _collect_two_phase(self) -> None:
        subject = self._subject
        if "two_phase" not in self._kinds:
            return
        entry, root = self._report.of("two_phase"), subject.paths.root
        for store in dict.fromkeys(map(find_two_phase, (subject.store, subject.wal_store))):
            if store is not None:
                with self._failing_alone("two_phase"):
                    min_age_ms = subject.options["two_phase"].min_age_ms
                    collect_leftovers(store, root, entry, min_age_ms=min_age_ms, dry_run=entry.dry_run)

    def _manifests_of(self, paths: DbPaths) -> ManifestStore:
        subject = self._subject
        return ManifestStore(subject.store, paths, clock=subject.clock, metrics=subject.metrics)

    @contextmanager
    def _failing_alone(self, kind: Kind) -> Iterator[None]:
        try:
            yield
        except FlagstoneError as error:
            self._report.of(kind).errors.append(f"{type(error).__name__}: {error}")


def _parsed(
    store: ObjectStore, folder: str, parse: Callable[[str], Any], make: Callable[[Any, Any], Any]
) -> list[Any]:
    """The objects of a folder whose names are ours; everything else is passed over and never deleted."""
    return [
        make(object_id, meta) for meta in store.list(folder) if (object_id := parse(meta.path)) is not None
    ]
