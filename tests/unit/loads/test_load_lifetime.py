"""The life of a load record: who renews it, what happens when it lapses, and what garbage collection then deletes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin, Closed
from flagstone.loads.lifetime import LIFETIME_S
from flagstone.metadata.annotations import encode_load, held_loads
from flagstone.metadata.manifest import Manifest, add_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.spark.address import DatabaseAddress, open_manifests
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.heartbeat import Heartbeat, LoadRenewal, confirm_plan
from flagstone.spark.load.plan import LoadPlan, MadeSst
from flagstone.spark.load.request import abort_load, begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import FaultyStore
from kit.databases import QUIET

ROWS = {b"a": b"1", b"b": b"2"}
NOW = timedelta()


class World:
    """A database in memory with a clock that only tests advance, and a load into it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = FaultyStore(MemoryStore(clock=self.clock))
        self.address = DatabaseAddress("db", store=self.store, clock=self.clock, ids=Ids(5, clock=self.clock))
        self.admin = Admin("db", store=self.store, clock=self.clock)

    def begin(self, owner: str = "") -> LoadPlan:
        return begin_load(self.address, owner=owner)

    def task(self, plan: LoadPlan) -> list[MadeSst]:
        batch = pa.RecordBatch.from_pydict({"key": list(ROWS), "value": list(ROWS.values())})
        return write_ssts([batch], plan, WriteOptions(self.address))

    def commit(self, plan: LoadPlan, made: list[MadeSst]) -> None:
        commit_load(plan, WriteOptions(self.address), made)

    def collect(self) -> None:
        self.admin.collect_garbage(min_age=NOW)

    def wait(self, seconds: float) -> None:
        self.clock.advance(1000 * seconds)

    def open(self) -> flagstone.Db:
        return flagstone.open("db", store=self.store, settings=QUIET, clock=self.clock)

    @property
    def rows(self) -> dict[bytes, bytes]:
        with flagstone.open_reader("db", store=self.store, mode="latest", clock=self.clock) as reader:
            return dict(reader.scan())

    @property
    def ssts(self) -> int:
        return sum(meta.path.endswith(".sst") for meta in self.store.list("db/compacted"))

    @property
    def manifests(self) -> int:
        return open_manifests(self.address).require_latest().id


@pytest.fixture
def world() -> World:
    return World()


def test_garbage_collection_deletes_the_ssts_of_a_killed_driver_after_minutes(world: World) -> None:
    plan = world.begin()
    made = world.task(plan)
    world.wait(LIFETIME_S - 1)
    world.collect()
    assert world.ssts == 1
    world.wait(2)
    world.collect()
    # No later flush is needed, although no other process has written to the database.
    assert world.ssts == 0
    assert world.admin.loads() == []
    with pytest.raises(Closed, match=r"lapsed because .* None of it is visible"):
        world.commit(plan, made)
    assert world.rows == {}


def test_garbage_collection_keeps_only_the_ssts_of_open_loads(world: World) -> None:
    lost = world.begin()
    world.task(lost)
    abandoned = world.task(world.begin(owner="query"))
    world.begin(owner="query")  # cancels the former load, and deletes its SSTs
    assert world.ssts == 1
    world.wait(LIFETIME_S / 2)
    plan = world.begin()
    made = world.task(plan)
    world.wait(LIFETIME_S / 2 + 1)
    with world.open() as db:  # SSTs that are newer than all loads
        db.put(b"z", b"row")
    world.collect()
    alive = {meta.path for meta in world.store.list("db/compacted")}
    assert len(alive) == 2, "the SST of the writer and that of the open load"
    world.commit(plan, made)
    assert world.rows == {**ROWS, b"z": b"row"}
    assert abandoned[0].sst.id != made[0].sst.id


def test_a_load_that_is_renewed_lives_as_long_as_it_takes(world: World) -> None:
    plan = world.begin()
    renewal, before = LoadRenewal(world.address, plan.record_id), world.manifests
    for _ in range(100):
        delay = renewal.run_once()
        assert delay is not None
        world.wait(delay)
        world.collect()
    assert world.clock.monotonic() > 10 * LIFETIME_S
    assert world.manifests - before < 1.2 * world.clock.monotonic() / (LIFETIME_S / 2), "few manifests"
    world.commit(plan, world.task(plan))
    assert world.rows == ROWS


