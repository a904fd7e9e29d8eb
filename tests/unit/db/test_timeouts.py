"""Snapshots and transactions that stay open too long: what they raise, when, and how long is too long."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import flagstone
from flagstone.config import Settings
from flagstone.db.aio.database import AsyncDb
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Snapshot, Transaction
from flagstone.errors import Closed, InvalidRequest, TransactionConflict
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore

HOUR_MS = 3_600_000


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        # The manifest follower polls once an hour of real time: here only a use can notice the expiry.
        settings = Settings(
            manifest_poll_interval=timedelta(hours=1), compactor_options=None, garbage_collector_options=None
        )
        self.db: Db = open_database("db", store=MemoryStore(), settings=settings, clock=self.clock)

    @property
    def open_points(self) -> int:
        return len(self.db._engine.state.conflicts._points)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.db.put(b"k", b"v")
    yield world
    world.db.close()


READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda reads: reads.get(b"k"),
    "get_row": lambda reads: reads.get_row(b"k"),
    "multi_get": lambda reads: reads.multi_get([b"k"]),
    "scan": lambda reads: list(reads.scan()),
    "scan_arrow": lambda reads: reads.scan_arrow(),
    "getitem": lambda reads: reads[b"k"],
    "contains": lambda reads: b"k" in reads,
}
WRITES: dict[str, Callable[[Transaction], Any]] = {
    "put": lambda transaction: transaction.put(b"k", b"w"),
    "delete": lambda transaction: transaction.delete(b"k"),
    "mark_read": lambda transaction: transaction.mark_read(b"k"),
    "unmark_write": lambda transaction: transaction.unmark_write(b"k"),
    "commit": lambda transaction: transaction.commit(),
    "durable commit": lambda transaction: transaction.commit(await_durable=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
@pytest.mark.parametrize("use", [*READS, *WRITES])
def test_an_expired_transaction_raises_a_conflict_at_every_use(
    world: World, use: str, isolation: Any
) -> None:
    transaction = world.db.transaction(isolation)
    transaction.put(b"other", b"mine")
    world.clock.advance(HOUR_MS - 1)
    assert transaction.get(b"k") == b"v"
    world.clock.advance(1)
    for _ in range(2):
        with pytest.raises(TransactionConflict, match="past its time to live; run it again"):
            (READS | WRITES)[use](transaction)
    assert world.open_points == 0
    transaction.rollback()
    transaction.rollback()
    assert world.db.get(b"other") is None


@pytest.mark.parametrize("use", READS)
def test_an_expired_snapshot_is_closed(world: World, use: str) -> None:
    snapshot = world.db.snapshot()
    world.clock.advance(HOUR_MS - 1)
    READS[use](snapshot)
    world.clock.advance(1)
    for _ in range(2):
        with pytest.raises(Closed, match="past its time to live; take another"):
            READS[use](snapshot)
    assert world.open_points == 0
    snapshot.close()


def test_a_with_block_longer_than_the_timeout_raises_a_conflict_and_writes_nothing(world: World) -> None:
    with pytest.raises(TransactionConflict), world.db.transaction(timeout="5s") as transaction:  # noqa: PT012
        transaction.put(b"k", b"w")
        world.clock.advance(5_000)
    assert world.db.get(b"k") == b"v"


def test_transactions_and_snapshots_of_an_async_database_expire(world: World) -> None:
    async def main() -> None:
        db = AsyncDb(world.db)
        transaction, snapshot = db.transaction(timeout="5s"), db.snapshot(timeout="5s")
        await transaction.put(b"k", b"w")
        world.clock.advance(5_000)
        uses: list[Callable[[], Any]] = [
            lambda: transaction.get(b"k"),
            lambda: transaction.get_row(b"k"),
            lambda: transaction.multi_get([b"k"]),
            lambda: transaction.put(b"k", b"x"),
            transaction.commit,
        ]
        for use in uses:
            with pytest.raises(TransactionConflict, match="time to live"):
                await use()
        with pytest.raises(TransactionConflict):
            transaction.scan()
        with pytest.raises(Closed, match="time to live"):
            await snapshot.get(b"k")
        await transaction.rollback()

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [timedelta(milliseconds=1500), "1500ms", "1s 500ms"])
@pytest.mark.parametrize("begin", [Db.transaction, Db.snapshot])
def test_the_timeout_is_given_as_timedelta_or_text(
    world: World, timeout: Any, begin: Callable[..., Transaction | Snapshot]
) -> None:
    reading = begin(world.db, timeout=timeout)
    world.clock.advance(1_499)
    assert reading.get(b"k") == b"v"
    world.clock.advance(1)
    with pytest.raises(TransactionConflict if isinstance(reading, Transaction) else Closed):
        reading.get(b"k")


def test_without_a_timeout_transactions_and_snapshots_never_expire(world: World) -> None:
    with (
        world.db.transaction(timeout=timedelta.max) as transaction,
        world.db.snapshot(timeout=timedelta.max) as snapshot,
    ):
        world.clock.advance(1000 * HOUR_MS)
        assert transaction.get(b"k") == snapshot.get(b"k") == b"v"
        transaction.put(b"k", b"w")
    assert world.db.get(b"k") == b"w"


@pytest.mark.parametrize("timeout", [30, 1.5, True, b"30s"])
@pytest.mark.parametrize("begin", [Db.transaction, Db.snapshot])
def test_a_bare_number_is_refused_with_a_hint(world: World, timeout: Any, begin: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"timeout: .*use a timedelta or text such as '5s'"):
        begin(world.db, timeout=timeout)
    assert world.open_points == 0


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), "0s", "soon", ""])
def test_an_invalid_timeout_is_refused(world: World, timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout: "):
        world.db.transaction(timeout=timeout)


@pytest.mark.parametrize("shift_ms", [-2 * HOUR_MS, 2 * HOUR_MS])
def test_setting_the_wall_clock_does_not_change_the_expiry(world: World, shift_ms: int) -> None:
    transaction, snapshot = world.db.transaction(), world.db.snapshot()
    world.clock.shift_wall(shift_ms)
    assert transaction.get(b"k") == snapshot.get(b"k") == b"v"
    world.clock.advance(HOUR_MS)
    with pytest.raises(TransactionConflict):
        transaction.get(b"k")
    with pytest.raises(Closed):
        snapshot.get(b"k")


def test_garbage_collected_snapshots_and_transactions_keep_no_rows(world: World) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reading: list[Any] = [world.db.snapshot(), world.db.transaction()]
        reading[1].get(b"k")
        assert world.open_points == 2
        reading.clear()
        gc.collect()
        world.db._engine.state.expire_reads()
    assert world.open_points == 0
    assert not caught


def test_a_garbage_collected_transaction_with_writes_warns_of_the_loss(world: World) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transaction = world.db.transaction()
        transaction.put(b"a", b"1")
        transaction.put(b"b", b"2")
        del transaction
        gc.collect()
    assert [(each.category, str(each.message)) for each in caught] == [
        (
            ResourceWarning,
            "unclosed transaction whose operations are lost: 2; commit it, or roll it back",
        )
    ]


def test_run_repeats_an_expired_transaction(world: World) -> None:
    attempts = 0
    for attempt in range(3):
        try:
            with world.db.transaction(timeout="1s") as transaction:
                attempts += 1
                world.clock.advance(600 if attempt else 2_000)
                transaction.put(b"k", b"%d" % attempt)
            break
        except flagstone.TransactionConflict:
            continue
    assert (attempts, world.db.get(b"k")) == (2, b"1")
