"""What transactions see of each other: the anomalies by name, and which isolation lets which happen."""

# ruff: noqa: PT012 - the commit at the end of a block is what raises
from __future__ import annotations

from collections.abc import Iterator

import pytest

from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest, TransactionConflict
from flagstone.lsm.operators import Concatenate
from flagstone.store.memory import MemoryStore
from flagstone.write.conflicts import Isolation
from kit.databases import QUIET

BOTH: list[Isolation] = ["snapshot", "serializable"]


@pytest.fixture
def db() -> Iterator[Db]:
    with open_database("db", store=MemoryStore(), settings=QUIET, merge_operator=Concatenate()) as db:
        yield db


def go_off_call_if_the_other_stays(db: Db, isolation: Isolation) -> None:
    """Two doctors; each leaves because the other one is there: the classic write skew."""
    db[b"alice"] = db[b"bob"] = b"on call"
    first, second = db.transaction(isolation), db.transaction(isolation)
    assert first.get(b"bob") == second.get(b"alice") == b"on call"
    first.put(b"alice", b"off")
    second.put(b"bob", b"off")
    first.commit()
    second.commit()


def test_write_skew_happens_under_snapshot_isolation(db: Db) -> None:
    go_off_call_if_the_other_stays(db, "snapshot")
    assert db[b"alice"] == db[b"bob"] == b"off"


def test_write_skew_is_refused_under_serializable_isolation(db: Db) -> None:
    with pytest.raises(TransactionConflict):
        go_off_call_if_the_other_stays(db, "serializable")
    assert (db[b"alice"], db[b"bob"]) == (b"off", b"on call")


def test_a_key_marked_as_read_refuses_write_skew_under_snapshot_isolation_too(db: Db) -> None:
    first, second = db.transaction(), db.transaction()
    first.put(b"alice", b"off")
    second.mark_read(b"alice")
    second.put(b"bob", b"off")
    first.commit()
    with pytest.raises(TransactionConflict):
        second.commit()


@pytest.mark.parametrize("isolation", BOTH)
def test_two_concurrent_updates_of_a_key_conflict(db: Db, isolation: Isolation) -> None:
    db[b"count"] = b"1"
    first, second = db.transaction(isolation), db.transaction(isolation)
    for transaction in (first, second):
        transaction.put(b"count", b"%d" % (int(transaction[b"count"]) + 1))
    first.commit()
    with pytest.raises(TransactionConflict):
        second.commit()
    assert db[b"count"] == b"2"


@pytest.mark.parametrize("isolation", BOTH)
def test_a_transaction_conflicts_with_a_plain_write_of_its_key(db: Db, isolation: Isolation) -> None:
    with pytest.raises(TransactionConflict), db.transaction(isolation) as transaction:
        transaction.put(b"count", b"mine")
        db.put(b"count", b"theirs")
    assert db[b"count"] == b"theirs"


@pytest.mark.parametrize("isolation", BOTH)
def test_two_reads_of_a_transaction_see_the_same_state(db: Db, isolation: Isolation) -> None:
    db[b"x"] = db[b"y"] = b"old"
    transaction = db.transaction(isolation)
    assert transaction[b"x"] == b"old"
    with db.batch() as batch:
        batch.put(b"x", b"new")
        batch.put(b"y", b"new")
    db.flush()
    assert transaction[b"y"] == b"old"
    assert transaction.multi_get([b"x", b"y"]) == [b"old", b"old"]
    assert dict(transaction.scan()) == {b"x": b"old", b"y": b"old"}
    transaction.rollback()


