"""Databases that the official wheel wrote are sound: repair finds nothing to do in any of them."""

from __future__ import annotations

from flagstone import Admin
from golden.corpus import GoldenDatabase, every_database


@every_database
def test_repair_of_a_golden_database_finds_nothing_to_do(database: GoldenDatabase) -> None:
    wal_store = None if database.wal_store is None else str(database.wal_store)
    report = Admin(database.path, store=str(database.store), wal_store=wal_store).repair()
    assert report.sound, report.defects
