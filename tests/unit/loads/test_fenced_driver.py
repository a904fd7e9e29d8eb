"""A load that waits for its adoption while other writers open the database."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import reduce

import pyarrow as pa
import pytest

import flagstone
from flagstone import Closed
from flagstone.metadata.annotations import held_loads
from flagstone.metadata.manifest import Manifest, remove_checkpoint
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SystemClock
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.adoption import judge_without_record
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import abort_load, begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectVersion
from flagstone.testing.faults import FaultyStore
from flagstone.types import Seq
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
    assert abort_load(plan) == 1

    with pytest.raises(Closed, match="None of it is visible"):
        commit_load(plan, options, made)

    assert dict(deaf.scan()) == {}
    deaf.close()


class LateDriver(SystemClock):
    """The clock of a driver that sleeps until its load was added and the record of the load is gone."""

    def __init__(self, manifests: ManifestStore, seq: int) -> None:
        self._manifests = manifests
        self._seq = seq

    def sleep(self, seconds: float) -> None:
        eventually(lambda: self._manifests.require_latest().value.last_l0_seq >= self._seq)
        self._manifests.update(
            lambda now: reduce(
                remove_checkpoint, [held.checkpoint.id for held in held_loads(now.value)], now.value
            )
        )


def test_a_driver_that_finds_no_record_of_its_added_load_does_not_report_that_it_was_cancelled() -> None:
    memory = MemoryStore()
    with flagstone.open("db", store=memory, settings=ATTENTIVE) as db:
        eventually(lambda: any("flagstone/writer" in meta.path for meta in memory.list("db")))
        address = DatabaseAddress("db", store=memory)
        plan = begin_load(address)
        late = LateDriver(ManifestStore(memory, DbPaths("db")), plan.seq)
        options = WriteOptions(address)
        batch = pa.RecordBatch.from_pydict({"key": list(LOADED), "value": list(LOADED.values())})
        made = write_ssts([batch], plan, options)
        report = commit_load(replace(plan, address=replace(address, clock=late)), options, made)
        assert report.seq == plan.seq
        eventually(lambda: dict(db.scan()) == LOADED)


@pytest.mark.parametrize(
    ("last_l0_seq", "outcome"), [(Seq(99), "cancelled"), (Seq(100), "unknown"), (Seq(200), "unknown")]
)
def test_without_record_and_ssts_only_a_lower_number_proves_that_the_load_was_cancelled(
    last_l0_seq: Seq, outcome: str
) -> None:
    assert judge_without_record(Manifest(last_l0_seq=last_l0_seq), (), Seq(100)) == outcome
