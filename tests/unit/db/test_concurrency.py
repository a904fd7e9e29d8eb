"""Concurrent merges and reads, and writers that fence each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.errors import Closed, Unavailable
from flagstone.lsm.operators import Counter
from flagstone.store.memory import MemoryStore

SETTINGS = Settings(
    flush_interval=timedelta(milliseconds=1),
    manifest_poll_interval=timedelta(milliseconds=1),
    l0_sst_size_bytes=4096,
    sst_block_size=1024,
    l0_max_ssts=100_000,
    l0_max_ssts_per_key=100_000,
    compactor_options=None,
    garbage_collector_options=None,
)


def run_all(*works: Callable[[], None]) -> list[BaseException]:
    """Run everything at once; what was raised."""
    raised: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told to the test
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return raised


def test_a_counter_counts_every_merge_once_while_it_is_flushed_and_read() -> None:
    writers, rounds = 4, 300
    done = threading.Event()
    store = MemoryStore()
    with open_database("db", store=store, settings=SETTINGS, merge_operator=Counter()) as db:
        left = threading.Semaphore(0)

        def count() -> None:
            for number in range(rounds):
                db.merge(b"counter", Counter.encode(1), await_durable=number % 50 == 0)
            left.release()

        def watch() -> None:
            seen = 0
            while not done.is_set():
                now = [Counter.decode(db.get(b"counter") or b"")]
                now += [Counter.decode(value) for _, value in db.scan()]
                now += [Counter.decode(value or b"") for value in db.multi_get([b"counter"])]
                assert now == sorted(now), now
                assert seen <= now[0], (seen, now)
                assert now[-1] <= writers * rounds, now
                seen = now[-1]

        def flush() -> None:
            while not done.is_set():
                db.flush()

        def end() -> None:
            for _ in range(writers):
                assert left.acquire(timeout=50)
            done.set()

        assert run_all(*[count] * writers, watch, watch, flush, end) == []
        assert Counter.decode(db[b"counter"]) == writers * rounds
    with open_database("db", store=store, settings=SETTINGS, merge_operator=Counter()) as db:
        assert Counter.decode(db[b"counter"]) == writers * rounds


@pytest.mark.slow
def test_writers_that_fence_each_other_lose_no_acknowledged_row() -> None:
    store = MemoryStore()
    acknowledged: list[set[bytes]] = [set() for _ in range(4)]
    fenced = [0] * 4

    def duel(name: int) -> None:
        for life in range(15):
            try:
                with open_database("db", store=store, settings=SETTINGS) as db:
                    for number in range(20):
                        key = b"%d/%d/%d" % (name, life, number)
                        db.put(key, b"v" * 300, await_durable=True)
                        acknowledged[name].add(key)
            except Closed as error:
                assert error.reason == "fenced", error
                fenced[name] += 1
            except Unavailable:
                # The writers fenced each other: none finished opening.
                fenced[name] += 1

    assert run_all(*[lambda name=name: duel(name) for name in range(4)]) == []
    with open_database("db", store=store, settings=SETTINGS) as db:
        found = {key for key, _ in db.scan()}
    assert set().union(*acknowledged) <= found
    assert sum(fenced) > 0
