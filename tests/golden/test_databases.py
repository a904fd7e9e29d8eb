"""All 31 golden databases: contents as the official wheel read them, and a clean bill from `verify`."""

from __future__ import annotations

import pytest

from flagstone import Admin
from golden.corpus import GoldenDatabase, databases
from golden.reading import PlainReader

every_database = pytest.mark.parametrize("database", databases(), ids=lambda database: database.name)


def unhex(pairs: dict[str, str]) -> dict[bytes, bytes]:
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in pairs.items()}


def test_there_are_thirty_one_of_them() -> None:
    assert len(databases()) == 31


@every_database
def test_contents_are_what_the_wheel_read(database: GoldenDatabase) -> None:
    assert PlainReader(database).contents() == unhex(database.expected["kv"])


@every_database
def test_checkpoints_show_what_the_wheel_showed(database: GoldenDatabase) -> None:
    pinned = {entry["id"]: entry["manifest_id"] for entry in database.expected["checkpoints"]}
    for checkpoint_id, contents in database.expected.get("checkpoint_kv", {}).items():
        assert PlainReader(database).contents(pinned[checkpoint_id]) == unhex(contents)


@every_database
def test_verify_finds_it_sound(database: GoldenDatabase) -> None:
    wal_store = None if database.wal_store is None else str(database.wal_store)
    report = Admin(database.path, store=str(database.store), wal_store=wal_store).verify()
    assert report.ok, [str(finding) for finding in report.findings]
    assert report.manifest_id == database.expected["manifest_id"]
    assert [finding for finding in report.findings if finding.severity == "warning"] == []
