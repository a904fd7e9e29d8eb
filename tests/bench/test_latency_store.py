"""The store that waits: a store like any other, with requests counted as a service would bill them."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

import pytest
from bench.latency_store import STANDARD, LatencyStore, Profile, Wait
from bench.prices import GIGABYTE, S3_EXPRESS, S3_STANDARD

from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.testing.store_contract import StoreContract

_NEAR = Wait(1e-6, 2e-6)
NEAR = Profile("near", _NEAR, _NEAR, _NEAR, _NEAR, _NEAR, bytes_per_second=1e12, prices=S3_STANDARD)


class TestLatencyStoreContract(StoreContract):
    pickles = False

    @pytest.fixture
    def store(self) -> ObjectStore:
        return LatencyStore(MemoryStore(), NEAR)


def test_half_of_the_waits_are_below_the_median_and_one_in_a_hundred_above_p99() -> None:
    source = random.Random(1)

    waits = [STANDARD.get.draw(source) for _ in range(20_000)]

    assert statistics.median(waits) == pytest.approx(0.020, rel=0.05)
    assert sum(wait > 0.120 for wait in waits) / len(waits) == pytest.approx(0.01, abs=0.004)


def test_a_request_waits_for_its_first_byte_and_for_its_bytes() -> None:
    slow = replace(NEAR, put=Wait(0.02, 0.0201), bytes_per_second=1e6)
    store = LatencyStore(MemoryStore(), slow)

    started = time.perf_counter()
    store.put("a", bytes(30_000))

    assert time.perf_counter() - started >= 0.045


def test_requests_and_bytes_are_counted_as_they_are_billed() -> None:
    inner = MemoryStore()
    store = LatencyStore(inner, NEAR)
    inner.put("far", bytes(1 << 20))
    for number in range(2_001):
        inner.put(f"many/{number:05}", b"")

    store.get_ranges("far", [(0, 10), (20, 30), (900_000, 900_010)])  # two are neighbours
    assert sum(1 for _ in store.list("many")) == 2_001  # three pages
    store.delete_many(f"many/{number:05}" for number in range(1_500))
    store.put("near", bytes(100))
    with pytest.raises(ObjectMissing):
        store.get("missing")

    assert store.requests == {"get": 3, "list": 3, "delete": 2, "put": 1}
    assert store.moved["sent"] == 100
    assert store.moved["received"] == 40


def test_prices_charge_a_list_as_a_put_and_a_head_as_a_get_and_deletes_not_at_all() -> None:
    counted = {"put": 1000, "list": 1000, "get": 1000, "head": 1000, "delete": 1000}

    assert S3_STANDARD.requests(counted) == pytest.approx(2 * 0.005 + 2 * 0.0004)
    assert S3_STANDARD.moved(sent=GIGABYTE, received=GIGABYTE) == 0
    assert S3_EXPRESS.moved(sent=GIGABYTE, received=GIGABYTE) == pytest.approx(0.0032 + 0.0006)
