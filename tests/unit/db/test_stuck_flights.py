"""A reader whose request was cut off by an interrupt must not keep others waiting for its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagstone.config import ObjectStoreCacheOptions, Settings
from flagstone.db.open import open_database
from flagstone.runtime.sync import Event
from flagstone.sst import store as table_store
from flagstone.sst.reader import INDEX
from flagstone.sst.store import _Flight
from flagstone.store import caching
from flagstone.store.caching import CachingStore
from flagstone.store.memory import MemoryStore


def settings(folder: Path | None = None) -> Settings:
    return Settings(
        compactor_options=None,
        garbage_collector_options=None,
        object_store_cache_options=ObjectStoreCacheOptions(
            root_folder=None if folder is None else str(folder)
        ),
    )


def test_a_fetch_that_never_ends_is_repeated_by_the_next_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_store, "FLIGHT_PATIENCE_S", 0.01)
    store = MemoryStore()
    with open_database("db", store=store, settings=settings()) as db:
        db.put(b"k", b"v")
    with open_database("db", store=store, settings=settings()) as db:
        ssts = db._engine.manifest.views.ssts
        (sst,) = ssts._ssts.values()
        ssts._flights[sst, INDEX] = _Flight()
        assert db.get(b"k") == b"v"
        assert not ssts._flights


def test_cached_parts_whose_fetch_never_ends_are_fetched_by_the_next_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "_FLIGHT_PATIENCE_S", 0.01)
    store = MemoryStore()
    with open_database("db", store=store, settings=settings()) as db:
        db.put(b"k", b"v")
    with open_database("db", store=store, settings=settings(tmp_path)) as db:
        ssts = db._engine.manifest.views.ssts
        (sst,) = ssts._ssts.values()
        cached = ssts._store
        assert isinstance(cached, CachingStore)
        cached._flights[cached._key(sst.path, 0)] = Event()
        assert db.get(b"k") == b"v"
        assert not cached._flights