def test_the_renewal_waits_for_the_record_and_survives_a_store_that_fails(world: World) -> None:
    record_id = world.address.ids.uuid()
    renewal = LoadRenewal(world.address, record_id)
    assert renewal.run_once() is not None
    assert not list(world.store.list("db"))
    plan = begin_load(world.address, record_id=record_id)
    assert plan.record_id == record_id
    nowhere = LoadRenewal(replace(world.address, path="../no"), record_id)
    assert nowhere.run_once() is not None


def test_tasks_renew_the_record_when_it_is_old_and_one_of_them_is_enough(world: World) -> None:
    plan = world.begin()
    tasks, before = [Heartbeat(plan) for _ in range(50)], world.manifests
    calls = len(world.store.calls)
    for _ in range(60):
        world.wait(LIFETIME_S / 60)
        for task in tasks:
            task.touch()
    assert 1 <= world.manifests - before <= 2
    assert len(world.store.calls) - calls < 50 * 10
    world.collect()
    world.commit(plan, world.task(plan))
    assert world.rows == ROWS


def test_a_first_task_that_starts_late_adds_the_record_again_under_another_tag(world: World) -> None:
    plan = world.begin()
    early = world.task(plan)
    world.wait(LIFETIME_S + 1)
    world.collect()
    late = [confirm_plan(plan) for _ in range(2)]
    assert late[0].tag == late[1].tag != plan.tag
    with pytest.raises(Closed, match="lapsed"):
        world.commit(plan, [*early, *world.task(late[0])])
    world.commit(plan, world.task(late[1]))
    assert world.rows == ROWS
    world.collect()
    assert world.ssts == 1


def test_a_task_that_lost_its_record_ends_with_closed(world: World) -> None:
    plan = world.begin()
    heartbeat = Heartbeat(plan)
    world.wait(LIFETIME_S + 1)
    world.collect()
    with pytest.raises(Closed, match="lapsed"):
        heartbeat.touch()


def test_a_cancelled_load_is_not_added_again_by_a_late_task(world: World) -> None:
    plan = world.begin()
    world.admin.cancel_load(plan.record_id)
    world.wait(LIFETIME_S)
    with pytest.raises(Closed, match="was cancelled"):
        confirm_plan(plan)
    batch = world.begin(owner="query")
    world.begin(owner="query")
    world.wait(LIFETIME_S)
    with pytest.raises(Closed, match="another run of the same query"):
        confirm_plan(batch)


def test_a_repeated_load_clears_a_dead_predecessor_and_never_a_live_one(world: World) -> None:
    dead = world.begin()
    world.task(dead)
    world.wait(LIFETIME_S / 2)
    live = world.begin()
    made = world.task(live)
    world.wait(LIFETIME_S / 2 + 1)
    again = world.begin()
    assert {status.id for status in world.admin.loads()} == {live.record_id, again.record_id}
    assert world.ssts == 1
    world.commit(live, made)
    abort_load(again)
    assert world.rows == ROWS


def test_an_aborted_load_leaves_no_sst_of_any_task(world: World) -> None:
    plan = world.begin()
    for _ in range(3):
        world.task(plan)
    assert abort_load(plan) == 3
    assert world.ssts == 0
    assert world.admin.loads() == []


def test_an_empty_overwriting_load_may_begin_long_before_its_commit(world: World) -> None:
    with world.open() as db:
        db.put(b"old", b"row")
    plan = world.begin()
    world.wait(LIFETIME_S + 1)
    world.collect()
    commit_load(plan, WriteOptions(world.address), [], replaces_all=True)
    assert world.rows == {}


def test_a_load_of_an_older_version_without_a_tag_keeps_all_younger_ssts(world: World) -> None:
    plan = world.begin()
    world.task(plan)
    manifests = open_manifests(world.address)

    def without_tag(now: Versioned[Manifest]) -> Manifest:
        [held] = held_loads(now.value)
        name = encode_load(replace(held.record, tag=None))
        return add_checkpoint(now.value, replace(held.checkpoint, name=name))

    manifests.update(without_tag)
    with world.open() as db:
        db.put(b"z", b"row")
    world.collect()
    assert world.ssts == 2
