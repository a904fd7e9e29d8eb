"""Loads beside other loads and beside processes that open the database: each becomes visible once, in commit order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import flagstone
from flagstone import Admin, Closed
from flagstone.db.reader.reader import open_reader
from flagstone.format.filter import FixedPrefix
from flagstone.loads.request import plan_renumbering, plan_seq
from flagstone.metadata.annotations import HeldLoad, LoadRecord, LoadState, encode_load, held_loads
from flagstone.metadata.manifest import SEQ_GAP, Checkpoint, Manifest
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.plan import LoadPlan, LoadReport
from flagstone.spark.load.request import abort_load, begin_load
from flagstone.types import ManifestId, Seq
from kit.databases import QUIET, eventually
from kit.spark_loads import address_of, assert_sound, load, pairs, run_task, shown, write_options

POLL = timedelta(milliseconds=50)
LIVE = QUIET.replace(manifest_poll_interval=POLL)
NAMES = "abc"
ORDERS = [
    order
    for order in permutations(["begin a", "commit a", "begin b", "commit b"])
    if order.index("begin a") < order.index("commit a") and order.index("begin b") < order.index("commit b")
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def open_live(folder: Path, **options: Any) -> flagstone.Db:
    return flagstone.open(folder, settings=LIVE, **options)


def rows_of(name: str, number: int = 300) -> dict[bytes, bytes]:
    """Rows that only this load has, and some that all loads have."""
    own = {b"%s%04d" % (name.encode(), at): b"of " + name.encode() for at in range(number)}
    return {**own, **{b"shared%d" % at: b"of " + name.encode() for at in range(5)}}


@dataclass
class Loads:
    """Loads into one database, by name; `expected` is what the database must show."""

    folder: Path

    def __post_init__(self) -> None:
        self.plans: dict[str, LoadPlan] = {}
        self.reports: dict[str, LoadReport] = {}
        self.expected: dict[bytes, bytes] = {}

    def begin(self, name: str, **options: Any) -> None:
        self.plans[name] = begin_load(address_of(self.folder), **options)

    def commit(self, name: str, *, replaces_all: bool = False, **options: str) -> None:
        plan, rows = self.plans[name], rows_of(name)
        made = run_task(plan, self.folder, [pairs(rows)], **options)
        self.reports[name] = commit_load(
            plan, write_options(self.folder, **options), made, replaces_all=replaces_all
        )
        if replaces_all:
            self.expected.clear()
        self.expected.update(rows)

    def do(self, step: str) -> None:
        verb, name = step.split()
        (self.begin if verb == "begin" else self.commit)(name)


def open_loads(folder: Path) -> list[str]:
    manifest = Admin(folder).manifest().value
    return [held.record.state for held in held_loads(manifest) if held.record.open]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_two_loads_into_an_idle_database_both_succeed_and_the_later_commit_is_newer(
    folder: Path, order: tuple[str, ...]
) -> None:
    loads = Loads(folder)
    for step in order:
        loads.do(step)
    assert shown(folder) == loads.expected
    assert not open_loads(folder)
    assert not list((folder / "flagstone" / "loads").iterdir())
    assert_sound(folder)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
@pytest.mark.parametrize("at", [0, 2, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 3, 4))])
def test_a_writer_may_open_at_any_step_of_two_loads(folder: Path, order: tuple[str, ...], at: int) -> None:
    load(folder, [pairs({b"before": b"here"})])
    loads, db = Loads(folder), None
    loads.expected[b"before"] = b"here"
    for number, step in enumerate(order):
        if number == at:
            db = open_live(folder)
        if db is not None:
            key = b"mine%d" % number
            db.put(key, b"row", await_durable=True)
            db.put(b"shared0", key, await_durable=True)
            loads.expected |= {key: b"row", b"shared0": key}
        loads.do(step)
    if db is not None:
        newest = max(report.seq for report in loads.reports.values())
        eventually(lambda: db.status()["committed_seq"] >= newest)
        assert db.status()["state"] == "open", "no load fenced the writer"
        assert dict(db.scan()) == loads.expected
        db.close()
    assert shown(folder) == loads.expected
    assert_sound(folder)


def test_loads_that_overtake_each_other_in_parallel_all_succeed(folder: Path) -> None:
    loads = Loads(folder)
    for name in NAMES:
        loads.begin(name)
    failures: list[BaseException] = []

    def commit(name: str) -> None:
        try:
            loads.commit(name)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=commit, args=(name,)) for name in reversed(NAMES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    # The newest of the shared rows is that of the load with the largest sequence number.
    last = max(NAMES, key=lambda name: loads.reports[name].seq)
    assert shown(folder) == {**rows_of("a"), **rows_of("b"), **rows_of("c"), **rows_of(last)}
    assert_sound(folder)


@pytest.mark.parametrize("codec", ["none", "Lz4", "Zstd", "Zlib", "Snappy"])
def test_the_wheel_reads_a_load_that_was_renumbered(folder: Path, wheel: Any, codec: str) -> None:
    loads = Loads(folder)
    loads.begin("a")
    loads.begin("b")
    loads.commit("b", compression_codec=codec)
    planned = loads.plans["a"].seq
    loads.commit("a", compression_codec=codec, max_sst_size="4000")
    assert loads.reports["a"].seq > loads.reports["b"].seq > planned
    assert wheel.scan(str(folder.parent), folder.name) == loads.expected
    after = wheel.apply(str(folder.parent), folder.name, [("put", b"shared0", b"theirs")])
    assert after == {**loads.expected, b"shared0": b"theirs"}
    assert shown(folder) == after
    assert_sound(folder)


@pytest.mark.slow
def test_slatedb_may_open_and_write_the_database_during_a_load(folder: Path, wheel: Any) -> None:
    loads = Loads(folder)
    loads.begin("a")
    mine = {b"w%d" % number: b"wheel" for number in range(20)} | {b"shared0": b"wheel"}
    wheel.hold(str(folder.parent), folder.name)
    try:
        wheel.held_apply(folder.name, [("put", key, value) for key, value in mine.items()])
        loads.commit("a")
        # Only now it is fenced.
        assert "fence" in wheel.held_put(folder.name, b"late", b"x").lower()
    finally:
        wheel.release(folder.name)
    assert shown(folder) == {**mine, **loads.expected}
    assert wheel.scan(str(folder.parent), folder.name) == {**mine, **loads.expected}
    assert_sound(folder)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("live", [False, True])
def test_an_overwriting_load_replaces_what_was_committed_before_it(
    folder: Path, order: tuple[str, str], live: bool
) -> None:
    load(folder, [pairs({b"before": b"here"})])
    db = open_live(folder) if live else None
    loads = Loads(folder)
    loads.begin("a")
    loads.begin("b")
    for name in order:
        loads.commit(name, replaces_all=name == "b")
    if db is not None:
        db.close()
    expected = rows_of("b") if order == ("a", "b") else {**rows_of("b"), **rows_of("a")}
    assert shown(folder) == expected
    assert_sound(folder)


def test_two_overwriting_loads_leave_the_rows_of_the_later_commit(folder: Path) -> None:
    loads = Loads(folder)
    loads.begin("a")
    loads.begin("b")
    loads.commit("b", replaces_all=True)
    loads.commit("a", replaces_all=True)
    assert shown(folder) == rows_of("a")
    assert_sound(folder)


def test_a_load_does_not_wait_for_a_writer_that_closed_during_it(folder: Path) -> None:
    db = open_live(folder)
    loads = Loads(folder)
    loads.begin("a")
    db.put(b"mine", b"row")
    db.close()
    began = time.monotonic()
    loads.commit("a")
    assert time.monotonic() - began < 10
    assert shown(folder) == {**loads.expected, b"mine": b"row"}


def test_a_load_offered_before_the_writer_closes_is_adopted_at_its_end_or_by_the_driver(folder: Path) -> None:
    deaf = flagstone.open(folder, settings=QUIET.replace(manifest_poll_interval=timedelta(hours=1)))
    eventually((folder / "flagstone" / "writer").exists)
    loads = Loads(folder)
    loads.begin("a")
    committing = threading.Thread(target=loads.commit, args=("a",))
    committing.start()
    eventually(lambda: open_loads(folder) == ["ready"])
    began = time.monotonic()
    deaf.close()
    committing.join(30)
    assert time.monotonic() - began < 10
    assert shown(folder) == rows_of("a")


def test_a_load_that_another_process_cancels_fails_with_closed(folder: Path) -> None:
    loads = Loads(folder)
    loads.begin("a")
    [status] = Admin(folder).loads()
    assert (status.state, status.alive, status.ssts) == ("loading", True, 0)
    run_task(loads.plans["a"], folder, [pairs(rows_of("a"))])
    [status] = Admin(folder).loads()
    assert status.ssts == 1
    assert status.bytes > 0
    assert Admin(folder).cancel_load(status.id) == 1
    with pytest.raises(Closed, match="was cancelled"):
        loads.commit("a")
    with pytest.raises(flagstone.InvalidRequest, match="is over: it is refused"):
        Admin(folder).cancel_load(status.id)
    assert shown(folder) == {}


def test_of_two_runs_of_a_query_that_spark_does_not_name_one_writes_the_batch(folder: Path) -> None:
    progress = b"\0flagstone/stream/x"
    one, two = (begin_load(address_of(folder)) for _ in range(2))
    made_one, made_two = (
        run_task(plan, folder, [pairs({progress: b"5", b"a": b"1"})]) for plan in (one, two)
    )
    commit_load(two, write_options(folder), made_two, expects=[(progress, None)])
    with pytest.raises(Closed, match="condition of the load does not hold"):
        commit_load(one, write_options(folder), made_one, expects=[(progress, None)])
    abort_load(one)
    assert shown(folder) == {progress: b"5", b"a": b"1"}
    three = begin_load(address_of(folder))
    made_three = run_task(three, folder, [pairs({progress: b"6"})])
    commit_load(three, write_options(folder), made_three, expects=[(progress, b"5")])
    assert shown(folder)[progress] == b"6"


@pytest.mark.parametrize("live", [False, True])
def test_a_database_with_segments_is_loaded_segment_by_segment(folder: Path, wheel: Any, live: bool) -> None:
    extractor, name = FixedPrefix("first3", 3), "spark.test_load_races:FIRST3"
    with flagstone.open(folder, settings=QUIET, segment_extractor=extractor) as db:
        db.put(b"aaa1", b"old")
        db.put(b"zzz1", b"old")
    writer = open_live(folder, segment_extractor=extractor) if live else None
    rows = {b"%s%03d" % (prefix, at): b"new" for prefix in (b"aaa", b"bbb", b"ccc") for at in range(100)}
    halves = [dict(sorted(rows.items())[::2]), dict(sorted(rows.items())[1::2])]
    plan = begin_load(address_of(folder), segment_extractor=extractor)
    made = [sst for half in halves for sst in run_task(plan, folder, [pairs(half)], segment_extractor=name)]
    other = begin_load(address_of(folder), segment_extractor=extractor)
    made_other = run_task(other, folder, [pairs({b"bbb000": b"newest"})], segment_extractor=name)
    commit_load(other, write_options(folder, segment_extractor=name), made_other)
    report = commit_load(plan, write_options(folder, segment_extractor=name), made)
    assert (report.tables, report.rows) == (3, 300)
    if writer is not None:
        eventually(lambda: writer.get(b"ccc000") == b"new")
        writer.put(b"ccc000", b"later")
        rows[b"ccc000"] = b"later"
        writer.close()
    expected = {**rows, b"aaa1": b"old", b"zzz1": b"old"}
    assert shown(folder) == expected
    assert wheel.apply(str(folder.parent), folder.name, [], segments=True) == expected
    assert {segment.prefix for segment in Admin(folder).manifest().value.segments} == {
        b"aaa", b"bbb", b"ccc", b"zzz",
    }  # fmt: skip
    again = begin_load(address_of(folder), segment_extractor=extractor)
    replaced = run_task(again, folder, [pairs({b"ddd1": b"only"})], segment_extractor=name)
    commit_load(again, write_options(folder, segment_extractor=name), replaced, replaces_all=True)
    assert shown(folder) == {b"ddd1": b"only"}
    theirs = [("put", b"ddd2", b"theirs"), ("put", b"aaa1", b"again")]
    assert wheel.apply(str(folder.parent), folder.name, theirs, segments=True) == {
        b"aaa1": b"again", b"ddd1": b"only", b"ddd2": b"theirs",
    }  # fmt: skip
    assert_sound(folder)


FIRST3 = FixedPrefix("first3", 3)


def test_a_load_with_the_wrong_segments_is_refused(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET, segment_extractor=FIRST3) as db:
        db.put(b"aaa1", b"old")
    with pytest.raises(flagstone.InvalidRequest, match="none was given"):
        begin_load(address_of(folder))
    with pytest.raises(flagstone.InvalidRequest, match="'other' was given"):
        begin_load(address_of(folder), segment_extractor=FixedPrefix("other", 2))
    assert not open_loads(folder)


def record(seq: int, owner: str = "", renumbered: int = 0, state: LoadState = "loading") -> Checkpoint:
    entry = LoadRecord(state, Seq(seq), 0, owner=owner, tag=1, renumbered=renumbered)
    return Checkpoint(uuid4(), ManifestId(1), 0, None, encode_load(entry))


def test_sequence_numbers_leave_room_for_loads_that_come_first() -> None:
    def with_loads(*entries: Checkpoint) -> Manifest:
        return Manifest(last_l0_seq=Seq(10), checkpoints=entries)

    assert plan_seq(with_loads()) == 10 + SEQ_GAP
    assert plan_seq(with_loads(record(10 + SEQ_GAP))) == 10 + 2 * SEQ_GAP
    # A micro-batch stays below a long load, and is above the batches of other queries.
    batch = plan_seq(with_loads(record(10 + SEQ_GAP)), stream=True)
    assert 10 < batch < 10 + SEQ_GAP
    assert batch < plan_seq(with_loads(record(batch, owner="q")), stream=True) < 10 + SEQ_GAP
    # A load that was renumbered is ahead of many loads that begin afterwards.
    entry = record(10 + SEQ_GAP)
    held = HeldLoad(entry, replace(next(iter(held_loads(with_loads(entry)))).record))
    far = plan_renumbering(with_loads(entry), held)
    assert far > 10 + 16 * SEQ_GAP
    below = plan_seq(with_loads(record(far, renumbered=1)))
    assert 10 < below < far
    # Unless it is ready: its driver may have crashed, and a repeated load is newer.
    assert plan_seq(with_loads(record(far, renumbered=1, state="ready"))) > far
    assert plan_seq(with_loads(record(far, renumbered=1, state="ready")), stream=True) > far
    taken = with_loads(record(10 + SEQ_GAP, renumbered=1))
    assert plan_seq(taken) != 10 + SEQ_GAP, "no two loads have the same number"
    again = HeldLoad(entry, replace(held.record, renumbered=1))
    assert plan_renumbering(with_loads(entry), again) - far > far


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_of_twenty_runs_of_two_loads_and_a_writer_shows_all_rows(tmp_path: Path) -> None:
    for run in range(20):
        race(tmp_path / f"db{run}", seed=run)


def test_two_loads_and_a_writer_that_opens_and_closes_show_all_rows(tmp_path: Path) -> None:
    for run in range(2):
        race(tmp_path / f"db{run}", seed=100 + run)


def race(folder: Path, *, seed: int) -> None:
    """Two loads of several tasks into an idle database, while a writer opens it, writes, and closes it again."""
    draw = random.Random(seed)
    load(folder, [pairs({b"before": b"here"})])
    expected: dict[bytes, bytes] = {b"before": b"here"}
    failures: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - shown by the assertion
                failures.append(error)

        return run

    pauses = [draw.random() * 0.4 for _ in range(8)]

    def long_load(name: str, pause_s: float) -> Callable[[], None]:
        def run() -> None:
            plan = begin_load(address_of(folder))
            made = []
            for task in range(3):
                rows = {b"%s%d%04d" % (name.encode(), task, at): b"x" for at in range(200)}
                made += run_task(plan, folder, [pairs(rows)])
                expected.update(rows)
                time.sleep(pause_s)
            commit_load(plan, write_options(folder), made)

        return run

    def write() -> None:
        for turn in range(3):
            time.sleep(pauses[turn])
            try:
                with open_live(folder) as db:
                    for number in range(20):
                        key = b"own%d-%d" % (turn, number)
                        db.put(key, b"row", await_durable=True)
                        expected[key] = b"row"
                        time.sleep(pauses[3 + turn] / 10)
            except Closed:
                # A driver may open the database in the moment in which this writer does: one of them owns it.
                continue

    threads = [
        threading.Thread(target=guarded(act))
        for act in (long_load("a", pauses[6]), long_load("b", pauses[7]), write)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert not failures
    with open_reader(folder, mode="latest") as reader:
        found = dict(reader.scan())
    assert {key: found.get(key) for key in expected} == expected
    # A write whose writer was replaced before it answered may be there.
    assert all(key.startswith(b"own") for key in found.keys() - expected.keys())
    assert_sound(folder)
