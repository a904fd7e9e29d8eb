"""Restore: the state of a checkpoint becomes the current state again. Everything written since is given up.

1. Find the end of the WAL, and claim both roles, which fences an active writer or compactor. End the WAL with a fence,
   and fail the compaction jobs that are left, because they were planned on the state that is given up.
2. Put the rows that only the checkpoint's WAL has into an SST, because the whole WAL will be skipped, and the schemas
   with the versions that are given up.
3. Create one manifest with the checkpoint's trees. Sequence numbers, WAL ids, epochs and the clock stay above all that
   were used, so no reader takes an old row for a new one.

A crash before step 3 changes only epochs, a fence and failed jobs; a second call starts over. All checkpoints stay, so
the state of any other checkpoint can still be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID

from flagstone.clones.checkpoint import (
    load_checkpointed,
    require_initialized,
    require_live_checkpoint,
    unflushed_rows,
)
from flagstone.clones.origin import require_alive
from flagstone.errors import InvalidRequest
from flagstone.lsm import tree as trees
from flagstone.lsm.segments import SegmentExtractor, route, segment_of
from flagstone.lsm.tree import SstView
from flagstone.metadata.compactions import Compactions, JobStatus
from flagstone.metadata.fencing import Fence, claim_compactions, claim_writer
from flagstone.metadata.invariants import check_replaced_state
from flagstone.metadata.manifest import ExternalDb, Manifest, SsTable, edit_tree, replace_trees
from flagstone.metadata.parallel_wal import forget_parallel_wal
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.runtime.pool import shared_pool
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import VALUE, EntryTuple, Seq, WalId
from flagstone.wal.frontier import find_frontier
from flagstone.wal.replay import decode_wal
from flagstone.wal.takeover import end_wal


def restore(
    store: ObjectStore,
    paths: DbPaths,
    checkpoint_id: UUID,
    *,
    wal_store: ObjectStore,
    clock: Clock,
    ids: Ids,
    segment_extractor: SegmentExtractor | None = None,
    options: SstOptions | None = None,
    system_rows: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple,
) -> Versioned[Manifest]:
    """Make the state of the checkpoint the current one; returns the manifest that does it.

    `segment_extractor` is needed only if the checkpoint's WAL holds the first rows of a segment. `system_rows` is
    called when no process can write any more, for system rows that replace those of the checkpoint.

    Raises:
        InvalidRequest: there is no database or no such checkpoint, it has expired, or the extractor is needed.
        Closed: a writer opened the database, or a compactor was started for it, meanwhile. Nothing was restored; stop
            them and try again.

    """
    require_alive(store, paths)
    manifests = ManifestStore(store, paths, clock=clock, ids=ids, check=check_replaced_state)
    checkpointed = _load_checkpointed(manifests, checkpoint_id, now_s=clock.now_ms() // 1000)
    rows = list(unflushed_rows(wal_store, paths, checkpointed))
    current = manifests.require_latest().value
    _part_rows(rows, checkpointed, current, segment_extractor)  # raises if it needs the extractor
    # Before the claim, as when a writer opens the database: a writer that claims it later takes these ids with its own
    # fence. An end that is found afterwards may be that writer's, and the fence would stop it.
    frontier = find_frontier(wal_store, paths, current, pool=shared_pool())
    writer, claimed = claim_writer(manifests)
    compactor, _ = _claim_compactor(manifests, writer)
    end, last_seq, last_tick = _end_wal(
        wal_store, paths, manifests, claimed.value, writer=writer, frontier=frontier
    )
    _fail_jobs(CompactionsStore(store, paths, clock=clock, ids=ids), compactor)

    latest = manifests.require_latest().value
    newest, seq = latest.newest_l0, _step(latest, last_seq)
    tick = max(last_tick, clock.now_ms())
    rows += [(key, seq, VALUE, value, tick, None) for key, value in system_rows()]
    parted = _part_rows(rows, checkpointed, latest, segment_extractor)
    at_ms = max(clock.now_ms(), 0 if newest is None else ulid_ms(newest))
    added = []
    for prefix, part in parted:
        built = encode_sst(part, options)
        sst = SsTable(ids.ulid(at_ms), built.info, built.format_version)
        store.put(paths.sst(sst.id), built.data)
        added.append((prefix, sst))

    def edit(now: Versioned[Manifest]) -> Manifest:
        # Checked again: the checkpoint may have expired and been deleted meanwhile.
        require_live_checkpoint(now.value, checkpoint_id, now_s=clock.now_ms() // 1000)
        # The present time: these SSTs do not show the state of any earlier time.
        now_ms = max(tick, clock.now_ms())
        return apply_restore(
            now.value, checkpointed, added=added, wal_end=end, last_seq=last_seq, last_tick_ms=now_ms
        )

    return manifests.update(writer.guard(compactor.guard(edit)))


def apply_restore(
    current: Manifest,
    checkpointed: Manifest,
    *,
    added: Iterable[tuple[bytes, SsTable]],
    wal_end: WalId,
    last_seq: Seq,
    last_tick_ms: int,
) -> Manifest:
    """The manifest after `current` with the state of `checkpointed`. Pure.

    `added` are the SSTs, by segment, of the rows that only its WAL has. The WAL up to `wal_end` is not replayed again;
    `last_seq` and `last_tick_ms` are the last ones in it.
    """
    # A new sequence number: these SSTs show the state of no earlier one, and a consumer of changes notices the step.
    step = _step(current, last_seq)
    restored = replace(
        forget_parallel_wal(current),
        tree=checkpointed.tree,
        segments=checkpointed.segments,
        ssts=checkpointed.ssts,
        external_dbs=_lenders(checkpointed, current),
        replay_after_wal_id=max(current.replay_after_wal_id, wal_end),
        wal_id_last_seen=max(current.wal_id_last_seen, wal_end),
        last_l0_seq=step,
        recent_snapshot_min_seq=step,
        last_l0_clock_tick=max(current.last_l0_clock_tick, last_tick_ms),
    )
    for prefix, sst in added:
        view = SstView.whole(sst.id)
        restored = edit_tree(restored, prefix, partial(trees.apply_flush, view=view), added=(sst,))
    return replace_trees(restored)


def _step(current: Manifest, last_seq: Seq) -> Seq:
    """The first sequence number above all that were used."""
    return Seq(max(current.last_l0_seq, last_seq) + 1)


def _lenders(checkpointed: Manifest, current: Manifest) -> tuple[ExternalDb, ...]:
    """The lenders of the checkpoint's state. Other entries stay, empty, until their final checkpoints are released."""
    known = {(db.path, db.final_checkpoint_id) for db in checkpointed.external_dbs}
    others = (db for db in current.external_dbs if (db.path, db.final_checkpoint_id) not in known)
    return (*checkpointed.external_dbs, *others)


