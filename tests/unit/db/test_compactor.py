"""The compactor inside an open database, and the operator's compactions beside it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

import flagstone
from flagstone.config import CompactionWorkerOptions, CompactorOptions, SchedulerOptions, Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, FlagstoneError, InvalidRequest, Unavailable
from flagstone.lsm.compaction_filter import CompactionJob, Decision, Outcome
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.compactions import DrainSpec, Job, JobStatus, TieredSpec, Worker, add_job
from flagstone.metadata.stores import CompactionsStore
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Crashed, FaultyStore
from flagstone.types import Row, RunId, Ulid
from kit.databases import eventually

pytestmark = pytest.mark.slow

QUICK = timedelta(milliseconds=20)
COMPACTOR = CompactorOptions(
    poll_interval=QUICK,
    commit_compacted_interval=QUICK,
    worker=CompactionWorkerOptions(compactions_poll_interval=QUICK),
)
PATIENCE_S = 20.0


def settings(**changes: Any) -> Settings:
    """The manifest is not polled: what the compactor does must reach the writer without that."""
    values: dict[str, Any] = {
        "manifest_poll_interval": timedelta(hours=1),
        "compactor_options": COMPACTOR,
        "garbage_collector_options": None,
        "sst_block_size": 1024,
        "l0_sst_size_bytes": 4096,
    }
    return Settings(**{**values, **changes})


def write(db: Db, ssts: int, *, start: int = 0) -> dict[bytes, bytes]:
    """One SST in L0 for each, which overwrites some rows of the one before."""
    rows: dict[bytes, bytes] = {}
    for number in range(start, start + ssts):
        for offset in range(20):
            key, value = b"key%05d" % (number * 10 + offset), b"value %d" % number
            db.put(key, value)
            rows[key] = value
        db.flush()
    return rows


def at_rest(db: Db) -> bool:
    status = db.status()
    return status["l0_tables"] < 4 and not status["compactor"]["jobs"]


def jobs_in(store: Any) -> tuple[Job, ...]:
    return Admin("db", store=store).compactions().value.jobs


# -- inside a writer


def test_an_open_database_compacts_far_more_rows_than_l0_can_hold() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=settings(l0_max_ssts=4, max_unflushed_bytes=8192)) as db:
        rows = {b"%06d" % number: b"v" * 50 for number in range(5000)}
        for key, value in rows.items():
            db.put(key, value)
        db.flush()
        eventually(lambda: at_rest(db), "compacted")
        assert dict(db.scan()) == rows
        assert db.status()["compactor"]["state"] == "coordinating"
        assert db.metrics()["slatedb.compactor.epoch"] == 1
        assert db.metrics()["slatedb.compactor.last_compaction_timestamp_sec"] > 0
    assert Admin("db", store=store).verify().ok
    with flagstone.open("db", store=store, settings=settings()) as db:
        assert dict(db.scan()) == rows


def test_each_segment_is_compacted_separately() -> None:
    class FirstByte:
        name = "first"

        def prefix(self, key: bytes) -> bytes | None:
            return key[:1]

    store = MemoryStore()
    with flagstone.open("db", store=store, settings=settings(), segment_extractor=FirstByte()) as db:
        rows = {}
        for number in range(9):
            for segment in (b"a", b"b"):
                rows[segment + b"%d" % number] = rows[segment] = b"%d" % number
                db.put(segment + b"%d" % number, b"%d" % number)
                db.put(segment, b"%d" % number)
            db.flush()
        eventually(
            lambda: not db.status()["compactor"]["jobs"] and db.status()["sorted_runs"] >= 2, "compacted"
        )
        assert {segment.prefix for segment in db.manifest().segments} == {b"a", b"b"}
        assert dict(db.scan()) == rows
    with flagstone.open("db", store=store, settings=settings(), segment_extractor=FirstByte()) as db:
        assert dict(db.scan()) == rows


def test_a_disabled_compactor_compacts_nothing() -> None:
    store = MemoryStore()
    options = settings(compactor_options=None, l0_max_ssts=100, l0_max_ssts_per_key=100)
    with flagstone.open("db", store=store, settings=options) as db:
        write(db, 9)
        assert db.status()["compactor"] is None
        assert db.status()["l0_tables"] == 9
    with pytest.raises(InvalidRequest, match="no coordinator was ever started"):
        Admin("db", store=store).compactions()


def test_a_database_that_is_closed_at_once_starts_no_coordinator() -> None:
    store = CountingStore(MemoryStore(), component="test")
    with flagstone.open("db", store=store) as db:
        write(db, 3)
        assert db.status()["compactor"]["state"] == "waiting"
    assert Admin("db", store=store).list_compactions() == []


def test_an_opened_database_starts_the_needed_compactions_at_once() -> None:
    store = MemoryStore()
    off = settings(compactor_options=None)
    with flagstone.open("db", store=store, settings=off) as db:
        rows = write(db, 5)
    patient = settings(compactor_options=CompactorOptions(poll_interval=timedelta(hours=1)))
    with flagstone.open("db", store=store, settings=patient) as db:
        eventually(lambda: at_rest(db), "compacted")
        assert dict(db.scan()) == rows


class Filter:
    """Drops values of 7; waits in `gate` when there is one; fails when `broken`."""

    broken = False
    gate: threading.Event | None = None
    reached = threading.Event()

    def __init__(self, job: CompactionJob) -> None:
        pass

    def filter(self, row: Row) -> Outcome:
        type(self).reached.set()
        if self.gate is not None:
            self.gate.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError("a bug of the user")
        return Decision.TOMBSTONE if row.value == b"value 7" else Decision.KEEP


def make_filter(**attributes: Any) -> type[Filter]:
    return type("Filter", (Filter,), {"reached": threading.Event(), **attributes})


def test_compaction_applies_the_filter_and_the_merge_operator() -> None:
    store = MemoryStore()
    options = {"settings": settings(), "merge_operator": Concatenate(), "compaction_filter": make_filter()}
    with flagstone.open("db", store=store, **options) as db:  # type: ignore[arg-type]
        for number in range(12):
            db.put(b"%d" % number, b"value %d" % number)
            db.merge(b"all", b"+%d" % number)
            db.flush()
        eventually(lambda: at_rest(db) and b"7" not in db, "filtered")
        assert b"8" in db
        assert db[b"all"] == b"".join(b"+%d" % number for number in range(12))


def test_an_async_database_compacts_and_applies_the_filter() -> None:
    async def use() -> None:
        store = MemoryStore()
        async with flagstone.aio.open(
            "db", store=store, settings=settings(), compaction_filter=make_filter()
        ) as db:
            for number in range(12):
                await db.put(b"%d" % number, b"value %d" % number)
                await db.flush()
            for _ in range(2000):
                if await db.get(b"7") is None:
                    return
                await asyncio.sleep(0.005)
            pytest.fail("never filtered")

    asyncio.run(use())


def test_a_failing_compaction_shows_in_the_status_and_writes_continue() -> None:
    broken = make_filter(broken=True)
    with flagstone.open("db", store=MemoryStore(), settings=settings(), compaction_filter=broken) as db:
        rows = write(db, 5)
        eventually(lambda: bool(db.status()["compactor"]["worker"]["setbacks"]), "the failure shows")
        (setback,) = db.status()["compactor"]["worker"]["setbacks"].values()
        assert "a bug of the user" in setback["reason"]
        assert db.metrics()["flagstone.compactor.job_failures"] == 1
        assert db.status()["state"] == "open"
        rows |= write(db, 2, start=5)
        assert dict(db.scan()) == rows


def test_closing_releases_a_job_and_the_next_open_runs_it() -> None:
    store = MemoryStore()
    gate = threading.Event()
    hanging = make_filter(gate=gate)
    db = flagstone.open("db", store=store, settings=settings(), compaction_filter=hanging)
    rows = write(db, 5)
    assert hanging.reached.wait(PATIENCE_S)
    closer = threading.Thread(target=db.close)
    closer.start()
    eventually(lambda: db.closed, "closing")
    gate.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    (job,) = [job for job in jobs_in(store) if not job.status.finished]
    assert (job.status, job.worker) == (JobStatus.SCHEDULED, None)

    with flagstone.open("db", store=store, settings=settings()) as db:
        eventually(lambda: at_rest(db), "compacted")
        assert dict(db.scan()) == rows


def test_a_database_closes_after_its_store_fails_during_a_compaction() -> None:
    store = FaultyStore(MemoryStore())
    hanging = make_filter(gate=threading.Event())
    db = flagstone.open("db", store=store, settings=settings(), compaction_filter=hanging)
    rows = write(db, 5)
    assert hanging.reached.wait(PATIENCE_S)
    store.crash()
    assert hanging.gate is not None
    hanging.gate.set()
    with suppress(FlagstoneError, Crashed):
        db.close()
    assert db.closed

    with flagstone.open("db", store=store.inner, settings=settings(compactor_options=None)) as db:
        assert dict(db.scan()) == rows


def test_a_second_writer_fences_the_first_during_a_compaction_and_loses_no_row() -> None:
    store = MemoryStore()
    gate = threading.Event()
    hanging = make_filter(gate=gate)
    old = flagstone.open("db", store=store, settings=settings(), compaction_filter=hanging)
    rows = write(old, 5)
    assert hanging.reached.wait(PATIENCE_S)
    with flagstone.open("db", store=store, settings=settings()) as new:
        rows |= write(new, 2, start=5)
        gate.set()
        with pytest.raises(Closed):
            old.put(b"x", b"y", await_durable=True)
        old.close()
        eventually(lambda: at_rest(new), "compacted")
        assert dict(new.scan()) == rows
    assert Admin("db", store=store).verify().ok


# -- beside it


def test_another_coordinator_claims_the_role_and_writes_continue() -> None:
    store = MemoryStore()
    admin = Admin("db", store=store)
    stop = threading.Event()
    with flagstone.open("db", store=store, settings=settings()) as db:
        rows = write(db, 4)
        eventually(lambda: at_rest(db), "compacted here")
        thread = threading.Thread(target=admin.run_compactor, kwargs={"options": COMPACTOR, "stop": stop})
        thread.start()
        try:
            eventually(lambda: db.status()["compactor"]["state"] == "fenced", "fenced")
            rows |= write(db, 3, start=4)
            assert "newer compactor" in db.status()["compactor"]["failure"]
            assert db.status()["state"] == "open"
            rows |= write(db, 1, start=7)
            eventually(lambda: len(admin.manifest().value.tree.l0) < 4, "compacted elsewhere")
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        eventually(lambda: db.status()["compactor"]["state"] == "coordinating", "the role is claimed back")
        rows |= write(db, 9, start=8)
        eventually(lambda: at_rest(db), "compacted here again")
        assert dict(db.scan()) == rows


def test_a_full_compaction_beside_our_writer_goes_through_its_coordinator() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=settings()) as db:
        rows = write(db, 6)
        eventually(lambda: at_rest(db), "compacted")
        rows |= write(db, 2, start=6)
        seen: list[Any] = []
        (job,) = Admin("db", store=store).compact(full=True, progress=seen.append)
        eventually(lambda: not db.status()["l0_tables"], "the writer has adopted it")
        assert db.manifest().compactor_epoch == 1
        assert db.status()["sorted_runs"] == 1
        assert seen[-1].jobs_done == seen[-1].jobs == 1
        assert 0 < seen[-1].bytes_written <= seen[-1].bytes_to_read
        assert dict(db.scan()) == rows
    assert job in {entry.id for entry in jobs_in(store)}


def test_a_full_compaction_of_a_closed_database_claims_the_coordinator_role() -> None:
    store = MemoryStore()
    off = settings(compactor_options=None)
    with flagstone.open("db", store=store, settings=off) as db:
        rows = write(db, 6)
    admin = Admin("db", store=store)
    assert len(admin.compact(full=True)) == 1
    assert admin.compact(full=True) == []
    tree = admin.manifest().value.tree
    assert (len(tree.l0), len(tree.runs)) == (0, 1)
    with flagstone.open("db", store=store, settings=off) as db:
        assert dict(db.scan()) == rows


def test_a_compaction_without_full_runs_what_the_scheduler_chooses() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=settings(compactor_options=None)) as db:
        rows = write(db, 3)
        assert Admin("db", store=store).compact() == []
        rows |= write(db, 2, start=3)
        assert len(Admin("db", store=store).compact()) == 1
        assert dict(db.scan()) == rows


@pytest.mark.parametrize("status", [JobStatus.SUBMITTED, JobStatus.SCHEDULED, JobStatus.RUNNING])
def test_jobs_of_a_dead_coordinator_run_first(status: JobStatus) -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=settings(compactor_options=None)) as db:
        rows = write(db, 4)
        Admin("db", store=store).compact()
        rows |= write(db, 4, start=4)
        l0 = tuple(view.id for view in db.manifest().tree.l0)
    worker = Worker("dead", 0) if status is JobStatus.RUNNING else None
    left = Job(SYSTEM_IDS.ulid(), TieredSpec(l0, (), RunId(1)), status, worker=worker)
    jobs = CompactionsStore(store, DbPaths("db"))
    jobs.update(lambda now: add_job(now.value, left))
    admin = Admin("db", store=store)
    options = COMPACTOR.replace(worker_heartbeat_timeout=timedelta(seconds=11))

    done = admin.compact(full=True, patience=timedelta(milliseconds=100), options=options)

    assert len(done) == 1
    assert len(admin.manifest().value.tree.runs) == 1
    with flagstone.open("db", store=store, settings=settings(compactor_options=None)) as db:
        assert dict(db.scan()) == rows


def test_a_compaction_longer_than_its_timeout_raises() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=settings(compactor_options=None)) as db:
        write(db, 4)
    gate = threading.Event()
    hanging = make_filter(gate=gate)
    threading.Timer(0.5, gate.set).start()
    with pytest.raises(Unavailable, match="not done after"):
        Admin("db", store=store).compact(
            full=True, compaction_filter=hanging, timeout=timedelta(milliseconds=200)
        )
    Admin("db", store=store).compact(full=True, patience=timedelta(0))
    tree = Admin("db", store=store).manifest().value.tree
    assert (len(tree.l0), len(tree.runs)) == (0, 1)


def test_a_compaction_without_the_needed_merge_operator_raises_and_its_job_fails() -> None:
    store = MemoryStore()
    off = settings(compactor_options=None)
    with flagstone.open("db", store=store, settings=off, merge_operator=Concatenate()) as db:
        for number in range(4):
            db.merge(b"k", b"%d" % number)
            db.flush()
    with pytest.raises(InvalidRequest, match="no merge operator"):
        Admin("db", store=store).compact(full=True)
    assert [job.status for job in jobs_in(store)] == [JobStatus.FAILED]
    Admin("db", store=store).compact(full=True, merge_operator=Concatenate())
    with flagstone.open("db", store=store, settings=off, merge_operator=Concatenate()) as db:
        assert db[b"k"] == b"0123"


def test_compaction_requests_without_a_database_or_a_coordinator_change_nothing() -> None:
    store = MemoryStore()
    admin = Admin("db", store=store)
    for request in (
        admin.compact,
        lambda: admin.run_worker(stop=threading.Event()),
        lambda: admin.run_compactor(stop=threading.Event()),
    ):
        with pytest.raises(InvalidRequest, match="no database"):
            request()
    assert [*store.list("")] == []
    flagstone.open("db", store=store, settings=settings(compactor_options=None)).close()
    with pytest.raises(InvalidRequest, match="no coordinator was ever started"):
        admin.submit_compaction(TieredSpec((Ulid(1),), (), RunId(0)))
    with flagstone.open("db", store=store, settings=settings()) as db:
        write(db, 4)
        eventually(lambda: at_rest(db), "compacted")
        before = admin.compactions()
        with pytest.raises(InvalidRequest, match="is not in L0 of the database"):
            admin.submit_compaction(TieredSpec((Ulid(1),), (), RunId(9)))
        with pytest.raises(InvalidRequest, match="no segment b'x'"):
            admin.submit_compaction(DrainSpec(b"x", (), (RunId(0),)))
        with pytest.raises(InvalidRequest, match="no segment b'x'"):
            admin.compact(full=True, segment=b"x")
        with pytest.raises(InvalidRequest, match="no compactions file 999"):
            admin.compactions(999)
        assert admin.compactions() == before
        assert admin.compactions(before.id) == before


def test_the_open_database_runs_a_submitted_compaction() -> None:
    store = MemoryStore()
    lazy = SchedulerOptions(min_compaction_sources=6)
    options = settings(compactor_options=COMPACTOR.replace(scheduler_options=lazy))
    with flagstone.open("db", store=store, settings=options) as db:
        rows = write(db, 3)
        eventually(lambda: db.status()["compactor"]["state"] == "coordinating", "claimed")
        l0 = tuple(view.id for view in db.manifest().tree.l0)
        job = Admin("db", store=store).submit_compaction(TieredSpec(l0, (), RunId(0)))
        eventually(lambda: db.status()["sorted_runs"] == 1, "compacted")
        assert dict(db.scan()) == rows
        assert job in {entry.id for entry in jobs_in(store)}


def test_workers_of_other_processes_run_the_jobs_of_a_coordinator_without_worker() -> None:
    store = MemoryStore()
    admin, stop = Admin("db", store=store), threading.Event()
    options = settings(compactor_options=COMPACTOR.replace(worker=None))
    work = CompactionWorkerOptions(compactions_poll_interval=QUICK)
    threads = [
        threading.Thread(target=admin.run_worker, kwargs={"options": work, "stop": stop}) for _ in range(3)
    ]
    with flagstone.open("db", store=store, settings=options) as db:
        for thread in threads:
            thread.start()
        rows: dict[bytes, bytes] = {}
        try:
            for start in range(0, 40, 5):
                rows |= write(db, 5, start=start)
            eventually(lambda: at_rest(db), "compacted")
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert dict(db.scan()) == rows
        assert db.status()["compactor"]["worker"] is None
