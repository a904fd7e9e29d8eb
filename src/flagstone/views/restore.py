"""Restore: what a checkpoint pins becomes the current state again. Everything written since is given up.

1. Claim both roles: a writer or compactor that is at work learns that it was replaced. End the log for it with
   a fence, and fail the compaction jobs it left, because they were decided on the state that goes.
2. Put the rows that only the checkpoint's log has into a table, because the log is going to be skipped as a whole.
3. Create one manifest: the checkpoint's trees, above all that was used since. Sequence numbers, WAL ids, epochs
   and the clock never go back, so nothing that was read before is mistaken for something new.

A crash before the third step changes nothing but epochs, a fence and failed jobs; doing it again starts over. All
checkpoints stay, so a state that was pinned before can be restored in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from uuid import UUID

from flagstone.errors import InvalidRequest
from flagstone.lsm import tree as trees
from flagstone.lsm.segments import SegmentExtractor, route, segment_of
from flagstone.lsm.tree import SstView
from flagstone.metadata.compactions import Compactions, JobStatus
from flagstone.metadata.fencing import Fence, claim_compactions, claim_writer
from flagstone.metadata.invariants import check_replaced_state
from flagstone.metadata.manifest import ExternalDb, Manifest, SsTable, edit_tree, replace_trees
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.table.builder import TableBuilder, TableOptions
from flagstone.types import EntryTuple, Seq, WalId
from flagstone.views.checkpoint import load_pinned, require_initialized, require_live_checkpoint
from flagstone.views.log_copy import unflushed_rows
from flagstone.views.marks import require_alive
from flagstone.wal.encoding import decode_wal
from flagstone.wal.fencing import write_fence
from flagstone.wal.listing import find_frontier


def restore(
    store: ObjectStore,
    paths: DbPaths,
    checkpoint_id: UUID,
    *,
    wal_store: ObjectStore,
    clock: Clock,
    ids: Ids,
    segment_extractor: SegmentExtractor | None = None,
    options: TableOptions | None = None,
) -> Versioned[Manifest]:
    """Make what the checkpoint pins the current state; returns the manifest that does it.

    `segment_extractor` is needed only where the checkpoint's log holds the first rows of a segment.

    Raises:
        InvalidRequest: there is no database or no such checkpoint, it has expired, or the extractor is needed.
        Closed: somebody opened the database, or started a compactor for it, while this went on. Nothing was
            restored; stop them and try again.

    """
    require_alive(store, paths)
    manifests = ManifestStore(store, paths, clock=clock, ids=ids, check=check_replaced_state)
    pinned = _load_pinned(manifests, checkpoint_id, now_s=clock.now_ms() // 1000)
    rows = list(unflushed_rows(wal_store, paths, pinned))
    parted = _part_rows(rows, pinned, manifests.require_latest().value, segment_extractor)

    writer, claimed = claim_writer(manifests)
    compactor, _ = _claim_compactor(manifests, writer)
    end, last_seq, last_tick = _end_log(wal_store, paths, manifests, writer, claimed.value)
    _fail_jobs(CompactionsStore(store, paths, clock=clock, ids=ids), compactor)

    newest = manifests.require_latest().value.newest_l0
    at_ms = max(clock.now_ms(), 0 if newest is None else ulid_ms(newest))
    added = []
    for prefix, part in parted:
        builder = TableBuilder(options)
        builder.add_rows(part)
        built = builder.finish()
        table = SsTable(ids.ulid(at_ms), built.info, built.format_version)
        store.put(paths.table(table.id), built.data)
        added.append((prefix, table))

    def edit(now: Versioned[Manifest]) -> Manifest:
        # Read afresh: the checkpoint may have expired and been collected meanwhile.
        require_live_checkpoint(now.value, checkpoint_id, now_s=clock.now_ms() // 1000)
        # Stamped now: of a moment before, these tables show nothing.
        tick = max(last_tick, clock.now_ms())
        return apply_restore(
            now.value, pinned, added=added, log_end=end, last_seq=last_seq, last_tick_ms=tick
        )

    return manifests.update(writer.guard(compactor.guard(edit)))


def apply_restore(
    current: Manifest,
    pinned: Manifest,
    *,
    added: Iterable[tuple[bytes, SsTable]],
    log_end: WalId,
    last_seq: Seq,
    last_tick_ms: int,
) -> Manifest:
    """The manifest after `current` that shows what `pinned` does. Pure.

    `added` are tables, by segment, of the rows that only its log has. The log up to `log_end` is not replayed again;
    `last_seq` and `last_tick_ms` are the last ones in it.
    """
    # A number of its own: no former number is shown by these tables, and whoever follows the log sees the step.
    step = Seq(max(current.last_l0_seq, last_seq) + 1)
    restored = replace(
        current,
        tree=pinned.tree,
        segments=pinned.segments,
        ssts=pinned.ssts,
        external_dbs=_lenders(pinned, current),
        replay_after_wal_id=max(current.replay_after_wal_id, log_end),
        wal_id_last_seen=max(current.wal_id_last_seen, log_end),
        last_l0_seq=step,
        recent_snapshot_min_seq=step,
        last_l0_clock_tick=max(current.last_l0_clock_tick, last_tick_ms),
    )
    for prefix, table in added:
        view = SstView.whole(table.id)
        restored = edit_tree(restored, prefix, partial(trees.apply_flush, view=view), added=(table,))
    return replace_trees(restored)


def _lenders(pinned: Manifest, current: Manifest) -> tuple[ExternalDb, ...]:
    """All that the pinned state borrows. Other entries stay, empty, until their checkpoints are released."""
    known = {(db.path, db.final_checkpoint_id) for db in pinned.external_dbs}
    others = (db for db in current.external_dbs if (db.path, db.final_checkpoint_id) not in known)
    return (*pinned.external_dbs, *others)


def _load_pinned(manifests: ManifestStore, checkpoint_id: UUID, *, now_s: int) -> Manifest:
    latest = manifests.require_latest().value
    require_initialized(latest, manifests.paths.root)
    return load_pinned(manifests, require_live_checkpoint(latest, checkpoint_id, now_s=now_s)).value


def _part_rows(
    rows: list[EntryTuple], pinned: Manifest, current: Manifest, extractor: SegmentExtractor | None
) -> list[tuple[bytes, list[EntryTuple]]]:
    """The rows by segment (b"" without segments), each part in the order of a table."""
    if pinned.segment_extractor_name is None:
        parts = {b"": rows} if rows else {}
    else:
        parts = {}
        prefixes = sorted({segment.prefix for state in (pinned, current) for segment in state.segments})
        for row in rows:
            prefix = segment_of(row[0], prefixes) if extractor is None else route(extractor, row[0])
            if prefix is None:
                raise InvalidRequest(
                    f"the log of the checkpoint holds the key {row[0][:40]!r} of a segment that has no table yet; "
                    f"pass the segment_extractor {pinned.segment_extractor_name!r} to restore it"
                )
            parts.setdefault(prefix, []).append(row)
    return [
        (prefix, sorted(part, key=lambda row: (row[0], -row[1]))) for prefix, part in sorted(parts.items())
    ]


def _claim_compactor(manifests: ManifestStore, writer: Fence) -> tuple[Fence, Versioned[Manifest]]:
    claimed = manifests.update(
        writer.guard(lambda now: replace(now.value, compactor_epoch=now.value.compactor_epoch + 1))
    )
    return Fence("compactor", claimed.value.compactor_epoch), claimed


def _end_log(
    wal_store: ObjectStore, paths: DbPaths, manifests: ManifestStore, writer: Fence, claimed: Manifest
) -> tuple[WalId, Seq, int]:
    """Fence the log; returns the fence's number, and the last sequence number and time that the log has used."""

    def refresh() -> Manifest:
        latest = manifests.require_latest().value
        writer.check(latest)
        return latest

    frontier = find_frontier(
        wal_store,
        paths,
        claimed.replay_after_wal_id,
        expected=claimed.wal_id_last_seen,
        pool=shared_pool(),
    )
    end = write_fence(wal_store, paths, WalId(frontier + 1), claimed, refresh=refresh, pool=shared_pool())
    latest = refresh()
    # Numbers ascend from file to file, so the last file with rows has the last ones.
    for wal_id in range(end - 1, latest.replay_after_wal_id, -1):
        path = paths.wal(WalId(wal_id))
        rows = decode_wal(wal_store.get(path).data, path)
        if rows:
            ticks = [row[4] for row in rows if row[4] is not None]
            return end, Seq(rows[-1][1]), max(ticks, default=latest.last_l0_clock_tick)
    return end, latest.last_l0_seq, latest.last_l0_clock_tick


def _fail_jobs(compactions: CompactionsStore, compactor: Fence) -> None:
    """End every compaction that is not committed: the runs it read may be other runs by the same number now."""
    if compactions.latest() is None:
        return
    claim_compactions(compactions, compactor)

    def fail(now: Versioned[Compactions]) -> Compactions:
        jobs = (
            job if job.status.finished else replace(job, status=JobStatus.FAILED, worker=None, context=None)
            for job in now.value.jobs
        )
        return replace(now.value, jobs=tuple(jobs))

    compactions.update(compactor.guard(fail))
