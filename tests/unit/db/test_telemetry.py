"""Metrics for OpenTelemetry. The meter is a plain object with the methods of the API: no SDK is needed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import flagstone
from flagstone import Settings, aio, telemetry
from flagstone.runtime import metric_names as names
from flagstone.store.memory import MemoryStore

pytest.importorskip("opentelemetry.metrics", reason="opentelemetry-api is not installed")

QUIET = Settings(compactor_options=None, garbage_collector_options=None)


class Meter:
    def __init__(self) -> None:
        self.instruments: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {}

    def create_observable_counter(self, name: str, callbacks: list[Any], *, description: str) -> None:
        assert description
        self.instruments[name] = ("counter", callbacks[0])

    def create_observable_gauge(self, name: str, callbacks: list[Any], *, description: str) -> None:
        assert description
        self.instruments[name] = ("gauge", callbacks[0])

    def collect(self, name: str) -> dict[tuple[tuple[str, Any], ...], float]:
        observed = self.instruments[name][1](None)
        return {tuple(sorted(each.attributes.items())): each.value for each in observed}


def test_counters_gauges_and_histograms_are_observed_with_their_labels() -> None:
    meter = Meter()
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        telemetry.export_metrics(db, meter=meter, attributes={"database": "shop"})
        db.put(b"a", b"1", await_durable=True)
        db.flush()
        shop = ("database", "shop")
        assert meter.collect(names.DB_WRITE_OPS) == {(shop,): 1}
        assert meter.collect(names.DB_L0_SST_COUNT) == {(shop,): 1}
        assert meter.collect(f"{names.DB_OPERATION_SECONDS}.count")[(shop, ("op", "put"))] == 1
        assert meter.collect(f"{names.DB_OPERATION_SECONDS}.sum")[(shop, ("op", "put"))] > 0
        assert meter.instruments[names.DB_WRITE_OPS][0] == "counter"
        assert meter.instruments[names.DB_L0_SST_COUNT][0] == "gauge"
    assert meter.collect(names.DB_WRITE_OPS) == {}


def test_a_reader_and_the_asyncio_forms_are_observed_too() -> None:
    store, meters = MemoryStore(), (Meter(), Meter())

    async def observe() -> None:
        async with await aio.open("db", store=store, settings=QUIET) as db:
            telemetry.export_metrics(db, meter=meters[0])
            await db.put(b"a", b"1")
            assert meters[0].collect(names.DB_WRITE_OPS) == {(): 1}

    asyncio.run(observe())
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        telemetry.export_metrics(reader, meter=meters[1])
        assert meters[1].collect(names.READER_POLL_FAILING) == {(): 0}


def test_the_default_meter_is_that_of_the_global_provider() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        telemetry.export_metrics(db)  # without an SDK this does nothing


def test_a_missing_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with (
        flagstone.open("db", store=MemoryStore(), settings=QUIET) as db,
        pytest.raises(flagstone.InvalidRequest, match="pip install opentelemetry-api"),
    ):
        telemetry.export_metrics(db)
