"""Planted bugs: mistakes that the simulation must find.

Each mutant replaces a few functions of the product by wrong ones while it is installed. `recorded.FOUND` names a world
that finds it, so that a test can show it in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final
from unittest.mock import patch

from flagstone.gc.metadata import Reach
from flagstone.testing.simulation import mistakes
from flagstone.testing.simulation.mistakes import Make
from flagstone.testing.simulation.worlds import (
    ASLEEP,
    BUSY,
    DOUBT,
    GARBAGE,
    LONG_READS,
    PARALLEL,
    RIVALS,
    STALLED,
    TREE,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """Wrong functions by the name where the product looks them up, and which mistake they stand for.

    `world` has values of the plan that make the mistake show soon (see `plan_world`). A world without the bug is sound
    with the same values. `hours` is how long such a world lives until the quiet time.
    """

    mistake: str
    wrong: Mapping[str, Make]
    world: Mapping[str, Any] = field(default_factory=lambda: BUSY)
    hours: float = 0.5


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with that bug."""
    with ExitStack() as stack:
        for target, make in MUTANTS[name].wrong.items():
            stack.enter_context(patch(target, make(resolve_name(target))))
        yield


MUTANTS: Final[dict[str, Mutant]] = {
    # -- the WAL
    "acknowledge_before_upload": Mutant(
        "the WAL writer reports rows as durable before their file is on the store",
        {"flagstone.wal.writer.WalWriter.write_file": mistakes.acknowledge_before_upload},
    ),
    "mark_logged_after_upload": Mutant(
        "rows that are committed during the upload of a WAL file are marked as logged when it ends",
        {"flagstone.wal.writer.WalWriter.write_file": mistakes.mark_logged_after_upload},
    ),
    "durable_through_last_seq": Mutant(
        "a finished WAL file makes every write durable, also those that came after it was sealed",
        {"flagstone.write.writer_state.WriterState.note_logged": mistakes.durable_through_last_seq},
        RIVALS,
    ),
    "skip_ownership": Mutant(
        "a writer does not read the manifest after it created a WAL file",
        {"flagstone.wal.writer.Ownership.ensure": mistakes.skip},
        {**ASLEEP, "busy_s": 3_000.0},
        1.0,
    ),
    "no_fence": Mutant(
        "a new writer continues the WAL without a fence",
        {"flagstone.db.recovery.end_wal": mistakes.no_fence},
    ),
    "fence_one_id": Mutant(
        "a new writer fences one WAL id, although the former one has several files under way",
        {"flagstone.db.recovery.end_wal": mistakes.fence_one_id},
        PARALLEL,
    ),
    "finish_any_file": Mutant(
        "a WAL file makes its rows durable before the files before it are on the store",
        {"flagstone.wal.uploads.Uploads.take_created": mistakes.finish_any_file},
        PARALLEL,
    ),
    "replay_too_late": Mutant(
        "recovery replays the WAL from one file too late",
        {"flagstone.db.recovery.replay": mistakes.replay_too_late},
    ),
    "replay_flushed_rows": Mutant(
        "recovery replays rows that are in SSTs already, so merge operands count twice",
        {"flagstone.db.recovery.replay": mistakes.changed(skip_through_seq=lambda _: 0)},
    ),
    "reuse_sequence_number": Mutant(
        "recovery gives the last sequence number of the WAL out again",
        {"flagstone.db.recovery.Recovered": mistakes.recover_last_seq_too_low},
    ),
    "damaged_wal_is_empty": Mutant(
        "a damaged WAL file counts as one without rows",
        {"flagstone.wal.replay.open_wal": mistakes.damaged_wal_is_empty},
        {**BUSY, "cast": ("damage",)},
    ),
    "await_no_upload": Mutant(
        "a coroutine that awaits a write continues before the write is on the store",
        {"flagstone.write.writer_state.WriterState.wait_durable_async": mistakes.await_no_upload},
        {**BUSY, "cast": ("aio",)},
    ),
    # -- memory
    "reader_trims_by_insert": Mutant(
        "a reader copies the rest of a memtable in key order with a method for ascending sequence numbers",
        {"flagstone.db.reader.follower._rows_above": mistakes.rows_above_by_insert},
        {**TREE, "readers": 2},
    ),
    "reader_never_trims": Mutant(
        "a reader keeps WAL rows that are in SSTs by now, so merge operands count twice",
        {"flagstone.db.reader.follower.WalTail.trim": mistakes.skip},
        {**TREE, "readers": 2},
    ),
    "drop_memtable_before_commit": Mutant(
        "reads lose a memtable before the manifest has its SST",
        {"flagstone.write.flusher.Flusher._commit": mistakes.drop_memtable_before_commit},
        TREE,
    ),
    "keep_flushed_memtable": Mutant(
        "reads see a memtable and its SST at the same time, so merge operands count twice",
        {"flagstone.write.state.State._view": mistakes.keep_flushed_memtable},
        TREE,
    ),
    "split_batch": Mutant(
        "a batch takes two sequence numbers",
        {"flagstone.write.writer_state.WriterState.commit_batch": mistakes.split_batch},
        {**BUSY, "switch_rate": 0.6, "trouble": 0.0},
    ),
    "skip_write_conflicts": Mutant(
        "a transaction commits although a later write changed one of its keys",
        {"flagstone.write.conflicts.ConflictTracker._conflicting_key": mistakes.skip},
    ),
    "skip_read_conflicts": Mutant(
        "a serializable transaction does not record the keys that it reads",
        {"flagstone.write.conflicts.TransactionState.track_read": mistakes.skip},
    ),
    "skip_range_conflicts": Mutant(
        "a serializable transaction does not record the ranges that it scans",
        {"flagstone.write.conflicts.TransactionState.track_range": mistakes.skip},
        {**BUSY, "cast": ("range_reads",)},
    ),
    # -- flushes and compactions
    "flush_ignores_snapshots": Mutant(
        "a flush drops versions that a snapshot reads",
        {"flagstone.write.writer_state.WriterState.min_active_seq": mistakes.skip},
        LONG_READS,
    ),
    "compaction_ignores_snapshots": Mutant(
        "a flush does not record the oldest snapshot, and compactions drop versions that it reads",
        {"flagstone.write.flusher.Flush": mistakes.changed(snapshot_min_seq=lambda flush: flush["last_seq"])},
        LONG_READS,
    ),
    "replay_after_commit": Mutant(
        "a flush moves the start of replay to the newest WAL file, which may hold rows of the next memtable",
        {
            "flagstone.write.flusher.Flush": mistakes.changed(
                replay_after_wal_id=lambda flush: flush["wal_id_last_seen"]
            )
        },
        TREE,
    ),
    "last_seen_too_high": Mutant(
        "a flush records a WAL file that does not exist yet as seen",
        {
            "flagstone.write.flusher.Flush": mistakes.changed(
                wal_id_last_seen=lambda flush: flush["wal_id_last_seen"] + 1
            )
        },
    ),
    "flush_applied_twice": Mutant(
        "a flush whose reply was lost adds its rows a second time",
        {"flagstone.write.flusher.apply_flush": mistakes.apply_flush_again},
        {**TREE, "aims": DOUBT},
    ),
    "drop_tombstones": Mutant(
        "every compaction drops tombstones, also above an older run",
        {"flagstone.compaction.executor.is_last_run": mistakes.instead(True)},
        TREE,
    ),
    "drop_expired_rows": Mutant(
        "a compaction drops an expired row instead of leaving a tombstone, which uncovers an older version",
        {
            "flagstone.compaction.merging.merge.Merger": lambda right: partial(mistakes.by_rows, right),
            "flagstone.compaction.merging.apply_retention": mistakes.drop_expired,
        },
        TREE,
    ),
    "commit_stale_compaction": Mutant(
        "two compaction jobs share sources, and the second is committed although its sources have changed",
        {
            "flagstone.compaction.validation._rival_problem": mistakes.skip,
            "flagstone.compaction.commit.find_commit_problem": mistakes.skip,
            "flagstone.compaction.lifecycle.find_commit_problem": mistakes.skip,
            "flagstone.lsm.tree.apply_compaction": mistakes.apply_to_any_tree,
        },
        {
            **TREE,
            "writers": 1,
            "clients": 2,
            "busy_s": 600.0,
            "latency_s": 0.3,
            "max_subcompactions": 1,
        },
    ),
    "cut_under_old_ids": Mutant(
        "a range delete keeps the ids of views and runs, and a compaction of the old ones brings the rows back",
        {
            "flagstone.metadata.range_cut._renumbered": mistakes.keep_run_ids,
            "flagstone.metadata.range_cut._cut_views": mistakes.keep_view_ids,
        },
        {
            **TREE,
            "cast": ("range_deletes", "only_compactor", "compactor", "worker"),
            "latency_s": 0.3,
            "keys": 60,
        },
    ),
    "stop_before_last_key": Mutant(
        "the range of an SST ends before its last key",
        {"flagstone.lsm.tree.SstView.effective_range": mistakes.stop_before_last_key},
        TREE,
    ),
    "start_after_first_key": Mutant(
        "the parts of a compaction leave out the key between them",
        {"flagstone.compaction.inputs.BytesRange.of": mistakes.start_after_first_key},
        TREE,
    ),
    # -- manifests
    "skip_fence_check": Mutant(
        "a fenced process commits manifests",
        {"flagstone.metadata.fencing.Fence.check": mistakes.skip},
    ),
    "manifest_written_again": Mutant(
        "an edit that lost a race is not applied to the manifest that won",
        {"flagstone.metadata.sequenced.SequencedObject.update": mistakes.write_the_same_manifest_again},
    ),
    "adopt_older_manifest": Mutant(
        "a writer adopts a manifest that it read before the one that it has",
        {
            "flagstone.write.manifest.WriterManifest.adopt": mistakes.adopt_any_manifest,
            "flagstone.write.state.State.adopt": mistakes.adopt_older,
        },
        TREE,
    ),
    "skip_boundary": Mutant(
        "a writer does not read the boundary after it created a manifest",
        {"flagstone.metadata.boundary.Boundary.admits": mistakes.instead(True)},
        STALLED,
        1.0,
    ),
    "boundary_from_memory": Mutant(
        "a writer compares a manifest that it created with the boundary that it read before",
        {"flagstone.metadata.boundary.Boundary.admits": mistakes.boundary_from_memory},
        STALLED,
        1.0,
    ),
    "restored_with_wal": Mutant(
        "the manifest of a restore replays the WAL, and so the writes that were given up",
        {"flagstone.clones.restore.apply_restore": mistakes.restored_with_wal},
        {**BUSY, "cast": ("restore",)},
    ),
    "restored_without_step": Mutant(
        "a restore uses the last sequence number again",
        {"flagstone.clones.restore.apply_restore": mistakes.restored_without_step},
        {**BUSY, "cast": ("restore",)},
    ),
    # -- the store
    "trust_lost_reply": Mutant(
        "a conditional write without a reply counts as written",
        {"flagstone.store.retrying.RetryingStore._settled": mistakes.trust_lost_reply},
    ),
    "trust_any_winner": Mutant(
        "after a lost reply, an object of another process counts as our own",
        {"flagstone.store.retrying.RetryingStore._settled": mistakes.trust_any_winner},
    ),
    "deny_own_write": Mutant(
        "after a lost reply, our own object counts as that of another process",
        {"flagstone.store.retrying.RetryingStore._settled": mistakes.deny_own_write},
        {**BUSY, "trouble": 1.0},
    ),
    # -- garbage collection
    "delete_before_boundary": Mutant(
        "the collector deletes manifests before it advances the boundary",
        {"flagstone.gc.round.Round._delete_versions": mistakes.delete_before_boundary},
        {
            **STALLED,
            "aims": (
                *STALLED["aims"],
                ("put_if_absent", "boundary", "refused", 0.95),
                ("put_if_match", "boundary", "refused", 0.95),
            ),
        },
        1.0,
    ),
    "no_boundary": Mutant(
        "the collector deletes manifests and never advances the boundary",
        {"flagstone.gc.round.Round._delete_versions": mistakes.no_boundary},
        STALLED,
        1.0,
    ),
    "collect_checkpointed_ssts": Mutant(
        "the collector deletes SSTs that only a checkpoint keeps",
        {
            "flagstone.gc.metadata.CheckpointedManifests.reach": lambda _: (
                lambda _self, _manifests, latest: Reach(latest, {})
            )
        },
        GARBAGE,
    ),
    "collect_checkpointed_manifests": Mutant(
        "the collector deletes manifests that a checkpoint names",
        {"flagstone.gc.round.checkpointed_ids": mistakes.instead(frozenset())},
        GARBAGE,
    ),
    "collect_checkpointed_wal": Mutant(
        "the collector deletes WAL files that only a checkpoint needs",
        {"flagstone.gc.round.kept_ranges": mistakes.kept_for_latest_only},
        GARBAGE,
    ),
    "collect_wal_after_replay": Mutant(
        "the collector deletes WAL files that the last flush has seen, also those after the start of replay",
        {"flagstone.gc.round.kept_ranges": mistakes.kept_after_last_seen},
        {
            **GARBAGE,
            "writers": 1,
            "clients": 2,
            "busy_s": 3_000.0,
            "latency_s": 0.3,
            "l0_sst_size_bytes": 6_000,
            "crash_every_s": 900.0,
            "pauses_s": (400.0, 700.0),
        },
        1.0,
    ),
    "collect_output_of_jobs": Mutant(
        "the collector deletes SSTs that a compaction under way has uploaded",
        {"flagstone.gc.round.sst_cutoff": lambda right: lambda latest, _jobs: right(latest, None)},
        {**GARBAGE, "latency_s": 0.3, "pauses_s": (400.0, 700.0)},
    ),
    "collect_output_of_flushes": Mutant(
        "the collector deletes SSTs that a flush under way has uploaded",
        {"flagstone.gc.round.sst_cutoff": mistakes.ignore_flushes},
        {
            **GARBAGE,
            "clients": 2,
            "busy_s": 3_000.0,
            "latency_s": 0.3,
            "crash_every_s": 900.0,
            "pauses_s": (400.0, 700.0),
        },
        1.0,
    ),
}
