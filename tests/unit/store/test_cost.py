from __future__ import annotations

import pytest

import flagstone
from flagstone import Settings, cost
from flagstone.config.settings import PRICE_LIST_NAMES
from flagstone.runtime.clock import VirtualClock
from flagstone.store.cost import SHORTEST_PROJECTION_S, Component, Usage, component_of, plan_cost
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectExists
from flagstone.store.prices import PRICE_LISTS, SECONDS_A_MONTH
from flagstone.store.retrying import RetryingStore
from flagstone.testing.faults import Fault, FaultyStore


@pytest.mark.parametrize(
    ("path", "reads", "component"),
    [
        ("shop/wal/00000000000000000001.sst", False, "wal"),
        ("shop/wal", True, "wal"),
        ("shop/compacted/01J.sst", False, "sst"),
        ("shop/compacted/01J.sst", True, "reads"),
        ("shop/manifest/", True, "manifest"),
        ("shop/compactions/00000000000000000001.compactions", True, "compaction"),
        ("shop/gc/wal.boundary", False, "gc"),
        ("shop/flagstone/origin", True, "other"),
        ("wal", True, "wal"),
        ("", True, "other"),
    ],
)
def test_the_folder_of_an_object_tells_the_purpose_of_a_request(
    path: str, reads: bool, component: Component
) -> None:
    assert component_of(path, reads=reads) == component


def test_dollars_are_requests_and_transfer_at_the_price_list() -> None:
    usage = Usage(
        {"wal": {"put": 1000}, "reads": {"get": 10_000, "delete": 5}},
        sent={"wal": 1 << 30},
        operations=2_000_000,
        stored_bytes=10 << 30,
        seconds=SECONDS_A_MONTH / 10,
    )
    found = plan_cost(usage, "s3-express")
    prices = PRICE_LISTS["s3-express"]
    assert found.by_component["wal"] == pytest.approx(1000 * prices.put + prices.sent_gb)
    assert found.by_component["reads"] == pytest.approx(10_000 * prices.get)
    assert found.requests_a_month == pytest.approx(10 * found.dollars)
    assert found.storage_a_month == pytest.approx(10 * prices.stored_gb)
    assert found.dollars_a_month == pytest.approx(10 * found.dollars + 1.1)
    assert found.per_million_operations == pytest.approx(found.dollars / 2)


def test_a_few_seconds_are_not_projected_to_a_month() -> None:
    short = plan_cost(Usage({"wal": {"put": 1}}, seconds=SHORTEST_PROJECTION_S / 2), "s3-standard")
    assert short.requests_a_month is short.dollars_a_month is short.per_million_operations is None


def test_every_price_list_of_the_settings_exists() -> None:
    assert set(PRICE_LIST_NAMES) == PRICE_LISTS.keys() == cost.PRICE_LISTS.keys()
    with pytest.raises(flagstone.InvalidRequest, match="price_list"):
        Settings(price_list="s3")  # type: ignore[arg-type]


def test_the_cost_of_a_database_equals_what_a_counting_store_below_it_counts() -> None:
    below = CountingStore(MemoryStore(), component="test")
    settings = Settings(l0_max_ssts=20)
    with flagstone.open("db", store=below, settings=settings) as db:
        for number in range(6):
            db.put(b"key%d" % number, b"value" * 100, await_durable=True)
            db.flush()
        db.get(b"key1")
        list(db.scan())
        db.checkpoint()
    spent = db.status()["cost"]  # closed: no service sends requests any more
    totals = below.totals()

    by_kind: dict[str, int] = {}
    for kinds in spent["requests"].values():
        for kind, count in kinds.items():
            by_kind[kind] = by_kind.get(kind, 0) + count
    assert by_kind == below.by_kind()
    assert sum(spent["bytes_sent"].values()) == totals["bytes_written"]
    assert sum(spent["bytes_received"].values()) == totals["bytes_read"]
    assert spent["dollars"] == pytest.approx(PRICE_LISTS["s3-standard"].requests(below.by_kind()))
    assert spent["requests"]["wal"]["put"] >= 6
    assert spent["requests"]["sst"]["put"] >= 6
    assert spent["requests"]["compaction"]["put"] >= 1
    assert spent["operations"] == 8
    assert set(spent["requests"]) <= set(cost.COMPONENTS)


def test_requests_of_compaction_and_garbage_collection_have_their_own_component() -> None:
    store = CountingStore(MemoryStore(), component="db")
    for purpose in ("compaction", "gc"):
        mine = store.attributed(purpose)  # type: ignore[arg-type]
        mine.put("db/compacted/x", b"123")
        mine.get("db/compacted/x")
    store.get("db/compacted/x")
    assert store.totals()["requests"] == {"put": 2, "get": 3}
    assert store.attributed("gc") is mine  # so that a collector sees that the WAL is on the same store
    store.reset()
    mine.get("db/compacted/x")
    assert store.totals()["requests"] == {"get": 1}


def test_the_projection_uses_the_clock_of_the_database() -> None:
    clock = VirtualClock()
    quiet = Settings(compactor_options=None, garbage_collector_options=None, price_list="r2-standard")
    with flagstone.open("db", store=MemoryStore(), settings=quiet, clock=clock) as db:
        db.put(b"a", b"1")
        assert db.status()["cost"]["dollars_a_month"] is None
        clock.advance(100_000)
        found = db.status()["cost"]
        assert found["price_list"] == "r2-standard"
        assert found["seconds"] >= 100
        assert found["request_dollars_a_month"] == pytest.approx(
            found["dollars"] * SECONDS_A_MONTH / found["seconds"]
        )


def test_a_reader_tells_its_cost_too() -> None:
    store = MemoryStore()
    flagstone.open("db", store=store).close()
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        assert reader.status()["cost"]["requests"]["manifest"]["get"] >= 1
        assert reader.status().cost["dollars"] > 0


def test_repeated_requests_and_the_reading_of_a_winner_cost_something_for_their_purpose() -> None:
    below = CountingStore(MemoryStore(), component="test")
    faulty = FaultyStore(below, [Fault("error", op="get"), Fault("lost_reply", nth=2, op="put_if_absent")])
    store = CountingStore(RetryingStore(faulty, clock=VirtualClock()), component="db")
    mine = store.attributed("gc")
    mine.put("db/manifest/1", b"1")
    mine.get("db/manifest/1")
    with pytest.raises(ObjectExists):
        mine.put_if_absent("db/manifest/1", b"2")
    mine.put_if_absent("db/manifest/2", b"2")

    spent = Usage.of(store._registry.snapshot()).requests
    assert set(spent) == {"gc"}
    sent = below.by_kind()
    assert spent["gc"] == {**sent, "get": sent["get"] + 1}, "the get that failed did not reach the store"
    assert sent == {"put": 4, "get": 1, "head": 2}
    assert store.totals()["requests"] == {"put": 1, "get": 1, "put_if_absent": 2}
