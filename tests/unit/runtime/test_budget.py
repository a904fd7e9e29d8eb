"""The memory budget: its shares, and who waits for whom."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.config import Settings
from flagstone.errors import InvalidRequest
from flagstone.runtime import allocator
from flagstone.runtime.budget import (
    DATABASE_BYTES,
    MemoryBudget,
    fit_settings,
    plan_cache_bytes,
    plan_freezes,
    plan_shares,
    plan_step,
    process_budget,
)

MIB = 1024 * 1024
totals = st.integers(64 * MIB, 1 << 40)


class Cache:
    capacity_bytes = 0

    def resize(self, capacity_bytes: int) -> int:
        released, self.capacity_bytes = self.capacity_bytes - capacity_bytes, capacity_bytes
        return max(released, 0)


class Rows:
    """A database with memtables of a given size; a flush makes its frozen ones empty."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.active = self.frozen = 0
        self.account = budget.open_account(self)
        self.granted = True

    def write(self, size: int) -> None:
        self.active += size
        self.retry()

    def flush(self) -> None:
        self.frozen = 0
        self.retry()
        self.account.settle()

    def memtable_bytes(self) -> tuple[int, int]:
        return self.active, self.frozen

    def freeze(self) -> bool:
        self.active, self.frozen = 0, self.frozen + self.active
        return True

    def retry(self) -> None:
        self.granted, _ = self.account.ask(self.active + self.frozen)


