"""The blocking and the asyncio classes: the same names, the same parameters, the same results."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flagstone
from flagstone import Settings, TransactionConflict, WriteBatch, aio
from flagstone.changes.reader import WalReader
from flagstone.db.aio.collection import AsyncCollection, AsyncIndex
from flagstone.db.aio.database import AsyncDb, AsyncSnapshot, AsyncTransaction
from flagstone.db.aio.reader import AsyncChangeFeed, AsyncDbReader, AsyncWalReader
from flagstone.db.collections.collection import Collection
from flagstone.db.collections.index import Index
from flagstone.db.reader.feed import ChangeFeed
from flagstone.db.reader.reader import DbReader
from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Snapshot, Transaction
from flagstone.lsm.operators import Concatenate
from flagstone.read.scan import AsyncScan, Scan
from flagstone.store.memory import MemoryStore

FACES = [
    (Db, AsyncDb),
    (Snapshot, AsyncSnapshot),
    (Transaction, AsyncTransaction),
    (DbReader, AsyncDbReader),
    (Scan, AsyncScan),
    (WalReader, AsyncWalReader),
    (ChangeFeed, AsyncChangeFeed),
    (Collection, AsyncCollection),
    (Index, AsyncIndex),
]
CLOSED_BY_THEIR_DATABASE = (Collection, Index)
every_face = pytest.mark.parametrize(("blocking", "awaitable"), FACES, ids=lambda kind: kind.__name__)


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters(member: Any) -> list[tuple[str, Any, Any]]:
    return [
        (name, parameter.kind, parameter.default)
        for name, parameter in inspect.signature(member).parameters.items()
    ]


@every_face
def test_blocking_and_async_classes_have_the_same_public_names(blocking: type, awaitable: type) -> None:
    assert public_names(awaitable) == public_names(blocking)


@every_face
def test_methods_take_the_same_parameters_and_have_docstrings(blocking: type, awaitable: type) -> None:
    for name in public_names(blocking):
        one, other = inspect.getattr_static(blocking, name), inspect.getattr_static(awaitable, name)
        assert isinstance(one, property) == isinstance(other, property), name
        if isinstance(one, property):
            continue
        assert parameters(other) == parameters(one), name
        assert inspect.getdoc(getattr(blocking, name)), name
        assert inspect.getdoc(getattr(awaitable, name)), name


@every_face
def test_every_async_method_is_a_coroutine_or_returns_something_for_async_with_or_async_for(
    blocking: type, awaitable: type
) -> None:
    given_at_once = {"scan", "scan_arrow", "snapshot", "transaction", "batch", "rows", "seek"}
    given_at_once |= {"batches", "changes", "follow", "keys", "values", "items", "within"}
    for name in public_names(awaitable):
        member = inspect.getattr_static(awaitable, name)
        if callable(member) and name not in given_at_once:
            assert inspect.iscoroutinefunction(member), name


def test_opening_takes_the_same_parameters() -> None:
    assert parameters(aio.open) == parameters(flagstone.open)
    assert parameters(aio.open_reader) == parameters(flagstone.open_reader)
    assert parameters(aio.open_feed) == parameters(flagstone.open_feed)


@every_face
def test_blocking_and_async_classes_are_context_managers(blocking: type, awaitable: type) -> None:
    if blocking in CLOSED_BY_THEIR_DATABASE:
        return
    assert hasattr(blocking, "__enter__")
    assert hasattr(blocking, "__exit__")
    assert hasattr(awaitable, "__aenter__")
    assert hasattr(awaitable, "__aexit__")


# -- the same answers -------------------------------------------------------------------------------------

KEYS = st.sampled_from([b"\0", b"0", b"A", b"a", b"a\0", b"a\\", b"ab", b"b", b"\xff"])
VALUES = st.binary(max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES),
    st.tuples(st.just("put_durable"), KEYS, VALUES),
    st.tuples(st.just("merge"), KEYS, VALUES),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("batch"), KEYS, KEYS, VALUES),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("get_row"), KEYS),
    st.tuples(st.just("multi_get"), st.lists(KEYS, max_size=4)),
    st.tuples(st.just("scan"), st.booleans(), st.none() | st.integers(0, 4)),
    st.tuples(st.just("rows"), KEYS, st.booleans()),
    st.tuples(st.just("arrow"), KEYS),
    st.tuples(st.just("flush"), st.sampled_from(["wal", "memtable"])),
    st.tuples(st.just("transaction"), KEYS, KEYS, VALUES, st.booleans()),
    st.tuples(st.just("snapshot"), KEYS, VALUES),
    st.tuples(st.just("reader")),
)


class BlockingFace:
    """Runs steps on the blocking face."""

    def __init__(self, db: Db, store: MemoryStore) -> None:
        self.db, self.store = db, store

    async def run(self, step: tuple[Any, ...]) -> Any:
        db = self.db
        match step:
            case ("put", key, value):
                return db.put(key, value).seq
            case ("put_durable", key, value):
                return db.put(key, value, await_durable=True).seq
            case ("merge", key, value):
                return db.merge(key, value, ttl=timedelta(hours=1)).seq
            case ("delete", key):
                return db.delete(key).seq
            case ("batch", one, other, value):
                with db.batch() as batch:
                    batch.put(one, value)
                    batch.delete(other)
                return db.status()["last_seq"]
            case ("get", key):
                return db.get(key, b"default"), db.get(key, durable_only=True), db.get(key, dirty=True)
            case ("get_row", key):
                return _timeless(db.get_row(key))
            case ("multi_get", keys):
                return db.multi_get(keys)
            case ("scan", reverse, limit):
                return list(db.scan(b"a", b"z", reverse=reverse, limit=limit))
            case ("rows", key, reverse):
                with db.scan(reverse=reverse) as scan:
                    scan.seek(key)
                    return [_timeless(row) for row in scan.rows()]
            case ("arrow", key):
                return db.scan_arrow(prefix=key).read_all().to_pylist()
            case ("flush", kind):
                return db.flush(kind)
            case ("transaction", read, written, value, clash):
                try:
                    with db.transaction("serializable") as transaction:
                        seen = transaction.get(read), transaction.multi_get([read, written])
                        transaction.put(written, value)
                        if clash:
                            db.put(read, b"clash")
                        return seen, transaction.get(written), list(transaction.scan())
                except TransactionConflict as conflict:
                    return type(conflict)
            case ("snapshot", key, value):
                with db.snapshot() as snapshot:
                    db.put(key, value)
                    return snapshot.seq, snapshot.get(key), list(snapshot.scan())
            case _:
                db.flush("wal")
                with flagstone.open_reader("db", store=self.store, merge_operator=Concatenate()) as reader:
                    return list(reader.scan()), reader.multi_get([b"a", b"b"]), reader.status()["last_seq"]


class AwaitedFace:
    """Runs the same steps on the awaitable face."""

    def __init__(self, db: AsyncDb, store: MemoryStore) -> None:
        self.db, self.store = db, store

    async def run(self, step: tuple[Any, ...]) -> Any:
        db = self.db
        match step:
            case ("put", key, value):
                return (await db.put(key, value)).seq
            case ("put_durable", key, value):
                return (await db.put(key, value, await_durable=True)).seq
            case ("merge", key, value):
                return (await db.merge(key, value, ttl=timedelta(hours=1))).seq
            case ("delete", key):
                return (await db.delete(key)).seq
            case ("batch", one, other, value):
                async with db.batch() as batch:
                    batch.put(one, value)
                    batch.delete(other)
                return (await db.status())["last_seq"]
            case ("get", key):
                return (
                    await db.get(key, b"default"),
                    await db.get(key, durable_only=True),
                    await db.get(key, dirty=True),
                )
            case ("get_row", key):
                return _timeless(await db.get_row(key))
            case ("multi_get", keys):
                return await db.multi_get(keys)
            case ("scan", reverse, limit):
                return await _all(db.scan(b"a", b"z", reverse=reverse, limit=limit))
            case ("rows", key, reverse):
                async with db.scan(reverse=reverse) as scan:
                    scan.seek(key)
                    return [_timeless(row) async for row in scan.rows()]
            case ("arrow", key):
                return [row async for batch in db.scan_arrow(prefix=key) for row in batch.to_pylist()]
            case ("flush", kind):
                return await db.flush(kind)
            case ("transaction", read, written, value, clash):
                try:
                    async with db.transaction("serializable") as transaction:
                        seen = await transaction.get(read), await transaction.multi_get([read, written])
                        await transaction.put(written, value)
                        if clash:
                            await db.put(read, b"clash")
                        return seen, await transaction.get(written), await _all(transaction.scan())
                except TransactionConflict as conflict:
                    return type(conflict)
            case ("snapshot", key, value):
                async with db.snapshot() as snapshot:
                    await db.put(key, value)
                    return snapshot.seq, await snapshot.get(key), await _all(snapshot.scan())
            case _:
                await db.flush("wal")
                async with aio.open_reader("db", store=self.store, merge_operator=Concatenate()) as reader:
                    return (
                        await _all(reader.scan()),
                        await reader.multi_get([b"a", b"b"]),
                        (await reader.status())["last_seq"],
                    )


@pytest.mark.slow
@given(steps=st.lists(STEPS, max_size=12))
def test_the_same_steps_give_the_same_results(steps: list[tuple[Any, ...]]) -> None:
    async def main() -> None:
        stores = MemoryStore(), MemoryStore()
        settings = Settings(flush_interval=None)
        async with aio.open(
            "db", store=stores[1], settings=settings, merge_operator=Concatenate()
        ) as awaited:
            with flagstone.open(
                "db", store=stores[0], settings=settings, merge_operator=Concatenate()
            ) as blocking:
                one, other = BlockingFace(blocking, stores[0]), AwaitedFace(awaited, stores[1])
                for step in steps:
                    assert await other.run(step) == await one.run(step), step

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda db: db.get(b""),
        lambda db: db.get("text"),
        lambda db: db.put(b"", b"v"),
        lambda db: db.put(b"k", 7),
        lambda db: db.put(b"k", b"v", ttl="0s"),
        lambda db: db.merge(b"k", b"v"),
        lambda db: db.write(WriteBatch()),
        lambda db: db.scan(b"z", b"a"),
        lambda db: db.scan(limit=-1),
        lambda db: db.transaction("chaos"),
        lambda db: db.flush("everything"),
        lambda db: db.get(b"k", durable_only=True, dirty=True),
    ],
)
def test_bad_calls_raise_the_same_messages(call: Callable[[Any], Any]) -> None:
    async def main() -> None:
        async with aio.open("db", store=MemoryStore()) as awaited:
            with flagstone.open("db", store=MemoryStore()) as blocking:
                with pytest.raises(flagstone.InvalidRequest) as one:
                    call(blocking)
                with pytest.raises(flagstone.InvalidRequest) as other:
                    await _settled(call(awaited))
                assert str(one.value) == str(other.value)

    asyncio.run(main())


async def _settled(given: Awaitable[Any]) -> Any:
    return await given


async def _all(rows: AsyncIterator[Any]) -> list[Any]:
    return [row async for row in rows]


def _timeless(row: Any) -> Any:
    """The row without its times: the two databases were not written at the same millisecond."""
    return None if row is None else (row.key, row.value, row.seq, row.expires_ms is None)