def _load_checkpointed(manifests: ManifestStore, checkpoint_id: UUID, *, now_s: int) -> Manifest:
    latest = manifests.require_latest().value
    require_initialized(latest, manifests.paths.root)
    return load_checkpointed(manifests, require_live_checkpoint(latest, checkpoint_id, now_s=now_s)).value


def _part_rows(
    rows: list[EntryTuple], checkpointed: Manifest, current: Manifest, extractor: SegmentExtractor | None
) -> list[tuple[bytes, list[EntryTuple]]]:
    """The rows by segment (b"" without segments), each part in the order of an SST."""
    if checkpointed.segment_extractor_name is None:
        parts = {b"": rows} if rows else {}
    else:
        parts = {}
        prefixes = sorted({segment.prefix for state in (checkpointed, current) for segment in state.segments})
        for row in rows:
            prefix = segment_of(row[0], prefixes) if extractor is None else route(extractor, row[0])
            if prefix is None:
                raise InvalidRequest(
                    f"the WAL of the checkpoint holds the key {row[0][:40]!r} of a segment that has no SST yet; "
                    f"pass the segment_extractor {checkpointed.segment_extractor_name!r} to restore it"
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


def _end_wal(
    wal_store: ObjectStore,
    paths: DbPaths,
    manifests: ManifestStore,
    claimed: Manifest,
    *,
    writer: Fence,
    frontier: WalId,
) -> tuple[WalId, Seq, int]:
    """Fence the WAL after file `frontier`; returns the id of the fence, and the last sequence number and time."""

    def refresh() -> Manifest:
        latest = manifests.require_latest().value
        writer.check(latest)
        return latest

    ended = end_wal(wal_store, paths, WalId(frontier + 1), claimed, refresh=refresh, pool=shared_pool())
    end, latest = ended.last, refresh()
    # Sequence numbers ascend from file to file, so the last file with rows has the last one.
    for wal_id in range(ended.first - 1, latest.replay_after_wal_id, -1):
        path = paths.wal(WalId(wal_id))
        rows = decode_wal(wal_store.get(path).data, path)
        if rows:
            ticks = [row[4] for row in rows if row[4] is not None]
            return end, Seq(rows[-1][1]), max(ticks, default=latest.last_l0_clock_tick)
    return end, latest.last_l0_seq, latest.last_l0_clock_tick


def _fail_jobs(compactions: CompactionsStore, compactor: Fence) -> None:
    """Fail every job that is not committed: the runs that it read may be other runs with the same ids now."""
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
