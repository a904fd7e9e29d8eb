"""Databases that the official wheel wrote are sound: repair finds nothing to do in any of them."""

from __future__ import annotations

import pytest

from flagstone import Admin
from golden.corpus import GoldenDatabase, databases


@pytest.mark.parametrize("database", databases(), ids=lambda database: database.name)
def test_repair_finds_nothing_to_do(database: GoldenDatabase) -> None:
    wal_store = None if database.wal_store is None else str(database.wal_store)
    report = Admin(database.path, store=str(database.store), wal_store=wal_store).repair()
    assert report.sound, report.defects
