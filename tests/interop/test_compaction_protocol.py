"""Coordinators and workers of both engines in every combination; both engines read the same rows afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone.config import CompactorOptions, Settings
from flagstone.config.settings import CompactionWorkerOptions
from flagstone.db.admin.admin import Admin
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.compactions import DrainSpec, JobStatus
from flagstone.runtime.ids import ulid_text
from flagstone.store.local import LocalStore
from interop.worker_process import recorded, worker_options
from kit.databases import eventually

PATIENCE_S = 40.0
QUICK = timedelta(milliseconds=20)
COORDINATOR = CompactorOptions(
    poll_interval=QUICK,
    commit_compacted_interval=QUICK,
    worker=CompactionWorkerOptions(compactions_poll_interval=QUICK),
)


@contextmanager
def running(work: Callable[..., None], **options: Any) -> Iterator[None]:
    """Run `work` in a thread until the block ends; an error in it fails the test."""
    stop, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            work(stop=stop, **options)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def operations(rounds: int, *, start: int = 0, rows: int = 60) -> list[tuple[Any, ...]]:
    """Puts, overwrites, deletes and merges; every round becomes one SST in L0."""
    done: list[tuple[Any, ...]] = []
    for number in range(start, start + rounds):
        done += [("put", b"key%05d" % (number * rows // 2 + row), b"%d" % number * 40) for row in range(rows)]
        done += [("delete", b"key%05d" % (number * rows // 2 + row)) for row in range(0, rows, 7)]
        done += [("merge", b"merged%d" % (number % 5), b"+%d" % number)]
        done.append(("flush", "memtable"))
    return done


def manifest_of(admin: Admin) -> Any:
    return admin.manifest().value


def read_by_us(folder: Path, path: str = "db") -> dict[bytes, bytes]:
    store = LocalStore(folder)
    with flagstone.open_reader(path, store=store, mode="latest", merge_operator=Concatenate()) as reader:
        return dict(reader.scan())


@pytest.mark.slow
def test_two_of_our_workers_do_the_jobs_of_the_wheels_coordinator(wheel: Any, tmp_path: Path) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    wheel.hold(folder, "db", coordinator={})
    workers = {"options": worker_options(), "merge_operator": Concatenate()}
    with running(admin.run_worker, **workers), running(admin.run_worker, **workers):
        for start in range(0, 40, 4):
            wheel.held_apply("db", operations(4, start=start))
        eventually(
            lambda: len(manifest_of(admin).tree.l0) < 4 and not _active(admin), "everything is compacted"
        )
    contents = wheel.held_scan("db")
    wheel.release("db")

    manifest = manifest_of(admin)
    assert manifest.tree.runs
    assert contents == wheel.scan(folder, "db") == read_by_us(tmp_path)
    assert len(contents) > 500
    assert admin.verify().ok


@pytest.mark.slow
def test_segments_of_a_wheel_coordinator_are_compacted_and_drained(wheel: Any, tmp_path: Path) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    wheel.hold(folder, "db", coordinator={}, segments=True)
    with running(admin.run_worker, options=worker_options(), merge_operator=Concatenate()):
        for start in range(0, 12, 4):
            wheel.held_apply("db", operations(4, start=start))
        eventually(
            lambda: all(len(tree.l0) < 4 for tree in manifest_of(admin).trees) and not _active(admin),
            "everything is compacted",
        )
    contents = wheel.held_scan("db")
    assert contents == read_by_us(tmp_path)
    merged = next(segment for segment in manifest_of(admin).segments if segment.prefix == b"mer")
    assert merged.tree.runs

    l0, runs = (tuple(part.id for part in parts) for parts in (merged.tree.l0, merged.tree.runs))
    admin.submit_compaction(DrainSpec(b"mer", l0, runs))
    eventually(lambda: not _active(admin), "the segment is drained")

    expected = {key: value for key, value in contents.items() if not key.startswith(b"mer")}
    assert len(expected) < len(contents)
    eventually(lambda: wheel.held_scan("db") == expected, "the writer has seen it")
    wheel.release("db")
    assert read_by_us(tmp_path) == expected
    assert admin.verify().ok


@pytest.mark.slow
def test_our_coordinator_works_beside_a_wheel_writer(wheel: Any, tmp_path: Path) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    wheel.hold(folder, "db", compactor_options=None)
    wheel.held_apply("db", operations(1))
    with running(admin.run_compactor, options=COORDINATOR, merge_operator=Concatenate()):
        for start in range(1, 41, 4):
            # More than the writer accepts without a compactor: l0_max_ssts is 8.
            wheel.held_apply("db", operations(4, start=start))
        eventually(
            lambda: len(manifest_of(admin).tree.l0) < 4 and not _active(admin), "everything is compacted"
        )
        contents = wheel.held_scan("db")
    assert wheel.held_put("db", b"later", b"yes") == "durable"
    wheel.release("db")

    assert contents | {b"later": b"yes"} == wheel.scan(folder, "db") == read_by_us(tmp_path)
    assert manifest_of(admin).compactor_epoch == 1
    assert admin.verify().ok


@pytest.mark.slow
def test_the_wheels_coordinator_and_ours_replace_each_other(wheel: Any, tmp_path: Path) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    expected: dict[bytes, bytes] = {}
    for turn in range(3):
        expected = wheel.apply(folder, "db", operations(5, start=turn * 10))
        with flagstone.open(
            "db", store=LocalStore(tmp_path), settings=OURS, merge_operator=Concatenate()
        ) as db:
            assert dict(db.scan()) == expected
            for number in range(5):
                db.put(b"ours%d" % number, b"%d" % turn)
                db.flush()
            eventually(lambda db=db: db.status()["l0_tables"] < 4, "our compactor has compacted")  # type: ignore[misc]
            expected = dict(db.scan())
        assert wheel.scan(folder, "db") == expected
    assert admin.verify().ok


OURS = Settings(compactor_options=COORDINATOR, garbage_collector_options=None)


@pytest.mark.long
@pytest.mark.slow
def test_a_third_worker_finishes_a_job_from_the_output_of_two_killed_workers(
    wheel: Any, tmp_path: Path
) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    # Heartbeats come every 50 ms; after two seconds without one the wheel's coordinator releases the job.
    wheel.hold(folder, "db", coordinator={"worker_heartbeat_timeout": "2s"})
    wheel.held_apply("db", operations(4, rows=400))
    before = wheel.held_scan("db")
    eventually(lambda: bool(_active(admin)), "a job is scheduled")
    (job,) = _active(admin)

    kept: list[str] = []
    for ssts in (2, 3):
        worker = start_worker(folder, ssts)
        eventually(lambda: recorded(_context(admin, job.id)) == len(kept) + ssts, "the SSTs are recorded")  # noqa: B023
        worker.kill()
        worker.wait()
        context = _context(admin, job.id)
        names = [ulid_text(sst.id) for part in context.subcompactions for sst in part.output_ssts]
        assert names[: len(kept)] == kept
        kept = names
    assert len(kept) == 5
    assert not manifest_of(admin).tree.runs
    with running(admin.run_worker, options=worker_options(), merge_operator=Concatenate()):
        eventually(lambda: not manifest_of(admin).tree.l0, "the job is committed")
        eventually(lambda: not _active(admin), "the job is completed")
    after = wheel.held_scan("db")
    wheel.release("db")

    (run,) = manifest_of(admin).tree.runs
    made = [ulid_text(view.sst_id) for view in run.views]
    assert made[:5] == kept
    assert len(made) > 5
    assert before == after == wheel.scan(folder, "db") == read_by_us(tmp_path)
    assert wheel.get_many(folder, "db", list(before)) == list(before.values())
    assert admin.verify().ok
    print(f"{len(kept)} of {len(made)} SSTs come from two workers that were killed")


def start_worker(folder: str, ssts: int) -> subprocess.Popen[bytes]:
    script = Path(__file__).parent / "worker_process.py"
    return subprocess.Popen([sys.executable, str(script), folder, "db", str(ssts)])


def _active(admin: Admin) -> list[Any]:
    return [job for job in admin.compactions().value.jobs if not job.status.finished]


def _context(admin: Admin, job_id: Any) -> Any:
    job = admin.compactions().value.job(job_id)
    assert job is not None
    return job.context


@pytest.mark.slow
def test_a_full_compaction_beside_a_wheel_writer_goes_through_its_coordinator(
    wheel: Any, tmp_path: Path
) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    wheel.hold(folder, "db", coordinator={})
    wheel.held_apply("db", operations(3))
    before = wheel.held_scan("db")

    seen: list[Any] = []
    (job_id,) = admin.compact(full=True, merge_operator=Concatenate(), progress=seen.append)

    manifest = manifest_of(admin)
    assert not manifest.tree.l0
    assert len(manifest.tree.runs) == 1
    assert manifest.compactor_epoch == 1  # the wheel's: no other coordinator claimed the role
    assert admin.compactions().value.job(job_id).status is JobStatus.COMPLETED  # type: ignore[union-attr]
    assert not seen[-1].coordinating
    assert seen[-1].jobs_done == 1
    assert wheel.held_scan("db") == before
    assert wheel.held_put("db", b"later", b"yes") == "durable"
    wheel.release("db")
    assert wheel.scan(folder, "db") == before | {b"later": b"yes"}
