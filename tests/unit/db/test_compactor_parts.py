"""Schedulers and executors of the user, in an open database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

import flagstone
import flagstone.aio
from flagstone import Admin, InvalidRequest, Settings
from flagstone.compaction import (
    Cancelled,
    Compactions,
    CompactionTask,
    DrainSpec,
    JobContext,
    JobStatus,
    Manifest,
    SsTable,
    TieredSpec,
    plan_full,
)
from flagstone.compaction.extensions import PooledExecutor
from flagstone.config import CompactorOptions
from flagstone.store.memory import MemoryStore
from flagstone.types import RunId, Ulid
from kit.databases import eventually

SETTINGS = Settings(
    compactor_options=CompactorOptions(poll_interval="20ms", commit_compacted_interval="20ms"),  # type: ignore[arg-type]
    garbage_collector_options=None,
)


class Pairs:
    """Merges as soon as L0 has two SSTs; the size-tiered scheduler waits for four."""

    def plan(self, manifest: Manifest, compactions: Compactions) -> Sequence[TieredSpec]:
        busy = any(not job.status.finished for job in compactions.jobs)
        return [] if busy or len(manifest.tree.l0) < 2 else plan_full(manifest, compactions)


def write(db: flagstone.Db, ssts: int) -> dict[bytes, bytes]:
    for number in range(ssts):
        db.put(b"key%d" % number, b"value")
        db.flush()
    return dict(db.scan())


def test_a_scheduler_of_the_user_chooses_the_compactions() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=SETTINGS, scheduler=Pairs()) as db:
        rows = write(db, 2)
        eventually(lambda: len(db.manifest().tree.runs) == 1)
        assert dict(db.scan()) == rows


def test_an_async_database_accepts_the_same_scheduler_executor_and_pool() -> None:
    async def run() -> None:
        opening = flagstone.aio.open("db", store=MemoryStore(), settings=SETTINGS, scheduler=Pairs())
        async with opening as db:
            for number in range(2):
                await db.put(b"key%d" % number, b"value")
                await db.flush()
            deadline = time.monotonic() + 20
            while not (await db.manifest()).tree.runs:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

    asyncio.run(run())


class Harmful(Pairs):
    """Proposes what would lose rows, and fails now and then."""

    def __init__(self) -> None:
        self.asked = 0

    def plan(self, manifest: Manifest, compactions: Compactions) -> Sequence[Any]:
        self.asked += 1
        if self.asked % 3 == 0:
            raise RuntimeError("a bug of the scheduler")
        l0 = tuple(view.id for view in manifest.tree.l0)
        bad: list[Any] = [
            DrainSpec(b"", l0),
            TieredSpec(l0[:1], (), RunId(7)),
            TieredSpec((Ulid(5),), (), RunId(8)),
        ]
        return [*bad, *super().plan(manifest, compactions)]


@pytest.mark.slow
def test_invalid_jobs_of_a_scheduler_are_refused_and_no_row_is_lost() -> None:
    scheduler = Harmful()
    with flagstone.open("db", store=MemoryStore(), settings=SETTINGS, scheduler=scheduler) as db:
        rows = write(db, 6)
        eventually(lambda: scheduler.asked > 3 and len(db.manifest().tree.runs) == 1)
        assert dict(db.scan()) == rows


class Recording:
    """An executor that notes the jobs and lets ours do them."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.jobs = inner, list[CompactionTask]()

    def run(
        self, task: CompactionTask, *, record: Callable[[JobContext], None], cancelled: Callable[[], bool]
    ) -> tuple[SsTable, ...]:
        self.jobs.append(task)
        made: tuple[SsTable, ...] = self.inner.run(task, record=record, cancelled=cancelled)
        return made


def test_an_executor_of_the_user_runs_the_compactions() -> None:
    store = MemoryStore()
    inner = Admin("db", store=store)._executor(
        flagstone.config.CompactionWorkerOptions(), None, None, flagstone.runtime.metrics.Metrics()
    )
    executor = Recording(inner)
    with flagstone.open("db", store=store, settings=SETTINGS, scheduler=Pairs(), executor=executor) as db:
        rows = write(db, 2)
        eventually(lambda: len(db.manifest().tree.runs) == 1)
        assert dict(db.scan()) == rows
    assert [len(task.spec.l0_view_ids) for task in executor.jobs] == [2]


def test_two_databases_share_a_pool_of_the_user() -> None:
    names = set[str]()

    class Noting(Pairs):
        pass

    class Pool(ThreadPoolExecutor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            def noted() -> Any:
                names.add(threading.current_thread().name)
                return function(*args, **kwargs)

            return super().submit(noted)

    with Pool(max_workers=1, thread_name_prefix="mine") as pool:
        databases = [
            flagstone.open(
                f"db{number}", store=MemoryStore(), settings=SETTINGS, scheduler=Noting(), executor=pool
            )
            for number in range(3)
        ]
        for db in databases:
            write(db, 2)
        for db in databases:
            eventually(lambda db=db: len(db.manifest().tree.runs) == 1)  # type: ignore[misc]
            db.close()
    assert names == {"mine_0"}


def test_a_job_that_waits_for_a_thread_can_be_cancelled() -> None:
    released, begun = threading.Event(), list[object]()

    class Inner:
        def run(self, task: CompactionTask, **_: Any) -> tuple[SsTable, ...]:
            begun.append(task)
            return ()

    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(released.wait)
        task: Any = object()
        with pytest.raises(Cancelled):
            PooledExecutor(Inner(), pool).run(task, record=lambda _: None, cancelled=lambda: True)
        released.set()
    assert begun == []
    with pytest.raises(InvalidRequest, match="takes no more work"):
        PooledExecutor(Inner(), pool).run(task, record=lambda _: None, cancelled=lambda: False)


def test_a_database_closes_after_its_pool_was_shut_down() -> None:
    pool = ThreadPoolExecutor(max_workers=1)
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=SETTINGS, scheduler=Pairs(), executor=pool) as db:
        pool.shutdown()
        rows = write(db, 2)
        eventually(lambda: bool(db.status()["compactor"]["worker"]["setbacks"]))
        assert dict(db.scan()) == rows
    left = Admin("db", store=store).compactions().value.jobs
    assert [job.status for job in left if not job.status.finished] == [JobStatus.SCHEDULED]


@pytest.mark.parametrize(
    ("settings", "parts", "problem"),
    [
        (SETTINGS, {"scheduler": object()}, "has none"),
        (SETTINGS, {"executor": object()}, "is neither"),
        (SETTINGS, {"executor": ProcessPoolExecutor}, "is neither"),
        (SETTINGS.replace(compactor_options=None), {"scheduler": Pairs()}, "switches off"),
        (SETTINGS.replace(compactor_options=None), {"executor": Recording(None)}, "switch off"),
        (
            SETTINGS.replace(compactor_options=CompactorOptions(worker=None)),
            {"executor": Recording(None)},
            "switch off",
        ),
    ],
)
def test_an_invalid_scheduler_executor_or_pool_raises_invalid_request(
    settings: Settings, parts: dict[str, Any], problem: str
) -> None:
    store = MemoryStore()
    with pytest.raises(InvalidRequest, match=problem):
        flagstone.open("db", store=store, settings=settings, **parts)
    assert [*store.list("")] == []
    with ProcessPoolExecutor(max_workers=1) as pool, pytest.raises(InvalidRequest, match="processes"):
        flagstone.open("db", store=store, settings=SETTINGS, executor=pool)  # type: ignore[arg-type]
