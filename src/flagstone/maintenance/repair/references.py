"""References to what is gone: SSTs, the databases that lend them, and checkpoints. Pure."""

from __future__ import annotations

from uuid import UUID

from flagstone.maintenance.repair.facts import Facts, Unreadable
from flagstone.maintenance.repair.findings import Findings, some
from flagstone.maintenance.repair.plan import Defect
from flagstone.maintenance.repair.rebuild import find_rows
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.types import EntryTuple, Ulid
from flagstone.wal.pins import PIN_MANIFEST_ID, decode_pin


def find_lost_ssts(
    facts: Facts, base: Manifest, found: Findings
) -> tuple[set[Ulid], dict[Ulid, tuple[EntryTuple, ...]]]:
    """The SSTs that are gone for good, and the rows of those that the WAL tells again."""
    lost: set[Ulid] = set()
    rebuilt: dict[Ulid, tuple[EntryTuple, ...]] = {}
    for sst_id, table in base.ssts.items():
        path = facts.table_path(base, sst_id)
        size = facts.tables.get(path)
        keys = f"keys from {table.info.first_entry!r} to {table.info.last_entry!r}"
        again = find_rows(facts, base, sst_id) if size is None else None
        if again is not None:
            rebuilt[sst_id] = again.rows
            found.add(
                Defect(
                    "missing sst",
                    path,
                    "missing, but the manifest refers to it",
                    f"make it again from the WAL, which still has {len(again.rows)} rows of it",
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
                    f"the rows of this SST, {keys}, about {table.info.estimated_size:,} bytes; older versions of "
                    "these keys become visible",
                )
            )
        elif size < table.info.estimated_size:
            found.add(
                Defect(
                    "damaged sst",
                    path,
                    f"cut to {size} of at least {table.info.estimated_size} bytes; restore the object from a backup, "
                    f"or delete it, and repair gives up its {keys}",
                )
            )
    return lost, rebuilt


def find_gone_lenders(facts: Facts, base: Manifest, lost: set[Ulid], found: Findings) -> set[str]:
    """The databases that SSTs were borrowed from, none of which is left. One that is gone and still lends is named."""
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
    """The live checkpoints that cannot be read any more, or not after the removals found so far."""
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
        consumer = decode_pin(checkpoint)
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
    consumer = decode_pin(checkpoint)
    if consumer is None and checkpoint.manifest_id == PIN_MANIFEST_ID:
        return None
    if consumer is not None:
        wanted = range(consumer.position.next_id, max(facts.wal, default=0) + 1)
    else:
        wanted = range(pinned.replay_after_wal_id + 1, pinned.wal_id_last_seen + 1)
    if _within(removed, wanted):
        return "it needs WAL files that are damaged or out of order"
    # Not enumerated: a range from a damaged manifest may be huge.
    if len(_within(have, wanted)) < wanted.stop - wanted.start:
        return "it needs WAL files that are missing"
    missing = [
        path for sst_id in pinned.ssts if (path := facts.table_path(pinned, sst_id)) not in facts.tables
    ]
    return f"it needs SSTs that are missing: {some(missing)}" if missing else None


def _within(ids: set[int], wanted: range) -> list[int]:
    return [number for number in ids if number in wanted]
