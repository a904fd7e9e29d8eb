"""Transactions as functions: what is run again, what is raised, and what is stored afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import flagstone
from flagstone import Closed, InvalidRequest, TransactionConflict, Unavailable, aio
from flagstone.db.writer.database import Db
from flagstone.db.writer.run import Attempts
from flagstone.db.writer.transaction import Transaction
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.write.conflicts import TransactionExpired
from kit.databases import MANUAL, QUIET


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def db(clock: VirtualClock) -> Iterator[Db]:
    with flagstone.open("db", store=MemoryStore(), settings=MANUAL, clock=clock, ids=Ids(7)) as db:
        db[b"n"] = b"0"
        yield db


def colliding(db: Db, times: int) -> Any:
    """Adds one to `n`; the first `times` calls collide with another write."""
    calls: list[int] = []

    def add(tx: Transaction) -> int:
        number = int(tx[b"n"]) + 1
        tx[b"n"] = b"%d" % number
        if len(calls) < times:
            db[b"n"] = db[b"n"]
        calls.append(number)
        return number

    return add, calls


def test_the_result_of_the_function_is_returned_after_the_commit(db: Db) -> None:
    add, calls = colliding(db, 0)
    assert db.run(add) == 1
    assert (db[b"n"], len(calls)) == (b"1", 1)


def test_a_conflict_runs_the_function_again_after_a_pause(db: Db, clock: VirtualClock) -> None:
    add, calls = colliding(db, 3)
    before = clock.monotonic()
    assert db.run(add) == 1
    assert (db[b"n"], len(calls)) == (b"1", 4)
    assert 0 < clock.monotonic() - before < 0.007


def test_after_the_last_retry_the_conflict_is_raised_with_the_number_of_attempts(db: Db) -> None:
    add, calls = colliding(db, 99)
    with pytest.raises(TransactionConflict) as raised:
        db.run(add, retries=4)
    assert len(calls) == 5
    assert "5 attempts" in raised.value.__notes__[0]
    assert db[b"n"] == b"0"
    with pytest.raises(TransactionConflict):
        db.run(add, retries=0)
    assert len(calls) == 6


def test_pauses_grow_and_are_bounded() -> None:
    attempts, longest = Attempts(1000, Ids(1)), 0.0
    for number in range(1000):
        pause_s = attempts.pause_s(TransactionConflict("again"))
        assert 0 <= pause_s <= min(0.001 * 2**number, 0.25)
        longest = max(longest, pause_s)
    assert longest > 0.2


def test_other_errors_roll_back_and_are_not_retried(db: Db) -> None:
    calls: list[int] = []

    def fail(tx: Transaction) -> None:
        tx[b"n"] = b"9"
        calls.append(1)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        db.run(fail)
    assert (len(calls), db[b"n"]) == (1, b"0")


def test_an_expired_transaction_is_raised_and_not_run_again(db: Db, clock: VirtualClock) -> None:
    calls: list[int] = []

    def slow(tx: Transaction) -> None:
        calls.append(1)
        tx[b"n"] = b"9"
        clock.advance(2000)

    with pytest.raises(TransactionExpired):
        db.run(slow, timeout=timedelta(seconds=1))
    assert (len(calls), db[b"n"]) == (1, b"0")


def test_serializable_isolation_also_retries_after_a_changed_read(db: Db) -> None:
    calls: list[bytes] = []

    def copy(tx: Transaction) -> None:
        tx[b"copy"] = tx[b"n"]
        calls.append(tx[b"n"])
        if len(calls) == 1:
            db[b"n"] = b"5"

    db.run(copy, isolation="serializable")
    assert calls == [b"0", b"5"]
    assert db[b"copy"] == b"5"


def test_a_function_that_rolled_back_or_committed_is_left_alone(db: Db) -> None:
    def give_up(tx: Transaction) -> str:
        tx[b"n"] = b"9"
        tx.rollback()
        return "gave up"

    assert db.run(give_up) == "gave up"
    assert db[b"n"] == b"0"
    calls: list[int] = []

    def commit_and_conflict(tx: Transaction) -> None:
        calls.append(1)
        tx[b"n"] = b"1"
        tx.commit()
        raise TransactionConflict("of something else")

    with pytest.raises(TransactionConflict, match="something else"):
        db.run(commit_and_conflict)
    assert (len(calls), db[b"n"]) == (1, b"1")


def test_a_commit_whose_durability_is_unknown_is_raised_and_not_run_again() -> None:
    store = FaultyStore(MemoryStore())
    settings = MANUAL.replace(object_store_max_retries=0)
    db = flagstone.open("db", store=store, settings=settings, clock=VirtualClock())
    calls: list[int] = []

    def put(tx: Transaction) -> None:
        calls.append(1)
        tx[b"k"] = b"v"
        store.faults.append(Fault("error", nth=None, path="*/wal/*"))

    with pytest.raises((Unavailable, Closed)):
        db.run(put, await_durable=True)
    assert len(calls) == 1
    db.close()


@pytest.mark.parametrize("retries", [-1, 1.5, True, None, "3"])
def test_a_number_of_retries_that_is_none_is_refused(db: Db, retries: Any) -> None:
    with pytest.raises(InvalidRequest, match="retries"):
        db.run(lambda tx: None, retries=retries)


def test_a_coroutine_function_is_refused_and_nothing_is_written(db: Db) -> None:
    async def put(tx: Transaction) -> None:
        tx[b"n"] = b"9"

    with pytest.raises(InvalidRequest, match=r"AsyncDb\.run"):
        db.run(put)
    assert db[b"n"] == b"0"


def test_many_threads_that_add_to_one_number_lose_no_addition() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        db[b"n"] = b"0"

        def add(tx: Transaction) -> None:
            tx[b"n"] = b"%d" % (int(tx[b"n"]) + 1)

        threads = [
            threading.Thread(target=lambda: [db.run(add, retries=500) for _ in range(50)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert db[b"n"] == b"200"


def test_the_async_form_runs_again_and_refuses_plain_functions() -> None:
    async def main() -> None:
        async with aio.open("db", store=MemoryStore(), settings=QUIET) as db:
            await db.put(b"n", b"0")

            async def add(tx: aio.AsyncTransaction) -> int:
                number = int(await tx.get(b"n", b"0")) + 1
                await asyncio.sleep(0)
                await tx.put(b"n", b"%d" % number)
                return number

            results = await asyncio.gather(*(db.run(add, retries=200) for _ in range(20)))
            assert sorted(results) == list(range(1, 21))
            assert await db.get(b"n") == b"20"
            with pytest.raises(InvalidRequest, match="async def"):
                await db.run(lambda tx: None)  # type: ignore[arg-type, return-value]
            with pytest.raises(ZeroDivisionError):
                await db.run(_fail)

    asyncio.run(main())


async def _fail(tx: aio.AsyncTransaction) -> None:
    await tx.put(b"n", b"%d" % (1 // 0))
