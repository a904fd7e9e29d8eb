"""The store contract on every kind of service, and on the two-phase store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flagstone.store.commit_log.dynamodb import DynamoDbCommitLog
from flagstone.store.commit_log.postgres import PostgresCommitLog
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing, ObjectStore
from flagstone.store.resolve import resolve
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.testing.store_contract import StoreContract
from servers.azure import AzureServer
from servers.gcs import GcsServer
from servers.s3 import S3Server


@pytest.mark.slow
class TestSeaweedFs(StoreContract):
    """A real S3 server. Requests that lose a race wait whole seconds for the lock of a key, so races are short here."""

    versions_are_unique = False
    racers = 2
    race_rounds = 20

    @pytest.fixture
    def store(self, seaweedfs: S3Server) -> ObjectStore:
        return resolve(seaweedfs.url, pickle_secrets=True, **seaweedfs.options())


@pytest.mark.slow
class TestMiniStack(StoreContract):
    versions_are_unique = False

    @pytest.fixture
    def store(self, ministack: S3Server) -> ObjectStore:
        return resolve(ministack.url, pickle_secrets=True, **ministack.options())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.xdist_group("azurite")  # its installation takes a while: one worker waits, not both
class TestAzurite(StoreContract):
    @pytest.fixture
    def store(self, azurite: AzureServer) -> ObjectStore:
        return resolve(azurite.url, pickle_secrets=True, **azurite.options())


@pytest.mark.slow
class TestGcsStandIn(StoreContract):
    @pytest.fixture
    def store(self, gcs: GcsServer) -> ObjectStore:
        return resolve(gcs.url, pickle_secrets=True, **gcs.options())


class TwoPhaseContract(StoreContract):
    """The contract with one exception: a deleted path cannot be created again before its record is collected."""

    def test_create_succeeds_again_after_delete(self, store: ObjectStore, folder: str) -> None:
        assert isinstance(store, TwoPhaseStore)
        store.put_if_absent(f"{folder}/x", b"first")
        store.delete(f"{folder}/x")

        with pytest.raises(ObjectExists):
            store.put_if_absent(f"{folder}/x", b"too early")
        with pytest.raises(ObjectMissing):
            store.head(f"{folder}/x")
        store.collect_garbage(prefix=folder, min_age_ms=0)
        store.put_if_absent(f"{folder}/x", b"second")

        assert store.get(f"{folder}/x").data == b"second"

    def test_writing_the_same_bytes_again_gives_a_new_version(self, store: ObjectStore, folder: str) -> None:
        assert isinstance(store, TwoPhaseStore)
        path = f"{folder}/x"
        seen = {store.put_if_absent(path, b"a")}
        for _ in range(10):
            seen.add(store.put_if_match(path, b"b", store.head(path).version))
            seen.add(store.put(path, b"a"))
            store.delete(path)
            store.collect_garbage(prefix=folder, min_age_ms=0)
            seen.add(store.put_if_absent(path, b"a"))

        assert len(seen) == 31
        for stale in seen - {store.head(path).version}:
            with pytest.raises(ObjectChanged):
                store.put_if_match(path, b"c", stale)


class TestTwoPhaseOverSqlite(TwoPhaseContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ObjectStore]:
        log = SqliteCommitLog(tmp_path / "commits.db", synchronous="NORMAL")
        yield TwoPhaseStore(MemoryStore.named("two-phase-sqlite"), log)
        log.close()


@pytest.mark.slow
class TestTwoPhaseOverPostgres(TwoPhaseContract):
    many_objects = 60  # few, because the store below the commit log does the listing

    @pytest.fixture
    def store(self, postgres_url: str) -> Iterator[ObjectStore]:
        log = PostgresCommitLog(postgres_url, namespace="contract")
        yield TwoPhaseStore(MemoryStore.named("two-phase-postgres"), log)
        log.close()


@pytest.mark.slow
class TestTwoPhaseOverDynamoDb(TwoPhaseContract):
    race_rounds = 10
    many_objects = 60

    @pytest.fixture
    def store(self, ministack: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ministack.access_key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ministack.secret_access_key)
        log = DynamoDbCommitLog(
            "contract", region=ministack.region, endpoint_url=ministack.endpoint, create_table=True
        )
        yield TwoPhaseStore(MemoryStore.named("two-phase-dynamodb"), log)
        log.close()
