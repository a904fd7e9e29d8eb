"""`Admin`: inspects and maintains a database without opening it for writing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

from flagstone.clones import checkpoint as checkpoints
from flagstone.clones.checkpoint import find_checkpoint, require_unneeded
from flagstone.clones.clone import Cloner
from flagstone.clones.destroy import GRACE, Destroyer, Destruction
from flagstone.clones.origin import CloneSource, load_origin, refuse_destroyed
from flagstone.clones.residue import PURGE_AGE
from flagstone.config import GarbageCollectorOptions
from flagstone.config.durations import as_duration
from flagstone.db.admin.compaction import AdminCompaction
from flagstone.db.admin.diff import Diff
from flagstone.db.admin.garbage import make_room, open_collector
from flagstone.db.admin.loads import AdminLoads
from flagstone.db.admin.restored_schemas import restore_with_schemas
from flagstone.db.read_methods import check_range
from flagstone.db.reader import as_of
from flagstone.db.reader.reader import open_reader
from flagstone.db.reader.schemas import read_schemas
from flagstone.errors import InvalidRequest
from flagstone.gc.plan import Kind, requested_options
from flagstone.gc.report import GarbageReport
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.lsm.sequence import Rounding
from flagstone.metadata.annotations import is_record
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.sequenced import Listed, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.repair.plan import RepairReport, report_of
from flagstone.repair.repairer import Repairer, finished
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.pool import shared_pool
from flagstone.schema.table_schema import TableSchema
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, StoreFull
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_neighbour, resolve_wal_store
from flagstone.store.retrying import with_retries
from flagstone.types import KeyRange
from flagstone.verification.report import Report
from flagstone.verification.ssts import Checker
from flagstone.verification.verifier import Verifier
from flagstone.wal.frontier import find_frontier

Keys = KeyRange | tuple[bytes | None, bytes | None]
"""A range of keys: start included, stop not; None leaves that side open."""

SourceLike = CloneSource | str | os.PathLike[str]


class Admin(AdminCompaction, AdminLoads):
    """Inspects and maintains the database at `path`. Makes no request before the first call.

    Addresses are those of `flagstone.open`: a folder, `file://`, `memory://NAME/path`, `s3://bucket/path` and so
    on, or a path inside `store`. `wal_store` is the store of the WAL, if it has one of its own.

    An `Admin` can be pickled and used in another process. Credentials are left out, unless an option of the store
    includes them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        store: StoreLike | None = None,
        store_options: Mapping[str, OptionValue] | None = None,
        wal_store: StoreLike | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        found, root = resolve_database(path, store, store_options)
        self._clock = clock
        self._ids = ids
        self._paths = DbPaths(root)
        self._by_folder = store is None and found.url.startswith("file:")
        self._store = with_retries(found, clock=clock, ids=ids)
        self._wal_store = (
            self._store
            if wal_store is None
            else with_retries(resolve_wal_store(wal_store, found, store_options), clock=clock, ids=ids)
        )

    def __repr__(self) -> str:
        return f"Admin({self._paths.root!r}, store={self._store.url!r})"

    def verify(self, *, checker: Checker | None = None) -> Report:
        """Read every object, check every checksum, filter, order and reference, and report what is wrong.

        Reads only, and may run beside a writer. A `checker` reads the SSTs and WAL files instead of this process.

        Raises:
            InvalidRequest: there is no database at that path.
            Unavailable: the store did not answer.

        """
        verifier = Verifier(
            self._store, self._paths, wal_store=self._wal_store, checker=checker, clock=self._clock
        )
        return verifier.verify()

    def collect_garbage(
        self,
        *,
        kinds: Iterable[Kind] | None = None,
        min_age: timedelta | str | None = None,
        dry_run: bool = False,
        options: GarbageCollectorOptions | None = None,
    ) -> GarbageReport:
        """Delete once the objects that nothing refers to. May run beside writers, compactors and other collectors.

        `kinds` are some of manifest, compactions, wal, wal_fence, compacted, detach and two_phase; all by default,
        with fences only reported. `min_age` replaces the ages in `options`. The report lists what could not be deleted.
        A softly destroyed database is deleted as a whole when its grace period is over.

        Raises:
            InvalidRequest: there is no database at that path, or an argument is wrong.
            Unavailable: the store did not answer.

        """
        options = options or GarbageCollectorOptions()
        collector = open_collector(
            self._store,
            self._paths,
            requested_options(options, kinds, min_age),
            wal_store=self._wal_store,
            boundary_files=options.boundary_files_enabled,
            clock=self._clock,
            ids=self._ids,
        )
        return collector.collect(dry_run=dry_run)

    def sequence_at(self, time: datetime, *, rounding: Rounding = "down") -> int | None:
        """The last sequence number known to have been current at `time` (`up`: the first known after it), or None.

        The manifest records at most one sequence number per minute. `time` needs a time zone.

        Raises:
            InvalidRequest: there is no database, or `time` has no time zone.

        """
        return as_of.sequence_at(self._latest().value, time, rounding)

    def time_of(self, sequence: int, *, rounding: Rounding = "down") -> datetime | None:
        """When the last known sequence number up to `sequence` was current (`up`: the first from it on), or None."""
        return as_of.time_of(self._latest().value, sequence, rounding)

    def diff(
        self,
        before: UUID | str,
        after: UUID | str,
        *,
        start: bytes | None = None,
        stop: bytes | None = None,
        prefix: bytes | None = None,
        include_system: bool = False,
        merge_operator: MergeOperator | None = None,
    ) -> Diff:
        """The keys whose rows differ between two checkpoints, in [start, stop) or with `prefix`, ordered by key.

        Iterate it for `(key, before, after)`, or `.arrow()` for record batches. It reads the SSTs that only one of the
        two has, and of the others the blocks with the same keys. Rows that had expired by the later checkpoint are left
        out of both, so a key that only expired is no difference. System rows are left out unless `include_system`. The
        checkpoints must outlive the iteration.

        Raises:
            InvalidRequest: there is no database or no such checkpoint, or merge operands without a `merge_operator`.

        """
        return Diff(
            ManifestStore(self._store, self._paths),
            self._store,
            self._wal_store,
            self._checkpoint_id(before, newest=True),
            self._checkpoint_id(after, newest=True),
            keys=check_range(start, stop, prefix),
            include_system=include_system,
            merge_operator=merge_operator,
        )

    def schema(self, prefix: bytes = b"") -> TableSchema | None:
        """The newest schema of the rows under `prefix`, by default of the whole database. Raises as `schemas` does."""
        return self.schemas().get(prefix)

    def schemas(self) -> dict[bytes, TableSchema]:
        """The newest schemas of structured rows, by the prefix of the keys that they are for.

        Raises `InvalidRequest` without a database, and `CorruptData` for a damaged row.
        """
        wal_store = None if self._wal_store is self._store else self._wal_store
        with open_reader(self._paths.root, store=self._store, wal_store=wal_store, mode="latest") as reader:
            return read_schemas(reader)

    def repair(
        self, *, plan_only: bool = True, segment_extractor: SegmentExtractor | None = None
    ) -> RepairReport:
        """Report what is wrong with the database and what a repair would lose; with `plan_only=False`, repair it.

        A sound database is not changed. Planning reads only. A repair first ends the WAL with a fence, which fences a
        running writer: stop it before. Removed objects are copied below `flagstone/repair/` of the database and stay
        there until you delete them. A crash during the repair leaves the database as it was, or sound; repeat the call.
        `segment_extractor` is needed only if the WAL holds the first rows of a segment.

        Raises:
            InvalidRequest: there is nothing at that path, or rows of the WAL need the segment extractor.
            TransactionConflict: another process writes manifests at the same time.
            Unavailable: the store did not answer.

        """
        repairer = Repairer(
            self._store,
            self._paths,
            wal_store=self._wal_store,
            clock=self._clock,
            ids=self._ids,
            has_origin=lambda: load_origin(self._store, self._paths) is not None,
            segment_extractor=segment_extractor,
        )
        plan = repairer.plan()
        if plan.sound and plan.manifest_id is None:
            raise InvalidRequest(
                f"no database at {self._paths.root!r} in {self._store.url}, and nothing to rebuild one from; check "
                "the path"
            )
        if plan_only or not plan.repairable:
            return report_of(plan)
        if plan.finish_clone:
            return finished(report_of(plan), self._finish_clone())
        return repairer.apply(plan)

    # -- manifests and checkpoints ------------------------------------------------------------------------

    def manifests(self) -> list[Listed]:
        """The stored manifests, ascending: id, size and time of each."""
        found = list(self._manifest_store().list())
        if not found:
            self._latest()  # raises that there is no database
        return found

    def manifest(self, id: int | None = None) -> Versioned[Manifest]:  # noqa: A002 - the name users know
        """One manifest with its id, by default the latest one.

        Raises:
            InvalidRequest: there is no such manifest, or no database.

        """
        if id is None:
            return self._latest()
        try:
            return Versioned(id, self._manifest_store().load(id))
        except ObjectMissing:
            ids = [entry.id for entry in self.manifests()]
            raise InvalidRequest(
                f"no manifest {id} of {self._paths.root!r}: stored are {ids[0]} to {ids[-1]}, without those that were "
                "collected in between"
            ) from None

    def checkpoints(self, name: str | None = None) -> tuple[Checkpoint, ...]:
        """The checkpoints of the database, oldest first; with `name` those of exactly that name.

        An empty `name` selects the checkpoints without a name. The entry that records a destruction, which is stored as
        a checkpoint, is left out.
        """
        held = tuple(entry for entry in self._latest().value.checkpoints if not is_record(entry))
        return held if name is None else tuple(entry for entry in held if (entry.name or "") == name)

    def create_checkpoint(
        self,
        lifetime: timedelta | str | None = None,
        source: UUID | str | None = None,
        name: str | None = None,
    ) -> Checkpoint:
        """Create a checkpoint of what is on the store now, or of the same manifest as the checkpoint `source`.

        It includes everything durable, also rows that are only in the WAL. It does not include rows that a running
        writer has only in memory: use `Db.checkpoint` for those. Without a lifetime it stays until it is deleted.

        Raises:
            InvalidRequest: no database, no such `source` or it has expired, or the lifetime is under a second.

        """
        latest = self._latest().value
        refuse_destroyed(latest, self._store, self._paths)
        frontier = None
        if source is None:
            frontier = find_frontier(self._wal_store, self._paths, latest, pool=shared_pool())
        created, _ = checkpoints.create_checkpoint(
            self._manifest_store(),
            clock=self._clock,
            ids=self._ids,
            lifetime=lifetime,
            name=name,
            source=None if source is None else self._checkpoint_id(source, newest=True),
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
        """Let a checkpoint expire `lifetime` from now, or never.

        Raises:
            InvalidRequest: there is no such checkpoint; or a clone needs its SSTs, so that it must not expire, and
                `force` is False.

        """
        wanted = self._checkpoint_id(id)
        latest = self._latest().value
        refuse_destroyed(latest, self._store, self._paths)
        held = checkpoints.require_checkpoint(latest, wanted)
        if lifetime is not None and not force:
            require_unneeded(self._store, self._manifest_store(), held)
        return checkpoints.refresh_checkpoint(
            self._manifest_store(), wanted, clock=self._clock, lifetime=lifetime
        )

    def delete_checkpoint(self, id: UUID | str, *, force: bool = False) -> None:  # noqa: A002 - the name users know
        """Delete a checkpoint. Garbage collection may then delete the objects that only it keeps.

        Raises:
            InvalidRequest: there is no such checkpoint; or a clone needs its SSTs and `force` is False. With `force`
                it is deleted, and the clone loses these SSTs.

        """
        wanted = self._checkpoint_id(id)
        held = checkpoints.require_checkpoint(self._latest().value, wanted)
        if not force:
            require_unneeded(self._store, self._manifest_store(), held)
        checkpoints.delete_checkpoint(self._manifest_store(), wanted)

    # -- other databases with the same SSTs -------------------------------------------------------------

    def clone(
        self,
        to: str | os.PathLike[str],
        *,
        checkpoint: UUID | str | None = None,
        range: Keys | None = None,  # noqa: A002 - the name users know
    ) -> Versioned[Manifest]:
        """Create a database at `to` with the content of this one, or of `checkpoint`: all of it, or one range.

        No SST is copied: the clone uses those of this database, which keeps them for it. `to` is a name beside this
        database, or an address as for `flagstone.open` in the same store. With `range` (start included, stop not) the
        clone is a projection: it holds that range, and refuses reads and writes outside of it. Repeating an interrupted
        call finishes it; a clone that is complete is not created again.

        Raises:
            InvalidRequest: there is a database at `to` already, or see `Cloner.clone`; then nothing was created.

        """
        source = CloneSource(
            self._paths.root,
            None if checkpoint is None else self._checkpoint_id(checkpoint, newest=True),
            _key_range(range),
        )
        return self._cloner().clone(self._inside(to), [source])

    def union(self, to: str | os.PathLike[str], sources: Sequence[SourceLike]) -> Versioned[Manifest]:
        """Create a database at `to` from this one and `sources`, which hold different keys.

        Sources are paths, or `CloneSource`s to choose a checkpoint or range; this database may be among them. Ranges
        that are given must be adjacent. All must be flushed: a union does not take over WAL files. SSTs are not copied,
        as in `clone`.

        Raises:
            InvalidRequest: two databases overlap, given ranges leave a gap or overlap, there is a database at `to`
                already, or see `Cloner.clone`; then nothing was created.

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
        """Make the state of `checkpoint` the current state again. All later writes are lost.

        A running writer or compactor is fenced, and finds out at its next durable write. Checkpoints stay: to be able
        to undo the restore, create a checkpoint of the present state first.

        Raises:
            InvalidRequest: no such checkpoint, or it has expired.
            Closed: another process opened the database meanwhile; nothing was restored.

        """
        wanted = self._checkpoint_id(checkpoint)
        self._latest()
        return restore_with_schemas(
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
        """Delete the database and release its lenders' SSTs: now, or with `soft` by garbage collection after `grace`.

        From then on no call opens it, claims it or adds a checkpoint, and a running writer or compactor is fenced.
        Deleting now is refused while there are unexpired checkpoints; a soft destruction waits for them. Repeating an
        interrupted call finishes it. With `dry_run` nothing changes, and `deleted` lists what would be deleted.

        A few small objects stay (`kept`). The next database at this path continues their ids, so that a late request of
        a former process cannot be mistaken for one of the new database's. `purge` removes them.

        Raises:
            InvalidRequest: there is no database, or it has unexpired checkpoints; then nothing has changed.

        """
        destroyer = self._destroyer()
        try:
            return destroyer.destroy(soft=soft, grace=grace, dry_run=dry_run)
        except StoreFull:
            # A destruction first writes two small objects. Deleting garbage frees the space for them.
            make_room(self._store, self._paths, wal_store=self._wal_store, clock=self._clock, ids=self._ids)
            return destroyer.destroy(soft=soft, grace=grace, dry_run=dry_run)

    def purge(self, *, min_age: timedelta | str = PURGE_AGE) -> tuple[str, ...]:
        """Delete what a destroyed database has left at this path; returns the objects deleted.

        Call it only when every process that used the database has ended: afterwards a late request of one would be
        mistaken for one of the next database's.

        Raises:
            InvalidRequest: there is a database, or none was destroyed here, or less than `min_age` ago.

        """
        return self._destroyer().purge(min_age=as_duration(min_age, "min_age", minimum=timedelta(0)))

    # -- inside -------------------------------------------------------------------------------------------

    def _manifest_store(self) -> ManifestStore:
        return ManifestStore(self._store, self._paths, clock=self._clock, ids=self._ids)

    def _latest(self) -> Versioned[Manifest]:
        return self._manifest_store().require_latest()

    def _checkpoint_id(self, given: UUID | str, *, newest: bool = False) -> UUID:
        now_s = self._clock.now_ms() // 1000
        return find_checkpoint(given, lambda: self._latest().value, now_s=now_s, newest=newest)

    def _cloner(self) -> Cloner:
        return Cloner(self._store, wal_store=self._wal_store, clock=self._clock, ids=self._ids)

    def _destroyer(self) -> Destroyer:
        return Destroyer(
            self._store, self._paths, wal_store=self._wal_store, clock=self._clock, ids=self._ids
        )

    def _inside(self, address: str | os.PathLike[str]) -> str:
        """The path inside the store. If this database was named by its folder, so are the others."""
        text = os.fspath(address)
        if self._by_folder and "/" in text and "://" not in text:
            text = str(Path(text).expanduser().absolute())
        return resolve_neighbour(text, self._store)

    def _finish_clone(self) -> int:
        """Repeat the call that created the clone, from its stored origin."""
        origin = load_origin(self._store, self._paths)
        assert origin is not None, "the plan found an origin"
        cloner = Cloner(self._store, wal_store=self._wal_store, clock=self._clock, ids=self._ids)
        return cloner.clone(self._paths.root, list(origin.sources)).id


def _key_range(keys: Keys | None) -> KeyRange | None:
    if keys is None or isinstance(keys, KeyRange):
        return None if keys == KeyRange() else keys
    start, stop = keys
    if not all(key is None or isinstance(key, bytes) for key in (start, stop)):
        raise InvalidRequest(f"a range is a pair of keys (bytes, or None for an open side), not {keys!r}")
    return _key_range(KeyRange(start or None, stop))
