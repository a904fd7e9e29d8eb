"""Clones: a new database over the tables of others, made without copying them.

One protocol serves clones, projections and unions:

1. Pin each source with a checkpoint: the given one, or a fresh one that lives five minutes.
2. Say in `flagstone/origin` what is being made. Create manifest 1 of the clone, not initialized, which names the
   databases it borrows from and the id of a checkpoint in each.
3. Place those checkpoints, which never expire and have the name of the clone (`metadata.borrowing`). Copy the log
   of a whole clone.
4. Create manifest 2, initialized.

A crash at any step is made good by the same call: before manifest 1 it starts over, afterwards it goes on with
what that manifest says, also if the source has changed since. What it leaves meanwhile are checkpoints that expire by
themselves. If it takes longer than the source checkpoint lives, the sources may be gone; then the clone is destroyed
and made again. A call that finds a finished clone is refused: what stands there is not what the source holds now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final
from uuid import UUID

from flagstone.errors import InvalidRequest
from flagstone.metadata.borrowing import Owner, final_name, owner_of
from flagstone.metadata.manifest import (
    Checkpoint,
    ExternalDb,
    Manifest,
    add_checkpoint,
    renew_repeated_view_ids,
)
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids, ulid_ms
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import KeyRange, WalId
from flagstone.views.checkpoint import (
    create_checkpoint,
    load_pinned,
    require_initialized,
    require_live_checkpoint,
)
from flagstone.views.lineage import PinnedSource, is_same_clone, merge_lenders, sign
from flagstone.views.log_copy import copy_log, require_flushed
from flagstone.views.marks import CloneSource, Origin, load_origin, require_alive, save_origin
from flagstone.views.projection import project
from flagstone.views.union import check_adjacent, find_collisions, rename_tables, unite
from flagstone.views.writable import unite_writable
from flagstone.wal.listing import find_frontier

SOURCE_LIFETIME: Final = timedelta(seconds=300)
"""How long a clone may take, crashes included, before its sources may be collected."""

_NO_CHECKPOINT: Final = UUID(int=0)


class Cloner:
    """Makes clones inside one store; `wal_store` is where the logs are, `store` itself unless they have their own."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        wal_store: ObjectStore | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        self._store = store
        self._wal_store = wal_store or store
        self._clock = clock
        self._ids = ids

    def clone(self, to: str, sources: Sequence[CloneSource]) -> Versioned[Manifest]:
        """Make the database `to` of one source, or of several that hold different keys; returns its manifest.

        A call that was interrupted is finished by the same call. Calls with the same arguments at the same time make
        one clone, and all of them return it.

        Raises:
            InvalidRequest: a source is missing, unfinished or destroyed, its checkpoint is missing or has expired,
                its log holds rows that a projection or union would lose, sources overlap, given ranges are not
                adjacent, or there is a database at `to`: a finished clone, also of the same arguments, or another
                one. Nothing has changed then, except that checkpoints may have been added that expire.

        """
        asked = tuple(sources)
        _check_places(to, asked)
        paths = DbPaths(to)
        require_alive(self._store, paths)
        manifests = self._manifests(to)
        found = manifests.latest()
        if found is None:
            self._rehearse(asked)
            found = self._begin(manifests, asked)
        elif found.value.initialized:
            raise self._occupied(paths.root, found.value)
        else:
            self._require_same(manifests, found, asked)
        return found if found.value.initialized else self._finish(manifests, found.value, asked)

    # -- before the first manifest ------------------------------------------------------------------------

    def _rehearse(self, sources: Sequence[CloneSource]) -> None:
        """Decide everything on what is there now, so that a refusal leaves nothing behind."""
        now_s = self._clock.now_ms() // 1000
        looked = []
        for source in sources:
            manifests = self._manifests(source.path)
            require_alive(self._store, manifests.paths)
            latest = manifests.latest()
            if latest is None:
                raise InvalidRequest(f"no database at {source.path!r} in {self._store.url}; check the path")
            require_initialized(latest.value, source.path)
            if source.checkpoint is None:
                frontier = self._frontier(manifests.paths, latest.value)
                state = replace(latest.value, wal_id_last_seen=max(latest.value.wal_id_last_seen, frontier))
            else:
                held = require_live_checkpoint(latest.value, source.checkpoint, now_s=now_s)
                state = load_pinned(manifests, held).value
            looked.append(PinnedSource(source.path, _NO_CHECKPOINT, state))
        self._plan(looked, sources)

    def _begin(self, manifests: ManifestStore, sources: Sequence[CloneSource]) -> Versioned[Manifest]:
        """Pin the sources and create the first manifest, or find the one that a concurrent call created."""
        first = self._plan([self._pin(source) for source in sources], sources, manifests.paths)
        writable = unite_writable(
            [(load_origin(self._store, DbPaths(source.path)), source.range) for source in sources]
        )
        kept = save_origin(self._store, manifests.paths, Origin(tuple(sources), writable))
        if kept.sources == tuple(sources):
            with suppress(SequencedConflict):
                return manifests.create_next(first, None)
            # The same call of another process was quicker, or a database was created there.
            self._require_begun_as_clone(manifests)
        found = manifests.latest()
        if found is None or kept.sources != tuple(sources):
            raise _other_origin(manifests.paths.root, kept)
        return found

    def _pin(self, source: CloneSource) -> PinnedSource:
        manifests = self._manifests(source.path)
        if source.checkpoint is None:
            latest = manifests.require_latest().value
            created, written = create_checkpoint(
                manifests,
                clock=self._clock,
                ids=self._ids,
                lifetime=SOURCE_LIFETIME,
                last_wal_id=self._frontier(manifests.paths, latest),
            )
            return PinnedSource(source.path, created.id, written.value)
        held = require_live_checkpoint(
            manifests.require_latest().value, source.checkpoint, now_s=self._clock.now_ms() // 1000
        )
        return PinnedSource(source.path, held.id, load_pinned(manifests, held).value)

    def _plan(
        self, pinned: Sequence[PinnedSource], sources: Sequence[CloneSource], to: DbPaths | None = None
    ) -> Manifest:
        """The first manifest of the clone. With `to`, tables whose ids collide are copied there."""
        if len(pinned) == 1 and sources[0].range is None:
            return self._whole(pinned[0])
        parts = [self._part(one, source.range) for one, source in zip(pinned, sources, strict=True)]
        if len(parts) == 1:
            part = parts[0].manifest
            return self._unborn(part, merge_lenders(parts[0].lenders))
        check_adjacent(parts, [source.range for source in sources])
        apart = self._told_apart(parts, to)
        united = unite(apart)
        return replace(united, external_dbs=sign(united.external_dbs, self._ids.uuid))

    def _whole(self, source: PinnedSource) -> Manifest:
        return self._unborn(source.manifest, [lender.entry for lender in source.lenders])

    def _unborn(self, manifest: Manifest, lenders: Sequence[ExternalDb]) -> Manifest:
        return replace(
            renew_repeated_view_ids(manifest),
            checkpoints=(),
            initialized=False,
            external_dbs=sign(lenders, self._ids.uuid),
        )

    def _part(self, source: PinnedSource, keys: KeyRange | None) -> PinnedSource:
        """The source as far as it lies in the range, without a log: what that says must be in the tables."""
        manifest = source.manifest
        require_flushed(self._wal_store, DbPaths(source.path), manifest, keys)
        projected = manifest if keys is None else project(manifest, keys)
        return replace(source, manifest=replace(projected, replay_after_wal_id=projected.wal_id_last_seen))

    def _told_apart(self, parts: Sequence[PinnedSource], to: DbPaths | None) -> list[PinnedSource]:
        """The sources with different ids for different tables; a copy of a table gets a new one."""
        apart = list(parts)
        for number, sst_id in find_collisions(parts):
            part = apart[number]
            new_id = self._ids.ulid(ulid_ms(sst_id))
            if to is not None:
                # Before the manifest that refers to it, as with every table. A crash leaves it to the collector.
                self._store.copy(DbPaths(part.owner_of(sst_id)).table(sst_id), to.table(new_id))
            renamed = rename_tables(part.manifest, {sst_id: new_id})
            apart[number] = replace(part, manifest=renamed, copied=part.copied | {new_id})
        return apart

    def _frontier(self, paths: DbPaths, manifest: Manifest) -> WalId:
        """The end of a log that its writer may still be extending: what is on the store is durable."""
        return find_frontier(
            self._wal_store,
            paths,
            manifest.replay_after_wal_id,
            expected=manifest.wal_id_last_seen,
            pool=shared_pool(),
        )

    # -- after it -----------------------------------------------------------------------------------------

    def _require_same(
        self, manifests: ManifestStore, found: Versioned[Manifest], sources: tuple[CloneSource, ...]
    ) -> None:
        """Refuse to go on with an unfinished clone that is not the one asked for.

        An unfinished clone has its first manifest and no later one. One that Flagstone began says in its origin what it
        is. One that SlateDB began is the same if planning the call from the checkpoint that the manifest names
        gives the same SSTs, views and lenders again.
        """
        path = manifests.paths.root
        if self._is_unborn(manifests, found.id - 1):
            raise InvalidRequest(
                f"the unfinished clone at {path!r} was opened for writing, and may hold more than its source does; "
                "destroy it and clone again"
            )
        unborn = found.value
        origin = load_origin(self._store, manifests.paths)
        if origin is not None:
            if origin.sources != sources:
                raise _other_origin(path, origin)
            return
        if len(sources) > 1 or not any(
            is_same_clone(unborn, self._plan([pinned], sources))
            for pinned in self._pinned_again(unborn, sources[0])
        ):
            raise InvalidRequest(
                f"there is an unfinished clone at {path!r} in {self._store.url}, and it is not this one; "
                "choose another path, or destroy it first"
            )

    def _pinned_again(self, unborn: Manifest, source: CloneSource) -> Iterator[PinnedSource]:
        """What the unfinished clone may have been made from, by the checkpoints it names in the source."""
        manifests = self._manifests(source.path)
        latest = manifests.latest()
        for db in unborn.external_dbs:
            if latest is None or db.path != source.path:
                continue
            if source.checkpoint is not None and source.checkpoint != db.source_checkpoint_id:
                continue
            for checkpoint_id in (db.source_checkpoint_id, db.final_checkpoint_id):
                held = None if checkpoint_id is None else latest.value.checkpoint(checkpoint_id)
                if held is not None:
                    yield PinnedSource(
                        source.path, db.source_checkpoint_id, load_pinned(manifests, held).value
                    )
                    break

    def _require_begun_as_clone(self, manifests: ManifestStore) -> None:
        """Refuse a database that was created at the path while the clone was being planned: it never was unfinished."""
        if not any(self._is_unborn(manifests, entry.id) for entry in manifests.list()):
            raise self._occupied(manifests.paths.root, manifests.require_latest().value)

    def _is_unborn(self, manifests: ManifestStore, manifest_id: int) -> bool:
        """Whether that manifest is stored and belongs to an unfinished clone. Manifest 0 belongs to no history."""
        with suppress(ObjectMissing):
            return manifest_id > 0 and not manifests.load(manifest_id).initialized
        return False

    def _occupied(self, path: str, manifest: Manifest) -> InvalidRequest:
        """There is a finished database; says as well if a lender has lost the checkpoint that it needs."""
        lost = [
            f"the checkpoint {db.final_checkpoint_id} in {db.path!r}"
            for db in manifest.external_dbs
            if db.sst_ids and db.final_checkpoint_id is not None and not self._has_final(db)
        ]
        broken = (
            f"; it borrows by {' and '.join(lost)}, which no longer exists, so its SSTs may be deleted at any time"
            if lost
            else ""
        )
        what = "a finished clone" if manifest.external_dbs else "a database"
        return InvalidRequest(
            f"there is {what} at {path!r} in {self._store.url} already, and a clone does not replace it{broken}; "
            "choose another path, or destroy it first"
        )

    def _has_final(self, lender: ExternalDb) -> bool:
        latest = self._manifests(lender.path).latest()
        return (
            latest is not None
            and lender.final_checkpoint_id is not None
            and latest.value.checkpoint(lender.final_checkpoint_id) is not None
        )

    def _finish(
        self, manifests: ManifestStore, unborn: Manifest, sources: Sequence[CloneSource]
    ) -> Versioned[Manifest]:
        for lender in unborn.external_dbs:
            self._place_checkpoint(lender, manifests.paths.root)
        if len(sources) == 1 and sources[0].range is None:
            copy_log(self._wal_store, DbPaths(sources[0].path), manifests.paths, unborn)
        return manifests.update(lambda now: replace(now.value, initialized=True))

    def _place_checkpoint(self, lender: ExternalDb, borrower: str) -> None:
        """Make a lender keep what the clone borrows, for as long as it borrows it. One that is there stays."""
        final_id = lender.final_checkpoint_id
        if final_id is None:
            return

        def edit(now: Versioned[Manifest]) -> Manifest | None:
            held = now.value.checkpoint(final_id)
            if owner_of(held, borrower) is Owner.OTHER:
                raise InvalidRequest(
                    f"the unfinished clone at {borrower!r} lists the checkpoint {final_id} of {lender.path!r}, but "
                    f"that is another's ({held.name if held else None!r}): a copy; destroy it and clone again"
                )
            if held is not None and held.expires_s is None:
                return None
            # Expired is good enough here: while the manifest has it, nothing it pins was collected.
            source = held or now.value.checkpoint(lender.source_checkpoint_id)
            if source is None:
                raise InvalidRequest(
                    f"the checkpoint {lender.source_checkpoint_id} of {lender.path!r}, which this clone is made from, "
                    f"has expired and was collected; destroy the unfinished clone at {borrower!r} and make it again"
                )
            created_s = self._clock.now_ms() // 1000
            placed = Checkpoint(final_id, source.manifest_id, created_s, name=final_name(borrower))
            return add_checkpoint(now.value, placed)

        self._manifests(lender.path).update(edit)

    def _manifests(self, path: str) -> ManifestStore:
        return ManifestStore(self._store, DbPaths(path), clock=self._clock, ids=self._ids)


def _check_places(to: str, sources: Sequence[CloneSource]) -> None:
    if not sources:
        raise InvalidRequest("a clone needs a source")
    if not to:
        raise InvalidRequest("a clone needs a path of its own inside the store")
    paths = [source.path for source in sources]
    if to in paths:
        raise InvalidRequest(f"{to!r} cannot be a clone of itself; choose another path")
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        named = ", ".join(map(repr, twice))
        raise InvalidRequest(f"{named} is named twice; each source of a union is another database")


def _other_origin(path: str, origin: Origin) -> InvalidRequest:
    made_of = ", ".join(
        repr(source.path)
        + ("" if source.checkpoint is None else f" at checkpoint {source.checkpoint}")
        + ("" if source.range is None else f" from {source.range.start!r} to {source.range.stop!r}")
        for source in origin.sources
    )
    return InvalidRequest(
        f"there is a clone at {path!r} already, begun with other arguments: of {made_of}; repeat that call to finish "
        "it, choose another path, or destroy it first"
    )
