"""Every way to read many rows hides system rows, and shows them on request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin, InvalidRequest, TransactionConflict, WalReader, WriteBatch
from flagstone.aio import open as open_async
from flagstone.schema import Column, GivenColumns, schema_key
from flagstone.store.memory import MemoryStore

SCHEMA = GivenColumns((Column("id", "int64"),), (Column("n", "int8"),))
KEY = schema_key()
OURS = [b"\x00", b"\x00flagstone", b"\x00flagstone0", b"a", b"b"]


@pytest.fixture(params=["memtable", "ssts", "both"])
def db(request: pytest.FixtureRequest) -> Iterator[flagstone.Db]:
    with flagstone.open("db", store=MemoryStore()) as db:
        if request.param == "both":
            db.put(b"a", b"old")
            db.ensure_schema(SCHEMA, prefix=b"x")
            db.delete(schema_key(b"x"))
            db.flush()
        for key in OURS:
            db.put(key, key)
        db.ensure_schema(SCHEMA)
        if request.param == "ssts":
            db.flush()
        yield db


def keys_of(scan: Any) -> list[bytes]:
    return [key for key, _ in scan]


def test_scans_hide_system_rows_unless_asked(db: flagstone.Db) -> None:
    everything = sorted([*OURS, KEY])
    assert keys_of(db.scan()) == OURS
    assert keys_of(db.scan(reverse=True)) == OURS[::-1]
    assert keys_of(db.scan(include_system=True)) == everything
    assert keys_of(db.scan(reverse=True, include_system=True)) == everything[::-1]
    assert keys_of(db.scan(prefix=b"\x00flagstone")) == OURS[1:3]
    assert keys_of(db.scan(prefix=b"\x00flagstone/")) == []
    assert keys_of(db.scan(KEY, KEY + b"\0")) == []
    assert keys_of(db.scan(KEY)) == OURS[2:]
    assert keys_of(db.scan(None, KEY, reverse=True)) == OURS[1::-1]
    assert [row.key for row in db.scan().rows()] == OURS
    assert db.scan_arrow().read_all()["key"].to_pylist() == OURS
    assert db.scan_arrow(include_system=True, batch_rows=None).read_all()["key"].to_pylist() == everything
    for limit in range(7):
        assert keys_of(db.scan(limit=limit)) == OURS[:limit]
        assert keys_of(db.scan(limit=limit, reverse=True)) == OURS[::-1][:limit]


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("goal", [b"\x00", b"\x00e", b"\x00flagstone/", KEY, b"\x00flagstone0", b"a", b"c"])
@pytest.mark.parametrize("reverse", [False, True])
def test_seek_crosses_system_rows(db: flagstone.Db, first: int, goal: bytes, reverse: bool) -> None:
    scan = db.scan(reverse=reverse)
    for _ in range(first):
        next(scan)
    scan.seek(goal)

    rest = (OURS[::-1] if reverse else OURS)[first:]
    assert keys_of(scan) == [key for key in rest if (key <= goal if reverse else key >= goal)]


def test_a_read_of_one_key_shows_a_system_row(db: flagstone.Db) -> None:
    assert db[KEY] == db.multi_get([KEY])[0]
    schema = db.schema()
    assert schema is not None
    assert db[KEY] == schema.encode()


def test_snapshots_transactions_readers_and_asyncio_hide_system_rows(db: flagstone.Db) -> None:
    with db.snapshot() as snapshot:
        assert keys_of(snapshot.scan()) == OURS
    with db.transaction() as transaction:
        transaction.put(b"c", b"")
        assert keys_of(transaction.scan()) == [*OURS, b"c"]
        transaction.ensure_schema(SCHEMA, prefix=b"p")
        assert keys_of(transaction.scan(reverse=True)) == [*OURS, b"c"][::-1]
        assert transaction.schema(b"p") is not None
        transaction.rollback()
    db.flush()
    store = db._engine.env.store
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        assert keys_of(reader.scan()) == OURS
        assert reader.schema() == db.schema()


def test_asyncio_hides_system_rows() -> None:
    async def main() -> None:
        async with await open_async("db", store=MemoryStore()) as db:
            await db.put(b"a", b"")
            await db.ensure_schema(SCHEMA)
            assert [key async for key, _ in db.scan()] == [b"a"]
            assert [key async for key, _ in db.scan(include_system=True)] == [KEY, b"a"]
            assert await db.schema() is not None

    asyncio.run(main())


def test_differences_and_change_feeds_hide_system_rows_and_see_their_numbers() -> None:
    store = MemoryStore()
    admin = Admin("db", store=store)
    with flagstone.open("db", store=store) as db:
        db.put(b"a", b"1", await_durable=True)
        before = admin.create_checkpoint()
        db.ensure_schema(SCHEMA)
        db.flush("wal")
        db.put(b"b", b"2", await_durable=True)
        db.flush()
        after = admin.create_checkpoint()
    assert [each.key for each in admin.diff(before.id, after.id)] == [b"b"]
    assert [each.key for each in admin.diff(before.id, after.id, include_system=True)] == [KEY, b"b"]
    plain, whole = WalReader("db", store=store), WalReader("db", store=store, include_system=True)
    assert [change.key for change in plain.changes()] == [b"a", b"b"]
    assert [change.key for change in whole.changes()] == [b"a", KEY, b"b"]
    assert [change.key for batch in plain.follow(timeout_s=0) for change in batch.changes] == [b"a", b"b"]
    seen = [change.key for batch in whole.follow(timeout_s=0) for change in batch.changes]
    assert seen == [b"a", KEY, b"b"]


def test_reserved_keys_are_refused_with_the_reason(db: flagstone.Db) -> None:
    batch = WriteBatch()
    transaction = db.transaction()
    for write in (
        lambda: db.put(KEY, b""),
        lambda: db.merge(KEY, b""),
        lambda: batch.put(KEY, b""),
        lambda: batch.merge(KEY, b""),
        lambda: transaction.put(KEY, b""),
        lambda: db.write_arrow(pa.table({"key": [b"a", KEY], "value": [b"", b""]})),
    ):
        with pytest.raises(InvalidRequest, match="reserved"):
            write()
    transaction.rollback()
    db.delete(KEY)
    assert db.schema() is None


def test_a_transaction_that_scans_everything_does_not_conflict_with_system_rows(db: flagstone.Db) -> None:
    with db.transaction("serializable") as transaction:
        assert keys_of(transaction.scan()) == OURS
        transaction.put(b"c", b"")
        db.ensure_schema(SCHEMA, prefix=b"other")
    assert db[b"c"] == b""


def test_of_two_transactions_that_change_the_schema_one_is_refused(db: flagstone.Db) -> None:
    first, second = db.transaction(), db.transaction()
    first.ensure_schema(GivenColumns(SCHEMA.key, (*SCHEMA.value, Column("a", "int8"))))
    second.ensure_schema(GivenColumns(SCHEMA.key, (*SCHEMA.value, Column("b", "int8"))))
    first.commit()

    with pytest.raises(TransactionConflict):
        second.commit()


def test_rows_of_a_version_conflict_with_a_change_of_the_schema(db: flagstone.Db) -> None:
    transaction = db.transaction()
    transaction.ensure_schema(SCHEMA)
    transaction.put(b"row", b"")
    db.ensure_schema(GivenColumns(SCHEMA.key, (*SCHEMA.value, Column("a", "int8"))))

    with pytest.raises(TransactionConflict):
        transaction.commit()


class FixedPrefix:
    name = "two bytes"

    def prefix(self, key: bytes) -> bytes:
        return key[:2]


class Colon:
    name = "up to the colon"

    def prefix(self, key: bytes) -> bytes:
        return key[: key.find(b":") + 1]


def test_system_rows_have_a_segment_of_their_own_if_the_extractor_finds_one() -> None:
    with flagstone.open("db", store=MemoryStore(), segment_extractor=FixedPrefix()) as db:
        db.put(b"aa1", b"")
        db.ensure_schema(SCHEMA)
        db.flush()
        assert db.schema() is not None
        assert keys_of(db.scan()) == [b"aa1"]
    with flagstone.open("db", store=MemoryStore(), segment_extractor=Colon()) as db:
        db.put(b"a:1", b"")
        with pytest.raises(InvalidRequest, match="finds no prefix in the key b'\\\\x00flagstone/schema/'"):
            db.ensure_schema(SCHEMA)
        db.put(b"a:2", b"", await_durable=True)
