"""Wrong functions for planted bugs. Each takes the right function of the product, and returns the wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from flagstone.errors import CorruptData, Unavailable
from flagstone.kernels import memtable as kernel
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, Tree
from flagstone.metadata.sequenced import SequencedConflict
from flagstone.store.port import NotWritten, ObjectExists
from flagstone.types import MAX_SEQ, TOMBSTONE, KeyRange, WalId
from flagstone.wal.frontier import write_fence
from flagstone.wal.takeover import EndedWal
from flagstone.write.batch import WriteBatch

Make = Callable[[Any], Any]
"""Takes the right function, and returns the wrong one."""


def instead(answer: Any) -> Make:
    """A function that only returns `answer`."""
    return lambda _right: lambda *_arguments, **_options: answer


skip: Final = instead(None)


def changed(**changes: Callable[[Mapping[str, Any]], Any]) -> Make:
    """The same call with other keyword arguments, each computed from the right ones."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*arguments: Any, **options: Any) -> Any:
            return right(
                *arguments, **{**options, **{name: change(options) for name, change in changes.items()}}
            )

        return wrong

    return make


# -- the WAL ------------------------------------------------------------------------------------------------


def acknowledge_before_upload(_right: Any) -> Any:
    def write_file(self: Any, attempt: Any) -> None:
        file = self._source.seal_wal(self._ids.token)
        if file is not None:
            self._source.note_logged(file)
            path, data = self._paths.wal(file.wal_id), self._encode(file.spans)
            attempt(lambda: self._store.put_if_absent(path, data, token=file.token), path)

    return write_file


def mark_logged_after_upload(right: Any) -> Any:
    def write_file(self: Any, attempt: Any) -> None:
        state = self._source
        right(self, attempt)
        state.update(lambda now: replace(now, memtables=now.memtables.logged()))

    return write_file


def durable_through_last_seq(right: Any) -> Any:
    return lambda self, file: right(self, replace(file, last_seq=self.last_seq))


def replay_too_late(right: Any) -> Any:
    def replay(store: Any, paths: Any, after: int, last: int, **options: Any) -> Any:
        return right(store, paths, min(after + 1, last), last, **options)

    return replay


def recover_last_seq_too_low(right: Any) -> Any:
    def recovered(manifest: Any, memtables: Any, last_seq: int, *rest: Any) -> Any:
        return right(manifest, memtables, max(int(manifest.value.last_l0_seq), last_seq - 1), *rest)

    return recovered


def damaged_wal_is_empty(right: Any) -> Any:
    def open_wal(stored: bytes, path: str) -> Any:
        try:
            return right(stored, path)
        except CorruptData:
            return right(b"", path)

    return open_wal


def no_fence(_right: Any) -> Any:
    def end_wal(_store: Any, _paths: Any, candidate: int, *_arguments: Any, **_options: Any) -> EndedWal:
        return EndedWal(WalId(candidate - 1), WalId(candidate - 1))

    return end_wal


def fence_one_id(_right: Any) -> Any:
    def end_wal(*arguments: Any, **options: Any) -> EndedWal:
        first = write_fence(*arguments, **options)
        return EndedWal(first, first)

    return end_wal


def finish_any_file(_right: Any) -> Any:
    def take_created(self: Any) -> Any:
        for upload in self._unfinished:
            self._check(upload)
        created = next((upload for upload in self._unfinished if upload.is_created()), None)
        if created is not None:
            self._unfinished.remove(created)
        return created

    return take_created


def await_no_upload(_right: Any) -> Any:
    return lambda _self, _seq: iter(())


# -- memory -------------------------------------------------------------------------------------------------


def rows_above_by_insert(_right: Any) -> Any:
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


def drop_memtable_before_commit(right: Any) -> Any:
    def commit(self: Any, frozen: Any, uploaded: Any) -> None:
        def drop(now: Any) -> Any:
            waiting = (each for each in now.view.memtables if each is not frozen.memtable)
            return replace(now, view=now.view.with_memtables(waiting))

        self._state.update(drop)
        right(self, frozen, uploaded)

    return commit


def keep_flushed_memtable(_right: Any) -> Any:
    def view(self: Any, _manifest: Any, memtables: Any, base: Any) -> Any:
        if self.closed is not None:
            return self.view
        return base.with_memtables(memtables.newest_first())

    return view


def split_batch(right: Any) -> Any:
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


def apply_flush_again(right: Any) -> Any:
    def apply_flush(manifest: Any, flush: Any) -> Any:
        if flush.last_seq > manifest.last_l0_seq:
            return right(manifest, flush)
        return replace(
            right(replace(manifest, last_l0_seq=flush.last_seq - 1), flush), last_l0_seq=manifest.last_l0_seq
        )

    return apply_flush


def drop_expired(right: Any) -> Any:
    def apply_retention(versions: Any, policy: Any) -> Any:
        alive = [row for row in versions if row[5] is None or row[5] > policy.clock_ms]
        return right(alive, policy) if alive else []

    return apply_retention


