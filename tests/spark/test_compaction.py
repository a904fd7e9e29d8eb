"""A compaction on Spark has the same result as a local one, and the wheel's coordinator commits it."""

from __future__ import annotations

import logging
import random
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, CorruptData, InvalidRequest
from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.runtime.pool import IoPool
from flagstone.runtime.sync import Event
from flagstone.spark.jobs.compaction import compact, run_worker
from kit.databases import QUIET
from kit.spark_loads import shown

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

SMALL = CompactorOptions(worker=CompactionWorkerOptions(max_sst_size=20_000))


def written(folder: Path) -> dict[bytes, bytes]:
    """Write a database of several overlapping L0 SSTs with deletions and overwritten rows; returns its rows."""
    chance, model = random.Random(3), dict[bytes, bytes]()
    with flagstone.open(folder, settings=QUIET) as db:
        for turn in range(4):
            for _ in range(1500):
                key = b"k%05d" % chance.randrange(4000)
                if chance.random() < 0.2:
                    db.delete(key)
                    model.pop(key, None)
                else:
                    model[key] = b"%d of turn %d" % (chance.randrange(1000), turn)
                    db.put(key, model[key])
            db.flush()
    return model


def everything(folder: Path) -> list[tuple[Any, ...]]:
    with flagstone.open_reader(folder, mode="latest") as reader:
        return [tuple(row) for row in reader.scan().rows()]


def jobs_of(spark: Any) -> list[Any]:
    """The jobs that Spark's pages show."""
    found = spark._jsc.sc().statusStore().jobsList(None)
    return [found.apply(at) for at in range(found.size())]


def test_a_full_compaction_equals_the_local_one_row_for_row(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flagstone.spark")
    ours, other = tmp_path / "spark", tmp_path / "local"
    expected = written(ours)
    shutil.copytree(ours, other)

    jobs = compact(spark, ours, full=True, tasks=3, options=SMALL)
    Admin(other).compact(full=True, options=SMALL)

    assert len(jobs) == 1
    tree = Admin(ours).manifest().value.tree
    assert not tree.l0
    [run] = tree.runs
    assert len(run.views) > 1
    assert everything(ours) == everything(other)
    assert shown(ours) == expected
    made = [line for line in caplog.messages if line.startswith("compacted database=spark ")]
    assert f" rows={len(everything(ours))} " in made[0], "a full compaction leaves one version of a key"
    assert "mb_per_s=" in made[0]
    descriptions = {job.description().get() for job in jobs_of(spark) if job.description().isDefined()}
    assert {f"flagstone: compact spark, range {number} of 3" for number in (1, 2, 3)} <= descriptions
    assert not Admin(ours).verify().findings


def test_an_error_of_a_compaction_task_is_raised_to_the_caller(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
        db.flush()
        db.put(b"b", b"2")
    [first, *_] = sorted((folder / "compacted").iterdir())
    stored = first.read_bytes()
    first.write_bytes(bytes([stored[0] ^ 1]) + stored[1:])

    with pytest.raises(CorruptData, match=r"compacted/.*checksum"):
        compact(spark, folder, full=True, timeout=timedelta(seconds=60))
    with pytest.raises(InvalidRequest, match="no database"):
        compact(spark, tmp_path / "nothing")


def test_a_stopped_worker_releases_its_job_and_ends_at_once(spark: Any, tmp_path: Path) -> None:
    class Latest:
        """Is pickled to the tasks with its code. With a pause, the rows of this test take minutes."""

        def __init__(self, pause_s: float) -> None:
            self.pause_s = pause_s

        def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
            time.sleep(self.pause_s)
            return operand

    with flagstone.open(tmp_path / "db", settings=QUIET, merge_operator=Latest(0)) as db:
        for _ in range(4):
            for number in range(2000):
                db.merge(b"%04d" % number, b"x")
            db.flush()
    stop, left, pool = Event(), Event(), IoPool(max_workers=2, name="test")
    coordinator = CompactorOptions(worker=None, poll_interval=timedelta(milliseconds=50))
    quick = CompactionWorkerOptions(compactions_poll_interval=timedelta(milliseconds=50))
    admin = Admin(tmp_path / "db")
    coordinating = pool.submit(admin.run_compactor, options=coordinator, stop=left)
    worker = pool.submit(
        run_worker, spark, tmp_path / "db", options=quick, tasks=2, merge_operator=Latest(0.05), stop=stop
    )
    try:
        deadline = time.monotonic() + 120
        while not spark.sparkContext.statusTracker().getActiveJobsIds():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        stopped_at = time.monotonic()
        stop.set()
        worker.result(timeout=100)
        assert time.monotonic() - stopped_at < 25, "the worker did not wait for the tasks"
    finally:
        stop.set()
        left.set()
        coordinating.result(timeout=60)
        pool.close()
    [job] = [job for job in admin.compactions().value.jobs if job.spec.l0_view_ids]
    assert job.worker is None, "another worker may claim it"
    assert job.context is not None
    assert len(job.context.subcompactions) == 2, "the next worker continues with the same ranges"
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()


def test_spark_runs_a_job_of_the_wheels_coordinator_and_the_wheel_commits_it(
    spark: Any, wheel: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flagstone.spark")
    folder = tmp_path / "db"
    expected = written(folder)
    wheel.hold(str(tmp_path), "db", coordinator={})
    coordinator = Admin(folder).manifest().value.compactor_epoch
    stop, pool = Event(), IoPool(max_workers=1, name="test")
    quick = CompactionWorkerOptions(compactions_poll_interval=timedelta(milliseconds=50), max_sst_size=20_000)
    worker = pool.submit(run_worker, spark, folder, options=quick, tasks=2, stop=stop)
    try:
        deadline = 60
        watch = Event()
        while Admin(folder).manifest().value.tree.l0 and deadline:
            watch.wait(0.5)
            deadline -= 0.5
        assert wheel.held_scan("db") == expected
    finally:
        stop.set()
        worker.result(timeout=60)
        pool.close()
        wheel.release("db")
    manifest = Admin(folder).manifest().value
    assert not manifest.tree.l0
    assert manifest.compactor_epoch == coordinator, "the wheel's coordinator committed it"
    [line] = [line for line in caplog.messages if line.startswith("compacted database=db ")]
    [run] = manifest.tree.runs
    assert f" ranges=2 tables={len(run.views)} " in line, "Spark wrote every SST of the run"
    assert shown(folder) == expected
