"""A program of a user that type checkers must accept; `test_typing.py` runs them. The program itself runs, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import polars as pl

import flagstone
from flagstone import Settings, aio, operators
from flagstone.config import CompactorOptions


@dataclass
class Order:
    customer: str
    pieces: int


def settings() -> Settings:
    given = Settings(
        flush_interval="10ms",
        manifest_poll_interval=timedelta(seconds=1),
        wal_hedge_after=None,
        compactor_options={"poll_interval": "1h"},
    )
    interval: timedelta | None = given.flush_interval
    assert interval == timedelta(milliseconds=10)
    compactor: CompactorOptions | None = given.compactor_options
    assert compactor is not None
    seconds: float = compactor.poll_interval.total_seconds()
    assert seconds == 3600
    return given


def total(rows: Mapping[bytes, bytes]) -> int:
    return sum(len(value) for value in rows.values())


def fill(rows: MutableMapping[bytes, bytes]) -> None:
    rows[b"a"] = b"1"
    rows.update({b"b": b"2"})


def blocking() -> None:
    with flagstone.open("memory://typing/db", settings=settings(), merge_operator=operators.Counter()) as db:
        fill(db)
        maybe: bytes | None = db.get(b"a")
        surely: bytes = db.get(b"x", b"default")
        either: bytes | int = db.get(b"x", 7)
        found: bytes = db[b"a"]
        keys: list[bytes] = [*db.keys(), *db[b"a":b"c"], *reversed(db)]
        pairs: list[tuple[bytes, bytes]] = list(db.items())
        popped: bytes | None = db.pop(b"zz", None)
        taken: bytes = db.pop(b"b")
        assert (maybe, surely, either, found, popped, taken) == (b"1", b"default", 7, b"1", None, b"2")
        assert (len(keys), len(pairs), db.count(), total(db), total(db[b"a":])) == (6, 2, 1, 1, 1)

        def transfer(tx: flagstone.Transaction) -> int:
            fill(tx)
            return int(tx[b"a"])

        amount: int = db.run(transfer, isolation="serializable", retries=3, timeout="1min")
        durable: int = db.status().durable_seq
        state: str = db.status()["state"]
        assert (amount, state) == (1, "open")
        assert durable >= 0
        with db.snapshot() as snapshot:
            assert total(snapshot) == 2
        orders: flagstone.Collection[tuple[str, int], Order] = db.collection(
            "orders", key=(str, int), value=Order
        )
        orders["eu", 1] = Order("alice", 2)
        order: Order = orders["eu", 1]
        absent: Order | None = orders.get(("eu", 2))
        by_customer = orders.index("by_customer", lambda each: each.customer)
        found_keys: list[tuple[str, int]] = list(by_customer.keys("alice"))
        db.run(lambda tx: orders.within(tx).pop(("eu", 1)))
        assert (order.pieces, absent, found_keys, orders.count()) == (2, None, [("eu", 1)], 0)
        db.put(b"c", b"3", ttl="30s").wait(timeout=5.0)
        db.put(b"c", b"3", ttl=timedelta(days=1)).wait("5s")
        names: Iterator[bytes] = iter(db[b"a":])
        assert next(names) == b"a"


def arrow() -> None:
    with flagstone.open("memory://typing/arrow") as db:
        written: int = db.write_arrow(pl.DataFrame({"key": ["a", "b"], "value": ["1", "2"]}))
        frame: pl.DataFrame = db.scan(prefix=b"a").to_polars(columns=("key", "seq"))
        readings: flagstone.Collection[int, float] = db.collection("readings", key=int, value=float)
        readings.update({1: 2.5})
        lazy: pl.LazyFrame = flagstone.scan_polars(readings)
        with flagstone.dataset(db, prefix=b"a", include_expired=True) as rows:
            count: int = rows.count_rows()
        high: int = lazy.filter(pl.col("value") > 1).collect().height
        assert (written, frame.height, count, high) == (2, 1, 1, 1)


def handles() -> None:
    with flagstone.open("memory://typing/handles", settings={"flush_interval": "10ms"}) as db:
        with db.batch() as batch:
            batch[b"a"] = b"1"
            batch.put(b"b", b"2", ttl="1h")
        checkpoint = db.checkpoint(name="nightly", lifetime="7days")
        explained = db.explain(b"a")
        steps: list[str] = [step.outcome for step in explained.steps]
        estimate: int = db.approximate_len(prefix=b"a")
        inside: bool = db.keys() <= {b"a", b"b"}
        users = db.collection("users", key=str, value=Order)
        by_name = users.index("by_name", lambda each: each.customer, unique=True)
        users.update(ada=Order("Ada", 1))
        found: Order = by_name["Ada"]
        assert steps[-1].startswith("value")
        assert (estimate >= 0, inside, found.pieces) == (True, True, 1)
    with flagstone.open_reader(
        "memory://typing/handles", checkpoint=checkpoint.id, settings={"manifest_poll_interval": "1s"}
    ) as reader:
        value: bytes | None = reader.get(b"a")
        assert value == b"1"
    admin: flagstone.Admin = flagstone.Admin("memory://typing/handles")
    admin.delete_checkpoint(checkpoint.id)
    try:
        flagstone.open("s3:/bucket/x")
    except flagstone.InvalidRequest as error:
        text: str = str(error)
        assert "s3://bucket/x" in text


async def awaited() -> None:
    async with aio.open("memory://typing/other", settings={"flush_interval": "10ms"}) as db:
        await db.put(b"a", b"1")
        value: bytes = await db.get(b"a", b"")
        assert value == b"1"

        async def transfer(tx: aio.AsyncTransaction) -> bytes:
            return await tx.pop(b"a")

        taken: bytes = await db.run(transfer)
        keys: list[bytes] = [key async for key in db]
        assert (taken, keys, await db.count()) == (b"1", [], 0)
        orders = await db.collection("orders", key=(str, int), value=Order)
        await orders.put(("eu", 1), Order("ada", 2))
        order: Order | None = await orders.get(("eu", 1))
        rows: list[tuple[tuple[str, int], Order]] = [row async for row in orders.scan("eu")]
        assert order is not None
        assert len(rows) == 1


if __name__ == "__main__":
    blocking()
    arrow()
    handles()
    asyncio.run(awaited())
