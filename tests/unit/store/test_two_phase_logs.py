"""The contract of commit logs, and the two-phase protocol on each of them."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

import pytest

from flagstone.errors import InvalidRequest, Unavailable
from flagstone.store.commit_log import CommitRecord, RecordState, postgres, sqlite
from flagstone.store.commit_log.dynamodb import DynamoDbCommitLog
from flagstone.store.commit_log.postgres import PostgresCommitLog
from kit.two_phase import TwoPhaseWorld
from servers.commit_logs import NewLog
from unit.store.test_two_phase_crashes import CASES, check_final, crashed, read

PENDING, COMMITTED, DELETED = RecordState.PENDING, RecordState.COMMITTED, RecordState.DELETED


def _record(destination: str, *, source: str = "s", version: int = 1) -> CommitRecord:
    return CommitRecord(destination, source, version, PENDING, 17, token="t", replaced="r")


def test_a_destination_is_inserted_once_and_read_back_whole(new_log: NewLog) -> None:
    log = new_log()
    record = _record("wal/ü 1")
    assert log.find("wal/ü 1") is None
    assert log.insert(record)
    assert not log.insert(replace(record, source="other"))
    assert log.find("wal/ü 1") == record
    assert log.insert(CommitRecord("bare", "s", 1, COMMITTED, 0))
    assert log.find("bare") == CommitRecord("bare", "s", 1, COMMITTED, 0)


def test_a_record_is_replaced_only_as_it_was_read(new_log: NewLog) -> None:
    log = new_log()
    first = _record("a")
    assert log.insert(first)
    second = replace(first, source="s2", version=2, state=COMMITTED, token=None, replaced=None)
    for stale in (
        replace(first, source="x"),
        replace(first, version=2),
        replace(first, state=COMMITTED),
    ):
        assert not log.replace(stale, second)
        assert not log.remove(stale)
    assert log.find("a") == first
    assert log.replace(first, second)
    assert not log.replace(first, second)
    assert log.find("a") == second
    assert log.remove(second)
    assert not log.remove(second)
    assert log.find("a") is None


def test_pending_records_are_found_below_whole_folders(new_log: NewLog) -> None:
    log = new_log()
    for path in ("a/b/1", "a/b/2", "a/b0", "a/bc/1", "a/b", "z", "a/b/3", "A/b/1", "a/b/ü"):
        assert log.insert(_record(path))
    done = _record("a/b/2")
    assert log.replace(done, replace(done, state=COMMITTED))
    assert [record.destination for record in log.pending("a/b")] == ["a/b/1", "a/b/3", "a/b/ü"]
    assert {record.destination for record in log.pending("")} == {
        *("a/b/1", "a/b0", "a/bc/1", "a/b", "z", "a/b/3", "A/b/1", "a/b/ü")
    }
    assert [record.destination for record in log.records("a/b")] == ["a/b/1", "a/b/2", "a/b/3", "a/b/ü"]
    everything = [record.destination for record in log.records("")]
    assert everything == sorted(everything)
    assert len(everything) == 9


def test_namespaces_have_separate_records(new_log: NewLog) -> None:
    log, other = new_log(), new_log()
    assert log.insert(_record("a"))
    assert other.insert(_record("a", source="s2"))
    assert other.find("a") == _record("a", source="s2")
    assert [record.source for record in log.records("")] == ["s"]


def test_an_unpickled_commit_log_has_the_same_records(new_log: NewLog) -> None:
    log = new_log()
    assert log.insert(_record("a"))
    arrived = pickle.loads(pickle.dumps(log))
    assert arrived.find("a") == _record("a")
    arrived.close()


def test_a_closed_commit_log_opens_again(new_log: NewLog) -> None:
    log = new_log()
    assert log.insert(_record("a"))
    log.close()
    log.close()
    assert log.find("a") == _record("a")


def test_records_of_several_pages_are_listed_in_order(
    new_log: NewLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sqlite, postgres):
        monkeypatch.setattr(module, "_PAGE_ROWS", 3)
    log = new_log()
    paths = [f"wal/{number:02}" for number in range(10)]
    for path in paths:
        assert log.insert(_record(path))
    assert [record.destination for record in log.records("")] == paths
    assert [record.destination for record in log.records("wal")] == paths


@pytest.mark.long
@pytest.mark.parametrize("case", ["create", "later update", "delete of an updated object"])
def test_a_crash_at_any_step_leaves_the_old_or_the_new_object_on_every_commit_log(
    new_log: NewLog, case: str
) -> None:
    prepare, write, old, new = CASES[case]
    seen = []
    for world, acknowledged in crashed(lambda: TwoPhaseWorld(new_log()), prepare, write):
        found = read(world.process())
        assert found == new if acknowledged else found in (old, new)
        seen.append(found)
        check_final(world, found)
    assert {*seen} == {old, new}


@pytest.mark.parametrize(
    ("log", "module", "extra"),
    [
        (PostgresCommitLog("postgresql+psycopg://localhost/none"), "sqlalchemy", "flagstone[postgres]"),
        (DynamoDbCommitLog("none", region="us-east-1"), "boto3.session", "flagstone[dynamodb]"),
    ],
    ids=["postgres", "dynamodb"],
)
def test_a_missing_driver_is_refused_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, log: PostgresCommitLog | DynamoDbCommitLog, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidRequest) as error:
        log.find("a")
    assert extra in str(error.value)


@pytest.mark.slow
def test_a_database_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="PostgreSQL commit log"):
        PostgresCommitLog("postgresql+psycopg://user:password@127.0.0.1:1/none").find("a")


def test_the_repr_of_a_commit_log_has_no_password() -> None:
    assert "password" not in repr(PostgresCommitLog("postgresql+psycopg://user:password@localhost/none"))
