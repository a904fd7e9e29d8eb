"""Clones: a new database that uses the SSTs of others, without copying them.

One protocol serves clones, projections and unions:

1. Keep each source with a checkpoint: the given one, or a new one that lives five minutes.
2. Write the sources to `flagstone/origin`. Create manifest 1 of the clone, not initialized, which lists the lenders and
   the id of a final checkpoint in each.
3. Place the final checkpoints, which never expire and have the name of the clone (`metadata.borrowing`). Copy the WAL
   if the whole database is cloned.
4. Create manifest 2, initialized.

After a crash at any step the same call finishes the clone: before manifest 1 it starts over, afterwards it continues
from that manifest, also if the source has changed since. An interrupted call leaves only checkpoints that expire. If it
is not repeated before the source checkpoint expires, the sources may be gone; then the clone has to be destroyed and
made again. A call that finds a finished clone is refused: the source may have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final
from uuid import UUID

from flagstone.clones.checkpoint import (
    create_checkpoint,
    load_checkpointed,
    require_flushed,
    require_initialized,
    require_live_checkpoint,
)
from flagstone.clones.origin import (
    CheckpointedSource,
    CloneSource,
    Origin,
    add_final_checkpoints,
    is_same_clone,
    load_origin,
    merge_lenders,
    require_alive,
    save_origin,
    unite_writable,
)
from flagstone.clones.projection import project
from flagstone.clones.union import check_adjacent, find_collisions, rename_ssts, unite
from flagstone.errors import InvalidRequest
from flagstone.metadata.annotations import final_name
from flagstone.metadata.borrowing import Owner, owner_of
from flagstone.metadata.destruction import wal_shift
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
from flagstone.store.port import ObjectExists, ObjectMissing, ObjectStore
from flagstone.types import KeyRange, WalId
from flagstone.wal.frontier import find_frontier
from flagstone.wal.replay import decode_wal

SOURCE_LIFETIME: Final = timedelta(seconds=300)
"""How long a clone may take, including repeated calls, before garbage collection may delete its sources."""

_NO_CHECKPOINT: Final = UUID(int=0)
_COPIED_AT_ONCE: Final = 64


class Cloner:
    """Makes clones inside one store; `wal_store` holds the WALs, by default `store`."""

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

        The same call finishes an interrupted one. Concurrent calls with the same arguments make one clone, and all
        return it.

        Raises:
            InvalidRequest: a source is missing, unfinished or destroyed, its checkpoint is missing or has expired,
                its WAL holds rows that a projection or union would lose, sources overlap, given ranges are not
                adjacent, or there is a database at `to`: a finished clone, also of the same arguments, or another
                database. Nothing has changed then, except that checkpoints may have been added that expire.

        """
        asked = tuple(sources)
        _check_paths(to, asked)
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
        """Plan the clone on the current state, so that a refusal leaves nothing behind."""
        now_s = self._clock.now_ms() // 1000
        current = []
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
                state = load_checkpointed(manifests, held).value
            current.append(CheckpointedSource(source.path, _NO_CHECKPOINT, state))
        self._plan(current, sources)

    def _begin(self, manifests: ManifestStore, sources: Sequence[CloneSource]) -> Versioned[Manifest]:
        """Take checkpoints of the sources and create the first manifest, or find the one of a concurrent call."""
        first = self._plan([self._take_checkpoint(source) for source in sources], sources, manifests.paths)
        writable = unite_writable(
            [(load_origin(self._store, DbPaths(source.path)), source.range) for source in sources]
        )
        kept = save_origin(self._store, manifests.paths, Origin(tuple(sources), writable))
        if kept.sources == tuple(sources):
            with suppress(SequencedConflict):
                return manifests.create_next(first, None)
            # Another process has made the same call, or created a database there.
            self._require_begun_as_clone(manifests)
        found = manifests.latest()
        if found is None or kept.sources != tuple(sources):
            raise _other_origin(manifests.paths.root, kept)
        return found

    def _take_checkpoint(self, source: CloneSource) -> CheckpointedSource:
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
            return CheckpointedSource(source.path, created.id, written.value)
        held = require_live_checkpoint(
            manifests.require_latest().value, source.checkpoint, now_s=self._clock.now_ms() // 1000
        )
        return CheckpointedSource(source.path, held.id, load_checkpointed(manifests, held).value)

    def _plan(
        self,
        checkpointed: Sequence[CheckpointedSource],
        sources: Sequence[CloneSource],
        to: DbPaths | None = None,
    ) -> Manifest:
        """The first manifest of the clone. With `to`, SSTs whose ids collide are copied there."""
        if len(checkpointed) == 1 and sources[0].range is None:
            return self._whole(checkpointed[0])
        parts = [self._part(one, source.range) for one, source in zip(checkpointed, sources, strict=True)]
        if len(parts) == 1:
            part = parts[0].manifest
            return self._unfinished(part, merge_lenders(parts[0].lenders))
        check_adjacent(parts, [source.range for source in sources])
        apart = self._with_distinct_ids(parts, to)
        united = unite(apart)
        return replace(united, external_dbs=add_final_checkpoints(united.external_dbs, self._ids.uuid))

    def _whole(self, source: CheckpointedSource) -> Manifest:
        return self._unfinished(source.manifest, [lender.entry for lender in source.lenders])

    def _unfinished(self, manifest: Manifest, lenders: Sequence[ExternalDb]) -> Manifest:
        return replace(
            renew_repeated_view_ids(manifest),
            checkpoints=(),
            initialized=False,
            external_dbs=add_final_checkpoints(lenders, self._ids.uuid),
        )

    def _part(self, source: CheckpointedSource, keys: KeyRange | None) -> CheckpointedSource:
        """The source restricted to the range, without its WAL: all rows must be in SSTs."""
        manifest = source.manifest
        require_flushed(self._wal_store, DbPaths(source.path), manifest, keys)
        projected = manifest if keys is None else project(manifest, keys)
        return replace(source, manifest=replace(projected, replay_after_wal_id=projected.wal_id_last_seen))

    def _with_distinct_ids(
        self, parts: Sequence[CheckpointedSource], to: DbPaths | None
    ) -> list[CheckpointedSource]:
        """The sources with different ids for different SSTs; SSTs whose ids collide are copied under new ids."""
        apart = list(parts)
        for number, sst_id in find_collisions(parts):
            part = apart[number]
            new_id = self._ids.ulid(ulid_ms(sst_id))
            if to is not None:
                # Before the manifest that refers to it, like every SST. After a crash the copy is garbage.
                self._store.copy(DbPaths(part.owner_of(sst_id)).sst(sst_id), to.sst(new_id))
            renamed = rename_ssts(part.manifest, {sst_id: new_id})
            apart[number] = replace(part, manifest=renamed, copied=part.copied | {new_id})
        return apart

    def _frontier(self, paths: DbPaths, manifest: Manifest) -> WalId:
        """The last WAL file, which an active writer may extend: every file on the store is durable."""
        return find_frontier(self._wal_store, paths, manifest, pool=shared_pool())

    # -- after it -----------------------------------------------------------------------------------------

    def _require_same(
        self, manifests: ManifestStore, found: Versioned[Manifest], sources: tuple[CloneSource, ...]
    ) -> None:
        """Refuse to continue an unfinished clone that is not the requested one.

        An unfinished clone has its first manifest and no later one. If Flagstone began it, its origin has the sources.
        If SlateDB began it, it is the requested one if a plan from the checkpoint that its manifest names gives the
        same SSTs, views and lenders.
        """
        path = manifests.paths.root
        if self._is_unfinished(manifests, found.id - 1):
            raise InvalidRequest(
                f"the unfinished clone at {path!r} was opened for writing, and may hold more than its source does; "
                "destroy it and clone again"
            )
        unfinished = found.value
        origin = load_origin(self._store, manifests.paths)
        if origin is not None:
            if origin.sources != sources:
                raise _other_origin(path, origin)
            return
        if len(sources) > 1 or not any(
            is_same_clone(unfinished, self._plan([checkpointed], sources))
            for checkpointed in self._sources_again(unfinished, sources[0])
        ):
            raise InvalidRequest(
                f"there is an unfinished clone at {path!r} in {self._store.url}, and it is not this one; "
                "choose another path, or destroy it first"
            )

    def _sources_again(self, unfinished: Manifest, source: CloneSource) -> Iterator[CheckpointedSource]:
        """The states that the unfinished clone may have been made from, by the checkpoints it names in the source."""
        manifests = self._manifests(source.path)
        latest = manifests.latest()
        for db in unfinished.external_dbs:
            if latest is None or db.path != source.path:
                continue
            if source.checkpoint is not None and source.checkpoint != db.source_checkpoint_id:
                continue
            for checkpoint_id in (db.source_checkpoint_id, db.final_checkpoint_id):
                held = None if checkpoint_id is None else latest.value.checkpoint(checkpoint_id)
                if held is not None:
                    yield CheckpointedSource(
                        source.path, db.source_checkpoint_id, load_checkpointed(manifests, held).value
                    )
                    break

    def _require_begun_as_clone(self, manifests: ManifestStore) -> None:
        """Refuse a database that was created at the path meanwhile: none of its manifests is of an unfinished clone."""
        if not any(self._is_unfinished(manifests, entry.id) for entry in manifests.list()):
            raise self._occupied(manifests.paths.root, manifests.require_latest().value)

    def _is_unfinished(self, manifests: ManifestStore, manifest_id: int) -> bool:
        """Whether that manifest exists and belongs to an unfinished clone. Manifest 0 is for retention checkpoints."""
        with suppress(ObjectMissing):
            return manifest_id > 0 and not manifests.load(manifest_id).initialized
        return False

    def _occupied(self, path: str, manifest: Manifest) -> InvalidRequest:
        """The error about a finished database at the path; also names final checkpoints that lenders have lost."""
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
        self, manifests: ManifestStore, unfinished: Manifest, sources: Sequence[CloneSource]
    ) -> Versioned[Manifest]:
        for lender in unfinished.external_dbs:
            self._place_checkpoint(lender, manifests.paths.root)
        if len(sources) == 1 and sources[0].range is None:
            copy_wal(self._wal_store, DbPaths(sources[0].path), manifests.paths, unfinished)
        return manifests.update(lambda now: replace(now.value, initialized=True))

    def _place_checkpoint(self, lender: ExternalDb, borrower: str) -> None:
        """Place the final checkpoint in a lender, which keeps the borrowed SSTs. One that exists stays."""
        final_id = lender.final_checkpoint_id
        if final_id is None:
            return

        def edit(now: Versioned[Manifest]) -> Manifest | None:
            held = now.value.checkpoint(final_id)
            if owner_of(held, borrower) is Owner.OTHER:
                raise InvalidRequest(
                    f"the unfinished clone at {borrower!r} lists the checkpoint {final_id} of {lender.path!r}, but "
                    f"that one is of another database ({held.name if held else None!r}), so this is a copy; destroy it "
                    "and clone again"
                )
            if held is not None and held.expires_s is None:
                return None
            # An expired one will do: while the manifest lists it, nothing it keeps was deleted.
            source = held or now.value.checkpoint(lender.source_checkpoint_id)
            if source is None:
                raise InvalidRequest(
                    f"the checkpoint {lender.source_checkpoint_id} of {lender.path!r}, which this clone is made from, "
                    f"has expired and was deleted; destroy the unfinished clone at {borrower!r} and make it again"
                )
            created_s = self._clock.now_ms() // 1000
            placed = Checkpoint(final_id, source.manifest_id, created_s, name=final_name(borrower))
            return add_checkpoint(now.value, placed)

        self._manifests(lender.path).update(edit)

    def _manifests(self, path: str) -> ManifestStore:
        return ManifestStore(self._store, DbPaths(path), clock=self._clock, ids=self._ids)


