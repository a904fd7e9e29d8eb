"""Range deletes of ours beside the official wheel: it reads, writes into the hole, compacts, collects and clones.

`RANGE_HISTORIES=200` runs that many random histories instead of a few.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, Settings
from flagstone.compaction.executor import LocalExecutor
from flagstone.compaction.extensions import CompactionTask
from flagstone.errors import InvalidRequest
from flagstone.format.filter import FixedPrefix
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.compactions import JobContext, JobStatus
from flagstone.metadata.manifest import SsTable
from flagstone.store.local import LocalStore
from flagstone.types import KeyRange
from interop.test_both_ways import Workload, perform
from interop.test_compaction_protocol import operations, read_by_us, running
from interop.worker_process import local_executor, worker_options
from kit.databases import eventually

pytestmark = pytest.mark.slow

# Without a compactor, a wheel with its default settings waits for ever once L0 is full.
PATIENT = {"compactor_options": None, "l0_max_ssts": 100, "l0_max_ssts_per_key": 100}
HISTORIES = int(os.environ.get("RANGE_HISTORIES", "6"))
FIRST = int(os.environ.get("RANGE_FIRST", "0"))
STEPS = 8


def ours(folder: Path, *, segments: bool = False, block_bytes: int = 1024) -> flagstone.Db:
    return flagstone.open(
        "db",
        store=str(folder),
        store_options={"fsync": False},
        settings=Settings(
            min_filter_keys=10,
            l0_max_ssts=100,
            l0_max_ssts_per_key=100,
            sst_block_size=block_bytes,
            compactor_options=None,
            garbage_collector_options=None,
        ),
        merge_operator=Concatenate(),
        segment_extractor=FixedPrefix("first3", 3) if segments else None,
    )


def delete_by_manifest(db: flagstone.Db, keys: KeyRange) -> None:
    """As `delete_range` does for more than a hundred rows."""
    db._engine.services.range_deletes.delete(keys)


class History:
    """One database that both engines change in turn, and the rows that both must show after each step."""

    def __init__(self, seed: int, folder: Path, wheel: Any) -> None:
        self.random = random.Random(seed)
        self.segments = seed % 3 == 0
        self.work = Workload(seed, segments=self.segments)
        self.folder = folder
        self.wheel = wheel
        self.admin = Admin("db", store=LocalStore(folder, fsync=False))
        self.deleted = 0
        self.done: list[str] = []

    def bounds(self) -> KeyRange:
        ends = sorted(self.work.key() for _ in range(2))
        start = None if self.random.random() < 0.1 else ends[0]
        stop = None if self.random.random() < 0.1 else ends[1] + self.random.choice([b"", b"\0", b"z"])
        return KeyRange(start, stop)

    def we_write_and_delete_ranges(self) -> None:
        with ours(self.folder, segments=self.segments) as db:
            for _ in range(self.random.randrange(1, 4)):
                for operation in self.work.operations(self.random.randrange(0, 30)):
                    perform(db, operation)
                keys = self.bounds()
                if not keys.empty:
                    (delete_by_manifest if self.random.random() < 0.8 else _delete_publicly)(db, keys)
                    self.deleted += 1
                    self.forget(keys)
                assert dict(db.scan()) == self.work.expected
            for operation in self.work.operations(self.random.randrange(0, 5)):
                perform(db, operation)

    def forget(self, keys: KeyRange) -> None:
        self.work.expected = {key: value for key, value in self.work.expected.items() if key not in keys}

    def the_wheel_writes(self) -> None:
        seen = self.wheel.apply(
            str(self.folder),
            "db",
            self.work.operations(self.random.randrange(5, 30)),
            segments=self.segments,
            **PATIENT,
        )
        assert seen == self.work.expected

    def the_wheel_writes_and_compacts(self) -> None:
        wanted = [
            operation for _ in range(5) for operation in (*self.work.operations(6), ("flush", "memtable"))
        ]
        seen = self.wheel.apply(str(self.folder), "db", wanted, segments=self.segments)
        assert seen == self.work.expected

    def the_wheel_compacts_all(self) -> None:
        busy = False
        # A job that it left unfinished would run first, and take the sources.
        with suppress(InvalidRequest):  # no coordinator was ever started
            busy = any(not job.status.finished for job in self.admin.compactions().value.jobs)
        if not self.segments and not busy and any(True for _ in self.admin.manifest().value.views):
            assert self.wheel.compact_everything(str(self.folder), "db") == self.work.expected

    def we_compact(self) -> None:
        self.admin.compact(full=self.random.random() < 0.5, merge_operator=Concatenate())

    def we_collect(self) -> None:
        self.admin.collect_garbage(min_age="0s")

    def the_wheel_collects(self) -> None:
        self.wheel.run_gc_once(str(self.folder), "db")

    def step(self, number: int) -> None:
        actions: list[Callable[[], None]] = [
            *(self.we_write_and_delete_ranges,) * 3,
            *(self.the_wheel_writes, self.the_wheel_writes_and_compacts, self.the_wheel_compacts_all),
            *(self.we_compact, self.we_collect, self.the_wheel_collects),
        ]
        action = self.we_write_and_delete_ranges if number == 1 else self.random.choice(actions)
        if number == 0:
            action = self.random.choice([self.the_wheel_writes, self.the_wheel_writes_and_compacts])
        self.done.append(action.__name__)
        action()
        assert read_by_us(self.folder) == self.work.expected, self.done
        assert self.wheel_sees() == self.work.expected, self.done

    def wheel_sees(self) -> Any:
        if self.segments:  # the wheel's readers take no extractor here
            return self.wheel.apply(str(self.folder), "db", [], segments=True, **PATIENT)
        return self.wheel.scan(str(self.folder), "db")

    def clone(self) -> None:
        """A clone by either engine: we delete a range of borrowed SSTs in it, and then the wheel writes to it."""
        before = dict(self.work.expected)
        if self.random.random() < 0.5:
            self.admin.clone("copy")
        else:
            self.wheel.clone(str(self.folder), "copy", [("db", None, None)])
        keys = self.bounds()
        with flagstone.open(
            "copy",
            store=LocalStore(self.folder, fsync=False),
            settings=Settings(compactor_options=None, garbage_collector_options=None),
            merge_operator=Concatenate(),
            segment_extractor=FixedPrefix("first3", 3) if self.segments else None,
        ) as copy:
            if not keys.empty:
                delete_by_manifest(copy, keys)
                self.forget(keys)
        seen = self.wheel.apply(
            str(self.folder), "copy", self.work.operations(10), segments=self.segments, **PATIENT
        )
        assert seen == self.work.expected == read_by_us(self.folder, "copy")
        assert read_by_us(self.folder) == before
        assert Admin("copy", store=LocalStore(self.folder)).verify().ok


def _delete_publicly(db: flagstone.Db, keys: KeyRange) -> None:
    db.delete_range(keys.start, keys.stop)


@pytest.mark.timeout(60 + 10 * HISTORIES)
def test_both_engines_show_the_same_rows_throughout_random_histories_with_range_deletes(
    tmp_path: Path, wheel: Any
) -> None:
    deleted = 0
    for seed in range(FIRST, FIRST + HISTORIES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        history = History(seed, folder, wheel)
        try:
            for number in range(STEPS):
                history.step(number)
            report = history.admin.verify()
            assert report.ok, report.findings
            history.clone()
        except AssertionError as error:
            error.add_note(f"seed {seed}: {history.done}")
            raise
        deleted += history.deleted
    assert deleted >= HISTORIES
    print(f"{HISTORIES} histories, {deleted} range deletes")


class Gated:
    """An executor that merges, and then waits for the test before it hands the result over."""

    def __init__(self, inner: LocalExecutor) -> None:
        self.inner = inner
        self.merged, self.gate = threading.Event(), threading.Event()

    def run(
        self, task: CompactionTask, *, record: Callable[[JobContext], None], cancelled: Callable[[], bool]
    ) -> tuple[SsTable, ...]:
        made = self.inner.run(task, record=record, cancelled=cancelled)
        self.merged.set()
        assert self.gate.wait(20)
        return made


@pytest.mark.parametrize("sources", ["L0", "runs"])
def test_a_job_of_the_wheel_that_has_merged_the_old_views_brings_no_row_back(
    sources: str, tmp_path: Path, wheel: Any
) -> None:
    folder, admin = str(tmp_path), Admin("db", store=LocalStore(tmp_path))
    if sources == "runs":
        for number in range(4):
            wheel.apply(folder, "db", operations(1, start=number), compactor_options=None)
            wheel.compact(folder, "db", runs=[], destination=number)
    else:
        wheel.apply(folder, "db", operations(4), compactor_options=None)
    before = read_by_us(tmp_path)
    keys = KeyRange(b"key00020", b"key00090")
    expected = {key: value for key, value in before.items() if key not in keys}
    wheel.hold(folder, "db", coordinator={})
    gated = Gated(local_executor(folder, "db"))
    with running(admin.run_worker, options=worker_options(), executor=gated), ours(tmp_path) as db:
        assert gated.merged.wait(20)
        delete_by_manifest(db, keys)
        gated.gate.set()
        eventually(lambda: any(job.status is JobStatus.COMPACTED for job in admin.compactions().value.jobs))
    assert read_by_us(tmp_path) == wheel.scan(folder, "db") == expected

    wheel.release("db")
    wheel.hold(folder, "db")  # its coordinator finds the finished job, and compacts anew
    for number in range(5):
        wheel.held_apply("db", [("put", b"key00050", b"%d" % number), ("flush", "memtable")])
    expected[b"key00050"] = b"4"
    eventually(
        lambda: admin.manifest().value.tree.runs and not admin.manifest().value.tree.l0[3:], "it compacts"
    )
    assert wheel.held_scan("db") == expected
    wheel.release("db")
    assert read_by_us(tmp_path) == expected
    assert len(expected) < len(before)
    assert admin.verify().ok


def test_the_wheel_reads_the_deleted_rows_in_a_checkpoint_made_before(tmp_path: Path, wheel: Any) -> None:
    with ours(tmp_path) as db:
        for number in range(300):
            db.put(b"%03d" % number, b"v%d" % number)
        held = db.checkpoint(name="before")
        db.delete_range(b"050", b"250")
    admin = Admin("db", store=LocalStore(tmp_path))
    admin.compact(full=True)
    admin.collect_garbage(min_age="0s")
    assert len(wheel.scan(str(tmp_path), "db", checkpoint=str(held.id))) == 300
    assert len(wheel.scan(str(tmp_path), "db")) == 100


def test_our_consumers_read_a_range_delete_before_the_rows_of_the_wheel(tmp_path: Path, wheel: Any) -> None:
    with ours(tmp_path) as db:
        for number in range(300):
            db.put(b"%03d" % number, b"v")
        db.delete_range(b"100", b"220")
        db.put(b"150", b"ours")
    wheel.apply(str(tmp_path), "db", [("put", b"160", b"theirs")], compactor_options=None)
    reader = flagstone.WalReader("db", store=LocalStore(tmp_path))
    changes = [change for batch in reader.follow(timeout_s=0) for change in batch.changes]
    assert [change.seq for change in changes] == [*range(1, 304)]
    assert [change[:3] for change in changes[300:]] == [
        ("delete_range", b"100", b"220"),
        ("put", b"150", b"ours"),
        ("put", b"160", b"theirs"),
    ]