@pytest.mark.parametrize("isolation", BOTH)
def test_a_transaction_does_not_see_a_row_written_after_it_started(db: Db, isolation: Isolation) -> None:
    transaction = db.transaction(isolation)
    assert list(transaction.scan(prefix=b"seat/")) == []
    db[b"seat/1"] = b"taken"
    assert list(transaction.scan(prefix=b"seat/")) == []
    transaction.rollback()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_phantom_in_a_scanned_range_is_refused_under_serializable_isolation(db: Db, reverse: bool) -> None:
    with pytest.raises(TransactionConflict), db.transaction("serializable") as transaction:
        assert not list(transaction.scan(b"seat/", b"seat0", reverse=reverse))
        transaction.put(b"order", b"seat/1")
        db[b"seat/1"] = b"taken"


def test_a_phantom_in_a_range_scanned_as_arrow_is_refused(db: Db) -> None:
    with pytest.raises(TransactionConflict), db.transaction("serializable") as transaction:
        assert transaction.scan_arrow(prefix=b"seat/").read_all().num_rows == 0
        transaction.put(b"order", b"seat/1")
        db[b"seat/1"] = b"taken"


def test_a_phantom_behind_the_point_where_the_scan_stopped_is_refused(db: Db) -> None:
    db[b"seat/1"] = b"free"
    with pytest.raises(TransactionConflict), db.transaction("serializable") as transaction:
        assert next(transaction.scan(prefix=b"seat/")) == (b"seat/1", b"free")
        transaction.put(b"order", b"seat/1")
        db[b"seat/9"] = b"taken"


def test_a_row_beside_a_scanned_range_is_no_phantom(db: Db) -> None:
    with db.transaction("serializable") as transaction:
        list(transaction.scan(b"seat/1", b"seat/5"))
        transaction.put(b"order", b"1")
        db[b"seat/5"] = b"taken"
        db[b"seat/0"] = b"taken"
    assert db[b"order"] == b"1"


def test_a_row_deleted_from_a_scanned_range_is_refused(db: Db) -> None:
    db[b"seat/1"] = b"free"
    with pytest.raises(TransactionConflict), db.transaction("serializable") as transaction:
        list(transaction.scan(prefix=b"seat/"))
        transaction.put(b"order", b"1")
        del db[b"seat/1"]


def test_a_read_only_serializable_transaction_commits_if_its_reads_are_unchanged(db: Db) -> None:
    db[b"x"] = b"1"
    with db.transaction("serializable") as transaction:
        assert transaction[b"x"] == b"1"
        db[b"y"] = b"2"
    assert db[b"x"] == b"1"


def test_a_read_only_transaction_under_snapshot_isolation_never_conflicts(db: Db) -> None:
    db[b"x"] = b"1"
    with db.transaction("snapshot") as transaction:
        assert transaction[b"x"] == b"1"
        db[b"x"] = b"2"
        assert transaction[b"x"] == b"1"


def test_only_the_transaction_itself_reads_its_uncommitted_writes(db: Db) -> None:
    db[b"a"], db[b"b"] = b"1", b"2"
    transaction = db.transaction()
    transaction.put(b"a", b"mine")
    transaction.delete(b"b")
    transaction.merge(b"c", b"3")
    assert dict(transaction.scan()) == {b"a": b"mine", b"c": b"3"}
    assert list(transaction.scan(reverse=True)) == [(b"c", b"3"), (b"a", b"mine")]
    assert dict(db.scan()) == {b"a": b"1", b"b": b"2"}
    transaction.rollback()
    assert dict(db.scan()) == {b"a": b"1", b"b": b"2"}


def test_an_error_inside_a_transaction_writes_nothing(db: Db) -> None:
    with pytest.raises(RuntimeError), db.transaction() as transaction:
        transaction.put(b"a", b"1")
        raise RuntimeError
    assert db.get(b"a") is None
    with pytest.raises(InvalidRequest):
        transaction.put(b"a", b"2")


def test_two_unmarked_writes_of_a_key_do_not_conflict(db: Db) -> None:
    first, second = db.transaction(), db.transaction()
    for number, transaction in enumerate((first, second)):
        transaction.merge(b"log", b"%d" % number)
        transaction.unmark_write(b"log")
    first.commit()
    second.commit()
    assert db[b"log"] == b"01"
