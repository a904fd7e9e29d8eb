"""Lazy leveling of ours beside the official wheel: its worker executes our jobs, and it reads what they leave."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone.compaction.lazy_leveling import plan_lazy_leveling
from flagstone.compaction.survey import Survey
from flagstone.config import CompactorOptions, SchedulerOptions, Settings
from flagstone.db.admin.admin import Admin
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.compactions import Compactions, TieredSpec
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from interop.test_compaction_protocol import COORDINATOR, operations, read_by_us, running
from kit.databases import eventually

pytestmark = pytest.mark.slow

LAZY = SchedulerOptions(compaction_policy="lazy-leveling", min_compaction_sources=2)
OPTIONS = CompactorOptions(scheduler_options=LAZY.replace(last_run_ratio=2.0))
ROWS = 400


def ours(folder: Path, **changes: Any) -> flagstone.Db:
    options = {"compactor_options": None, "garbage_collector_options": None, "l0_max_ssts": 100}
    return flagstone.open(
        "db",
        store=str(folder),
        store_options={"fsync": False},
        settings=Settings.from_dict({**options, **changes}),
        merge_operator=Concatenate(),
    )


def write(folder: Path, number: int, chance: random.Random) -> None:
    """Two SSTs of L0 with overwrites, deletes, merges and rows that have expired. The first ones are large."""
    rows = ROWS * 6 if number == 0 else ROWS
    with ours(folder, sst_block_size=1024) as db:
        for _ in range(2):
            for _ in range(rows // 2):
                key = b"key%05d" % chance.randrange(number * 100, number * 100 + rows)
                db.put(key, chance.randbytes(60))
            for _ in range(20):
                db.delete(b"key%05d" % chance.randrange(ROWS))
                db.merge(b"merged%d" % chance.randrange(5), b"+%d" % number)
                db.put(b"gone%05d" % chance.randrange(ROWS), b"x" * 30, ttl="1ms")
            db.flush()


def test_the_wheel_executes_every_job_of_lazy_leveling_and_reads_the_result(
    wheel: Any, tmp_path: Path
) -> None:
    chance, admin = random.Random(11), Admin("db", store=LocalStore(tmp_path, fsync=False))
    kinds = dict.fromkeys(["l0", "last", "upper"], 0)
    for number in range(12):
        if number in (6, 10):
            with ours(tmp_path) as db:
                db.delete_range(b"key00100", b"key00700" if number == 6 else b"key02000")
        else:
            write(tmp_path, number, chance)
        before = read_by_us(tmp_path)
        while specs := planned(admin, tmp_path):
            runs = [run.id for run in admin.manifest().value.tree.runs]
            kinds[kind(specs[0], runs)] += 1
            assert execute(wheel, tmp_path, specs[0]) == before == read_by_us(tmp_path)
        assert wheel.get_many(str(tmp_path), "db", list(before)) == list(before.values())

    assert admin.verify().ok
    assert all(kinds.values()), kinds
    print(f"jobs that the wheel executed: {kinds}")


def test_the_wheel_rewrites_a_single_run_whose_range_was_deleted(wheel: Any, tmp_path: Path) -> None:
    admin = Admin("db", store=LocalStore(tmp_path, fsync=False))
    write(tmp_path, 0, random.Random(12))
    admin.compact(full=True, merge_operator=Concatenate(), patience="0s")
    with ours(tmp_path) as db:
        db.delete_range(b"key00100", b"key02200")
    before = read_by_us(tmp_path)
    (run,) = admin.manifest().value.tree.runs
    (spec,) = planned(admin, tmp_path)
    assert spec == TieredSpec((), (run.id,), run.id)

    assert execute(wheel, tmp_path, spec) == before == read_by_us(tmp_path)

    (rewritten,) = admin.manifest().value.tree.runs
    assert rewritten.id == run.id
    assert all(view.visible_range is None for view in rewritten.views)
    assert planned(admin, tmp_path) == []
    assert admin.verify().ok


def execute(wheel: Any, folder: Path, spec: TieredSpec) -> dict[bytes, bytes]:
    """Let the wheel's coordinator and worker do the job, and scan. The wheel shows rows that have expired."""
    found: dict[bytes, bytes] = wheel.compact(
        str(folder),
        "db",
        l0=bool(spec.l0_view_ids),
        runs=list(spec.sorted_runs),
        destination=spec.destination,
    )
    return {key: value for key, value in found.items() if not key.startswith(b"gone")}


def planned(admin: Admin, folder: Path) -> list[TieredSpec]:
    manifest = admin.manifest().value
    survey = Survey(LocalStore(folder), DbPaths("db"))
    while survey.read(manifest):
        pass
    return plan_lazy_leveling(manifest, Compactions(), OPTIONS, survey.stats)


def kind(spec: TieredSpec, runs: list[int]) -> str:
    if spec.l0_view_ids:
        return "l0"
    return "last" if spec.destination == runs[-1] else "upper"


def test_our_lazy_coordinator_works_beside_a_wheel_writer(wheel: Any, tmp_path: Path) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    wheel.hold(folder, "db", compactor_options=None)
    wheel.held_apply("db", operations(1))
    options = COORDINATOR.replace(scheduler_options=LAZY)
    with running(admin.run_compactor, options=options, merge_operator=Concatenate()):
        for start in range(1, 41, 4):
            wheel.held_apply("db", operations(4, start=start))
        eventually(lambda: at_rest(admin), "everything is compacted")
        contents = wheel.held_scan("db")
    wheel.release("db")

    manifest = admin.manifest().value
    *upper, last = [
        sum(manifest.sst(view).info.estimated_size for view in run.views) for run in manifest.tree.runs
    ]
    assert sum(upper) * 4 < last
    assert contents == wheel.scan(folder, "db") == read_by_us(tmp_path)
    assert admin.verify().ok


def at_rest(admin: Admin) -> bool:
    jobs = admin.compactions().value.jobs
    return len(admin.manifest().value.tree.l0) < 2 and all(job.status.finished for job in jobs)


def test_the_wheel_takes_settings_with_our_policy_and_compacts_by_its_own(wheel: Any, tmp_path: Path) -> None:
    compactor = json.loads(Settings(compactor_options=OPTIONS).to_json())["compactor_options"]
    compactor |= {"poll_interval": "10ms", "commit_compacted_interval": "10ms"}
    assert compactor["scheduler_options"]["compaction_policy"] == "lazy-leveling"
    wheel.hold(str(tmp_path), "db", compactor_options=compactor)
    try:
        wheel.held_apply("db", operations(6))
        admin = Admin("db", store=LocalStore(tmp_path))
        eventually(lambda: bool(admin.manifest().value.tree.runs), "the wheel has compacted")
        assert len(wheel.held_scan("db")) > 100
    finally:
        wheel.release("db")
