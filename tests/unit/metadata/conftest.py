"""The metadata of a database in memory, and a clock that only a test moves."""

from __future__ import annotations

import pytest

from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.metrics import Metrics
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths

PATHS = DbPaths("db")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def manifests(store: MemoryStore, clock: VirtualClock, metrics: Metrics) -> ManifestStore:
    return ManifestStore(store, PATHS, clock=clock, metrics=metrics)


@pytest.fixture
def compactions(store: MemoryStore, clock: VirtualClock, metrics: Metrics) -> CompactionsStore:
    return CompactionsStore(store, PATHS, clock=clock, metrics=metrics)
