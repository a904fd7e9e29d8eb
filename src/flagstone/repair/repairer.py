"""Carries a repair out.

1. Claim both roles with a manifest that changes only the epochs, and end the WAL with a fence: an active writer stops
   before its next acknowledgement. Then read all facts again. A database whose newest manifest cannot be read needs no
   claim, because no process can open it.
2. Copy the objects to remove into `flagstone/repair/<time>/`, and upload SSTs with the rows of a WAL that cannot be
   replayed.
3. Create one manifest: the repaired state, with newer epochs of both roles. This is the only commit point. It fails if
   any process has written a manifest since the facts were read, and then nothing has changed.
4. Raise the boundary and delete what was copied, and write a new compactions file if its jobs refer to missing SSTs.

A crash before step 3 leaves the database as it was, with newer epochs, a fence, copies, and SSTs that garbage
collection deletes. After it the database is sound, and at most objects are left that a second repair removes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from flagstone.errors import InvalidRequest, TransactionConflict, Unavailable
from flagstone.lsm.segments import SegmentExtractor, route, segment_of
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.fencing import claim_writer
from flagstone.metadata.invariants import check_repaired_state
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.parallel_wal import find_parallel_wal, note_settled
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.repair.diagnosis import plan_repair
from flagstone.repair.facts import Facts, read_facts
from flagstone.repair.plan import Removal, RepairPlan, RepairReport, apply_repair, report_of
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.runtime.pool import shared_pool
from flagstone.sst.builder import encode_sst
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectMissing, ObjectStore
from flagstone.types import EntryTuple, ManifestId, Ulid, WalId
from flagstone.wal.frontier import FENCE, find_frontier
from flagstone.wal.takeover import end_wal

_log = logging.getLogger("flagstone.repair")

_ATTEMPTS: Final = 5
_FENCE_ATTEMPTS: Final = 1000
_SST_BYTES: Final = 64 * 1024 * 1024
"""How many bytes of rows go into one L0 SST."""


class Repairer:
    """Repairs the database at `paths`. `has_origin` returns whether the database was begun as a clone."""

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        wal_store: ObjectStore,
        clock: Clock,
        ids: Ids,
        has_origin: Callable[[], bool],
        segment_extractor: SegmentExtractor | None = None,
    ) -> None:
        self._store = store
        self._wal_store = wal_store
        self._paths = paths
        self._clock = clock
        self._ids = ids
        self._has_origin = has_origin
        self._extractor = segment_extractor
        self._aside = ""

    def plan(self) -> RepairPlan:
        """The defects, and what repair would do. Reads only, and may run beside a writer.

        Defects count if two plans in a row find the same ones: a busy database changes while it is read, damage stays.
        """
        plan = plan_repair(self._read_facts())
        for _ in range(_ATTEMPTS):
            if plan.sound:
                break
            before, plan = plan, plan_repair(self._read_facts())
            if _defect_names(plan) == _defect_names(before):
                break
        return plan

    def apply(self, plan: RepairPlan) -> RepairReport:
        """Repair every defect that has a remedy; a sound database is not changed.

        Raises:
            TransactionConflict: another process writes manifests at the same time; stop it and repeat.
            InvalidRequest: rows of the WAL belong to a new segment, and no segment extractor was given.

        """
        if not plan.repairable:
            return report_of(plan)
        if plan.base is not None and find_parallel_wal(plan.base) is not None:
            self._settle_wal()
            settled, plan = plan, self.plan()
            if plan.sound:
                report = report_of(settled)
                report.applied = True
                return report
        for _ in range(_ATTEMPTS):
            try:
                facts = self._read_facts()
                epoch = self._claim(facts)
                fence_id = self._end_wal(facts)
                plan = self.plan()
                if not plan.repairable:
                    return report_of(plan)
                if epoch is not None and plan.base is not None:
                    if plan.base.writer_epoch != epoch:
                        raise SequencedConflict("a writer has claimed the database since")
                    plan = replace(plan, writer_epoch=epoch)
                return self._carry_out(plan, fence_id)
            except SequencedConflict:
                _log.info("a manifest was written during the repair; reading the database again")
        raise TransactionConflict(
            f"{self._paths.root!r} changes faster than it can be repaired; stop its writer and compactor, and repeat"
        )

    # -- reading and fencing ------------------------------------------------------------------------------

    def _read_facts(self) -> Facts:
        return read_facts(
            self._store, self._wal_store, self._paths, clock=self._clock, has_origin=self._has_origin()
        )

    def _settle_wal(self) -> None:
        """Take the database over from a writer with several WAL files under way, as the next writer would."""
        manifests = ManifestStore(self._store, self._paths, clock=self._clock, ids=self._ids)
        fence, claimed = claim_writer(manifests)

        def refresh() -> Manifest:
            latest = manifests.require_latest().value
            fence.check(latest)
            return latest

        pool, value = shared_pool(), claimed.value
        frontier = find_frontier(self._wal_store, self._paths, value, pool=pool)
        ended = end_wal(self._wal_store, self._paths, WalId(frontier + 1), value, refresh=refresh, pool=pool)
        manifests.update(
            fence.guard(
                lambda now: note_settled(
                    now.value, limit=1, through=ended.last, manifest_id=ManifestId(now.next_id)
                )
            )
        )

    def _claim(self, facts: Facts) -> int | None:
        """Claim the role of writer, so that a writer that is opening the database stops; returns the epoch.

        None if the newest manifest, or its boundary, keeps every process from opening the database.
        """
        base, boundary = facts.base, facts.manifest_boundary
        newest_id = facts.newest_id
        if base is None or newest_id is None or newest_id != facts.base_id:
            return None
        if boundary.problem is not None or boundary.value >= newest_id:
            return None
        fences = sum(1 for file in facts.wal.values() if not file.size)
        epoch = max(base.writer_epoch, fences) + 1
        claimed = replace(base, writer_epoch=epoch, compactor_epoch=base.compactor_epoch + 1)
        self._manifests().create_next(claimed, Versioned(newest_id, base))
        return epoch

    def _manifests(self) -> ManifestStore:
        return ManifestStore(
            self._store, self._paths, clock=self._clock, ids=self._ids, check=check_repaired_state
        )

    def _end_wal(self, facts: Facts) -> WalId:
        """Write a fence after the last WAL file that exists or is known to have existed; returns its id."""
        base = facts.base
        seen = 0 if base is None else max(base.wal_id_last_seen, base.replay_after_wal_id)
        first = max(max(facts.wal, default=0), seen) + 1
        for wal_id in range(first, first + _FENCE_ATTEMPTS):
            if self._fence(wal_id):
                return WalId(wal_id)
        raise Unavailable(
            f"a writer of {self._paths.root!r} writes WAL files faster than it can be fenced; stop it"
        )

    def _fence(self, wal_id: int) -> bool:
        try:
            self._wal_store.put_if_absent(self._paths.wal(WalId(wal_id)), FENCE)
        except ObjectExists:
            return False
        return True

    # -- acting -------------------------------------------------------------------------------------------

    def _carry_out(self, plan: RepairPlan, fence_id: WalId) -> RepairReport:
        assert plan.base is not None, "a plan with a remedy has a state to start from"
        report = report_of(plan)
        report.fenced_wal_id = fence_id
        stamp = self._ids.ulid(self._clock.now_ms())
        self._aside = self._paths.own(f"repair/{ulid_ms(stamp)}-{stamp & 0xFFFFFF:06x}")
        report.kept_aside = [self._keep_aside(removal) for removal in plan.removals]
        replaced = self._copy_restamped(plan) | self._rebuild(plan)
        added = self._upload_rows(plan)
        edited = apply_repair(plan.base, plan, fence_id=fence_id, added=added, replaced=replaced)
        manifests = self._manifests()
        for of, value in plan.boundaries:
            path = self._paths.boundary(of)
            report.kept_aside.append(self._copy_aside(self._store, path, "gc"))
            self._store.put(path, b"%d" % value)
        before = None if plan.next_id == 1 else Versioned(plan.next_id - 1, plan.base)
        created = manifests.create_next(edited, before)
        report.manifest_id = created.id
        self._write_compactions(plan)
        self._remove(plan, manifests)
        report.applied = True
        self._store.put(f"{self._aside}/report.json", json.dumps(report.to_dict(), indent=1).encode())
        return report

    def _keep_aside(self, removal: Removal) -> str:
        store = self._wal_store if removal.folder == "wal" else self._store
        return self._copy_aside(store, removal.path, removal.folder)

    def _copy_aside(self, store: ObjectStore, path: str, folder: str) -> str:
        kept = f"{self._aside}/{folder}/{path.rpartition('/')[2]}"
        try:
            store.copy(path, kept)
        except ObjectMissing:
            raise SequencedConflict(f"{path} was deleted while the database was repaired") from None
        return kept

    def _copy_restamped(self, plan: RepairPlan) -> dict[Ulid, SsTable]:
        """Copies of the SSTs that are stamped in the future, under present ids."""
        assert plan.base is not None
        copies: dict[Ulid, SsTable] = {}
        for sst_id in sorted(plan.restamped):
            owner = plan.base.path_of_owner(sst_id)
            source = (self._paths if owner is None else DbPaths(owner)).sst(sst_id)
            copy = replace(plan.base.ssts[sst_id], id=self._fresh_id(self._clock.now_ms()))
            self._store.copy(source, self._paths.sst(copy.id))
            copies[sst_id] = copy
        return copies

    def _rebuild(self, plan: RepairPlan) -> dict[Ulid, SsTable]:
        """Missing SSTs, built again from the WAL."""
        now_ms = self._clock.now_ms()
        return {sst_id: self._upload(rows, now_ms) for sst_id, rows in sorted(plan.rebuilt.items())}

    def _upload_rows(self, plan: RepairPlan) -> list[tuple[bytes, SsTable]]:
        """SSTs of the rows that only the WAL holds, oldest first."""
        if plan.wal_rows is None or not plan.wal_rows.rows:
            return []
        assert plan.base is not None
        live = [
            view.sst_id
            for tree in plan.base.trees
            for view in tree.l0
            if view.sst_id not in plan.restamped | plan.lost_ssts | plan.rebuilt.keys()
        ]
        at_ms = max([self._clock.now_ms(), *map(ulid_ms, live)])
        added: list[tuple[bytes, SsTable]] = []
        for rows in _chunks(plan.wal_rows.rows):
            for prefix, part in self._by_segment(rows, plan.base):
                added.append((prefix, self._upload(part, at_ms)))
        return added

    def _upload(self, rows: Iterable[EntryTuple], at_ms: int) -> SsTable:
        """One SST of the rows, stamped with that time. Until a manifest names it, it is garbage."""
        built = encode_sst(sorted(rows, key=lambda row: (row[0], -row[1])))
        sst = SsTable(self._fresh_id(at_ms), built.info, built.format_version)
        self._store.put(self._paths.sst(sst.id), built.data)
        return sst

    def _fresh_id(self, at_ms: int) -> Ulid:
        return Ulid((at_ms << 80) | (self._ids.ulid() & ((1 << 80) - 1)))

    def _by_segment(self, rows: list[EntryTuple], base: Manifest) -> list[tuple[bytes, list[EntryTuple]]]:
        """The rows by segment; b"" without segments."""
        if base.segment_extractor_name is None:
            return [(b"", rows)]
        prefixes = [segment.prefix for segment in base.segments]
        parts: dict[bytes, list[EntryTuple]] = {}
        for row in rows:
            prefix = (
                segment_of(row[0], prefixes) if self._extractor is None else route(self._extractor, row[0])
            )
            if prefix is None:
                raise InvalidRequest(
                    f"the WAL holds the key {row[0][:40]!r} of a segment that has no SST yet; pass the "
                    f"segment_extractor {base.segment_extractor_name!r} to repair this database"
                )
            parts.setdefault(prefix, []).append(row)
        return sorted(parts.items())

    def _write_compactions(self, plan: RepairPlan) -> None:
        if plan.compactions is None:
            return
        compactions = CompactionsStore(self._store, self._paths, clock=self._clock, ids=self._ids)
        before = Versioned(plan.next_compactions_id - 1, Compactions())
        try:
            compactions.create_next(plan.compactions, before if before.id else None)
        except SequencedConflict:
            # A coordinator was started on the new manifest: it checks the jobs itself.
            _log.info("the compactions file was claimed by a compactor during the repair")

    def _remove(self, plan: RepairPlan, manifests: ManifestStore) -> None:
        """Delete what was kept aside. The boundary is raised first: an id must not be used again."""
        wal_paths = [removal.path for removal in plan.removals if removal.folder == "wal"]
        self._wal_store.delete_many(wal_paths)
        manifest_ids = [removal.id for removal in plan.removals if removal.folder == "manifest"]
        if manifest_ids:
            manifests.advance_boundary(max(manifest_ids))
            manifests.delete(manifest_ids)
        compactions_ids = [removal.id for removal in plan.removals if removal.folder == "compactions"]
        if compactions_ids:
            compactions = CompactionsStore(self._store, self._paths, clock=self._clock, ids=self._ids)
            compactions.advance_boundary(max(compactions_ids))
            compactions.delete(compactions_ids)


def _defect_names(plan: RepairPlan) -> set[tuple[str, str]]:
    return {(defect.kind, defect.object) for defect in plan.defects}


def finished(report: RepairReport, manifest_id: int) -> RepairReport:
    """The report of a clone that was finished by repeating the call that makes it."""
    return replace(report, applied=True, manifest_id=manifest_id)


def _chunks(rows: tuple[EntryTuple, ...]) -> Iterator[list[EntryTuple]]:
    """The rows in commit order, in parts for one SST each. A batch may be cut: one manifest names all SSTs."""
    chunk: list[EntryTuple] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row[0]) + len(row[3]) + 32
        if size >= _SST_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
