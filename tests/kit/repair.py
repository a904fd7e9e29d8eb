"""A database that a test damages and repairs, and the check that a repair left it sound."""

from __future__ import annotations

from collections.abc import Iterable

from flagstone.db.writer.database import Db
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import encode_manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.repair.plan import RepairReport
from flagstone.store.paths import DbPaths
from flagstone.types import EntryTuple, ManifestId, WalId
from flagstone.wal.replay import decode_wal
from kit.databases import Rows, World, copy_of, encode_wal

PATHS = DbPaths("db")


class RepairWorld(World):
    """The database `db` in memory; `model` has the rows that it must have."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Rows = {}

    # -- writing ------------------------------------------------------------------------------------------

    def write_and_crash(self, *groups: Rows, flushed: int = 0) -> None:
        """Write each group into a WAL file of its own, the first `flushed` of them also into SSTs. Then crash."""
        db = self.open()
        for number, rows in enumerate(groups):
            for key, value in rows.items():
                db.put(key, value)
            self.model |= rows
            self.clock.advance(10)
            if number < flushed:
                db.flush()
            else:
                db.flush("wal")
        self.crash(db)

    def crash(self, db: Db) -> None:
        """Keep the objects that are on the store now, without those that closing adds."""
        left = copy_of(self.store, clock=self.clock)
        db.close()
        self.store = left

    # -- damaging -----------------------------------------------------------------------------------------

    def wal_ids(self) -> list[int]:
        """The WAL files with bytes in them."""
        return [
            wal_id
            for meta in self.store.list(PATHS.wal_folder)
            if meta.size and (wal_id := PATHS.parse_wal(meta.path)) is not None
        ]

    def wal_rows(self, wal_id: int) -> list[EntryTuple]:
        path = PATHS.wal(WalId(wal_id))
        return decode_wal(self.store.get(path).data, path)

    def put_wal(self, wal_id: int, rows: Iterable[EntryTuple]) -> None:
        self.store.put(PATHS.wal(WalId(wal_id)), encode_wal(list(rows)))

    def manifest(self) -> tuple[int, Manifest]:
        latest = ManifestStore(self.store, PATHS).require_latest()
        return latest.id, latest.value

    def put_manifest(self, manifest_id: int, manifest: Manifest) -> None:
        self.store.put(PATHS.manifest(ManifestId(manifest_id)), encode_manifest(manifest))

    # -- checking -----------------------------------------------------------------------------------------

    def plan(self) -> RepairReport:
        """The plan, which changes nothing."""
        before = self.objects("db")
        report = self.admin().repair()
        assert self.objects("db") == before, "planning reads only"
        assert not report.applied
        return report

    def repair(self) -> RepairReport:
        """Plan and apply; check that the database is sound, and that a second repair changes nothing."""
        assert not self.plan().sound
        report = self.admin().repair(plan_only=False)
        assert report.applied, report
        verified = self.admin().verify()
        assert verified.ok, [str(finding) for finding in verified.damage]
        assert self.plan().sound
        before = self.objects("db")
        assert self.admin().repair(plan_only=False).sound
        assert self.objects("db") == before, "a sound database is not changed"
        for path in report.kept_aside:
            assert path in before
        return report

    def rows(self) -> Rows:
        with self.open() as db:
            return dict(db.scan())


def sequences(world: RepairWorld) -> list[list[int]]:
    """The sequence numbers of every WAL file with rows."""
    return [[row[1] for row in world.wal_rows(wal_id)] for wal_id in world.wal_ids()]
