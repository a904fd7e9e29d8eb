"""Planted bugs: mistakes that the simulation must find.

Each mutant replaces a few functions of the product by wrong ones while it is installed. `recorded.FOUND` names a world
that finds it, so that a test can show it in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final
from unittest.mock import patch

from flagstone.errors import Unavailable
from flagstone.gc.metadata import Reach
from flagstone.kernels import memtable as kernel
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, Tree
from flagstone.metadata.sequenced import SequencedConflict
from flagstone.store.port import NotWritten, ObjectExists
from flagstone.testing.simulation.plan import NEVER_S
from flagstone.types import MAX_SEQ, TOMBSTONE, KeyRange
from flagstone.write.batch import WriteBatch

BUSY: Final[Mapping[str, Any]] = {
    "writers": 2,
    "clients": 4,
    "busy_s": 60.0,
    "idle_s": 1.0,
    "latency_s": 0.02,
    "wal_enabled": True,
}
"""A world in which the clients of two writers have much to do."""
RIVALS: Final[Mapping[str, Any]] = {
    **BUSY,
    "writers": 3,
    "busy_s": 5.0,
    "latency_s": 0.3,
    "flush_interval_s": 0.1,
}
"""A world in which three writers take the database away from each other all the time."""
TREE: Final[Mapping[str, Any]] = {
    **BUSY,
    "l0_sst_size_bytes": 600,
    "compactor": True,
    "min_compaction_sources": 2,
    "max_sst_size": 2_000,
    "crash_every_s": 20_000.0,
    "pause_every_s": NEVER_S,
    "trouble": 0.3,
}
"""A world of many small flushes and compactions, and of few disturbances."""
GARBAGE: Final[Mapping[str, Any]] = {
    **TREE,
    "collector": True,
    "garbage_every_s": 60,
    "keep_fences": False,
    "pause_every_s": 120.0,
}
"""A world in which garbage is collected often, and machines are paused for longer than its minimum age."""

LONG_READS: Final[Mapping[str, Any]] = {
    **TREE,
    "busy_s": 3_000.0,
    "keys": 12,
    "collector": True,
    "garbage_every_s": 60,
    "checkpoint_lifetime_s": 5,
}
"""A world in which garbage collection deletes SSTs that a snapshot has seen: it goes on with newer ones."""
DOUBT: Final = (("put_if_absent", "/manifest/", "lost_reply", 0.2), ("head", "/manifest/", "refused", 0.98))
"""A writer of a manifest often does not learn whether it was written."""

ASLEEP: Final[Mapping[str, Any]] = {
    **BUSY,
    "readers": 0,
    "latency_s": 0.05,
    "flush_interval_s": 0.1,
    "manifest_poll_s": 10,
    "trouble": 0.0,
    "aims": (
        ("get", "/manifest/", "slow", 0.6),
        ("list", "/manifest", "slow", 0.6),
        ("get_if_changed", "boundary", "slow", 0.6),
    ),
    "collector": True,
    "garbage_every_s": 60,
    "keep_fences": False,
    "crash_every_s": NEVER_S,
    "outage_every_s": NEVER_S,
    "pause_every_s": 300.0,
    "pauses_s": (400.0, 700.0),
}
"""A world in which a writer wakes up after its successor has made and collected a fence."""
STALE: Final[Mapping[str, Any]] = {**ASLEEP, "writers": 3, "compactor": True, "wal_enabled": False}
"""A world in which a machine often wakes up long after it read a manifest."""

Make = Callable[[Any], Any]
"""Takes the right function, and returns the wrong one."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Wrong functions by the name where the product looks them up, and which mistake they stand for.

    `world` has values of the plan that make the mistake show soon (see `plan.tuned`): a world without the bug is sound
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


def _instead(answer: Any) -> Make:
    """A function that only returns `answer`."""
    return lambda _right: lambda *_arguments, **_options: answer


