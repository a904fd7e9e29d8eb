"""Destroying a database: mark it, take it over, let go of what it borrowed, delete it.

The mark (`flagstone/destroyed`) comes first: from then on we refuse to open it. Then both roles are claimed and the
log is fenced, so that whoever is at work stops. A soft destruction ends there, and garbage collection calls
`collect_destroyed` until the grace period is over and nobody holds a checkpoint any more; a hard one goes on at once.

Deletion releases the checkpoints this database placed in others, deletes all of its objects except the current
manifest, then that, then the mark. A crash anywhere is made good by doing it again: the manifest says what is left
to release, and the mark keeps everybody out until the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Final
from uuid import UUID

from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.metadata.borrowing import release_final
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Checkpoint, Manifest, remove_expired_checkpoints
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import ManifestId, WalId
from flagstone.views.checkpoint import is_expired
from flagstone.views.marks import (
    DESTROYED,
    ORIGIN,
    Destroyed,
    load_destroyed,
    save_destroyed,
)
from flagstone.wal.fencing import write_fence
from flagstone.wal.listing import find_frontier

_log = logging.getLogger("flagstone.views")

GRACE: Final = timedelta(days=1)
"""How long a soft destruction keeps the data unless told otherwise."""


class Verdict(Enum):
    """What is to be done with a database now."""

    ALIVE = "it was not destroyed"
    WAITING = "its grace period is not over"
    PINNED = "somebody holds checkpoints of it"
    REOPENED = "somebody has opened it since"
    DUE = "it may be deleted"


@dataclass(frozen=True, slots=True)
class Destruction:
    """What destroying did, or would do: the objects deleted, and until when a soft one waits.

    `unreleased` says which checkpoints of lenders were not released, and why: they are not provably this database's.
    """

    verdict: Verdict
    deleted: tuple[str, ...] = ()
    due_ms: int | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    unreleased: tuple[str, ...] = ()


def plan_destruction(mark: Destroyed | None, manifest: Manifest | None, *, now_ms: int) -> Verdict:
    """Whether a database may be deleted now. Pure.

    A database that lost its manifest and still has its mark was being deleted: that is finished.
    """
    if mark is None:
        return Verdict.ALIVE
    if manifest is None:
        return Verdict.DUE
    if not _same_epochs(mark, manifest):
        return Verdict.REOPENED
    if now_ms < mark.due_ms:
        return Verdict.WAITING
    return Verdict.PINNED if live_checkpoints(manifest, now_ms) else Verdict.DUE


def live_checkpoints(manifest: Manifest, now_ms: int) -> tuple[Checkpoint, ...]:
    """Those whose owners may still use them."""
    return tuple(entry for entry in manifest.checkpoints if not is_expired(entry, now_ms // 1000))


class Destroyer:
    """Destroys the database at `paths`."""

    def __init__(
        self, store: ObjectStore, paths: DbPaths, *, wal_store: ObjectStore, clock: Clock, ids: Ids
    ) -> None:
        self._store = store
        self._wal_store = wal_store
        self._paths = paths
        self._clock = clock
        self._ids = ids
        self._manifests = ManifestStore(store, paths, clock=clock, ids=ids)
        self._unreleased: list[str] = []

    def destroy(
        self, *, soft: bool = False, grace: timedelta | str = GRACE, dry_run: bool = False
    ) -> Destruction:
        """Delete the database now, or with `soft` after the grace period, by garbage collection.

        With `dry_run` nothing changes; `deleted` then names what would be. Destroying again finishes what was begun; a
        second soft destruction keeps the first one's time.

        Raises:
            InvalidRequest: there is no database, or `soft` is False and somebody holds a checkpoint of it.

        """
        grace = as_duration(grace, "grace", minimum=timedelta(0))
        mark, latest = load_destroyed(self._store, self._paths), self._manifests.latest()
        if latest is None:
            return self._destroy_remains(mark, dry_run=dry_run)
        held = live_checkpoints(latest.value, self._clock.now_ms())
        if not soft:
            self._refuse_pinned(held)
        if dry_run:
            doomed = (*self._doomed(latest.id), self._last(latest))
            return Destruction(Verdict.WAITING if soft else Verdict.DUE, doomed, checkpoints=held)
        if soft:
            mark = self._mark_and_claim(mark, latest.value, grace)
            return Destruction(Verdict.WAITING, due_ms=mark.due_ms, checkpoints=held)
        marked_before = mark is not None
        self._mark_and_claim(mark, latest.value, timedelta(0))
        # Once more: a checkpoint may have been created before the mark was there.
        latest = self._manifests.require_latest()
        held = live_checkpoints(latest.value, self._clock.now_ms())
        if held:
            if not marked_before:
                self._store.delete(self._paths.own(DESTROYED))
            self._refuse_pinned(held)
        return Destruction(Verdict.DUE, self._delete(latest), unreleased=tuple(self._unreleased))

    def collect(self, *, dry_run: bool = False) -> Destruction:
        """Delete the database if it was destroyed and its time has come; otherwise say why not."""
        mark, latest = load_destroyed(self._store, self._paths), self._manifests.latest()
        now_ms = self._clock.now_ms()
        verdict = plan_destruction(mark, None if latest is None else latest.value, now_ms=now_ms)
        due_ms = None if mark is None else mark.due_ms
        held = () if latest is None else live_checkpoints(latest.value, now_ms)
        if verdict is not Verdict.DUE:
            return Destruction(verdict, due_ms=due_ms, checkpoints=held)
        if latest is None:
            return self._destroy_remains(mark, dry_run=dry_run)
        if dry_run:
            return Destruction(verdict, (*self._doomed(latest.id), self._last(latest)), due_ms)
        return Destruction(verdict, self._delete(latest), due_ms, unreleased=tuple(self._unreleased))

    # -- taking over --------------------------------------------------------------------------------------

    def _mark_and_claim(self, mark: Destroyed | None, manifest: Manifest, grace: timedelta) -> Destroyed:
        """Mark first, then claim: who opens the database meanwhile sees the mark, or is replaced by the claim."""
        if mark is not None and mark.writer_epoch is not None and _same_epochs(mark, manifest):
            return mark
        begun = Destroyed(self._clock.now_ms(), round(grace.total_seconds() * 1000))
        save_destroyed(self._store, self._paths, begun)
        now_s = begun.at_ms // 1000
        claimed = self._manifests.update(
            lambda now: replace(
                remove_expired_checkpoints(now.value, now_s),
                writer_epoch=now.value.writer_epoch + 1,
                compactor_epoch=now.value.compactor_epoch + 1,
            )
        ).value
        self._fence_log(claimed)
        done = replace(begun, writer_epoch=claimed.writer_epoch, compactor_epoch=claimed.compactor_epoch)
        save_destroyed(self._store, self._paths, done)
        return done

    def _fence_log(self, claimed: Manifest) -> None:
        fence = Fence("writer", claimed.writer_epoch)

        def refresh() -> Manifest:
            latest = self._manifests.require_latest().value
            fence.check(latest)
            return latest

        frontier = find_frontier(
            self._wal_store,
            self._paths,
            claimed.replay_after_wal_id,
            expected=claimed.wal_id_last_seen,
            pool=shared_pool(),
        )
        write_fence(
            self._wal_store, self._paths, WalId(frontier + 1), claimed, refresh=refresh, pool=shared_pool()
        )

    def _refuse_pinned(self, held: tuple[Checkpoint, ...]) -> None:
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

    def _delete(self, latest: Versioned[Manifest]) -> tuple[str, ...]:
        for lender in latest.value.external_dbs:
            if lender.final_checkpoint_id is not None:
                self._release(lender.path, lender.final_checkpoint_id)
        doomed = self._doomed(latest.id)
        self._delete_all(doomed)
        self._store.delete(self._last(latest))
        self._store.delete(self._paths.own(DESTROYED))
        return (*doomed, self._last(latest))

    def _delete_all(self, doomed: tuple[str, ...]) -> None:
        logs = {path for path in doomed if self._paths.parse_wal(path) is not None}
        self._wal_store.delete_many(sorted(logs))
        self._store.delete_many([path for path in doomed if path not in logs])

    def _release(self, path: str, checkpoint_id: UUID) -> None:
        """Let a lender collect what it kept for this database, if the checkpoint is provably this database's."""
        lender = ManifestStore(self._store, DbPaths(path), clock=self._clock, ids=self._ids)
        released = release_final(self._store, lender, checkpoint_id, borrower=self._paths.root)
        if released.kept is not None:
            self._unreleased.append(released.kept)
            _log.warning(
                "a checkpoint of a lender is kept path=%s reason=%s", self._paths.root, released.kept
            )

    def _last(self, latest: Versioned[Manifest]) -> str:
        return self._paths.manifest(ManifestId(latest.id))

    def _doomed(self, current_id: int | None) -> tuple[str, ...]:
        """Every object of the database but the current manifest and the mark. What is not ours by name stays."""
        paths = self._paths
        found = [
            *_ours(self._wal_store, paths.wal_folder, paths.parse_wal),
            *_ours(self._store, paths.table_folder, paths.parse_table),
            *_ours(self._store, paths.compactions_folder, paths.parse_compactions),
            *_ours(self._store, paths.gc_folder, paths.parse_boundary),
            *_ours(self._store, paths.manifest_folder, paths.parse_manifest),
            *(meta.path for meta in self._store.list(paths.own_folder)),
        ]
        kept = {paths.own(DESTROYED)}
        if current_id is not None:
            kept.add(paths.manifest(ManifestId(current_id)))
        return tuple(path for path in found if path not in kept)

    def _destroy_remains(self, mark: Destroyed | None, *, dry_run: bool) -> Destruction:
        """Delete what an interrupted destruction, or a clone that never got a manifest, has left."""
        doomed = self._doomed(None)
        if mark is None and self._paths.own(ORIGIN) not in doomed:
            raise InvalidRequest(f"no database at {self._paths.root!r} in {self._store.url}; check the path")
        if not dry_run:
            self._delete_all(doomed)
            self._store.delete(self._paths.own(DESTROYED))
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
    """What garbage collection does first: delete a database that was destroyed, once its time has come.

    A database without a mark costs the mark's and the manifest's requests, and nothing happens to it. After
    `Verdict.DUE` there is nothing left to collect.
    """
    return Destroyer(store, paths, wal_store=wal_store, clock=clock, ids=ids).collect(dry_run=dry_run)


def _same_epochs(mark: Destroyed, manifest: Manifest) -> bool:
    return (mark.writer_epoch, mark.compactor_epoch) == (manifest.writer_epoch, manifest.compactor_epoch)


def _ours(store: ObjectStore, folder: str, parse: Callable[[str], object | None]) -> Iterable[str]:
    return [meta.path for meta in store.list(folder) if parse(meta.path) is not None]
