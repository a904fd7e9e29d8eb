"""Finds every defect in the facts, and plans its remedy and what the remedy gives up. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from uuid import UUID

from flagstone.metadata.annotations import RETENTION_MANIFEST_ID, decode_retention
from flagstone.metadata.compactions import Compactions, Job, JobStatus
from flagstone.metadata.manifest import Checkpoint, Manifest, new_manifest
from flagstone.repair.facts import Facts, Unreadable
from flagstone.repair.plan import (
    CLOCK_TOLERANCE_MS,
    Defect,
    DefectKind,
    Findings,
    Removal,
    RepairPlan,
    name_some,
)
from flagstone.repair.wal import find_rows, order_rows, plan_clock, plan_wal
from flagstone.runtime.ids import ulid_ms, ulid_text
from flagstone.store.paths import BoundaryOf
from flagstone.types import CompactionsId, EntryTuple, ManifestId, Ulid, WalId

_LARGEST_BOUNDARY: Final = 2**63
"""No database reaches this id: a higher boundary is damage."""


def plan_repair(facts: Facts) -> RepairPlan:
    """The defects of the database, and the changes that repair it. A sound database has an empty plan."""
    if facts.destroyed:
        return _without_remedy(
            facts,
            "half-made",
            facts.paths.root,
            "the database was destroyed; destroy it again to finish that, or use another path",
        )
    newer = [
        number
        for versions in (facts.manifests, facts.compactions)
        for number, found in versions.items()
        if isinstance(found, Unreadable) and found.newer
    ]
    if newer:
        return _without_remedy(
            facts,
            "manifest",
            facts.paths.root,
            "manifests or compactions files of a format that this release cannot read; use the release that wrote them",
        )
    base = facts.base
    if base is None:
        return _plan_without_manifest(facts)
    if not base.initialized:
        return _plan_unfinished_clone(facts)
    return _plan_from(facts, base, Findings())


def _plan_from(facts: Facts, base: Manifest, found: Findings, *, begun: bool = False) -> RepairPlan:
    """The plan for a database whose state is `base`; with `begun` it has no manifest, and the repair creates one."""
    newest_id = facts.newest_id or 0
    next_id = newest_id + 1
    boundaries: list[tuple[BoundaryOf, int]] = []
    _find_unreadable_manifests(facts, found)
    boundary = facts.manifest_boundary
    if boundary.problem is not None or boundary.value >= max(newest_id, 1):
        next_id, rewritten = _plan_boundary(facts, found, "manifest", newest_id)
        boundaries += [] if rewritten is None else [("manifest", rewritten)]
    lost_ssts, rebuilt = find_lost_ssts(facts, base, found)
    gone_lenders = find_gone_lenders(facts, base, lost_ssts | rebuilt.keys(), found)
    wal_rows = plan_wal(facts, base, found)
    restamped, reset_ms, wal_rows = plan_clock(facts, base, wal_rows, found)
    lost_checkpoints = find_lost_checkpoints(facts, base, found)
    compactions, compactions_id, compactions_boundary = _plan_compactions(
        facts, changed=bool(lost_ssts or rebuilt or restamped or newest_id != facts.base_id), found=found
    )
    if compactions_boundary is not None:
        boundaries.append(("compactions", compactions_boundary))
    # A manifest raises an epoch by one at most, so this is above every epoch of a manifest that cannot be read.
    step = 1 + newest_id - (facts.base_id or newest_id)
    # A writer writes one fence and claims one epoch. An interrupted repair leaves a fence without an epoch.
    fences = sum(1 for file in facts.wal.values() if not file.size)
    newest_jobs = facts.compactions.get(max(facts.compactions, default=0))
    stored_epoch = newest_jobs.compactor_epoch if isinstance(newest_jobs, Compactions) else 0
    compactor_epoch = max(base.compactor_epoch + step, stored_epoch + 1)
    return RepairPlan(
        database=facts.database,
        manifest_id=facts.newest_id,
        defects=tuple(found.defects),
        losses=found.losses,
        base=base,
        next_id=next_id,
        writer_epoch=max(base.writer_epoch + step, fences),
        compactor_epoch=compactor_epoch,
        wal_rows=wal_rows,
        lost_ssts=frozenset(lost_ssts),
        rebuilt=rebuilt,
        lost_checkpoints=frozenset(lost_checkpoints),
        gone_lenders=frozenset(gone_lenders),
        restamped=frozenset(restamped - lost_ssts - rebuilt.keys()),
        reset_clock_ms=reset_ms,
        removals=tuple(found.removals),
        compactions=None if compactions is None else replace(compactions, compactor_epoch=compactor_epoch),
        next_compactions_id=compactions_id,
        boundaries=tuple(boundaries),
        new_manifest=begun,
    )


# -- half-made databases ----------------------------------------------------------------------------------


def _plan_without_manifest(facts: Facts) -> RepairPlan:
    folder = facts.paths.manifest_folder
    unreadable = [number for number in facts.manifests if number > 0]
    if facts.has_origin and not unreadable:
        return _plan_unfinished_clone(facts)
    if not facts.wal and not facts.ssts and not unreadable:
        return RepairPlan(database=facts.database, manifest_id=None)
    files = [facts.wal[wal_id] for wal_id in sorted(facts.wal)]
    first = next((file for file in files if file.rows), None)
    complete = first is None or first.min_seq == 1
    if facts.ssts and not complete:
        return _without_remedy(
            facts,
            "half-made",
            folder,
            f"no manifest can be read, and {len(facts.ssts)} SSTs cannot be put in order without one; restore "
            "the manifests from a backup",
        )
    found = Findings()
    lost = "" if complete or first is None else f"every row before sequence number {first.min_seq}"
    if lost and first is not None and first.min_seq is not None:
        found.sequences.append((1, first.min_seq - 1))
    found.add(
        Defect(
            "half-made",
            folder,
            f"no manifest can be read, but there are {len(files)} WAL files with "
            f"{sum(len(file.rows) for file in files)} rows",
            "create a manifest, and SSTs of the rows in the WAL",
            lost,
        )
    )
    begin = new_manifest()
    if files:
        start = WalId(files[0].id - 1)
        begin = replace(begin, replay_after_wal_id=start, wal_id_last_seen=start)
    plan = _plan_from(facts, begin, found, begun=True)
    if plan.wal_rows is None and files:
        wal_rows = order_rows(files, after=None, last_l0_seq=0)
        plan = replace(plan, wal_rows=wal_rows)
    return plan


def _plan_unfinished_clone(facts: Facts) -> RepairPlan:
    path = facts.paths.root
    if not facts.has_origin:
        return _without_remedy(
            facts,
            "half-made",
            path,
            "a clone that is not finished, and no record of its sources; repeat the call that makes it, or "
            "destroy it",
        )
    defect = Defect("half-made", path, "a clone that is not finished", "finish the clone")
    return RepairPlan(
        database=facts.database, manifest_id=facts.newest_id, defects=(defect,), finish_clone=True
    )


def _without_remedy(facts: Facts, kind: DefectKind, path: str, problem: str) -> RepairPlan:
    defect = Defect(kind, path, problem)
    return RepairPlan(database=facts.database, manifest_id=facts.newest_id, defects=(defect,))


# -- metadata ---------------------------------------------------------------------------------------------


def _find_unreadable_manifests(facts: Facts, found: Findings) -> None:
    for number, version in sorted(facts.manifests.items()):
        if not isinstance(version, Unreadable) or number == 0:
            continue
        path = facts.paths.manifest(ManifestId(number))
        found.removals.append(Removal("manifest", number, path))
        if number > (facts.base_id or 0):
            remedy = (
                f"go back to manifest {facts.base_id}, and move this one aside"
                if facts.base_id
                else "move it aside"
            )
            price = (
                "what only this manifest recorded: checkpoints, compactions and bulk loads since then, and rows of "
                "flushes since then whose WAL files are gone"
            )
        else:
            remedy, price = "move it aside", ""
        found.add(Defect("manifest", path, version.problem, remedy, price))


def _plan_boundary(facts: Facts, found: Findings, of: str, newest: int) -> tuple[int, int | None]:
    """The id of the next manifest or compactions file, and the boundary to write (None: it stays as it is)."""
    manifests = of == "manifest"
    fact = facts.manifest_boundary if manifests else facts.compactions_boundary
    path = facts.paths.boundary("manifest" if manifests else "compactions")
    if fact.problem is None and fact.value < _LARGEST_BOUNDARY:
        if fact.value == 0:
            return newest + 1, None
        found.add(
            Defect(
                "boundary",
                path,
                f"the boundary is {fact.value}, and no {of} file above it exists",
                f"write the next {of} file above the boundary",
                f"what the {of} files up to {fact.value} recorded after {newest}",
            )
        )
        return fact.value + 1, None
    found.add(
        Defect(
            "boundary",
            path,
            fact.problem or f"the boundary is {fact.value}, which no database reaches",
            f"rewrite it as {max(newest - 1, 0)}, below the newest {of} file",
        )
    )
    return newest + 1, max(newest - 1, 0)


def _plan_compactions(
    facts: Facts, *, changed: bool, found: Findings
) -> tuple[Compactions | None, int, int | None]:
    newest_id = max(facts.compactions, default=0)
    next_id, boundary = newest_id + 1, None
    fact = facts.compactions_boundary
    if fact.problem is not None or (fact.value and fact.value >= newest_id):
        next_id, boundary = _plan_boundary(facts, found, "compactions", newest_id)
    # A boundary must have a file above it, also where none was before.
    displaced = next_id != newest_id + 1 or (boundary is not None and not newest_id)
    for number, version in sorted(facts.compactions.items()):
        if isinstance(version, Unreadable):
            path = facts.paths.compactions(CompactionsId(number))
            found.removals.append(Removal("compactions", number, path))
            price = "the compaction jobs in it; no rows" if number == newest_id else ""
            found.add(Defect("compactions", path, version.problem, "move it aside", price))
    if not newest_id:
        return (Compactions() if displaced else None), next_id, boundary
    newest = facts.compactions[newest_id]
    if isinstance(newest, Unreadable):
        return Compactions(), next_id, boundary
    limit_ms = facts.now_ms + CLOCK_TOLERANCE_MS
    jobs = []
    for job in newest.jobs:
        path = facts.paths.compactions(CompactionsId(newest_id))
        if ulid_ms(job.id) > limit_ms:
            found.add(
                Defect(
                    "clock",
                    path,
                    f"job {ulid_text(job.id)} is stamped in the future",
                    "remove the job",
                    "" if job.status.finished else "the work of that compaction; no rows",
                )
            )
            continue
        lost = _lost_outputs(facts, job)
        if lost:
            found.add(
                Defect(
                    "compactions",
                    path,
                    f"job {ulid_text(job.id)} refers to SSTs that are gone: {name_some(lost)}",
                    "mark the job as failed",
                    "the work of that compaction; no rows",
                )
            )
        jobs.append(_failed(job) if lost or (changed and not job.status.finished) else job)
    edited = replace(newest, jobs=tuple(jobs))
    return (edited if edited != newest or displaced else None), next_id, boundary


def _lost_outputs(facts: Facts, job: Job) -> list[str]:
    if job.status.finished:
        return []
    parts = job.context.subcompactions if job.context else ()
    outputs = [*job.output_ssts, *(sst for part in parts for sst in part.output_ssts)]
    return [ulid_text(sst.id) for sst in outputs if facts.paths.sst(sst.id) not in facts.ssts]


def _failed(job: Job) -> Job:
    return replace(job, status=JobStatus.FAILED, worker=None, context=None)


# -- references -------------------------------------------------------------------------------------------


def find_lost_ssts(
    facts: Facts, base: Manifest, found: Findings
) -> tuple[set[Ulid], dict[Ulid, tuple[EntryTuple, ...]]]:
    """The SSTs that are lost, and the rows of missing SSTs that the WAL still has."""
    lost: set[Ulid] = set()
    rebuilt: dict[Ulid, tuple[EntryTuple, ...]] = {}
    for sst_id, sst in base.ssts.items():
        path = facts.sst_path(base, sst_id)
        size = facts.ssts.get(path)
        keys = f"keys from {sst.info.first_entry!r} to {sst.info.last_entry!r}"
        again = find_rows(facts, base, sst_id) if size is None else None
        if again is not None:
            rebuilt[sst_id] = again.rows
            found.add(
                Defect(
                    "missing sst",
                    path,
                    "missing, but the manifest refers to it",
                    f"build it again from the WAL, which still has {len(again.rows)} rows of it",
                    "" if again.complete else f"rows of this SST, {keys}, whose WAL files are gone",
                )
            )
            if not again.complete:
                found.ssts.append(path)
        elif size is None:
            lost.add(sst_id)
            found.ssts.append(path)
            found.add(
                Defect(
                    "missing sst",
                    path,
                    "missing, but the manifest refers to it",
                    "remove it from the manifest",
                    f"the rows of this SST, {keys}, about {sst.info.estimated_size:,} bytes; older versions of "
                    "these keys become visible",
                )
            )
        elif size < sst.info.estimated_size:
            found.add(
                Defect(
                    "damaged sst",
                    path,
                    f"cut to {size} of at least {sst.info.estimated_size} bytes; restore the object from a backup, "
                    f"or delete it, and repair gives up its {keys}",
                )
            )
    return lost, rebuilt


def find_gone_lenders(facts: Facts, base: Manifest, lost: set[Ulid], found: Findings) -> set[str]:
    """The lenders that are gone and lend no SST any more. A lender that is gone and still lends SSTs is a defect."""
    gone: set[str] = set()
    for lender in base.external_dbs:
        needed = [sst_id for sst_id in lender.sst_ids if sst_id not in lost]
        if facts.lenders.get(lender.path, True):
            continue
        if needed:
            found.add(
                Defect(
                    "lender",
                    lender.path,
                    f"the database that lends {len(needed)} SSTs has no manifest, so its objects may be deleted; "
                    "compact this database, which copies what it borrows, or restore the lender",
                )
            )
        else:
            gone.add(lender.path)
            found.add(
                Defect(
                    "lender",
                    lender.path,
                    "the database that SSTs were borrowed from is gone",
                    "remove it from the manifest",
                )
            )
    return gone


def find_lost_checkpoints(facts: Facts, base: Manifest, found: Findings) -> set[UUID]:
    """The live checkpoints that cannot be read any more, or cannot be read after the removals found so far."""
    gone_files = {removal.id for removal in found.removals if removal.folder == "wal"}
    have = facts.wal.keys() - gone_files
    lost: set[UUID] = set()
    for checkpoint in base.checkpoints:
        if checkpoint.expires_s is not None and checkpoint.expires_s <= facts.now_ms // 1000:
            continue
        problem = _checkpoint_problem(facts, checkpoint, have, gone_files)
        if problem is None:
            continue
        label = f"checkpoint {checkpoint.id}" + (f" ({checkpoint.name})" if checkpoint.name else "")
        consumer = decode_retention(checkpoint)
        price = (
            label
            if consumer is None
            else f"the position of the consumer {consumer.name!r}, which has to start again"
        )
        lost.add(checkpoint.id)
        found.checkpoints.append(label)
        path = facts.paths.manifest(checkpoint.manifest_id)
        found.add(Defect("checkpoint", path, f"{label}: {problem}", "delete the checkpoint", price))
    return lost


def _checkpoint_problem(
    facts: Facts, checkpoint: Checkpoint, have: set[int], removed: set[int]
) -> str | None:
    pinned = facts.manifests.get(checkpoint.manifest_id)
    if pinned is None:
        return "its manifest is missing"
    if isinstance(pinned, Unreadable):
        return f"its manifest cannot be read ({pinned.problem})"
    consumer = decode_retention(checkpoint)
    if consumer is None and checkpoint.manifest_id == RETENTION_MANIFEST_ID:
        return None
    if consumer is not None:
        wanted = range(consumer.position.next_id, max(facts.wal, default=0) + 1)
    else:
        wanted = range(pinned.replay_after_wal_id + 1, pinned.wal_id_last_seen + 1)
    if _within(removed, wanted):
        return "it needs WAL files that are damaged or out of order"
    # The ids are not enumerated: the range of a damaged manifest may be huge.
    if len(_within(have, wanted)) < wanted.stop - wanted.start:
        return "it needs WAL files that are missing"
    missing = [path for sst_id in pinned.ssts if (path := facts.sst_path(pinned, sst_id)) not in facts.ssts]
    return f"it needs SSTs that are missing: {name_some(missing)}" if missing else None


def _within(ids: set[int], wanted: range) -> list[int]:
    return [number for number in ids if number in wanted]
