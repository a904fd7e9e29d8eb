from __future__ import annotations

from pathlib import Path

import pytest

from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.caching import CachingStore
from flagstone.store.counting import CountingStore
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectStore
from flagstone.store.retrying import RetryingStore
from flagstone.testing.store_contract import StoreContract


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return RetryingStore(MemoryStore.named("contract-retrying"))


class TestCountingStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return CountingStore(LocalStore(tmp_path, fsync=False), component="test")


class TestCachingStoreOnUncachedPaths(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        inner = MemoryStore.named("contract-caching")
        return CachingStore(inner, folder=tmp_path, max_bytes=1 << 20, part_bytes=1024)


class TestCachingStoreOnCachedPaths(StoreContract):
    """Parts are tiny, so that most reads cross several of them."""

    objects_are_immutable = True

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        inner = MemoryStore.named("contract-caching")
        return CachingStore(inner, folder=tmp_path, max_bytes=1 << 20, part_bytes=4096, cache_on_put=True)

    @pytest.fixture
    def folder(self) -> str:
        return f"{SYSTEM_IDS.token()}/compacted"


class TestWholeStack(StoreContract):
    race_rounds = 10
    many_objects = 60

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        counted = CountingStore(LocalStore(tmp_path / "store", fsync=False), component="test")
        return CachingStore(RetryingStore(counted), folder=tmp_path / "cache", max_bytes=16 << 20)