_skip: Final = _instead(None)


def _changed(**changes: Callable[[Mapping[str, Any]], Any]) -> Make:
    """The same call with other keyword arguments, each computed from the right ones."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*arguments: Any, **options: Any) -> Any:
            return right(
                *arguments, **{**options, **{name: change(options) for name, change in changes.items()}}
            )

        return wrong

    return make


# -- the WAL ------------------------------------------------------------------------------------------------


def _acknowledge_before_upload(_right: Any) -> Any:
    def write_file(self: Any) -> None:
        spans, last_seq = self._source.seal_wal()
        if spans:
            self._source.note_logged(self._next_id, last_seq)
            self._put(self._paths.wal(self._next_id), self._encode(spans))
            self._next_id += 1

    return write_file


def _mark_logged_after_upload(right: Any) -> Any:
    def write_file(self: Any) -> None:
        state = self._source
        right(self)
        state.update(lambda now: replace(now, memtables=now.memtables.logged()))

    return write_file


def _durable_through_last_seq(right: Any) -> Any:
    return lambda self, wal_id, _last_seq: right(self, wal_id, self.last_seq)


def _replay_too_late(right: Any) -> Any:
    def replay(store: Any, paths: Any, after: int, last: int, **options: Any) -> Any:
        return right(store, paths, min(after + 1, last), last, **options)

    return replay


def _recover_last_seq_too_low(right: Any) -> Any:
    def recovered(manifest: Any, memtables: Any, last_seq: int, *rest: Any) -> Any:
        return right(manifest, memtables, max(int(manifest.value.last_l0_seq), last_seq - 1), *rest)

    return recovered


def _no_fence(_right: Any) -> Any:
    def write_fence(_store: Any, _paths: Any, candidate: int, *_arguments: Any, **_options: Any) -> int:
        return candidate - 1

    return write_fence


# -- memory -------------------------------------------------------------------------------------------------


def _rows_above_by_insert(_right: Any) -> Any:
    def rows_above(memtable: Any, seq: int) -> Any:
        kept: Any = kernel.Memtable()
        cursor = memtable.scan(None, None, MAX_SEQ, False)
        while rows := cursor.next_rows(4096):
            for row in rows:
                for version in reversed(memtable.versions(row[0], MAX_SEQ)):
                    if version[1] > seq:
                        kept.insert(*version)
        return kept

    return rows_above


def _drop_memtable_before_commit(right: Any) -> Any:
    def commit(self: Any, frozen: Any, uploaded: Any) -> None:
        def drop(now: Any) -> Any:
            waiting = (each for each in now.view.memtables if each is not frozen.memtable)
            return replace(now, view=now.view.with_memtables(waiting))

        self._state.update(drop)
        right(self, frozen, uploaded)

    return commit


def _keep_flushed_memtable(_right: Any) -> Any:
    def view(self: Any, _manifest: Any, memtables: Any, base: Any) -> Any:
        if self.closed is not None:
            return self.view
        return base.with_memtables(memtables.newest_first())

    return view


def _split_batch(right: Any) -> Any:
    def commit_batch(self: Any, batch: Any, **options: Any) -> Any:
        if options.get("transaction") is None and len(batch) > 1:
            first, rest = WriteBatch(), WriteBatch()
            for number, each in enumerate(batch):
                part = rest if number else first
                if each.kind == TOMBSTONE:
                    part.delete(each.key)
                else:
                    part.put(each.key, each.value)
            right(self, first, **options)
            return right(self, rest, **options)
        return right(self, batch, **options)

    return commit_batch


# -- flushes and compactions --------------------------------------------------------------------------------


def _apply_flush_again(right: Any) -> Any:
    def apply_flush(manifest: Any, flush: Any) -> Any:
        if flush.last_seq > manifest.last_l0_seq:
            return right(manifest, flush)
        return replace(
            right(replace(manifest, last_l0_seq=flush.last_seq - 1), flush), last_l0_seq=manifest.last_l0_seq
        )

    return apply_flush


def _drop_expired(right: Any) -> Any:
    def apply_retention(versions: Any, policy: Any) -> Any:
        alive = [row for row in versions if row[5] is None or row[5] > policy.clock_ms]
        return right(alive, policy) if alive else []

    return apply_retention


def _apply_to_any_tree(_right: Any) -> Any:
    def apply_compaction(tree: Any, *, l0: Any, runs: Any, destination: int | None, output: Any = ()) -> Any:
        kept = [run for run in tree.runs if run.id not in runs and run.id != destination]
        if destination is not None and output:
            kept.append(SortedRun(destination, output))  # type: ignore[arg-type]
            kept.sort(key=lambda run: -run.id)
        left = tuple(view for view in tree.l0 if view.id not in l0)
        newest = next((view.id for view in tree.l0 if view.id in l0), tree.last_compacted_l0)
        return Tree(left, tuple(kept), newest)

    return apply_compaction


def _stop_before_last_key(_right: Any) -> Any:
    def effective_range(self: Any, info: Any) -> Any:
        own = KeyRange(info.first_entry, info.last_entry)
        return own if self.visible_range is None else own.intersect(self.visible_range.keys)

    return effective_range


def _start_after_first_key(_right: Any) -> Any:
    def of(keys: Any) -> BytesRange:
        unbounded = BytesRange()
        start = unbounded.start if keys.start is None else Bound(BoundKind.EXCLUDED, keys.start)
        end = unbounded.end if keys.stop is None else Bound(BoundKind.EXCLUDED, keys.stop)
        return BytesRange(start, end)

    return of


# -- manifests ----------------------------------------------------------------------------------------------


def _write_the_same_manifest_again(_right: Any) -> Any:
    def update(self: Any, edit: Any, *, timeout_s: float = 0.0) -> Any:  # noqa: ARG001
        current = self.require_latest()
        value = edit(current)
        while value is not None and value != current.value:
            try:
                return self.create_next(value, current)
            except SequencedConflict:
                current = self.require_latest()
        return current

    return update


def _adopt_any_manifest(_right: Any) -> Any:
    def adopt(self: Any, latest: Any, flushed: Any = None) -> None:
        prepared = self.views.build(latest.value)
        for listener in self.listeners:
            listener.before_adoption(latest, prepared.forest)
        self._state.adopt(latest, prepared, flushed)
        for listener in self.listeners:
            listener.after_adoption(latest)

    return adopt


def _adopt_older(_right: Any) -> Any:
    def adopt(self: Any, latest: Any, prepared: Any, flushed: Any = None) -> Any:
        memtables = self.memtables if flushed is None else self.memtables.without(flushed)
        return replace(
            self, manifest=latest, memtables=memtables, view=self._view(latest, memtables, prepared)
        )

    return adopt


def _boundary_from_memory(right: Any) -> Any:
    def admits(self: Any, created_id: int) -> bool:
        return created_id > self._seen.value if self._seen is not None else bool(right(self, created_id))

    return admits


# -- the store ----------------------------------------------------------------------------------------------


def _trust_lost_reply(right: Any) -> Any:
    def settled(self: Any, effort: Any, write: Any, *rest: Any) -> Any:
        def believing() -> Any:
            try:
                return write()
            except (NotWritten, ObjectExists):
                raise
            except Unavailable:
                return None

        return right(self, effort, believing, *rest)

    return settled


def _trust_any_winner(right: Any) -> Any:
    def settled(self: Any, effort: Any, write: Any, *rest: Any) -> Any:
        def believing() -> Any:
            try:
                return write()
            except ObjectExists:
                if effort.in_doubt:
                    return None
                raise

        return right(self, effort, believing, *rest)

    return settled


def _deny_own_write(right: Any) -> Any:
    def settled(self: Any, effort: Any, write: Any, data: bytes, _token: str, *rest: Any) -> Any:
        return right(self, effort, write, data, "of another attempt", *rest)

    return settled


# -- garbage collection -------------------------------------------------------------------------------------


def _delete_before_boundary(_right: Any) -> Any:
    def delete_versions(self: Any, versions: Any, plan: Any) -> None:
        if plan.kind in self._kinds:
            aged = self._aged(plan, self._main_clock)
            self._carry_out(aged, lambda gone: versions.delete([one.id for one in gone], bounded=False))
            highest = max((verdict.id for verdict in aged.deletions), default=None)
            if highest is not None and not self._report.of(plan.kind).dry_run:
                versions.advance_boundary(highest)

    return delete_versions


def _no_boundary(_right: Any) -> Any:
    def delete_versions(self: Any, versions: Any, plan: Any) -> None:
        if plan.kind in self._kinds:
            aged = self._aged(plan, self._main_clock)
            self._carry_out(aged, lambda gone: versions.delete([one.id for one in gone], bounded=False))

    return delete_versions


def _kept_after_last_seen(right: Any) -> Any:
    def kept_ranges(latest: Any, checkpointed: Any) -> Any:
        return right(replace(latest, replay_after_wal_id=latest.wal_id_last_seen), checkpointed)

    return kept_ranges


def _kept_for_latest_only(right: Any) -> Any:
    return lambda latest, _checkpointed: right(latest, ())


def _ignore_flushes(right: Any) -> Any:
    def sst_cutoff(latest: Any, compactions: Any) -> Any:
        cutoff = right(latest, compactions)
        return cutoff._replace(before_ms=1 << 62) if "flush" in cutoff.reason else cutoff

    return sst_cutoff


MUTANTS: Final[dict[str, Mutant]] = {
    # -- the WAL
    "acknowledge_before_upload": Mutant(
        "the WAL writer reports rows as durable before their file is on the store",
        {"flagstone.wal.writer.WalWriter.write_file": _acknowledge_before_upload},
    ),
    "mark_logged_after_upload": Mutant(
        "rows that are committed during the upload of a WAL file are marked as logged when it ends",
        {"flagstone.wal.writer.WalWriter.write_file": _mark_logged_after_upload},
    ),
    "durable_through_last_seq": Mutant(
        "a finished WAL file makes every write durable, also those that came after it was sealed",
        {"flagstone.write.writer_state.WriterState.note_logged": _durable_through_last_seq},
        RIVALS,
    ),
    "skip_ownership": Mutant(
        "a writer does not read the manifest after it created a WAL file",
        {"flagstone.wal.writer.Ownership.ensure": _skip},
        ASLEEP,
        2.0,
    ),
    "no_fence": Mutant(
        "a new writer continues the WAL without a fence",
        {"flagstone.db.recovery.write_fence": _no_fence},
    ),
    "replay_too_late": Mutant(
        "recovery replays the WAL from one file too late",
        {"flagstone.db.recovery.replay": _replay_too_late},
    ),
    "replay_flushed_rows": Mutant(
        "recovery replays rows that are in SSTs already, so merge operands count twice",
        {"flagstone.db.recovery.replay": _changed(skip_through_seq=lambda _: 0)},
    ),
    "reuse_sequence_number": Mutant(
        "recovery gives the last sequence number of the WAL out again",
        {"flagstone.db.recovery.Recovered": _recover_last_seq_too_low},
    ),
    # -- memory
    "reader_trims_by_insert": Mutant(
        "a reader copies the rest of a memtable in key order with a method for ascending sequence numbers",
        {"flagstone.db.reader.follower._rows_above": _rows_above_by_insert},
        {**TREE, "readers": 2},
    ),
    "reader_never_trims": Mutant(
        "a reader keeps WAL rows that are in SSTs by now, so merge operands count twice",
        {"flagstone.db.reader.follower.WalTail.trim": _skip},
        {**TREE, "readers": 2},
    ),
    "drop_memtable_before_commit": Mutant(
        "reads lose a memtable before the manifest has its SST",
        {"flagstone.write.flusher.Flusher._commit": _drop_memtable_before_commit},
        TREE,
    ),
    "keep_flushed_memtable": Mutant(
        "reads see a memtable and its SST at the same time, so merge operands count twice",
        {"flagstone.write.state.State._view": _keep_flushed_memtable},
        TREE,
    ),
    "split_batch": Mutant(
        "a batch takes two sequence numbers",
        {"flagstone.write.writer_state.WriterState.commit_batch": _split_batch},
        {**BUSY, "switch_rate": 0.6, "trouble": 0.0},
    ),
    "skip_write_conflicts": Mutant(
        "a transaction commits although a later write changed one of its keys",
        {"flagstone.write.conflicts.ConflictTracker._conflicting_key": _skip},
    ),
    "skip_read_conflicts": Mutant(
        "a serializable transaction does not record the keys that it reads",
        {"flagstone.write.conflicts.TransactionState.track_read": _skip},
    ),
    # -- flushes and compactions
    "flush_ignores_snapshots": Mutant(
        "a flush drops versions that a snapshot reads",
        {"flagstone.write.writer_state.WriterState.min_active_seq": _skip},
        LONG_READS,
    ),
    "compaction_ignores_snapshots": Mutant(
        "a flush does not record the oldest snapshot, and compactions drop versions that it reads",
        {"flagstone.write.flusher.Flush": _changed(snapshot_min_seq=lambda flush: flush["last_seq"])},
        LONG_READS,
    ),
    "replay_after_commit": Mutant(
        "a flush moves the start of replay to the newest WAL file, which may hold rows of the next memtable",
        {
            "flagstone.write.flusher.Flush": _changed(
                replay_after_wal_id=lambda flush: flush["wal_id_last_seen"]
            )
        },
        TREE,
    ),
    "last_seen_too_high": Mutant(
        "a flush records a WAL file that does not exist yet as seen",
        {
            "flagstone.write.flusher.Flush": _changed(
                wal_id_last_seen=lambda flush: flush["wal_id_last_seen"] + 1
            )
        },
    ),
    "flush_applied_twice": Mutant(
        "a flush whose reply was lost adds its rows a second time",
        {"flagstone.write.flusher.apply_flush": _apply_flush_again},
        {**TREE, "aims": DOUBT},
    ),
    "drop_tombstones": Mutant(
        "every compaction drops tombstones, also above an older run",
        {"flagstone.compaction.executor.is_last_run": _instead(True)},
        TREE,
    ),
    "drop_expired_rows": Mutant(
        "a compaction drops an expired row instead of leaving a tombstone, which uncovers an older version",
        {
            "flagstone.compaction.merging.merge.Merger": lambda right: partial(_by_rows, right),
            "flagstone.compaction.merging.apply_retention": _drop_expired,
        },
        TREE,
    ),
    "commit_stale_compaction": Mutant(
        "two compaction jobs share sources, and the second is committed although its sources have changed",
        {
            "flagstone.compaction.validation._rival_problem": _skip,
            "flagstone.compaction.commit.find_commit_problem": _skip,
            "flagstone.compaction.lifecycle.find_commit_problem": _skip,
            "flagstone.lsm.tree.apply_compaction": _apply_to_any_tree,
        },
        {**TREE, "latency_s": 0.3, "max_subcompactions": 1},
    ),
    "stop_before_last_key": Mutant(
        "the range of an SST ends before its last key",
        {"flagstone.lsm.tree.SstView.effective_range": _stop_before_last_key},
        TREE,
    ),
    "start_after_first_key": Mutant(
        "the parts of a compaction leave out the key between them",
        {"flagstone.compaction.inputs.BytesRange.of": _start_after_first_key},
        TREE,
    ),
    # -- manifests
    "skip_fence_check": Mutant(
        "a fenced process commits manifests",
        {"flagstone.metadata.fencing.Fence.check": _skip},
    ),
    "manifest_written_again": Mutant(
        "an edit that lost a race is not applied to the manifest that won",
        {"flagstone.metadata.sequenced.SequencedObject.update": _write_the_same_manifest_again},
    ),
    "adopt_older_manifest": Mutant(
        "a writer adopts a manifest that it read before the one that it has",
        {
            "flagstone.write.manifest.WriterManifest.adopt": _adopt_any_manifest,
            "flagstone.write.state.State.adopt": _adopt_older,
        },
        TREE,
    ),
    "skip_boundary": Mutant(
        "a writer does not read the boundary after it created a manifest",
        {"flagstone.metadata.boundary.Boundary.admits": _instead(True)},
        STALE,
        1.0,
    ),
    "boundary_from_memory": Mutant(
        "a writer compares a manifest that it created with the boundary that it read before",
        {"flagstone.metadata.boundary.Boundary.admits": _boundary_from_memory},
        STALE,
        1.0,
    ),
    # -- the store
    "trust_lost_reply": Mutant(
        "a conditional write without a reply counts as written",
        {"flagstone.store.retrying.RetryingStore._settled": _trust_lost_reply},
    ),
    "trust_any_winner": Mutant(
        "after a lost reply, an object of another process counts as our own",
        {"flagstone.store.retrying.RetryingStore._settled": _trust_any_winner},
    ),
    "deny_own_write": Mutant(
        "after a lost reply, our own object counts as that of another process",
        {"flagstone.store.retrying.RetryingStore._settled": _deny_own_write},
        {**BUSY, "trouble": 1.0},
    ),
    # -- garbage collection
    "delete_before_boundary": Mutant(
        "the collector deletes manifests before it advances the boundary",
        {"flagstone.gc.round.Round._delete_versions": _delete_before_boundary},
        {
            **STALE,
            "aims": (
                *STALE["aims"],
                ("put_if_absent", "boundary", "refused", 0.95),
                ("put_if_match", "boundary", "refused", 0.95),
            ),
        },
        1.0,
    ),
    "no_boundary": Mutant(
        "the collector deletes manifests and never advances the boundary",
        {"flagstone.gc.round.Round._delete_versions": _no_boundary},
        STALE,
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
        {"flagstone.gc.round.checkpointed_ids": _instead(frozenset())},
        GARBAGE,
    ),
    "collect_checkpointed_wal": Mutant(
        "the collector deletes WAL files that only a checkpoint needs",
        {"flagstone.gc.round.kept_ranges": _kept_for_latest_only},
        GARBAGE,
    ),
    "collect_wal_after_replay": Mutant(
        "the collector deletes WAL files that the last flush has seen, also those after the start of replay",
        {"flagstone.gc.round.kept_ranges": _kept_after_last_seen},
        {**GARBAGE, "writers": 1, "pauses_s": (400.0, 700.0)},
    ),
    "collect_output_of_jobs": Mutant(
        "the collector deletes SSTs that a compaction under way has uploaded",
        {"flagstone.gc.round.sst_cutoff": lambda right: lambda latest, _jobs: right(latest, None)},
        {**GARBAGE, "latency_s": 0.3, "pauses_s": (400.0, 700.0)},
    ),
    "collect_output_of_flushes": Mutant(
        "the collector deletes SSTs that a flush under way has uploaded",
        {"flagstone.gc.round.sst_cutoff": _ignore_flushes},
        {**GARBAGE, "latency_s": 0.3, "pauses_s": (400.0, 700.0)},
    ),
}


def _by_rows(merger: Any, *arguments: Any, **options: Any) -> Any:
    """The same merge, row by row in Python."""
    return merger(*arguments, **{**options, "by_rows": True})