def apply_to_any_tree(_right: Any) -> Any:
    def apply_compaction(tree: Any, *, l0: Any, runs: Any, destination: int | None, output: Any = ()) -> Any:
        kept = [run for run in tree.runs if run.id not in runs and run.id != destination]
        if destination is not None and output:
            kept.append(SortedRun(destination, output))  # type: ignore[arg-type]
            kept.sort(key=lambda run: -run.id)
        left = tuple(view for view in tree.l0 if view.id not in l0)
        newest = next((view.id for view in tree.l0 if view.id in l0), tree.last_compacted_l0)
        return Tree(left, tuple(kept), newest)

    return apply_compaction


def keep_run_ids(_right: Any) -> Any:
    return lambda _before, after, _run_ids: tuple(run for run in after if run.views)


def keep_view_ids(right: Any) -> Any:
    def cut_views(views: Any, *rest: Any) -> Any:
        parts = [(view, right((view,), *rest)) for view in views]
        return tuple(
            replace(part, id=view.id) if part is found[0] else part for view, found in parts for part in found
        )

    return cut_views


def stop_before_last_key(_right: Any) -> Any:
    def effective_range(self: Any, info: Any) -> Any:
        own = KeyRange(info.first_entry, info.last_entry)
        return own if self.visible_range is None else own.intersect(self.visible_range.keys)

    return effective_range


def start_after_first_key(_right: Any) -> Any:
    def of(keys: Any) -> BytesRange:
        unbounded = BytesRange()
        start = unbounded.start if keys.start is None else Bound(BoundKind.EXCLUDED, keys.start)
        end = unbounded.end if keys.stop is None else Bound(BoundKind.EXCLUDED, keys.stop)
        return BytesRange(start, end)

    return of


# -- manifests ----------------------------------------------------------------------------------------------


def write_the_same_manifest_again(_right: Any) -> Any:
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


def adopt_any_manifest(_right: Any) -> Any:
    def adopt(self: Any, latest: Any, flushed: Any = None) -> None:
        prepared = self.views.build(latest.value)
        for listener in self.listeners:
            listener.before_adoption(latest, prepared.forest)
        self._state.adopt(latest, prepared, flushed)
        for listener in self.listeners:
            listener.after_adoption(latest)

    return adopt


def adopt_older(_right: Any) -> Any:
    def adopt(self: Any, latest: Any, prepared: Any, flushed: Any = None) -> Any:
        memtables = self.memtables if flushed is None else self.memtables.without(flushed)
        return replace(
            self, manifest=latest, memtables=memtables, view=self._view(latest, memtables, prepared)
        )

    return adopt


def boundary_from_memory(right: Any) -> Any:
    def admits(self: Any, created_id: int) -> bool:
        return created_id > self._seen.value if self._seen is not None else bool(right(self, created_id))

    return admits


def restored_with_wal(right: Any) -> Any:
    def apply_restore(current: Any, *arguments: Any, **options: Any) -> Any:
        return replace(right(current, *arguments, **options), replay_after_wal_id=current.replay_after_wal_id)

    return apply_restore


def restored_without_step(right: Any) -> Any:
    def apply_restore(*arguments: Any, **options: Any) -> Any:
        made = right(*arguments, **options)
        return replace(made, last_l0_seq=made.last_l0_seq - 1)

    return apply_restore


# -- the store ----------------------------------------------------------------------------------------------


def trust_lost_reply(right: Any) -> Any:
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


def trust_any_winner(right: Any) -> Any:
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


def deny_own_write(right: Any) -> Any:
    def settled(self: Any, effort: Any, write: Any, data: bytes, _token: str, *rest: Any) -> Any:
        return right(self, effort, write, data, "of another attempt", *rest)

    return settled


# -- garbage collection -------------------------------------------------------------------------------------


def delete_before_boundary(_right: Any) -> Any:
    def delete_versions(self: Any, versions: Any, plan: Any) -> None:
        if plan.kind in self._kinds:
            aged = self._aged(plan, self._main_clock)
            self._carry_out(aged, lambda gone: versions.delete([one.id for one in gone], bounded=False))
            highest = max((verdict.id for verdict in aged.deletions), default=None)
            if highest is not None and not self._report.of(plan.kind).dry_run:
                versions.advance_boundary(highest)

    return delete_versions


def no_boundary(_right: Any) -> Any:
    def delete_versions(self: Any, versions: Any, plan: Any) -> None:
        if plan.kind in self._kinds:
            aged = self._aged(plan, self._main_clock)
            self._carry_out(aged, lambda gone: versions.delete([one.id for one in gone], bounded=False))

    return delete_versions


def kept_after_last_seen(right: Any) -> Any:
    def kept_ranges(latest: Any, checkpointed: Any) -> Any:
        return right(replace(latest, replay_after_wal_id=latest.wal_id_last_seen), checkpointed)

    return kept_ranges


def kept_for_latest_only(right: Any) -> Any:
    return lambda latest, _checkpointed: right(latest, ())


def ignore_flushes(right: Any) -> Any:
    def sst_cutoff(latest: Any, compactions: Any) -> Any:
        cutoff = right(latest, compactions)
        return cutoff._replace(before_ms=1 << 62) if "flush" in cutoff.reason else cutoff

    return sst_cutoff


def by_rows(merger: Any, *arguments: Any, **options: Any) -> Any:
    """The same merge, row by row in Python."""
    return merger(*arguments, **{**options, "by_rows": True})
