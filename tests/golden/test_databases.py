"""All 31 golden databases: contents as the official wheel read them, and a clean bill from `verify`."""

from __future__ import annotations

from flagstone import Admin
from golden.corpus import GoldenDatabase, databases, every_database, unhex
from golden.reading import PlainReader


def test_the_corpus_has_thirty_one_databases() -> None:
    assert len(databases()) == 31


@every_database
def test_the_plain_reader_returns_what_the_wheel_read(database: GoldenDatabase) -> None:
    assert PlainReader(database).contents() == unhex(database.expected["kv"])


@every_database
def test_the_plain_reader_returns_what_the_wheel_read_at_each_checkpoint(database: GoldenDatabase) -> None:
    saved = {entry["id"]: entry["manifest_id"] for entry in database.expected["checkpoints"]}
    for checkpoint_id, contents in database.expected.get("checkpoint_kv", {}).items():
        assert PlainReader(database).contents(saved[checkpoint_id]) == unhex(contents)


@every_database
def test_verify_reports_a_golden_database_as_sound(database: GoldenDatabase) -> None:
    wal_store = None if database.wal_store is None else str(database.wal_store)
    report = Admin(database.path, store=str(database.store), wal_store=wal_store).verify()
    assert report.ok, [str(finding) for finding in report.findings]
    assert report.manifest_id == database.expected["manifest_id"]
    assert [finding for finding in report.findings if finding.severity == "warning"] == []
