"""Real databases, surgery on their stores, and the check that a repair left them sound."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from flagstone.config import Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import encode_manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.repair.plan import RepairReport
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import EntryTuple, ManifestId, WalId
from flagstone.wal.replay import decode_wal
from kit.databases import encode_wal

SETTINGS = Settings(
    flush_interval=None,
    manifest_poll_interval=timedelta(hours=1),
    compactor_options=None,
    garbage_collector_options=None,
)
PATHS = DbPaths("db")


class Patient:
    """A database in memory that a test damages and repairs."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = MemoryStore(clock=self.clock)
        self.ids = Ids(7, clock=self.clock)
        self.model: dict[bytes, bytes] = {}

    # -- life ---------------------------------------------------------------------------------------------

    @property
    def admin(self) -> Admin:
        return Admin("db", store=self.store, clock=self.clock, ids=self.ids)

    def open(self) -> Db:
        return open_database("db", store=self.store, settings=SETTINGS, clock=self.clock, ids=self.ids)

    def write(self, *turns: dict[bytes, bytes], tables: int = 0) -> None:
        """Write each turn into a WAL file of its own; the first `tables` of them into an SST, too. Then crash."""
        db = self.open()
        for number, rows in enumerate(turns):
            for key, value in rows.items():
                db.put(key, value)
            self.model |= rows
            self.clock.advance(10)
            if number < tables:
                db.flush()
            else:
                db.flush("wal")
        self.crash(db)

    def crash(self, db: Db) -> None:
        """What is on the store now, without anything that closing adds."""
        left = self.objects()
        db.close()
        self.store = MemoryStore(clock=self.clock)
        for path, data in left.items():
            self.store.put(path, data)

    # -- surgery ------------------------------------------------------------------------------------------

    def objects(self) -> dict[str, bytes]:
        return {meta.path: self.store.get(meta.path).data for meta in self.store.list("db")}

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

    # -- judging ------------------------------------------------------------------------------------------

    def plan(self) -> RepairReport:
        """The plan, which changes nothing."""
        before = self.objects()
        report = self.admin.repair()
        assert self.objects() == before, "planning reads only"
        assert not report.applied
        return report

    def repair(self) -> RepairReport:
        """Plan, apply, and check that the database is sound, opens, and is not touched by a second repair."""
        assert not self.plan().sound
        report = self.admin.repair(plan_only=False)
        assert report.applied, report
        verified = self.admin.verify()
        assert verified.ok, [str(finding) for finding in verified.damage]
        assert self.plan().sound
        before = self.objects()
        assert self.admin.repair(plan_only=False).sound
        assert self.objects() == before, "a sound database is not touched"
        for path in report.kept_aside:
            assert path in before
        return report

    def rows(self) -> dict[bytes, bytes]:
        with self.open() as db:
            return dict(db.scan())


def sequences(patient: Patient) -> list[list[int]]:
    """The sequence numbers of every WAL file with rows."""
    return [[row[1] for row in patient.wal_rows(wal_id)] for wal_id in patient.wal_ids()]
