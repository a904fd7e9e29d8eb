"""A writer adopts a bulk load, and the store does not answer: the manifest may have been written, or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Literal

import pyarrow as pa
import pytest

import flagstone
from flagstone import Db, WalReader
from flagstone.metadata.annotations import held_loads
from flagstone.spark.address import DatabaseAddress, open_manifests
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import begin_load, cancel_request
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.memory import MemoryStore
from flagstone.store.retrying import RetryingStore, RetryPolicy
from flagstone.testing.faults import Fault, FaultyStore
from kit.databases import QUIET, eventually

SETTINGS = QUIET.replace(manifest_poll_interval=timedelta(milliseconds=50))
IMPATIENT = RetryPolicy(attempts=2, initial_backoff_s=0.1)


class Loading:
    """A load that waits for its writer, in a thread of its own."""

    def __init__(self, memory: MemoryStore) -> None:
        self.address = DatabaseAddress("db", store=memory)
        plan = begin_load(self.address)
        self.record_id = plan.record_id
        options = WriteOptions(self.address)
        batch = pa.RecordBatch.from_pydict({"key": [b"a"], "value": [b"loaded"]})
        ssts = write_ssts([batch], plan, options)
        self.failure: Exception | None = None

        def commit() -> None:
            try:
                commit_load(plan, options, ssts)
            except flagstone.errors.FlagstoneError as error:
                self.failure = error

        self.thread = Thread(target=commit)
        self.thread.start()

    @property
    def ready(self) -> bool:
        manifest = open_manifests(self.address).require_latest().value
        return any(held.record.state == "ready" for held in held_loads(manifest))


@contextmanager
def in_doubt(effect: Literal["error", "lost_reply"]) -> Iterator[tuple[Db, FaultyStore, Loading]]:
    memory = MemoryStore()
    store = FaultyStore(memory)
    with flagstone.open("db", store=RetryingStore(store, policy=IMPATIENT), settings=SETTINGS) as db:
        eventually(lambda: any("flagstone/writer" in meta.path for meta in memory.list("db")))
        db.put(b"a", b"before", await_durable=True)
        db.flush()
        store.faults = [Fault(effect, nth=None, op="put_if_absent", path="*/manifest/*")]
        calls = len(store.calls)
        loading = Loading(memory)
        eventually(lambda: any(op == "put_if_absent" for op, _ in store.calls[calls:]))
        # The manifest cannot be read either, so the writer does not learn the outcome.
        store.faults.append(Fault("error", nth=None, op="[!p]*", path="*/manifest*"))
        yield db, store, loading
        loading.thread.join()


def changes(store: FaultyStore) -> list[bytes | None]:
    batches = WalReader("db", store=store).follow(timeout_s=0)
    return [change.value for batch in batches for change in batch.changes]


@pytest.mark.parametrize("effect", ["error", "lost_reply"])
def test_writes_wait_until_the_store_answers(effect: Literal["error", "lost_reply"]) -> None:
    with in_doubt(effect) as (db, store, loading):
        writing = Thread(target=lambda: db.put(b"b", b"later", await_durable=True))
        writing.start()
        writing.join(0.3)
        assert writing.is_alive()
        assert db.get(b"b") is None
        store.faults = []
        writing.join()
        loading.thread.join()
        assert loading.failure is None
        assert dict(db.scan()) == {b"a": b"loaded", b"b": b"later"}
        assert changes(store) == [b"before", b"loaded", b"later"]


def test_a_load_cancelled_in_doubt_leaves_no_gap() -> None:
    with in_doubt("error") as (db, store, loading):
        assert cancel_request(open_manifests(loading.address), loading.record_id)
        store.faults = []
        db.put(b"b", b"later", await_durable=True)
        db.flush()
        assert dict(db.scan()) == {b"a": b"before", b"b": b"later"}
        assert changes(store) == [b"before", b"later"]
    assert isinstance(loading.failure, flagstone.errors.Closed)


def test_a_database_can_be_closed_in_doubt() -> None:
    with in_doubt("lost_reply") as (db, store, loading):
        store.faults = []
        db.close()
        loading.thread.join()
        with flagstone.open("db", store=store, settings=SETTINGS) as again:
            again.put(b"b", b"later", await_durable=True)
            assert dict(again.scan()) == {b"a": b"loaded", b"b": b"later"}
            assert changes(store) == [b"before", b"loaded", b"later"]
