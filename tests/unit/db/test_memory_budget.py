"""Databases that share one memory budget."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.runtime import budget as budgets
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET

MIB = 1024 * 1024
BUDGET = QUIET.replace(memory_budget=64 * MIB, l0_max_ssts=1000, l0_max_ssts_per_key=1000)
VALUE = b"v" * 1000


@pytest.fixture(autouse=True)
def own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have databases open."""
    monkeypatch.setattr(budgets, "_process", budgets._Process())


def opened(stack: ExitStack, count: int, settings: Settings = BUDGET) -> list[Db]:
    store = MemoryStore()
    return [
        stack.enter_context(open_database(f"db{number}", store=store, settings=settings))
        for number in range(count)
    ]


def test_one_database_never_holds_more_rows_than_its_share() -> None:
    with ExitStack() as stack:
        (db,) = opened(stack, 1)
        most = 0
        for number in range(40_000):
            db.put(b"%08d" % number, VALUE)
            if number % 100 == 0:
                most = max(most, db.status()["unflushed_bytes"])
        assert most <= 16 * MIB + 10_000
        assert sum(1 for _ in db.scan()) == 40_000
        assert db.status()["l0_tables"] >= 8


def test_small_memtables_of_many_databases_make_room_for_each_other() -> None:
    with ExitStack() as stack:
        databases = opened(stack, 20)
        for number in range(1_500):
            for db in databases:
                db.put(b"%08d" % number, VALUE)
        usage = databases[0].status()["memory"]
        assert usage["rows"] <= 17 * MIB
        assert any(db.metrics()["slatedb.db.backpressure_count"] for db in databases)
        assert all(sum(1 for _ in db.scan()) == 1_500 for db in databases)


def test_writers_of_several_threads_all_finish() -> None:
    with ExitStack() as stack:
        databases = opened(stack, 4)

        def write(db: Db, lane: int) -> None:
            for number in range(4_000):
                db.put(b"%d/%08d" % (lane, number), VALUE)

        threads = [threading.Thread(target=write, args=(db, lane)) for db in databases for lane in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert all(sum(1 for _ in db.scan()) == 8_000 for db in databases)


def test_databases_share_one_cache_and_a_closed_one_leaves_it() -> None:
    with ExitStack() as stack:
        one, two = opened(stack, 2)
        for db in (one, two):
            for number in range(2_000):
                db.put(b"%08d" % number, VALUE)
            db.flush()
            for number in range(0, 2_000, 7):
                assert db.get(b"%08d" % number) == VALUE
        cache = one._context.ssts.cache
        assert cache is two._context.ssts.cache
        both = cache.held_bytes
        one.close()
        assert 0 < cache.held_bytes < both
        assert two.get(b"%08d" % 7) == VALUE


def test_a_compaction_fits_into_the_budget() -> None:
    settings = BUDGET.replace(compactor_options=Settings().compactor_options, l0_max_ssts=8)
    with ExitStack() as stack:
        (db,) = opened(stack, 1, settings)
        for turn in range(3):
            for number in range(20_000):
                db.put(b"%08d" % number, VALUE + b"%d" % turn)
        db.flush()
        assert db.get(b"%08d" % 5) == VALUE + b"2"
        assert sum(1 for _ in db.scan()) == 20_000
        assert db.status()["sorted_runs"] > 0


def test_without_a_budget_settings_are_those_of_slatedb() -> None:
    with ExitStack() as stack:
        (db,) = opened(stack, 1, QUIET)
        assert db.status()["memory"] is None
        assert db._engine.env.settings == QUIET
