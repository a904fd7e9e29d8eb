"""A load that waits for its adoption while other writers open the database."""

from __future__ import annotations

from datetime import timedelta

import pyarrow as pa
import pytest

import flagstone
from flagstone import Closed
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.commit import abort_load, begin_load, commit_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectVersion
from flagstone.testing.faults import FaultyStore
from kit.databases import QUIET, eventually

LOADED = {b"a": b"1", b"b": b"2"}
DEAF = QUIET.replace(manifest_poll_interval=timedelta(hours=1))
ATTENTIVE = QUIET.replace(manifest_poll_interval=timedelta(milliseconds=50))


class Overtaken(FaultyStore):
    """The store of a driver: before its next WAL file, another process opens the database."""

    armed = False
    other: flagstone.Db | None = None

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        if self.armed and "/wal/" in path:
            self.armed = False
            self.other = flagstone.open("db", store=self.inner, settings=ATTENTIVE)
        return super().put_if_absent(path, data, token=token)


def test_a_driver_that_is_fenced_while_it_adopts_its_load_waits_for_the_newer_writer() -> None:
    memory = MemoryStore()
    deaf = flagstone.open("db", store=memory, settings=DEAF)
    eventually(lambda: any("flagstone/writer" in meta.path for meta in memory.list("db")))
    store = Overtaken(memory)
    address = DatabaseAddress("db", store=store)
    plan = begin_load(address)
    assert plan.record_id is not None
    options = WriteOptions(address, hand_over_timeout=timedelta())
    batch = pa.RecordBatch.from_pydict({"key": list(LOADED), "value": list(LOADED.values())})
    made = write_ssts([batch], plan, options)
    store.armed = True

    report = commit_load(plan, options, made)

    assert store.other is not None
    assert report.seq == plan.seq
    eventually(lambda: dict(store.other.scan()) == LOADED if store.other else False)
    store.other.close()
    deaf.close()


def test_a_load_that_was_cancelled_before_its_commit_is_not_visible() -> None:
    memory = MemoryStore()
    deaf = flagstone.open("db", store=memory, settings=DEAF)
    eventually(lambda: any("flagstone/writer" in meta.path for meta in memory.list("db")))
    address = DatabaseAddress("db", store=memory)
    plan = begin_load(address)
    options = WriteOptions(address, hand_over_timeout=timedelta())
    batch = pa.RecordBatch.from_pydict({"key": list(LOADED), "value": list(LOADED.values())})
    made = write_ssts([batch], plan, options)
    assert abort_load(plan, made) == 1

    with pytest.raises(Closed, match="None of it is visible"):
        commit_load(plan, options, made)

    assert dict(deaf.scan()) == {}
    deaf.close()
