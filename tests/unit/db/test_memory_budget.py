"""Databases that share one memory budget."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from flagstone.config import ReaderSettings, Settings
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest
from flagstone.runtime import budget as budgets
from flagstone.runtime.budget import DATABASE_BYTES
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


def test_a_reader_draws_from_the_budget_and_a_closed_one_gives_everything_back() -> None:
    with ExitStack() as stack:
        (db,) = opened(stack, 1)
        store = db._engine.env.store
        for number in range(2_000):
            db.put(b"%08d" % number, VALUE)
        db.flush()
        db.put(b"new", VALUE)
        db._engine.flush_wal()
        with open_reader("db0", store=store, settings=ReaderSettings(memory_budget=64 * MIB)) as reader:
            assert reader._context.ssts.cache is db._context.ssts.cache
            assert reader._context.ssts.read_ahead is db._context.ssts.read_ahead
            assert sum(1 for _ in reader.scan()) == 2_001
            assert db.status()["memory"]["readers"] > 1000
            assert db.status()["memory"]["databases"] == 2 * DATABASE_BYTES
            held = db._context.ssts.cache.held_bytes
        memory = db.status()["memory"]
        assert memory["readers"] == 0
        assert memory["databases"] == DATABASE_BYTES
        assert db._context.ssts.cache.held_bytes <= held
        with pytest.raises(InvalidRequest, match="use the same for all"):
            open_reader("db0", store=store, settings=ReaderSettings(memory_budget=65 * MIB))


def test_closed_databases_give_everything_back() -> None:
    with ExitStack() as stack:
        databases = opened(stack, 3)
        budget = databases[0]._engine.env.memory
        assert budget is not None
        for db in databases:
            for number in range(3_000):
                db.put(b"%08d" % number, VALUE)
            db.flush()
            db.put(b"new", VALUE)
        assert budget.usage()["uploaded_ssts"] > 0
        assert sum(1 for _ in databases[0].scan()) == 3_001
        assert databases[0]._context.ssts.cache.held_bytes > 0
    assert budget.usage() == dict.fromkeys(budget.usage(), 0) | {"budget": 64 * MIB}
    assert databases[0]._context.ssts.cache.held_bytes == 0


def test_scans_of_all_databases_read_ahead_within_one_part_of_the_budget() -> None:
    with ExitStack() as stack:
        databases = opened(stack, 2)
        budget = databases[0]._engine.env.memory
        assert budget is not None
        for db in databases:
            for number in range(8_000):
                db.put(b"%08d" % number, VALUE)
            db.flush()
        # Memory for nothing: scans fetch only what they need next.
        budget.read_ahead.resize(0)
        scans = [stack.enter_context(db.scan()) for db in databases]
        assert sum(1 for _ in scans[0]) == sum(1 for _ in scans[1]) == 8_000
        assert budget.usage()["read_ahead"] < 2 * MIB


def test_a_forked_child_has_a_budget_of_its_own(tmp_path: Path) -> None:
    code = f"""
import os
import flagstone
from flagstone import Settings
from flagstone.runtime.budget import process_budget
settings = Settings(memory_budget=64 << 20)
with flagstone.open({str(tmp_path / "one")!r}, settings=settings) as db:
    db.put(b"k", b"v")
    pid = os.fork()
    if not pid:
        budget = process_budget(65 << 20)
        assert not budget.used
        with flagstone.open({str(tmp_path / "two")!r}, settings=Settings(memory_budget=65 << 20)) as own:
            own.put(b"k", b"v")
            own.flush()
            assert own.get(b"k") == b"v"
        assert not budget.used
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    db.flush()
    assert process_budget(64 << 20).used
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
