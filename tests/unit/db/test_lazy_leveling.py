"""Databases under lazy leveling: they return the right rows, and end with one run below a few smaller ones."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import pytest

import flagstone
from flagstone.config import CompactionWorkerOptions, CompactorOptions, SchedulerOptions
from flagstone.db.admin.admin import Admin
from flagstone.db.writer.database import Db
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.compactions import JobStatus, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.store.memory import MemoryStore
from flagstone.types import RunId
from kit.databases import World, eventually

LAZY = CompactorOptions(
    scheduler_options=SchedulerOptions(compaction_policy="lazy-leveling"),
    worker=CompactionWorkerOptions(max_subcompactions=1),
)
QUICK = {
    "poll_interval": "20ms",
    "commit_compacted_interval": "20ms",
    "scheduler_options": {"compaction_policy": "lazy-leveling", "min_compaction_sources": "2"},
    "worker": {"compactions_poll_interval": "20ms", "max_sst_size": 20_000},
}


def sizes(manifest: Manifest) -> list[int]:
    return [sum(manifest.sst(view).info.estimated_size for view in run.views) for run in manifest.tree.runs]


def settled(db: Db) -> bool:
    status = db.status()
    return status["l0_tables"] < 2 and not status["compactor"]["jobs"]


def change_at_random(db: Db, chance: random.Random, rows: dict[bytes, bytes]) -> None:
    """Two hundred overwrites, deletes, merges, and rows that expire within a millisecond; then a flush."""
    for _ in range(200):
        key, value = b"key%04d" % chance.randrange(1500), chance.randbytes(chance.randrange(120))
        match chance.choices(["put", "delete", "merge", "expired"], [6, 2, 1, 1])[0]:
            case "put":
                db.put(key, value)
                rows[key] = value
            case "delete":
                db.delete(key)
                rows.pop(key, None)
            case "merge":
                db.merge(key, value)
                rows[key] = rows.get(key, b"") + value
            case _:
                db.put(key, value, ttl=timedelta(milliseconds=1))
                rows.pop(key, None)
    db.flush()


@pytest.mark.slow
def test_a_database_under_lazy_leveling_returns_its_rows_and_reaches_one_last_run() -> None:
    store, chance = MemoryStore(), random.Random(5)
    options: dict[str, Any] = {
        "compactor_options": QUICK,
        "garbage_collector_options": None,
        "sst_block_size": 1024,
    }
    rows: dict[bytes, bytes] = {}
    with flagstone.open("db", store=store, settings=options, merge_operator=Concatenate()) as db:
        for number in range(40):
            change_at_random(db, chance, rows)
            if number % 10 == 9:
                start = chance.randrange(800)
                first, stop = b"key%04d" % start, b"key%04d" % (start + 500)
                db.delete_range(first, stop)
                for key in [key for key in rows if first <= key < stop]:
                    del rows[key]
        eventually(lambda: settled(db), "everything is compacted")
        assert dict(db.scan()) == rows
        assert {key: db.get(key) for key in rows} == rows
        *upper, last = sizes(db.manifest())
        assert len(upper) <= 8
        assert sum(upper) * 4 < last
    admin = Admin("db", store=store)
    assert admin.verify().ok
    with flagstone.open_reader("db", store=store, mode="latest", merge_operator=Concatenate()) as reader:
        assert dict(reader.scan()) == rows


def filled(world: World, *, ttl: str | None = None, batches: int = 4, **options: Any) -> None:
    """Four SSTs in L0, of 300 rows each."""
    with world.open(**options) as db:
        for number in range(batches):
            for row in range(300):
                db.put(b"k%d-%03d" % (number, row), b"v" * 50, ttl=ttl)
            db.flush()


def compact(world: World, options: CompactorOptions = LAZY) -> list[TieredSpec]:
    """Compact by the policy; the specs of the jobs."""
    admin = world.admin()
    done = admin.compact(options=options)
    files = [admin.compactions(entry.id).value for entry in admin.list_compactions()]
    specs = {job.id: job.spec for file in files for job in file.jobs}
    return [spec for job_id in done if isinstance(spec := specs[job_id], TieredSpec)]


def stored(world: World) -> int:
    """The bytes of the SSTs in the manifest."""
    return sum(sst.info.estimated_size for sst in world.admin().manifest().value.ssts.values())


@pytest.mark.parametrize("policy", ["lazy-leveling", "size-tiered"])
def test_a_run_of_expired_rows_is_rewritten_once_the_clock_of_the_manifest_has_passed_them(
    policy: Any,
) -> None:
    world = World()
    options = CompactorOptions(
        scheduler_options=SchedulerOptions(compaction_policy=policy, space_driven=policy == "size-tiered")
    )
    filled(world, ttl="1h")
    compact(world, options)
    before = stored(world)
    world.clock.advance(2 * 3600 * 1000)
    assert compact(world, options) == []  # the manifest has no later time yet
    world.write("db", {b"later": b"1"})

    assert compact(world, options) == [TieredSpec((), (RunId(0),), RunId(0))]

    assert stored(world) < before / 10
    assert world.scan("db") == {b"later": b"1"}
    assert compact(world, options) == []


def test_size_tiered_compaction_leaves_expired_rows_where_they_are_by_default() -> None:
    world = World()
    filled(world, ttl="1h")
    compact(world, CompactorOptions())
    world.clock.advance(2 * 3600 * 1000)
    world.write("db", {b"later": b"1"})
    assert compact(world, CompactorOptions()) == []


def test_an_expired_row_still_hides_an_older_version_in_the_run_below() -> None:
    world = World()
    rows = {b"k%04d" % number: b"v" * 50 for number in range(2000)}
    for _ in range(4):
        world.write("db", rows)
    compact(world)
    for _ in range(4):
        with world.open() as db:
            for number in range(100):
                db.put(b"k%04d" % number, b"short lived" * 4, ttl="1h")
            db.flush()
    (to_run,) = compact(world)
    assert to_run.l0_view_ids
    world.clock.advance(2 * 3600 * 1000)
    world.write("db", {b"later": b"1"})

    assert TieredSpec((), (RunId(1),), RunId(1)) in compact(world)

    left = {key: value for key, value in rows.items() if key >= b"k0100"}
    assert world.scan("db") == left | {b"later": b"1"}


def test_a_run_whose_range_was_deleted_is_rewritten_and_an_sst_that_is_covered_leaves_at_once() -> None:
    world = World()
    filled(world)
    compact(world)
    before = stored(world)
    with world.open() as db:
        db.delete_range(b"k1-000", b"k3-200")
    assert stored(world) == before  # one SST, which shows less

    (spec,) = compact(world)

    assert not spec.l0_view_ids
    assert len(spec.sorted_runs) == 1
    assert stored(world) < before * 0.6
    assert len(world.scan("db")) == 400
    with world.open() as db:
        db.delete_range(b"k0-000", b"k4")
        assert not db.manifest().ssts


def test_a_checkpoint_keeps_the_rows_that_a_rewritten_run_has_lost() -> None:
    world = World()
    filled(world)
    compact(world)
    kept = world.admin().create_checkpoint()
    with world.open() as db:
        db.delete_range(b"k1-000", b"k3-200")
    compact(world)

    assert len(world.scan("db")) == 400
    assert len(world.scan("db", kept.id)) == 1200


def test_moving_ssts_does_not_take_the_place_of_rewriting_one_run() -> None:
    world = World()
    filled(world)
    moving = LAZY.replace(enable_trivial_move=True)
    assert compact(world, moving)
    with world.open() as db:
        db.delete_range(b"k0-030", b"k3-270")
    before = stored(world)
    assert len(compact(world, moving)) == 1
    assert stored(world) < before / 2
    assert len(world.scan("db")) == 60


def test_a_compactor_of_its_own_uses_the_policy_of_its_options() -> None:
    store, stop = MemoryStore(), threading.Event()
    admin = Admin("db", store=store)
    rows: dict[bytes, bytes] = {}
    alone = flagstone.Settings(compactor_options=None, garbage_collector_options=None, l0_max_ssts=100)
    with flagstone.open("db", store=store, settings=alone, merge_operator=Concatenate()) as db:
        chance = random.Random(6)
        change_at_random(db, chance, rows)
        options = CompactorOptions.from_dict(QUICK)
        thread = threading.Thread(
            target=admin.run_compactor,
            kwargs={"options": options, "merge_operator": Concatenate(), "stop": stop},
        )
        thread.start()
        try:
            for _ in range(16):
                change_at_random(db, chance, rows)
            eventually(lambda: at_rest(admin), "everything is compacted")
        finally:
            stop.set()
            thread.join(30)
        *upper, last = sizes(admin.manifest().value)
        assert sum(upper) * 4 < last
        assert dict(db.scan()) == rows


def at_rest(admin: Admin) -> bool:
    jobs = admin.compactions().value.jobs
    idle = all(job.status in (JobStatus.COMPLETED, JobStatus.FAILED) for job in jobs)
    return idle and len(admin.manifest().value.tree.l0) < 2


def test_a_worker_in_its_own_process_executes_the_jobs_of_a_lazy_coordinator() -> None:
    store, stop = MemoryStore(), threading.Event()
    admin = Admin("db", store=store)
    options: dict[str, Any] = {
        "compactor_options": {**QUICK, "worker": None},
        "garbage_collector_options": None,
    }
    rows: dict[bytes, bytes] = {}
    work = CompactionWorkerOptions(compactions_poll_interval="20ms")
    thread = threading.Thread(
        target=admin.run_worker, kwargs={"options": work, "merge_operator": Concatenate(), "stop": stop}
    )
    with flagstone.open("db", store=store, settings=options, merge_operator=Concatenate()) as db:
        thread.start()
        try:
            chance = random.Random(7)
            for _ in range(12):
                change_at_random(db, chance, rows)
            eventually(lambda: settled(db), "everything is compacted")
        finally:
            stop.set()
            thread.join(30)
        assert dict(db.scan()) == rows
        *upper, last = sizes(db.manifest())
        assert sum(upper) * 4 < last


@pytest.mark.slow
def test_an_open_database_drops_a_run_of_expired_rows_by_itself() -> None:
    options: dict[str, Any] = {"compactor_options": QUICK, "garbage_collector_options": None}
    with flagstone.open("db", store=MemoryStore(), settings=options) as db:
        db.put(b"stays", b"1")
        for number in range(2):
            for row in range(300):
                db.put(b"%d-%03d" % (number, row), b"v" * 50, ttl="2s")
            db.flush()
        eventually(lambda: settled(db) and sizes(db.manifest()), "the rows are in one run")
        (before,) = sizes(db.manifest())
        eventually(lambda: b"1-299" not in db, "they have expired")
        db.put(b"later", b"1")
        db.flush()  # one SST in L0 is not compacted, but it has a later time
        eventually(lambda: sum(sizes(db.manifest())) < before / 10, "the run is rewritten")
        assert dict(db.scan()) == {b"stays": b"1", b"later": b"1"}
