"""The part of `Admin` that deals with pictures of a database: manifests, checkpoints, clones, and its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from flagstone.config.durations import as_duration
from flagstone.db.garbage import make_room
from flagstone.errors import InvalidRequest
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.destruction import is_mark
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.sequenced import Listed, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore, StoreFull
from flagstone.store.resolve import resolve_neighbour
from flagstone.types import KeyRange
from flagstone.views import checkpoint as checkpoints
from flagstone.views.borrowers import require_unneeded
from flagstone.views.checkpoint import parse_checkpoint_id
from flagstone.views.clone import Cloner
from flagstone.views.destroy import GRACE, Destroyer, Destruction
from flagstone.views.marks import CloneSource, refuse_destroyed
from flagstone.views.residue import PURGE_AGE
from flagstone.views.restore import restore
from flagstone.wal.listing import find_frontier

Keys = KeyRange | tuple[bytes | None, bytes | None]
"""A range of keys: start included, stop not; None leaves that side open."""

SourceLike = CloneSource | str | os.PathLike[str]


class AdminViews:
    """Manifests, checkpoints, clones, restoring and destroying. Made by `Admin`, which opens the stores."""

    _store: ObjectStore
    _wal_store: ObjectStore
    _paths: DbPaths
    _by_folder: bool
    _clock: Clock
    _ids: Ids

    # -- manifests and checkpoints ------------------------------------------------------------------------

    def manifests(self) -> list[Listed]:
        """The stored versions of the manifest, ascending: number, size and time of each."""
        found = list(self._manifest_store().list())
        if not found:
            self._latest()  # says that there is no database
        return found

    def manifest(self, id: int | None = None) -> Versioned[Manifest]:  # noqa: A002 - the name users know
        """One version of the manifest, by default the current one, with its number.

        Raises:
            InvalidRequest: there is no such version, or no database.

        """
        if id is None:
            return self._latest()
        try:
            return Versioned(id, self._manifest_store().load(id))
        except ObjectMissing:
            numbers = [entry.id for entry in self.manifests()]
            raise InvalidRequest(
                f"no manifest {id} of {self._paths.root!r}: stored are {numbers[0]} to {numbers[-1]}, less what "
                "was collected in between"
            ) from None

    def checkpoints(self, name: str | None = None) -> tuple[Checkpoint, ...]:
        """The checkpoints of the database, oldest first; with `name` those of exactly that name.

        An empty `name` asks for the checkpoints without one. The mark of a destroyed database, which is stored as a
        checkpoint, is left out.
        """
        held = tuple(entry for entry in self._latest().value.checkpoints if not is_mark(entry))
        return held if name is None else tuple(entry for entry in held if (entry.name or "") == name)

    def create_checkpoint(
        self,
        lifetime: timedelta | str | None = None,
        source: UUID | str | None = None,
        name: str | None = None,
    ) -> Checkpoint:
        """Pin what is on the store now, or once more what the checkpoint `source` pins.

        Everything durable is included, also what a running writer has only in its log; what it has only in memory
        is not: use `Db.checkpoint` for that. Without a lifetime it stays until it is deleted.

        Raises:
            InvalidRequest: no database, no such `source` or it has expired, or the lifetime is under a second.

        """
        latest = self._latest().value
        refuse_destroyed(latest, self._store, self._paths)
        frontier = None
        if source is None:
            frontier = find_frontier(
                self._wal_store,
                self._paths,
                latest.replay_after_wal_id,
                expected=latest.wal_id_last_seen,
                pool=shared_pool(),
            )
        created, _ = checkpoints.create_checkpoint(
            self._manifest_store(),
            clock=self._clock,
            ids=self._ids,
            lifetime=lifetime,
            name=name,
            source=None if source is None else parse_checkpoint_id(source),
            last_wal_id=frontier,
        )
        return created

    def refresh_checkpoint(
        self,
        id: UUID | str,  # noqa: A002 - the name users know
        lifetime: timedelta | str | None = None,
        *,
        force: bool = False,
    ) -> Checkpoint:
        """Let a checkpoint live `lifetime` from now on, or for ever.

        Raises:
            InvalidRequest: there is no such checkpoint; or a living clone borrows by it, so that it must not expire,
                and `force` is False.

        """
        wanted = parse_checkpoint_id(id)
        latest = self._latest().value
        refuse_destroyed(latest, self._store, self._paths)
        held = checkpoints.require_checkpoint(latest, wanted)
        if lifetime is not None and not force:
            require_unneeded(self._store, self._manifest_store(), held)
        return checkpoints.refresh_checkpoint(
            self._manifest_store(), wanted, clock=self._clock, lifetime=lifetime
        )

    def delete_checkpoint(self, id: UUID | str, *, force: bool = False) -> None:  # noqa: A002 - the name users know
        """Delete a checkpoint: what only it pins may be collected.

        Raises:
            InvalidRequest: there is no such checkpoint; or a living clone borrows by it and `force` is False.
                With `force` it is deleted, and that clone loses the SSTs it borrows.

        """
        wanted = parse_checkpoint_id(id)
        held = checkpoints.require_checkpoint(self._latest().value, wanted)
        if not force:
            require_unneeded(self._store, self._manifest_store(), held)
        checkpoints.delete_checkpoint(self._manifest_store(), wanted)

    # -- other databases over the same tables -------------------------------------------------------------

    def clone(
        self,
        to: str | os.PathLike[str],
        *,
        checkpoint: UUID | str | None = None,
        range: Keys | None = None,  # noqa: A002 - the name users know
    ) -> Versioned[Manifest]:
        """Make a database at `to` that begins with what this one holds, or what `checkpoint` pins, of all or one range.

        No table is copied: the clone borrows them, and this database keeps them for it. `to` is a name beside this
        database, or an address as for `flagstone.open` that leads into the same store. With `range` (start included,
        stop not) the clone holds that part, and takes no write and no read outside of it. A call that was interrupted
        is finished by the same call; a clone that is finished is not made again.

        Raises:
            InvalidRequest: there is a database at `to` already, or see `Cloner.clone`; nothing was made then.

        """
        source = CloneSource(
            self._paths.root,
            None if checkpoint is None else parse_checkpoint_id(checkpoint),
            _key_range(range),
        )
        return self._cloner().clone(self._inside(to), [source])

    def union(self, to: str | os.PathLike[str], sources: Sequence[SourceLike]) -> Versioned[Manifest]:
        """Make a database at `to` of this one and of `sources`, which hold different keys.

        Sources are paths, or `CloneSource`s where a checkpoint or range is wanted; this database may be among them.
        Ranges that are given must be adjacent. All must be flushed: a log is not taken over. Tables are borrowed, as
        with `clone`.

        Raises:
            InvalidRequest: two databases overlap, given ranges leave a gap or overlap, there is a database at `to`
                already, or see `Cloner.clone`; nothing was made then.

        """
        named = [
            CloneSource(self._inside(source.path), source.checkpoint, _key_range(source.range))
            if isinstance(source, CloneSource)
            else CloneSource(self._inside(source))
            for source in sources
        ]
        target, own = self._inside(to), self._paths.root
        if own != target and own not in [source.path for source in named]:
            named.insert(0, CloneSource(own))
        return self._cloner().clone(target, named)

    def restore(
        self, checkpoint: UUID | str, *, segment_extractor: SegmentExtractor | None = None
    ) -> Versioned[Manifest]:
        """Make what `checkpoint` pins the current state again. What was written since is given up.

        A writer or compactor that is at work is replaced, and learns it at its next durable write. Checkpoints stay:
        to be able to go back, create one of the present state first.

        Raises:
            InvalidRequest: no such checkpoint, or it has expired.
            Closed: somebody opened the database meanwhile; nothing was restored.

        """
        wanted = parse_checkpoint_id(checkpoint)
        self._latest()
        return restore(
            self._store,
            self._paths,
            wanted,
            wal_store=self._wal_store,
            clock=self._clock,
            ids=self._ids,
            segment_extractor=segment_extractor,
        )

    def destroy(
        self, soft: bool = False, *, grace: timedelta | str = GRACE, dry_run: bool = False
    ) -> Destruction:
        """Delete the database and release what it borrowed: now, or with `soft` by garbage collection after `grace`.

        From here on no call opens it, claims it or adds a checkpoint, and a writer or compactor that is at work is
        replaced. Deleting now is refused while there are live checkpoints; a soft destruction waits for them. A call
        that was interrupted is finished by calling again. With `dry_run` nothing happens, and `deleted` names what
        would go.

        A few small objects stay (`kept`): they keep requests of former processes from being taken for those of the next
        database at this path, which continues their ids. `purge` removes them.

        Raises:
            InvalidRequest: there is no database, or live checkpoints forbid it; nothing has changed then.

        """
        destroyer = Destroyer(
            self._store, self._paths, wal_store=self._wal_store, clock=self._clock, ids=self._ids
        )
        try:
            return destroyer.destroy(soft=soft, grace=grace, dry_run=dry_run)
        except StoreFull:
            # A destruction begins with a mark and a claim, which need a little room; garbage makes it.
            make_room(self._store, self._paths, wal_store=self._wal_store, clock=self._clock, ids=self._ids)
            return destroyer.destroy(soft=soft, grace=grace, dry_run=dry_run)

    def purge(self, *, min_age: timedelta | str = PURGE_AGE) -> tuple[str, ...]:
        """Delete what a destroyed database has left at this path; returns the objects deleted.

        Only when every process that used the database has ended: a late request of one would afterwards be taken
        for one of the next database's.

        Raises:
            InvalidRequest: there is a database, or none was destroyed here, or less than `min_age` ago.

        """
        destroyer = Destroyer(
            self._store, self._paths, wal_store=self._wal_store, clock=self._clock, ids=self._ids
        )
        return destroyer.purge(min_age=as_duration(min_age, "min_age", minimum=timedelta(0)))

    # -- inside -------------------------------------------------------------------------------------------

    def _manifest_store(self) -> ManifestStore:
        return ManifestStore(self._store, self._paths, clock=self._clock, ids=self._ids)

    def _latest(self) -> Versioned[Manifest]:
        return self._manifest_store().require_latest()

    def _cloner(self) -> Cloner:
        return Cloner(self._store, wal_store=self._wal_store, clock=self._clock, ids=self._ids)

    def _inside(self, address: str | os.PathLike[str]) -> str:
        """The path inside the store. Whoever named this database by its folder names others so, too."""
        text = os.fspath(address)
        if self._by_folder and "/" in text and "://" not in text:
            text = str(Path(text).expanduser().absolute())
        return resolve_neighbour(text, self._store)


def _key_range(keys: Keys | None) -> KeyRange | None:
    if keys is None or isinstance(keys, KeyRange):
        return None if keys == KeyRange() else keys
    start, stop = keys
    if not all(key is None or isinstance(key, bytes) for key in (start, stop)):
        raise InvalidRequest(f"a range is a pair of keys (bytes, or None for an open side), not {keys!r}")
    return _key_range(KeyRange(start or None, stop))
