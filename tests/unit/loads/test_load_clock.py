"""A bulk load takes every time and every id from the clock and the ids of its address."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone.metadata.annotations import HeldLoad, held_loads
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SystemClock, VirtualClock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.plan import LoadPlan, MadeSst
from flagstone.spark.load.request import begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from kit.databases import IDLE, eventually

LONG_AGO_MS = 1_000_000_000_000


@pytest.fixture(autouse=True)
def _nothing_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread of the test, the wall clock and the ids of the system raise."""
    own = threading.get_ident()

    def refused(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            of_the_system = not isinstance(self, Ids) or self._seed is None
            assert threading.get_ident() != own or not of_the_system, f"{name} of the system"
            return right(self, *arguments)

        return call

    for kind, name in [
        (SystemClock, "now_ms"),
        (SystemClock, "sleep"),
        (Ids, "ulid"),
        (Ids, "uuid"),
        (Ids, "uniform"),
    ]:
        monkeypatch.setattr(kind, name, refused(name, getattr(kind, name)))


def make_ssts(plan: LoadPlan, options: WriteOptions) -> list[MadeSst]:
    """The SSTs of two tasks with overlapping keys, which the driver merges."""
    parts = ({b"a": b"1", b"c": b"3"}, {b"b": b"2", b"d": b"4"})
    batches = [
        pa.RecordBatch.from_pydict({"key": list(part), "value": list(part.values())}) for part in parts
    ]
    return [sst for batch in batches for sst in write_ssts([batch], plan, options)]


def newest_manifest(store: MemoryStore) -> Manifest:
    return ManifestStore(store, DbPaths("db"), clock=VirtualClock()).require_latest().value


def load_record(store: MemoryStore) -> HeldLoad:
    (held,) = held_loads(newest_manifest(store))
    return held


def load_once(seed: int) -> MemoryStore:
    """Load into a database that no process has open."""
    clock = VirtualClock(LONG_AGO_MS)
    store = MemoryStore(clock=clock)
    address = DatabaseAddress("db", store=store, clock=clock, ids=Ids(seed, clock=clock))
    plan, options = begin_load(address), WriteOptions(address)
    commit_load(plan, options, make_ssts(plan, options))
    return store


def test_a_load_has_the_time_of_its_clock() -> None:
    store = load_once(7)

    manifest = newest_manifest(store)
    assert {ulid_ms(sst_id) for sst_id in manifest.ssts} == {LONG_AGO_MS}
    assert manifest.last_l0_clock_tick == LONG_AGO_MS
    assert load_record(store).checkpoint.created_s == LONG_AGO_MS // 1000


def test_two_loads_with_equal_ids_write_equal_objects() -> None:
    one, same, other = ({meta.path for meta in load_once(seed).list("db")} for seed in (7, 7, 8))
    assert one == same != other

    records = [load_record(load_once(seed)).checkpoint.id for seed in (7, 7, 8)]
    assert records[0] == records[1] != records[2]


class DriverClock(VirtualClock):
    """The clock of a driver. After the time for the writer has passed, the driver's next sleep ends once its own
    database has adopted the load.
    """

    def __init__(self, *, patience_s: float) -> None:
        super().__init__(LONG_AGO_MS)
        self.store = MemoryStore(clock=self)
        self._patience_s = patience_s

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.monotonic() > self._patience_s + 1:
            eventually(lambda: not load_record(self.store).record.open)


def test_a_load_request_waits_by_its_clock_for_the_writer() -> None:
    patience = timedelta(seconds=2)
    clock = DriverClock(patience_s=patience.total_seconds())
    store = clock.store
    address = DatabaseAddress("db", store=store, clock=clock, ids=Ids(7, clock=clock))
    deaf = flagstone.open("db", store=store, settings=IDLE, clock=clock, ids=Ids(8, clock=clock))
    eventually(lambda: any("flagstone/writer" in meta.path for meta in store.list("db")))

    plan, options = begin_load(address), WriteOptions(address, hand_over_timeout=patience)

    assert (plan.created_ms, plan.id_ms) == (LONG_AGO_MS, LONG_AGO_MS)
    assert load_record(store).checkpoint.created_s == LONG_AGO_MS // 1000
    commit_load(plan, options, make_ssts(plan, options))
    assert clock.monotonic() > patience.total_seconds()
    deaf.close()