@given(totals, st.floats(0, 1), st.floats(0, 1))
def test_shares_and_cache_fit_into_the_budget(total: int, rows: float, merging: float) -> None:
    shares = plan_shares(total)
    used, merges = int(rows * shares.rows), int(merging * shares.merge)
    cache = plan_cache_bytes(shares, used=used * 9 // 4 + merges)
    assert cache >= shares.least_cache
    reserved = shares.flush + shares.read_ahead + shares.fresh
    assert used * 9 // 4 + reserved + merges + cache <= total
    assert 2 * shares.largest_memtable <= shares.flush
    assert 200 * shares.step <= shares.rows


@given(totals, st.integers(0, 1000))
def test_open_databases_leave_at_least_a_quarter(total: int, databases: int) -> None:
    shares = plan_shares(total, databases=databases)
    assert 8 * shares.flush <= max(total - databases * DATABASE_BYTES, total // 4)
    assert 8 * shares.flush >= total // 4 - 8
    assert plan_step(shares, 0) == 0
    for used in (1, 100_000, 10**9):
        assert 0 < plan_step(shares, used) <= shares.step


@given(totals)
def test_limits_are_lowered_to_their_share(total: int) -> None:
    shares = plan_shares(total)
    fitted = fit_settings(Settings(), shares)
    assert fitted.l0_sst_size_bytes <= shares.largest_memtable
    assert fitted.max_unflushed_bytes <= shares.rows
    assert fitted.compactor_options is not None
    worker = fitted.compactor_options.worker
    assert worker is not None
    assert worker.max_sst_size + 2 * 8 * worker.bytes_to_fetch <= shares.merge
    assert fit_settings(Settings(compactor_options=None), shares).compactor_options is None
    small = Settings(l0_sst_size_bytes=1000, max_unflushed_bytes=2000, max_wal_bytes=10)
    assert fit_settings(small, shares).replace(compactor_options=None) == small.replace(
        compactor_options=None
    )


@given(st.lists(st.integers(0, 100)), st.integers(0, 100), st.integers(0, 300))
def test_the_largest_memtables_are_frozen_until_enough_is(
    active: list[int], frozen: int, wanted: int
) -> None:
    chosen = plan_freezes(active, frozen, wanted_bytes=wanted)
    total = frozen + sum(active[index] for index in chosen)
    rest = [size for index, size in enumerate(active) if index not in chosen and size]
    assert total >= wanted or not rest
    assert not chosen or total - active[chosen[-1]] < wanted
    assert not chosen or not rest or min(active[index] for index in chosen) >= max(rest)


def test_a_starved_database_continues_when_another_one_has_flushed() -> None:
    budget = MemoryBudget(64 * MIB)
    one, two = Rows(budget), Rows(budget)
    rows = budget.shares.rows
    one.write(rows - 200_000)
    two.write(50_000)
    assert one.granted
    assert two.granted
    two.write(50_000)
    assert not two.granted
    two.account.relieve()
    assert one.frozen
    one.flush()
    assert two.granted
    assert budget.usage()["rows"] < MIB


def test_many_small_memtables_are_frozen_when_none_of_them_is_full() -> None:
    budget = MemoryBudget(64 * MIB)
    databases = [Rows(budget) for _ in range(200)]
    for each in databases:
        each.write(30_000)
    starved = [each for each in databases if not each.granted]
    assert starved
    starved[0].account.relieve()
    assert sum(each.frozen for each in databases) >= budget.shares.rows // 4
    while any(not each.granted for each in databases):
        next(each for each in databases if each.frozen).flush()


def test_closing_a_database_releases_its_memory() -> None:
    budget = MemoryBudget(64 * MIB)
    one, two = Rows(budget), Rows(budget)
    one.write(16 * MIB)
    two.write(1)
    assert not two.granted
    one.account.close()
    assert two.granted
    del two
    gc.collect()
    assert budget.usage()["rows"] == 0
    assert not budget.used


def test_the_cache_gets_what_the_others_leave() -> None:
    budget = MemoryBudget(64 * MIB)
    cache = Cache()
    assert budget.share_cache(cache) is cache
    assert budget.share_cache(Cache()) is cache
    assert cache.capacity_bytes == plan_cache_bytes(budget.shares, used=0) > 37 * MIB
    rows = Rows(budget)
    rows.write(4 * MIB)
    full = cache.capacity_bytes
    assert full == plan_cache_bytes(budget.shares, used=rows.account.held * 9 // 4)
    with budget.merging(8 * MIB, lambda: None):
        assert cache.capacity_bytes < full - 6 * MIB


def test_the_cache_grows_again_when_a_database_is_closed_but_not_at_every_flush() -> None:
    budget = MemoryBudget(64 * MIB)
    cache = Cache()
    budget.share_cache(cache)
    one, two = Rows(budget), Rows(budget)
    before = cache.capacity_bytes
    one.write(6 * MIB)
    small = cache.capacity_bytes
    assert small < before - 10 * MIB
    one.freeze()
    one.flush()
    assert cache.capacity_bytes == small
    two.account.close()
    assert cache.capacity_bytes > before


def waits(enter: Callable[[], Any]) -> tuple[threading.Thread, threading.Event]:
    entered = threading.Event()

    def run() -> None:
        with enter():
            entered.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, entered


@pytest.mark.parametrize("kind", ["flush", "merge"])
def test_a_flush_or_merge_waits_for_others_of_its_kind_and_alone_never_waits(kind: str) -> None:
    budget = MemoryBudget(64 * MIB)

    def take(size: int) -> Any:
        return budget.flushing(size) if kind == "flush" else budget.merging(size, lambda: None)

    with take(100 * MIB):
        thread, entered = waits(lambda: take(1))
        assert not entered.wait(0.05)
        with budget.merging(1, lambda: None) if kind == "flush" else budget.flushing(1):
            pass
    assert entered.wait(20)
    thread.join(20)
    with take(3 * MIB), take(3 * MIB):
        assert budget.usage()["flushes" if kind == "flush" else "merges"] == 6 * MIB
    assert budget.usage()["flushes"] == budget.usage()["merges"] == 0


def test_a_merge_that_is_cancelled_waits_no_longer() -> None:
    budget = MemoryBudget(64 * MIB)

    def cancel() -> None:
        raise InvalidRequest("cancelled")

    with (
        budget.merging(100 * MIB, lambda: None),
        pytest.raises(InvalidRequest, match="cancelled"),
        budget.merging(1, cancel),
    ):
        raise AssertionError


def test_memory_of_a_thread_that_an_exception_ended_counts_as_free() -> None:
    budget = MemoryBudget(64 * MIB)
    lost = budget._flushes.take(100 * MIB)
    thread, entered = waits(lambda: budget.flushing(1))
    assert not entered.wait(0.05)
    del lost
    assert entered.wait(20)
    thread.join(20)


def test_all_databases_of_a_process_share_one_budget() -> None:
    total = 77 * MIB
    first = process_budget(total)
    rows = Rows(first)
    assert process_budget(total) is first
    with pytest.raises(InvalidRequest, match="use the same for all"):
        process_budget(78 * MIB)
    rows.account.close()
    assert process_budget(78 * MIB).total_bytes == 78 * MIB


def test_a_flush_or_merge_that_fails_gives_its_memory_back() -> None:
    budget = MemoryBudget(64 * MIB)

    def fail() -> None:
        assert budget.usage()["flushes"] == budget.usage()["merges"] == MIB
        raise InvalidRequest("failed")

    with pytest.raises(InvalidRequest, match="failed"), budget.flushing(MIB), budget.merging(MIB, fail):
        fail()
    assert budget.usage()["flushes"] == budget.usage()["merges"] == 0


def test_rows_of_a_reader_take_the_memory_of_the_cache_and_never_make_a_writer_wait() -> None:
    budget = MemoryBudget(64 * MIB)
    cache = Cache()
    budget.share_cache(cache)
    rows, reader = Rows(budget), budget.open_reader()
    before = cache.capacity_bytes
    reader.hold(8 * MIB)
    assert cache.capacity_bytes < before - 8 * MIB
    reader.hold(1000 * MIB)
    assert cache.capacity_bytes == budget.shares.least_cache
    rows.write(8 * MIB)
    assert rows.granted
    reader.close()
    assert budget.usage()["readers"] == 0
    rows.account.close()
    assert not budget.used


def test_all_parts_shrink_with_every_open_database_and_grow_when_it_closes() -> None:
    budget = MemoryBudget(64 * MIB)
    alone = budget.shares
    accounts = [budget.open_reader() for _ in range(20)]
    assert budget.shares == plan_shares(64 * MIB, databases=20)
    assert budget.read_ahead.limit_bytes == budget.shares.read_ahead < alone.read_ahead
    assert budget.fresh.limit_bytes == budget.shares.fresh < alone.fresh
    for account in accounts:
        account.close()
    assert budget.shares == alone
    assert budget.read_ahead.limit_bytes == alone.read_ahead


def test_freed_memory_returns_to_the_system_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = []
    monkeypatch.setattr(allocator, "trim", lambda: trims.append(1))
    budget = MemoryBudget(64 * MIB)
    for _ in range(7):
        with budget.flushing(MIB):
            pass
    assert len(trims) == 1
    budget.share_cache(Cache())
    rows = Rows(budget)
    before = len(trims)
    rows.write(4 * MIB)
    assert len(trims) == before + 1
