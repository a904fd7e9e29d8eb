from __future__ import annotations

from pathlib import Path

import pytest

from flagstone.store.local import LocalStore
from flagstone.store.port import ObjectStore
from flagstone.testing.store_contract import StoreContract, StoreRaces


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path, fsync=False)


@pytest.mark.long
@pytest.mark.slow
class TestLongRace(StoreRaces):
    race_rounds = 800

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path, fsync=False)

    @pytest.fixture
    def folder(self) -> str:
        return "race"


class TestLocalStoreWithFsync(StoreContract):
    race_rounds = 5
    many_objects = 60

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "made" / "on demand")
