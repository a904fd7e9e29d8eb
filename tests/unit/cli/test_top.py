"""`top`: what happened between two looks at a database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flagstone
from flagstone.cli.connection import Connection, connect
from flagstone.cli.context import Invocation
from flagstone.inspector.rates import Sampler, plan_rates
from flagstone.runtime.clock import VirtualClock
from unit.cli.running import Flagstone

QUIET = flagstone.Settings(compactor_options=None, garbage_collector_options=None)


@pytest.fixture
def connection(shop: Flagstone) -> Connection:
    return connect(Invocation(path=str(shop.path)))


def test_rates_are_the_differences_of_two_samples(shop: Flagstone, connection: Connection) -> None:
    clock = VirtualClock(start_ms=1_800_000_000_000)
    sampler = Sampler(connection, clock)
    before = sampler.take()
    assert (len(before.l0), before.run_count) == (2, 0)
    with flagstone.open(shop.path, settings=QUIET) as database:
        for number in range(50):
            database.put(b"new/%d" % number, bytes(1000))
        database.flush("wal")
        database.flush()
        clock.advance(2000)
        after = sampler.take()
    rates = plan_rates(before, after)
    assert rates.seconds == 2
    assert rates.rows == 50
    assert rates.flushes == 1
    assert rates.flushed_bytes > 50_000
    assert rates.wal_bytes > 50_000
    assert after.writer_epoch > before.writer_epoch
    assert rates.compacted_ssts == 0
    assert plan_rates(after, after).wal_bytes == 0


def test_a_compaction_shows_as_new_ssts_of_a_sorted_run(shop: Flagstone, connection: Connection) -> None:
    sampler = Sampler(connection)
    before = sampler.take()
    shop.ok("compact", "--full")
    rates = plan_rates(before, sampler.take())
    assert rates.compacted_ssts == 1
    assert rates.flushes == 0


def test_it_prints_one_interval(shop: Flagstone) -> None:
    shown = shop.ok("top", "--once", "--interval", "100ms")
    assert shown.startswith(f"shop in file://{shop.path.parent}\n")
    for word in ("WAL", "flushes", "compacted", "sorted runs", "requests/s"):
        assert word in shown
    found = json.loads(shop.ok("--json", "top", "--once", "--interval", "100ms"))
    assert found["l0"]["ssts"] == 2
    assert found["flushes"] == 0
    assert 0.1 <= found["seconds"] < 10


def test_it_writes_nothing_and_refuses_what_it_cannot_do(shop: Flagstone, tmp_path: Path) -> None:
    before = sorted(shop.path.rglob("*"))
    shop.ok("top", "--once", "--interval", "100ms")
    assert sorted(shop.path.rglob("*")) == before
    assert "100ms or more" in shop.refused("top", "--once", "--interval", "1ms")
    assert "no database" in shop.refused("top", "--once", path=tmp_path / "none")
