from __future__ import annotations

import pytest

from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectStore
from flagstone.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore.named("contract")
