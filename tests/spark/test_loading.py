"""Loads without Spark: the SSTs of tasks, and the commit into databases in various states."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, Closed, InvalidRequest
from flagstone.compaction.coordinator import claim_role
from flagstone.compaction.shared_state import Board
from flagstone.lsm.tree import Tree
from flagstone.metadata.manifest import Manifest, replace_trees
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.sync import Event
from flagstone.spark.address import open_store
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import abort_load, begin_load
from flagstone.spark.load.task import ordered_stretches
from kit.databases import QUIET, Append, eventually
from kit.spark_loads import address_of, assert_sound, load, pairs, run_task, shown, ssts_of, write_options

NOW = timedelta()
ROWS = {b"k%05d" % number: b"value %d" % number for number in range(3000)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


class FirstTwo:
    name = "first two"

    def prefix(self, key: bytes) -> bytes | None:
        return key[:2]


def test_a_load_into_a_new_database_shows_every_row_with_one_sequence_number(folder: Path) -> None:
    report = load(folder, [pairs(ROWS)])

    assert (report.rows, report.tables) == (3000, 1)
    assert shown(folder) == ROWS
    with flagstone.open(folder, settings=QUIET) as db:
        row = db.get_row(b"k00017")
        assert row is not None
        assert (row.seq, row.value) == (report.seq, b"value 17")
        assert row.created_ms is not None
        assert db.put(b"new", b"row").seq == report.seq + 1
    assert_sound(folder)


def test_tasks_start_a_new_sst_at_the_given_size_and_the_sorted_run_is_in_key_order(folder: Path) -> None:
    halves = [pairs(dict(sorted(ROWS.items())[1500:])), pairs(dict(sorted(ROWS.items())[:1500]))]

    report = load(folder, *([half] for half in halves), max_sst_size="8192")

    assert report.tables > 4
    assert shown(folder) == ROWS
    [run] = Admin(folder).manifest().value.tree.runs
    assert len(run.views) == report.tables
    assert_sound(folder)


def test_an_empty_load_changes_nothing(folder: Path) -> None:
    load(folder, [pairs(ROWS)])
    before = Admin(folder).manifest().value.last_l0_seq

    report = load(folder, [], [])

    assert (report.rows, report.tables) == (0, 0)
    assert Admin(folder).manifest().value.last_l0_seq == before
    assert shown(folder) == ROWS


def test_a_load_fences_a_slatedb_writer_and_its_unflushed_rows_are_older(folder: Path, wheel: Any) -> None:
    wheel.hold(str(folder.parent), folder.name)
    wheel.held_put(folder.name, b"k00001", b"old")
    wheel.held_put(folder.name, b"only in the WAL", b"kept")

    report = load(folder, [pairs(ROWS)])

    assert report.seq > 2
    assert shown(folder) == ROWS | {b"only in the WAL": b"kept"}
    assert wheel.held_put(folder.name, b"k00001", b"too late") != "durable"
    wheel.release(folder.name)
    with flagstone.open(folder, settings=QUIET) as again:
        assert again.get(b"k00001") == b"value 1"
        again.put(b"k00001", b"newer")
        assert again.get(b"k00001") == b"newer"
    assert shown(folder)[b"k00001"] == b"newer"


@pytest.mark.slow
def test_ssts_of_l0_become_sorted_runs_below_the_load_in_the_same_order(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for number in range(3):
            db.put(b"k00000", b"flush %d" % number)
            db.put(b"l%d" % number, b"mine")
            db.put(b"shared", b"of flush %d" % number)
            db.flush()

    load(folder, [pairs({b"k00000": b"loaded"})])

    tree = Admin(folder).manifest().value.tree
    assert not tree.l0
    assert [run.id for run in tree.runs] == [3, 2, 1, 0]
    expected = {
        b"k00000": b"loaded",
        b"shared": b"of flush 2",
        b"l0": b"mine",
        b"l1": b"mine",
        b"l2": b"mine",
    }
    assert shown(folder) == expected
    with flagstone.open(folder, settings=QUIET) as db:
        assert {key: db.get(key) for key in expected} == expected
    Admin(folder).compact(full=True)
    assert shown(folder) == expected
    assert_sound(folder)


def test_deletes_merges_and_times_are_loaded(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET, merge_operator=Append()) as db:
        for key in (b"a", b"b", b"c"):
            db.put(key, b"old")

    load(
        folder,
        [
            {
                "key": [b"a", b"b", b"c", b"d", b"e"],
                "value": [None, b"+new", b"put", b"short", b"long"],
                "op": ["delete", "merge", "put", None, "put"],
                "ttl_ms": [None, None, None, 0, 3_600_000],
            }
        ],
    )

    assert shown(folder, merge_operator=Append()) == {b"b": b"old+new", b"c": b"put", b"e": b"long"}
    with flagstone.open_reader(folder, mode="latest", merge_operator=Append()) as reader:
        row = reader.get_row(b"e")
        assert row is not None
        assert row.created_ms is not None
        assert row.expires_ms == row.created_ms + 3_600_000
        assert reader.get(b"d", include_expired=True) == b"short"


def test_the_last_of_several_rows_of_a_key_is_loaded_also_across_batches(folder: Path) -> None:
    batches = [
        {"key": [b"a", b"b", b"b"], "value": [b"1", b"2", b"3"]},
        {"key": [b"b"], "value": [b"4"]},
        {"key": [b"b", b"c", b"c"], "value": [b"5", b"6", b"7"]},
    ]

    report = load(folder, batches)

    assert report.rows == 3
    assert shown(folder) == {b"a": b"1", b"b": b"5", b"c": b"7"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (
            [{"key": [b"a", b"a"], "value": [b"1", b"2"]}],
            {"duplicates": "error"},
            "b'a' occurs more than once",
        ),
        ([{"key": [b"a"], "value": [b"1"]}] * 2, {"duplicates": "error"}, "b'a' occurs more than once"),
        (
            [{"key": [b"a", b"a"], "value": [b"1", b"2"], "op": ["put", "merge"]}],
            {},
            "one load holds one row per key",
        ),
        ([{"key": [b"b", b"a"], "value": [b"1", b"2"]}], {"sorted": "true"}, "not sorted by key"),
        ([pairs({b"b": b"1"}), pairs({b"a": b"1"})], {"sorted": "true"}, "not sorted by key"),
        ([{"key": [b"a", None], "value": [b"1", b"2"]}], {}, "column 'key' has 1 nulls"),
        ([{"key": [b"a"], "value": [None]}], {}, "column 'value' has 1 nulls"),
        ([{"key": [b""], "value": [b"1"]}], {}, "a key has 1 to 65535 bytes"),
        ([{"key": [b"x" * 65536], "value": [b"1"]}], {}, "a key has 1 to 65535 bytes"),
        ([{"key": [b"a"], "value": [b"1"], "op": ["upsert"]}], {}, "column 'op' has 'upsert'"),
        ([{"key": [b"a"], "value": [b"1"], "ttl_ms": [-1]}], {}, "negative"),
        ([{"key": [b"a"], "value": [b"1"], "ttl_ms": [2**63 - 1]}], {}, "too large"),
        ([{"key": [b"a"], "value": [b"1"], "op": ["merge"]}] * 2, {}, "one load holds one row per key"),
    ],
)
def test_invalid_rows_fail_the_load_and_nothing_is_visible(
    folder: Path, batches: list[Any], options: dict[str, str], message: str
) -> None:
    load(folder, [pairs({b"before": b"here"})])

    with pytest.raises(InvalidRequest, match=message):
        load(folder, batches, **options)

    assert shown(folder) == {b"before": b"here"}


def test_overlapping_tasks_declared_as_sorted_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="overlapping keys"):
        load(folder, [pairs({b"a": b"1", b"m": b"1"})], [pairs({b"b": b"1", b"z": b"1"})], sorted="true")

    assert shown(folder) == {}


def shuffled(rows: dict[bytes, bytes], tasks: int, seed: int) -> list[list[dict[str, list[bytes]]]]:
    """The rows distributed over tasks in batches, in no order."""
    keys = random.Random(seed).sample(sorted(rows), len(rows))
    dealt = [keys[at::tasks] for at in range(tasks)]
    return [
        [
            {"key": part, "value": [rows[key] for key in part]}
            for part in (mine[:100], mine[100:400], mine[400:])
        ]
        for mine in dealt
    ]


def test_rows_in_any_order_over_any_tasks_become_one_sorted_run(folder: Path) -> None:
    report = load(folder, *shuffled(ROWS, 5, 1), max_sst_size="20000")

    [run] = Admin(folder).manifest().value.tree.runs
    assert len(run.views) == report.tables > 1
    assert report.rows == 3000
    assert shown(folder) == ROWS
    assert len(ssts_of(folder)) == report.tables  # the merged SSTs are deleted
    assert_sound(folder)


def test_rows_that_exceed_the_sort_buffer_are_sorted_in_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flagstone.spark.load.task._MAX_SORT_BYTES", 2000)
    monkeypatch.setattr(
        "flagstone.spark.load.task.ordered_stretches", partial(ordered_stretches, sort_bytes=5000)
    )

    report = load(folder, *shuffled(ROWS, 2, 9))

    assert report.rows == 3000
    assert shown(folder) == ROWS
    assert_sound(folder)


def test_a_key_in_two_tasks_is_loaded_once_or_refused(folder: Path) -> None:
    tasks = [[pairs({b"a": b"1", b"k": b"1"})], [pairs({b"b": b"2", b"k": b"2"})]]
    with pytest.raises(InvalidRequest, match="1 keys occur more than once"):
        load(folder, *tasks, duplicates="error")
    assert shown(folder) == {}

    assert load(folder, *tasks).rows == 3

    rows = shown(folder)
    assert rows.pop(b"k") in (b"1", b"2")
    assert rows == {b"a": b"1", b"b": b"2"}


def test_deletes_and_merges_survive_the_merge_of_overlapping_tasks(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET, merge_operator=Append()) as db:
        for key in (b"a", b"b", b"c"):
            db.put(key, b"old")
    one = {"key": [b"a", b"c"], "value": [b"", b"+1"], "op": ["delete", "merge"], "ttl_ms": [None, 3_600_000]}
    two = {"key": [b"b", b"d"], "value": [b"+2", b"new"], "op": ["merge", "put"], "ttl_ms": [None, 0]}

    assert load(folder, [one], [two]).rows == 4

    assert shown(folder, merge_operator=Append()) == {b"b": b"old+2", b"c": b"old+1"}
    with pytest.raises(InvalidRequest, match="Fold the rows"):
        load(folder, [one], [one | {"key": [b"b", b"c"]}])


def test_huge_keys_and_values_are_loaded(folder: Path) -> None:
    rows = {b"k" * 65_535: b"small", b"large": b"v" * 10_000_000, b"none": b""}

    load(folder, [pairs(rows)], max_sst_size="1000000")

    assert shown(folder) == rows


def test_a_writer_that_opens_during_a_load_adopts_it_and_stays_the_writer(folder: Path) -> None:
    plan = begin_load(address_of(folder))
    made = run_task(plan, folder, [pairs(ROWS)])
    quick = QUIET.replace(manifest_poll_interval=timedelta(seconds=0.05))
    with flagstone.open(folder, settings=quick) as db:
        db.put(b"k00001", b"older than the load")

        commit_load(plan, write_options(folder), made)

        eventually(lambda: db.get(b"k00001") == b"value 1")
        assert abort_load(plan) == 0
        assert db.put(b"still", b"the owner").wait() is None
    assert shown(folder) == {**ROWS, b"still": b"the owner"}
    assert_sound(folder)


def names(made: list[Any]) -> set[str]:
    from flagstone.runtime.ids import ulid_text

    return {f"{ulid_text(each.sst.id)}.sst" for each in made}


def test_an_aborted_load_deletes_its_ssts_and_cannot_be_committed(folder: Path) -> None:
    load(folder, [pairs({b"before": b"here"})])
    plan = begin_load(address_of(folder))
    made = run_task(plan, folder, [pairs(ROWS)])

    assert abort_load(plan) == 1

    assert not names(made) & ssts_of(folder)
    with pytest.raises(Closed):
        commit_load(plan, write_options(folder), made)
    assert shown(folder) == {b"before": b"here"}
    assert_sound(folder)


def test_aborting_a_load_whose_commit_went_through_deletes_nothing(folder: Path) -> None:
    plan = begin_load(address_of(folder))
    made = run_task(plan, folder, [pairs(ROWS)])
    commit_load(plan, write_options(folder), made)

    assert abort_load(plan) == 0

    assert shown(folder) == ROWS


def test_committing_twice_is_committing_once(folder: Path) -> None:
    plan = begin_load(address_of(folder))
    made = run_task(plan, folder, [pairs(ROWS)])

    first, second = (
        commit_load(plan, write_options(folder), made),
        commit_load(plan, write_options(folder), made),
    )

    assert first == second
    assert shown(folder) == ROWS


@pytest.mark.parametrize("flushed", [True, False])
def test_the_collector_keeps_a_running_load_and_deletes_ssts_of_failed_tasks(
    folder: Path, flushed: bool
) -> None:
    if flushed:
        with flagstone.open(folder, settings=QUIET) as db:
            db.put(b"before", b"here")
    plan = begin_load(address_of(folder))
    failed = run_task(plan, folder, [pairs(ROWS)])
    made = run_task(plan, folder, [pairs(ROWS)])
    Admin(folder).collect_garbage(min_age=NOW)
    assert names(made) | names(failed) <= ssts_of(folder)

    commit_load(plan, write_options(folder), made)
    Admin(folder).collect_garbage(min_age=NOW)

    assert names(made) <= ssts_of(folder)
    assert not names(failed) & ssts_of(folder)
    assert_sound(folder)


@pytest.mark.slow
def test_a_load_fences_a_live_coordinator_which_can_claim_the_role_again(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for number in range(4):
            db.put(b"k%d" % number, b"x")
            db.flush()
    Admin(folder).compact(full=True)
    store, paths = open_store(address_of(folder))
    board = Board(ManifestStore(store, paths), CompactionsStore(store, paths), update_timeout_s=10)
    fence = claim_role(board)

    load(folder, [pairs(ROWS)])

    def drop_runs(now: Versioned[Manifest]) -> Manifest:
        return replace_trees(now.value, tree=Tree())

    with pytest.raises(Closed, match="newer compactor"):
        board.edit_manifest(fence.guard(drop_runs))
    Admin(folder).compact(full=True, patience=timedelta(seconds=0.1))
    assert shown(folder) == ROWS | {b"k%d" % number: b"x" for number in range(4)}


def test_an_overwriting_load_replaces_all_rows_and_open_readers_keep_their_ssts(
    folder: Path,
) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"k00001", b"old")
        db.put(b"gone", b"old")
    before = flagstone.open_reader(folder, mode="latest")

    report = load(folder, [pairs(ROWS)], replaces_all=True)
    Admin(folder).collect_garbage(min_age=NOW)

    assert shown(folder) == ROWS
    assert report.seq > 2
    assert dict(before.scan()) == {b"gone": b"old", b"k00001": b"old"}
    before.close()
    load(folder, replaces_all=True)
    assert shown(folder) == {}
    assert_sound(folder)


def test_a_load_has_its_own_sequence_number_in_the_history(folder: Path) -> None:
    one = load(folder, [pairs({b"a": b"1"})])
    first = Admin(folder).create_checkpoint()
    two = load(folder, [pairs({b"a": b"2"})])

    assert shown(folder, as_of=two.seq) == {b"a": b"2"}
    assert shown(folder, as_of=one.seq) == {b"a": b"1"}
    assert shown(folder, checkpoint=first.id) == {b"a": b"1"}


def test_a_load_into_a_projection_refuses_keys_outside_of_its_writable_range(folder: Path) -> None:
    load(folder, [pairs(ROWS)])
    Admin(folder).clone("part", range=(b"k01", b"k02"))
    part = folder.parent / "part"

    with pytest.raises(InvalidRequest, match="not all in the writable range of this clone"):
        load(part, [pairs({b"k01500": b"mine", b"k02000": b"not mine"})])
    load(part, [pairs({b"k01500": b"mine"})])

    assert shown(part)[b"k01500"] == b"mine"
    assert shown(folder)[b"k01500"] == b"value 1500"


def test_a_load_into_a_database_with_segments_is_refused(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET, segment_extractor=FirstTwo()) as db:
        db.put(b"aakey", b"x")

    with pytest.raises(InvalidRequest):
        begin_load(address_of(folder))


@pytest.mark.slow
def test_the_wheel_reads_writes_and_compacts_a_loaded_database(wheel: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    wheel.apply(
        str(tmp_path), "db", [("put", b"k00001", b"old"), ("put", b"wheel", b"1"), ("flush", "memtable")]
    )
    load(folder, [pairs(ROWS)], max_sst_size="20000")
    expected = ROWS | {b"wheel": b"1"}

    assert wheel.scan(str(tmp_path), "db") == expected
    assert wheel.get_many(str(tmp_path), "db", sorted(expected)[::50]) == [
        expected[key] for key in sorted(expected)[::50]
    ]
    after = expected | {b"k00002": b"newer", b"later": b"2"}
    assert (
        wheel.apply(
            str(tmp_path),
            "db",
            [("put", b"k00002", b"newer"), ("put", b"later", b"2"), ("flush", "memtable")],
        )
        == after
    )
    load(folder, [pairs({b"later": b"3"})])
    assert wheel.compact_everything(str(tmp_path), "db") == after | {b"later": b"3"}
    assert shown(folder) == after | {b"later": b"3"}
    assert_sound(folder)


@pytest.mark.slow
def test_a_load_fences_a_live_wheel_with_its_compactor_and_no_row_is_lost(wheel: Any, tmp_path: Path) -> None:
    folder, mine = tmp_path / "db", {b"w%03d" % number: b"wheel" for number in range(200)}
    wheel.hold(str(tmp_path), "db")
    try:
        for number, (key, value) in enumerate(mine.items()):
            wheel.held_apply("db", [("put", key, value)])
            if number % 40 == 39:
                wheel.held_apply("db", [("flush", "memtable")])  # enough SSTs for a compaction

        load(folder, [pairs(ROWS)])

        assert "fence" in wheel.held_put("db", b"late", b"x").lower()
        Event().wait(0.5)  # its compactor polls every 10 ms, and must not remove the load
        assert shown(folder) == ROWS | mine
    finally:
        wheel.release("db")
    assert wheel.compact_everything(str(tmp_path), "db") == ROWS | mine
    assert shown(folder) == ROWS | mine
    # A running compaction of the wheel may have left an unused SST, which verify reports as a note.
    assert {finding.severity for finding in Admin(folder).verify().findings} <= {"note"}
