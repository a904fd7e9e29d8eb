"""Money moves between accounts in many threads; every read sees the sum of the start."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from contextlib import suppress

import pytest

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import TransactionConflict
from flagstone.store.memory import MemoryStore
from flagstone.write.conflicts import Isolation

ACCOUNTS = [b"account/%02d" % number for number in range(16)]
START = 100
TRANSFERS = 120
CLERKS = 6


def total(rows: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(int(value) for _, value in rows)


def transfer(db: Db, isolation: Isolation, chance: random.Random) -> None:
    source, target = chance.sample(ACCOUNTS, 2)
    with db.transaction(isolation) as transaction:
        amount = min(chance.randint(1, 20), int(transaction[source]))
        transaction.put(source, b"%d" % (int(transaction[source]) - amount))
        transaction.put(target, b"%d" % (int(transaction[target]) + amount))


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_concurrent_transfers_keep_the_sum_in_every_read(isolation: Isolation) -> None:
    store = MemoryStore()
    settings = Settings(
        flush_interval="1ms",  # type: ignore[arg-type]
        l0_sst_size_bytes=2048,
        sst_block_size=1024,
        l0_max_ssts=10_000,
        l0_max_ssts_per_key=10_000,
        compactor_options=None,
        garbage_collector_options=None,
    )
    expected = START * len(ACCOUNTS)
    wrong: list[str] = []
    working = threading.Event()
    working.set()

    with open_database("bank", store=store, settings=settings) as db:
        with db.batch() as batch:
            for account in ACCOUNTS:
                batch.put(account, b"%d" % START)

        def clerk(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(TRANSFERS):
                with suppress(TransactionConflict):
                    transfer(db, isolation, chance)

        def auditor() -> None:
            while working.is_set():
                with db.snapshot() as snapshot:
                    sums = {
                        "scan": total(db.scan()),
                        "durable": total(db.scan(durable_only=True)),
                        "reverse": total(db.scan(reverse=True)),
                        "keys": sum(int(value or b"0") for value in db.multi_get(ACCOUNTS)),
                        "snapshot": total(snapshot.scan()),
                        "snapshot again": total(snapshot.scan(prefix=b"account/")),
                    }
                # Before the first WAL file there is nothing durable to sum up.
                wrong.extend(f"{how}: {found}" for how, found in sums.items() if found not in (expected, 0))

        auditors = [guarded(auditor, wrong) for _ in range(2)]
        clerks = [guarded(lambda seed=seed: clerk(seed), wrong) for seed in range(CLERKS)]
        for thread in clerks:
            thread.join(60)
        working.clear()
        for thread in auditors:
            thread.join(60)
        assert not wrong, wrong[:5]
        assert total(db.scan()) == expected

    with open_database("bank", store=store, settings=settings) as db:
        assert total(db.scan()) == expected


def guarded(work: object, wrong: list[str]) -> threading.Thread:
    def run() -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - told to the test
            wrong.append(repr(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
