"""Destroys a database: marks it, claims its roles, releases what it borrowed, deletes it.

1. One manifest sets the mark and claims both roles (`metadata/destruction.py`). From then on no claim and no edit
   succeeds, except edits that release something.
2. The WAL is fenced and the compactions file is emptied, so that every active process stops. The mark then records the
   fence. A soft destruction ends here, and garbage collection calls `collect_destroyed` until the grace period is over
   and no live checkpoint is left; a hard one continues at once.
3. The objects whose names the next database would use again are deleted: Flagstone's own objects beside the database,
   and manifest 0.
4. One manifest erases the database: it refers to nothing, and the path is vacant. This is the commit point. It is
   decided on the manifest that it follows, so a checkpoint added in between is noticed. From here on a new database may
   be created at the path, also while the rest is still being deleted.
5. The final checkpoints that the database placed in lenders are released, and its objects are deleted. They are listed
   first, and then the path is checked to be still vacant, so none of them belongs to the next database. The residue
   stays, which proves which ids were used: the newest manifest, the newest compactions file, the boundaries, and the
   fences of the last day with, emptied, the WAL file before each. A late request of a former process then finds the
   residue and fails, also one that retries the creation of a WAL file because its response was lost. A new database
   continues above the residue.

After a crash the call is repeated: the manifest records how far the destruction came. `purge` removes the residue when
no process of the destroyed database can be left.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Final
from uuid import UUID

from flagstone.clones.checkpoint import is_expired
from flagstone.clones.origin import ORIGIN
from flagstone.clones.residue import PURGE_AGE, DestroyedObjects
from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.metadata.annotations import Destroyed, MarkEntry, decode_retention, is_record, mark_entries
from flagstone.metadata.borrowing import release_final
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.destruction import erase, find_mark, is_vacant, mark_destroyed, note_fence
from flagstone.metadata.invariants import check_destruction
from flagstone.metadata.manifest import Checkpoint, Manifest, remove_expired_checkpoints
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore, NoDatabase
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import ManifestId, WalId
from flagstone.wal.frontier import find_frontier
from flagstone.wal.takeover import end_wal

_log = logging.getLogger("flagstone.clones")

GRACE: Final = timedelta(days=1)
"""How long a soft destruction keeps the data by default."""


class Verdict(Enum):
    """What can be done with a database now."""

    ALIVE = "it was not destroyed"
    WAITING = "its grace period is not over"
    PINNED = "live checkpoints hold it"
    REOPENED = "a SlateDB writer has opened it since"
    DUE = "it may be deleted"
    GONE = "it was deleted"


@dataclass(frozen=True, slots=True)
class Destruction:
    """What a destruction did, or would do: the objects deleted, the residue kept, and the end of the grace period.

    `unreleased` are the checkpoints of lenders that were not released, and why: they may not be this database's.
    """

    verdict: Verdict
    deleted: tuple[str, ...] = ()
    due_ms: int | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    kept: tuple[str, ...] = ()
    unreleased: tuple[str, ...] = ()


def plan_destruction(mark: Destroyed | None, manifest: Manifest | None, *, now_ms: int) -> Verdict:
    """Whether a database may be deleted now. Pure.

    A claim of the compactor role does not prevent that: a compactor of SlateDB, which does not read the mark, may be
    restarted at any time. A claim of the writer role does, because rows may have been acknowledged since.
    """
    if mark is None or manifest is None:
        return Verdict.ALIVE
    if mark.erased:
        return Verdict.GONE
    if manifest.writer_epoch != mark.writer_epoch:
        return Verdict.REOPENED
    if now_ms < mark.due_ms:
        return Verdict.WAITING
    return Verdict.PINNED if live_checkpoints(manifest, now_ms) else Verdict.DUE


def live_checkpoints(manifest: Manifest, now_ms: int) -> tuple[Checkpoint, ...]:
    """The checkpoints that have not expired, without the mark."""
    return tuple(
        entry
        for entry in manifest.checkpoints
        if not is_record(entry) and not is_expired(entry, now_ms // 1000)
    )


def why_kept(done: Destruction) -> tuple[str, ...]:
    """The reasons why a destroyed database is not deleted yet; none if it was not destroyed or is gone. Pure."""
    if done.verdict is Verdict.REOPENED:
        return ("a SlateDB writer has opened it since; destroy it again to delete it",)
    if done.verdict not in (Verdict.WAITING, Verdict.PINNED):
        return ()
    grace = () if done.verdict is Verdict.PINNED else (f"its grace period ends at {_time(done.due_ms or 0)}",)
    return (*grace, *map(_holder, done.checkpoints))


def _holder(checkpoint: Checkpoint) -> str:
    consumer = decode_retention(checkpoint)
    if consumer is not None:
        owner = f"of the consumer {consumer.name!r}"
    elif checkpoint.name:
        owner = f"named {checkpoint.name!r}"
    else:
        owner = "without a name, of a reader, a clone or a compaction,"
    until = "it is deleted" if checkpoint.expires_s is None else _time(1000 * checkpoint.expires_s)
    return f"the checkpoint {checkpoint.id} {owner} holds it until {until}"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


class Destroyer:
    """Destroys the database at `paths`."""

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        wal_store: ObjectStore,
        clock: Clock,
        ids: Ids,
        pool: IoPool | None = None,
    ) -> None:
        self._store = store
        self._wal_store = wal_store
        self._paths = paths
        self._clock = clock
        self._ids = ids
        self._pool = pool or shared_pool()
        self._unreleased: list[str] = []
        self._manifests = ManifestStore(store, paths, clock=clock, ids=ids, check=check_destruction)
        self._compactions = CompactionsStore(store, paths, clock=clock, ids=ids)
        self._objects = DestroyedObjects(store, paths, wal_store=wal_store, compactions=self._compactions)

    def destroy(
        self, *, soft: bool = False, grace: timedelta | str = GRACE, dry_run: bool = False
    ) -> Destruction:
        """Delete the database now, or with `soft` after the grace period, by garbage collection.

        With `dry_run` nothing changes, and `deleted` is what would be deleted. A repeated call finishes an interrupted
        one; a second soft destruction keeps the first one's time.

        Raises:
            InvalidRequest: there is no database, or `soft` is False and there are live checkpoints.

        """
        grace = as_duration(grace, "grace", minimum=timedelta(0))
        latest = self._manifests.latest_stored()
        if latest is None:
            return self._destroy_remains(dry_run=dry_run)
        if is_vacant(latest.value):
            return self._finish(latest, dry_run=dry_run)
        held = live_checkpoints(latest.value, self._clock.now_ms())
        if not soft:
            self._refuse_held(held)
        if dry_run:
            doomed = self._objects.planned(latest)
            return Destruction(Verdict.WAITING if soft else Verdict.DUE, doomed, checkpoints=held)
        marked, entry = self._mark(grace if soft else timedelta(0), refuse_held=not soft)
        if soft:
            held = live_checkpoints(marked.value, self._clock.now_ms())
            return Destruction(Verdict.WAITING, due_ms=entry.mark.due_ms, checkpoints=held)
        erased, named = self._erase()
        if not is_vacant(erased.value):
            self._refuse_held(live_checkpoints(erased.value, self._clock.now_ms()))
            raise InvalidRequest(
                f"a SlateDB writer has opened {self._paths.root!r} while it was being destroyed; stop it and destroy "
                "the database again"
            )
        return self._delete(erased, Verdict.DUE, named)

    def collect(self, *, dry_run: bool = False) -> Destruction:
        """Delete the database if it was destroyed and is due; otherwise return why not."""
        latest = self._manifests.latest_stored()
        if latest is None:
            return Destruction(Verdict.ALIVE)
        entry = find_mark(latest.value)
        if entry is None:
            return Destruction(Verdict.ALIVE)
        if entry.mark.erased:
            # No error if nothing is left to do: garbage collection then finds no database.
            leftovers = self._objects.doomed(latest) or latest.value.external_dbs
            return self._finish(latest, dry_run=dry_run) if leftovers else Destruction(Verdict.GONE)
        due_ms = entry.mark.due_ms
        verdict = plan_destruction(entry.mark, latest.value, now_ms=self._clock.now_ms())
        if verdict is Verdict.DUE and dry_run:
            return Destruction(verdict, self._objects.planned(latest), due_ms)
        if verdict is Verdict.DUE:
            self._take_over(latest, entry)
            latest, named = self._erase()
            if is_vacant(latest.value):
                return replace(self._delete(latest, verdict, named), due_ms=due_ms)
            verdict = plan_destruction(entry.mark, latest.value, now_ms=self._clock.now_ms())
        held = live_checkpoints(latest.value, self._clock.now_ms())
        return Destruction(verdict, due_ms=due_ms, checkpoints=held)

    def purge(self, *, min_age: timedelta = PURGE_AGE) -> tuple[str, ...]:
        """Delete the residue of a database that was destroyed at least `min_age` ago; returns what was deleted.

        Afterwards ids start at 1 again. So no process of the destroyed database may be left, and no request of one: it
        would be taken for one of the next database. The manifest is deleted last, so after a crash the path can be
        purged again.

        Raises:
            InvalidRequest: there is a database, or none was destroyed there, or not long enough ago.

        """
        latest = self._manifests.latest_stored()
        if latest is None:
            raise NoDatabase(f"nothing is left of a database at {self._paths.root!r} in {self._store.url}")
        if not is_vacant(latest.value):
            raise InvalidRequest(f"there is a database at {self._paths.root!r}; destroy it first")
        born_ms = max((entry.meta.last_modified_ms for entry in self._manifests.list()), default=0)
        age = timedelta(milliseconds=self._clock.now_ms() - born_ms)
        if age < min_age:
            raise InvalidRequest(
                f"the database at {self._paths.root!r} was deleted {age} ago; its residue stops late requests of its "
                f"processes, and stays for at least {min_age}"
            )
        self._delete(latest, Verdict.GONE)
        last = self._paths.manifest(ManifestId(latest.id))
        residue = tuple(path for path in self._objects.kept(latest) if path != last)
        self._objects.delete_all(residue)
        self._store.delete_many([meta.path for meta in self._store.list(self._paths.own_folder)])
        for store in (self._store, self._wal_store):
            # A collector that crashed while it read the store's clock has left its probe.
            store.delete(self._paths.clock_probe)
        self._store.delete(last)
        for folder in self._paths.folders:
            self._objects.forget_records(folder, lambda _: True)
        return (*residue, last)

    # -- marking and claiming -----------------------------------------------------------------------------

    def _mark(self, grace: timedelta, *, refuse_held: bool) -> tuple[Versioned[Manifest], MarkEntry]:
        """Set the mark and claim both roles. If this is refused, nothing has changed."""
        mark_id, at_ms = self._ids.uuid(), self._clock.now_ms()

        def edit(now: Versioned[Manifest]) -> Manifest | None:
            if refuse_held:
                self._refuse_held(live_checkpoints(now.value, at_ms))
            entry = find_mark(now.value)
            if entry is not None and entry.mark.writer_epoch == now.value.writer_epoch:
                return None
            return mark_destroyed(
                remove_expired_checkpoints(now.value, at_ms // 1000),
                mark_id=mark_id,
                at_ms=at_ms,
                grace_ms=round(grace.total_seconds() * 1000),
                manifest_id=ManifestId(now.next_id),
            )

        marked = self._manifests.update(edit)
        entry = find_mark(marked.value)
        if entry is None:
            raise InvalidRequest(f"the database at {self._paths.root!r} was deleted by another process")
        return self._take_over(marked, entry), entry

    def _take_over(self, marked: Versioned[Manifest], entry: MarkEntry) -> Versioned[Manifest]:
        """End the WAL and the compactions for every active process, once: the mark records it."""
        if entry.mark.fence_id is not None:
            return marked
        fence_id = self._fence_wal(marked.value)
        self._end_compactions()
        return self._manifests.update(lambda now: note_fence(now.value, fence_id))

    def _fence_wal(self, claimed: Manifest) -> WalId:
        frontier = find_frontier(self._wal_store, self._paths, claimed, pool=self._pool)
        ended = end_wal(
            self._wal_store,
            self._paths,
            WalId(frontier + 1),
            claimed,
            refresh=lambda: self._manifests.require_latest().value,
            pool=self._pool,
        )
        return ended.last

    def _end_compactions(self) -> None:
        """Claim the compactions file and drop all jobs, so that workers lose theirs."""
        if self._compactions.latest() is None:
            return
        epoch = self._manifests.require_latest().value.compactor_epoch

        def edit(now: Versioned[Compactions]) -> Compactions:
            return replace(now.value, compactor_epoch=max(epoch, now.value.compactor_epoch), jobs=())

        self._compactions.update(edit)

    def _refuse_held(self, held: tuple[Checkpoint, ...]) -> None:
        if held:
            named = ", ".join(f"{c.id}" + (f" ({c.name})" if c.name else "") for c in held[:5])
            more = f" and {len(held) - 5} more" if len(held) > 5 else ""
            last_s = max((c.expires_s for c in held if c.expires_s is not None), default=None)
            expiry = (
                ""
                if last_s is None
                else f" (some expire, the last in {last_s - self._clock.now_ms() // 1000} s)"
            )
            raise InvalidRequest(
                f"{self._paths.root!r} has live checkpoints, so readers, clones or compactions may depend on it: "
                f"{named}{more}{expiry}; delete them, destroy the clones first, or destroy softly, which waits for them"
            )

    # -- deleting -----------------------------------------------------------------------------------------

    def _erase(self) -> tuple[Versioned[Manifest], tuple[str, ...]]:
        """Make the path vacant, unless a checkpoint was added or a writer opened the database meanwhile.

        Returns the current manifest, and the objects that were deleted before it.
        """
        named = self._objects.delete_named()
        wal_ids = (self._paths.parse_wal(meta.path) for meta in self._wal_store.list(self._paths.wal_folder))
        wal_end = max((wal_id for wal_id in wal_ids if wal_id is not None), default=WalId(0))

        def edit(now: Versioned[Manifest]) -> Manifest | None:
            entry = find_mark(now.value)
            if entry is None or entry.mark.erased or entry.mark.writer_epoch != now.value.writer_epoch:
                return None
            if live_checkpoints(now.value, self._clock.now_ms()):
                return None
            return erase(now.value, entry, manifest_id=ManifestId(now.next_id), wal_end=wal_end)

        self._manifests.update(edit)
        stored = self._manifests.latest_stored()
        assert stored is not None, "a manifest was just read or written, and the newest one is never deleted"
        return stored, named

    def _finish(self, vacant: Versioned[Manifest], *, dry_run: bool) -> Destruction:
        """Delete what an interrupted destruction, or a late request of a former process, left behind."""
        doomed = self._objects.doomed(vacant)
        if not doomed and not vacant.value.external_dbs:
            if not dry_run:
                self._objects.forget_used_up(vacant, self._compactions.latest())
            raise NoDatabase(f"no database at {self._paths.root!r} in {self._store.url}; check the path")
        if dry_run:
            return Destruction(Verdict.DUE, doomed, kept=self._objects.kept(vacant))
        return self._delete(vacant, Verdict.DUE)

    def _delete(
        self, vacant: Versioned[Manifest], verdict: Verdict, named: tuple[str, ...] = ()
    ) -> Destruction:
        lenders = vacant.value.external_dbs
        for lender in lenders:
            if lender.final_checkpoint_id is not None:
                self._release(lender.path, lender.final_checkpoint_id)
        if lenders:
            vacant = self._forget_lenders(vacant)
        # Before any delete: a process that creates one of these ids again must fail.
        self._manifests.advance_boundary(vacant.id - 1)
        jobs = self._compactions.latest()
        if jobs is not None:
            self._compactions.advance_boundary(jobs.id - 1)
        doomed = self._objects.doomed(vacant)
        latest = self._manifests.latest_stored()
        if latest is None or latest.id != vacant.id:
            # There is a new database, and some listed objects may be its own: its garbage collection deletes the rest.
            return Destruction(verdict, named, unreleased=tuple(self._unreleased))
        self._objects.empty_kept_wal(vacant)
        self._objects.delete_all(doomed)
        self._objects.forget_used_up(vacant, jobs)
        return Destruction(
            verdict,
            (*doomed, *named),
            kept=self._objects.kept(vacant),
            unreleased=tuple(self._unreleased),
        )

    def _forget_lenders(self, vacant: Versioned[Manifest]) -> Versioned[Manifest]:
        entry = mark_entries(vacant.value)[-1]
        value = erase(vacant.value, entry, manifest_id=ManifestId(vacant.next_id))
        with suppress(SequencedConflict):  # a new database has the entries now, and detaches them
            return self._manifests.create_next(replace(value, external_dbs=()), vacant)
        return vacant

    def _release(self, path: str, checkpoint_id: UUID) -> None:
        """Release the final checkpoint in a lender, if it is provably this database's."""
        lender = ManifestStore(self._store, DbPaths(path), clock=self._clock, ids=self._ids)
        released = release_final(self._store, lender, checkpoint_id, borrower=self._paths.root)
        if released.kept is not None:
            self._unreleased.append(released.kept)
            _log.warning(
                "a checkpoint of a lender is kept path=%s reason=%s", self._paths.root, released.kept
            )

    def _destroy_remains(self, *, dry_run: bool) -> Destruction:
        """Delete the objects of a clone that never got a manifest."""
        doomed = self._objects.doomed(None)
        if self._paths.own(ORIGIN) not in doomed:
            raise NoDatabase(f"no database at {self._paths.root!r} in {self._store.url}; check the path")
        if not dry_run:
            self._objects.delete_all(doomed)
            self._objects.forget_records(self._paths.own_folder, lambda _: True)
        return Destruction(Verdict.DUE, doomed)


def collect_destroyed(
    store: ObjectStore,
    paths: DbPaths,
    *,
    wal_store: ObjectStore,
    clock: Clock,
    ids: Ids,
    dry_run: bool = False,
) -> Destruction:
    """The first step of garbage collection: delete a database that was destroyed, once it is due.

    A database without a mark costs only the requests for its manifest. After `Verdict.DUE` there is nothing left to
    collect.
    """
    return Destroyer(store, paths, wal_store=wal_store, clock=clock, ids=ids).collect(dry_run=dry_run)
