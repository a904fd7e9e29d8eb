"""Our coordinator and the wheel's accept and refuse the same submitted compactions.

The tests write requests directly to the compactions file, without the checks of `submit_compaction`.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone.compaction.validation import find_problem
from flagstone.config.settings import SchedulerOptions
from flagstone.db.admin.admin import Admin
from flagstone.metadata.compactions import Compactions, DrainSpec, Job, JobStatus, Spec, TieredSpec, add_job
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import CompactionsStore
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.types import RunId, Ulid
from interop.test_compaction_protocol import COORDINATOR, running
from interop.worker_process import worker_options
from kit.databases import eventually

SAMPLE = int(os.environ.get("COMPACTION_RULES", "40"))
"""How many of the 448 tiered requests are tried; all drains are tried."""

NEVER = {"scheduler_options": {"min_compaction_sources": "1000", "max_compaction_sources": "1000"}}


@dataclass
class Layout:
    """A database with two segments, each with three SSTs in L0 and three sorted runs, and copies of it."""

    wheel: Any
    folder: Path
    manifest: Manifest
    copies: int = 0

    def copy(self) -> Admin:
        self.copies += 1
        path = f"copy{self.copies}"
        shutil.copytree(self.folder / "base", self.folder / path)
        self.wheel.hold(str(self.folder), path, coordinator=NEVER, segments=True)
        return Admin(path, store=LocalStore(self.folder))

    @property
    def current(self) -> str:
        return f"copy{self.copies}"


def rows(number: int) -> list[tuple[Any, ...]]:
    return [("put", b"aaa%d" % number, b"v"), ("put", b"bbb%d" % number, b"v"), ("flush", "memtable")]


@pytest.fixture(scope="module")
def layout(wheel: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    folder = tmp_path_factory.mktemp("rules")
    wheel.hold(str(folder), "base", coordinator=NEVER, segments=True)
    admin = Admin("base", store=LocalStore(folder))
    numbers = iter(range(100))
    with running(admin.run_worker, options=worker_options()):
        for _ in range(3):
            wheel.held_apply("base", rows(next(numbers)))
            for segment in (b"aaa", b"bbb"):
                now = admin.manifest().value
                tree = now.tree_of(segment)
                assert tree is not None
                destination = RunId(max(now.run_ids, default=0) + 1)
                admin.submit_compaction(
                    TieredSpec(tuple(view.id for view in tree.l0), (), destination, segment)
                )
                eventually(
                    lambda: all(job.status.finished for job in admin.compactions().value.jobs), "a new run"
                )
        for _ in range(3):
            wheel.held_apply("base", rows(next(numbers)))
    wheel.release("base")
    built = Layout(wheel, folder, admin.manifest().value)
    yield built
    if built.copies:
        wheel.release(built.current)


def submit_unchecked(store: LocalStore, path: str, spec: Spec) -> Ulid:
    submitted = Ulid(0)

    def edit(now: Any) -> Compactions:
        nonlocal submitted
        newest = now.value.newest_job
        submitted = Ids().ulid(0 if newest is None else ulid_ms(newest))
        return add_job(now.value, Job(submitted, spec))

    CompactionsStore(store, DbPaths(path)).update(edit)
    return submitted


def decided_status(admin: Admin, job_id: Ulid) -> JobStatus:
    """The status that the coordinator gave to the job."""

    def status() -> JobStatus:
        job = admin.compactions().value.job(job_id)
        assert job is not None
        return job.status

    eventually(lambda: status() is not JobStatus.SUBMITTED, "the coordinator has decided about the job")
    return status()


def disagreements(layout: Layout, specs: list[Spec]) -> list[str]:
    found = []
    admin: Admin | None = None
    for spec in specs:
        if admin is None:
            admin = layout.copy()
        status = decided_status(admin, submit_unchecked(LocalStore(layout.folder), layout.current, spec))
        problem = find_problem(spec, layout.manifest, Compactions())
        if (status is JobStatus.FAILED) != (problem is not None):
            found.append(f"{spec}: the wheel says {status.name}, we say {problem}")
        if status is not JobStatus.FAILED:
            layout.wheel.release(layout.current)
            admin = None
    return found


def subsets(layout: Layout) -> list[tuple[tuple[Ulid, ...], tuple[RunId, ...]]]:
    tree = layout.manifest.tree_of(b"aaa")
    assert tree is not None
    l0, runs = [view.id for view in tree.l0], [run.id for run in tree.runs]
    assert (len(l0), len(runs)) == (3, 3)
    return [
        (views, chosen)
        for count in range(4)
        for views in combinations(l0, count)
        for size in range(4)
        for chosen in combinations(runs, size)
    ]


@pytest.mark.slow
def test_the_wheel_and_flagstone_accept_the_same_drain_requests(layout: Layout) -> None:
    drains: list[Spec] = [DrainSpec(b"aaa", *sources) for sources in subsets(layout)]
    l0, runs = subsets(layout)[-1]
    drains += [
        DrainSpec(b"aaa", l0[::-1], runs[::-1]),
        DrainSpec(b"aaa", (l0[-1], l0[-1])),
        DrainSpec(b"", l0),
        DrainSpec(b"bbb", l0),
        DrainSpec(b"zzz", l0),
    ]
    assert disagreements(layout, drains) == []


@pytest.mark.slow
def test_the_wheel_and_flagstone_accept_the_same_tiered_compactions(layout: Layout) -> None:
    tree = layout.manifest.tree_of(b"aaa")
    assert tree is not None
    highest = max(layout.manifest.run_ids)
    destinations = {*(run.id for run in tree.runs), RunId(0), highest, RunId(highest + 1), RunId(highest + 5)}
    tiered: list[Spec] = [
        TieredSpec(*sources, destination, b"aaa")
        for sources in subsets(layout)
        for destination in sorted(destinations)
    ]
    # Only this is refused by us and not by the wheel: a group of L0 SSTs that leaves older ones in L0. They would
    # be read before the newer rows of the run, and the wheel's own writer drops them.
    oldest = tree.l0[-1].id
    tiered = [
        spec for spec in tiered if spec.sorted_runs or oldest in spec.l0_view_ids or not spec.l0_view_ids
    ]
    random.Random(17).shuffle(tiered)
    assert disagreements(layout, tiered[:SAMPLE]) == []


def test_the_wheel_and_flagstone_refuse_to_drain_the_root_tree(wheel: Any, tmp_path: Path) -> None:
    wheel.hold(str(tmp_path), "plain", coordinator=NEVER)
    wheel.held_apply("plain", rows(0))
    admin = Admin("plain", store=LocalStore(tmp_path))
    now = admin.manifest().value
    drain = DrainSpec(b"", tuple(view.id for view in now.tree.l0))
    assert decided_status(admin, submit_unchecked(LocalStore(tmp_path), "plain", drain)) is JobStatus.FAILED
    wheel.release("plain")
    with pytest.raises(flagstone.InvalidRequest, match="only a segment can be drained"):
        admin.submit_compaction(drain)


def test_our_coordinator_refuses_a_gap_beside_a_rust_writer_and_no_row_is_lost(
    wheel: Any, tmp_path: Path
) -> None:
    wheel.hold(str(tmp_path), "db", compactor_options=None, segments=True)
    for number in range(3):
        wheel.held_apply("db", rows(number))
    before = wheel.held_scan("db")
    store = LocalStore(tmp_path)
    admin = Admin("db", store=store)
    tree = admin.manifest().value.tree_of(b"aaa")
    assert tree is not None
    newest, middle, oldest = (view.id for view in tree.l0)
    # The scheduler picks no job here: with four SSTs in L0 it would, and use the sources of the drain below.
    options = replace(COORDINATOR, scheduler_options=SchedulerOptions.from_dict(NEVER["scheduler_options"]))
    with running(admin.run_compactor, options=options):
        eventually(lambda: bool(admin.list_compactions()), "the coordinator runs")
        for gap in ((newest, oldest), (newest,), (newest, middle)):
            job = submit_unchecked(store, "db", DrainSpec(b"aaa", gap))
            assert decided_status(admin, job) is JobStatus.FAILED
        wheel.held_apply("db", [("put", b"aaa9", b"v"), ("flush", "memtable")])
        assert wheel.held_scan("db") == {**before, b"aaa9": b"v"}
        # L0 SSTs up to the oldest, in any order, are a valid drain.
        job = submit_unchecked(store, "db", DrainSpec(b"aaa", (oldest, newest, middle)))
        assert decided_status(admin, job) is JobStatus.COMPLETED
    expected = {key: value for key, value in before.items() if key.startswith(b"bbb")} | {b"aaa9": b"v"}
    wheel.held_apply("db", [("put", b"bbb9", b"v"), ("flush", "memtable")])
    eventually(lambda: wheel.held_scan("db") == {**expected, b"bbb9": b"v"}, "the writer sees the drain")
    wheel.release("db")
    assert wheel.apply(str(tmp_path), "db", [], segments=True) == {**expected, b"bbb9": b"v"}
    assert admin.verify().ok