def copy_wal(wal_store: ObjectStore, source: DbPaths, to: DbPaths, manifest: Manifest) -> None:
    """Copy the WAL of a checkpoint's state under the same ids; under higher ones if a database was destroyed at `to`.

    A crash leaves some of the files; copying again adds the others. A file that exists already must be the same: if it
    differs, a writer has opened the unfinished clone. A damaged file is not copied, because the damage would stay in
    the copy: it raises `CorruptData`, and after a repair of the source the clone can be finished.
    """
    shift = wal_shift(manifest)

    def copy(wal_id: int) -> None:
        origin = source.wal(WalId(wal_id - shift))
        try:
            data = wal_store.get(origin).data
        except ObjectMissing:
            raise InvalidRequest(
                f"{origin} is gone, so the checkpoint this clone is made from has expired and was "
                f"deleted; destroy the unfinished clone at {to.root!r} and make it again"
            ) from None
        decode_wal(data, origin)
        path = to.wal(WalId(wal_id))
        try:
            wal_store.put_if_absent(path, data)
        except ObjectExists:
            if wal_store.get(path).data != data:
                raise InvalidRequest(
                    f"{path} differs from {origin}: the unfinished clone was opened for writing; "
                    f"destroy {to.root!r} and clone again"
                ) from None

    first, end = manifest.replay_after_wal_id + 1, manifest.wal_id_last_seen + 1
    # A few at a time: the first missing file ends it, however many files a damaged manifest names.
    for start in range(first, end, _COPIED_AT_ONCE):
        shared_pool().map_ordered(copy, range(start, min(start + _COPIED_AT_ONCE, end)))


def _check_paths(to: str, sources: Sequence[CloneSource]) -> None:
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
