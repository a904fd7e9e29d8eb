"""Streams into a database: every micro-batch exactly once through faults and repeats; without Spark, then on Spark."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import flagstone
from flagstone import Admin, Closed, CorruptData, FlagstoneError, InternalError, InvalidRequest
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.annotations import held_loads
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.spark import foreach_batch
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.overlaps import order_ssts, plan_layers, plan_ordered_layers
from flagstone.spark.load.plan import MadeSst
from flagstone.spark.row_mapping import arrow_schema
from flagstone.spark.stream.sink import StreamSink
from flagstone.spark.stream.stream_progress import StreamProgress, is_written, progress_key
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from kit.databases import QUIET
from kit.faults import struck_calls
from kit.spark_loads import pairs, shown
from spark.stream_rig import PROGRESS, commit, on_store, run_batch, run_tasks, sink_options

NOW = timedelta()


def merges(*keys: bytes) -> dict[str, list[Any]]:
    return {"key": list(keys), "value": [b"x"] * len(keys), "op": ["merge"] * len(keys)}


def rows_of(folder: Path, **options: Any) -> dict[bytes, bytes]:
    """All rows but the progress rows."""
    return {key: value for key, value in shown(folder, **options).items() if not key.startswith(b"\0")}


def ssts_of(folder: Path) -> int:
    return len(list((folder / "compacted").iterdir()))


def assert_sound(folder: Path) -> None:
    report = Admin(folder).verify()
    assert not report.findings, report.findings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def test_rows_and_progress_row_become_visible_with_one_manifest_and_sequence_number(folder: Path) -> None:
    options = sink_options(folder)
    run_batch(options, 0, [pairs({b"a": b"1", b"c": b"1"})], [pairs({b"b": b"1", b"d": b"1"})])
    before = Admin(folder).manifest()

    messages = run_tasks(options, [pairs({b"a": b"2"})], [])
    assert Admin(folder).manifest().id == before.id + 1, "the record of the load"
    assert shown(folder)[PROGRESS] == b"0"
    commit(options, 1, messages)

    [load] = [
        held for held in held_loads(Admin(folder).manifest().value) if held.checkpoint.manifest_id > before.id
    ]
    added, former = (Admin(folder).manifest(load.checkpoint.manifest_id - back).value for back in (0, 1))
    assert former.last_l0_seq == before.value.last_l0_seq < added.last_l0_seq == load.record.seq
    assert len(added.ssts) > len(former.ssts) == len(before.value.ssts)
    assert rows_of(folder) == {b"a": b"2", b"b": b"1", b"c": b"1", b"d": b"1"}
    with flagstone.open_reader(folder, mode="latest") as reader:
        progress, row = reader.get_row(PROGRESS), reader.get_row(b"a")
        assert progress is not None
        assert row is not None
        assert (progress.value, progress.seq) == (b"1", row.seq)
    assert_sound(folder)


@pytest.mark.slow
def test_a_repeated_batch_is_skipped_and_its_ssts_are_deleted(folder: Path) -> None:
    options = sink_options(folder)
    run_batch(options, 0, [merges(b"a", b"b")])
    run_batch(options, 1, [merges(b"a")])
    held = ssts_of(folder)

    run_batch(options, 1, [merges(b"a")])
    run_batch(options, 0, [merges(b"a", b"b")])

    assert rows_of(folder, merge_operator=Concatenate()) == {b"a": b"xx", b"b": b"x"}
    assert ssts_of(folder) == held
    run_batch(options, 2, [merges(b"b")])
    assert rows_of(folder, merge_operator=Concatenate()) == {b"a": b"xx", b"b": b"xx"}


def test_a_repeated_commit_deletes_no_committed_sst(folder: Path) -> None:
    options = sink_options(folder)
    run_batch(options, 0, [pairs({b"a": b"1"})])
    messages = run_tasks(options, [pairs({b"a": b"2"})])
    commit(options, 1, messages)
    Admin(folder).compact(full=True)

    commit(options, 1, messages)
    StreamSink(None, options).abort(messages, 1)

    assert rows_of(folder) == {b"a": b"2"}
    assert_sound(folder)
    # The SSTs that the compaction replaced are kept for readers of older manifests.
    assert ssts_of(folder) > len(Admin(folder).manifest().value.ssts)


def test_an_aborted_batch_leaves_no_sst_and_can_be_repeated(folder: Path) -> None:
    options = sink_options(folder)
    run_batch(options, 0, [merges(b"a")])
    held = ssts_of(folder)
    messages = run_tasks(options, [merges(b"a")], [merges(b"b")])

    StreamSink(None, options).abort([messages[0], messages[1], None], 1)
    StreamSink(None, options).abort([None, None], 1)

    assert ssts_of(folder) == held
    with pytest.raises(Closed):
        commit(options, 1, messages)
    run_batch(options, 1, [merges(b"a")], [merges(b"b")])
    assert rows_of(folder, merge_operator=Concatenate()) == {b"a": b"xx", b"b": b"x"}


def test_a_replaced_run_of_a_query_cannot_commit(folder: Path) -> None:
    options = sink_options(folder)
    stale = run_tasks(options, [merges(b"a")])
    fresh = run_tasks(options, [merges(b"a")])

    with pytest.raises(Closed, match="was cancelled"):
        commit(options, 0, stale)
    commit(options, 0, fresh)
    commit(options, 0, stale)  # the progress row shows that it was written

    assert rows_of(folder, merge_operator=Concatenate()) == {b"a": b"x"}


def open_live(folder: Path) -> flagstone.Db:
    """Open a writer and wait for its notice that it adopts loads."""
    quick = replace(QUIET, manifest_poll_interval=timedelta(seconds=0.05))
    db = flagstone.open(folder, settings=quick, merge_operator=Concatenate())
    until = time.monotonic() + 30
    while not (folder / "flagstone" / "writer").exists():
        assert time.monotonic() < until, "the writer wrote no notice"
        time.sleep(0.01)
    return db


@pytest.mark.slow
def test_an_open_writer_adopts_the_batches_and_continues(folder: Path) -> None:
    options = sink_options(folder)
    with open_live(folder) as db:
        for batch_id in (0, 1, 1, 0):
            db.put(b"mine", b"%d" % batch_id)
            run_batch(options, batch_id, [merges(b"a")], [merges(b"a%d" % batch_id)])
        run_batch(options, 2, [])
        stale = run_tasks(options, [merges(b"a")])
        fresh = run_tasks(options, [merges(b"a")])
        with pytest.raises(Closed, match="was cancelled"):
            commit(options, 3, stale)
        commit(options, 3, fresh)
        commit(options, 3, stale)

        expected = {b"a": b"xxx", b"a0": b"x", b"a1": b"x", b"mine": b"0"}
        assert dict(db.scan(b"\1")) == expected
        db.put(b"still", b"the owner", await_durable=True)
        assert not [held for held in held_loads(Admin(folder).manifest().value) if held.record.open]
    assert rows_of(folder, merge_operator=Concatenate()) == expected | {b"still": b"the owner"}


@pytest.mark.slow
def test_a_request_of_an_earlier_run_to_a_closed_writer_is_never_adopted(folder: Path) -> None:
    options = sink_options(folder)
    with open_live(folder):
        [stale] = run_tasks(options, [merges(b"a")])
        [other] = run_tasks(sink_options(folder, query="other"), [merges(b"b")])

    fresh = run_tasks(options, [merges(b"a")])

    with pytest.raises(Closed, match="was cancelled"):
        commit_load(stale.plan, options.write, stale.made)
    commit(options, 0, fresh)
    commit_load(other.plan, replace(options.write, hand_over_timeout=NOW), other.made)
    assert rows_of(folder, merge_operator=Concatenate()) == {b"a": b"x", b"b": b"x"}


def test_batches_without_rows_change_nothing(folder: Path) -> None:
    options = sink_options(folder)
    run_batch(options, 0, [pairs({b"a": b"1"})])
    before = Admin(folder).manifest().value.last_l0_seq

    run_batch(options, 1, [], [])
    commit(options, 2, [])

    assert Admin(folder).manifest().value.last_l0_seq == before
    assert shown(folder) == {PROGRESS: b"0", b"a": b"1"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("rows", [{b"a": b"1"}, {}], ids=["rows", "nothing"])
def test_the_cost_of_a_batch_does_not_grow_with_earlier_batches(rows: dict[bytes, bytes]) -> None:
    store = FaultyStore(MemoryStore())
    calls = []
    for batch_id in range(45):
        before = len(store.calls)
        run_batch(on_store(store), batch_id, [pairs(rows)] if rows else [])
        calls.append(len(store.calls) - before)

    assert max(calls[25:]) <= max(calls[:25])
    assert max(calls) < 70


@pytest.mark.slow
def test_queries_have_separate_progress_rows_and_may_alternate(folder: Path) -> None:
    one, two = sink_options(folder), sink_options(folder, query="other", mark_prefix="hex:ff2f")
    for turn in range(3):
        run_batch(one, turn, [merges(b"one")])
        run_batch(two, turn, [merges(b"two")])
        run_batch(one, turn, [merges(b"one")])

    found = shown(folder, merge_operator=Concatenate())
    assert found == {PROGRESS: b"2", b"\xff/other": b"2", b"one": b"xxx", b"two": b"xxx"}


def test_foreach_batch_and_the_sink_share_the_progress_row_of_a_query(folder: Path) -> None:
    frame = sink_frame((b"a", "x", "merge"))
    options = sink_options(folder)
    run_batch(options, 0, [merges(b"a")])
    with flagstone.open(folder, settings=QUIET, merge_operator=Concatenate()) as db:
        write = foreach_batch(db, "orders")
        write(frame, 0)
        write(frame, 1)

    run_batch(options, 1, [merges(b"a")])
    run_batch(options, 2, [merges(b"a")])

    assert rows_of(folder, merge_operator=Concatenate()) == {b"a": b"xxx"}


def test_another_query_with_the_same_name_is_refused(folder: Path) -> None:
    options = sink_options(folder)
    for batch_id in range(2):
        messages = run_tasks(options, [merges(b"a")])
        commit(options, batch_id, [replace(message, query_id="first") for message in messages])
    assert shown(folder, merge_operator=Concatenate())[PROGRESS] == b"1 first"

    messages = [replace(message, query_id="second") for message in run_tasks(options, [merges(b"a")])]
    with pytest.raises(InvalidRequest, match="batch 1 of another query under the same name"):
        commit(options, 0, messages)

    assert rows_of(folder, merge_operator=Concatenate()) == {b"a": b"xx"}


def test_a_query_without_a_name_uses_the_id_of_spark_or_is_refused(folder: Path) -> None:
    options = replace(sink_options(folder), query=None)
    with pytest.raises(InvalidRequest, match="name it with the option 'query'"):
        run_tasks(options, [pairs({b"a": b"1"})])
    [message] = run_tasks(sink_options(folder), [pairs({b"a": b"1"})])

    commit(options, 0, [replace(message, query_id="7f3c")])

    assert shown(folder) == {b"a": b"1", b"\0flagstone/stream/7f3c": b"0 7f3c"}


def test_a_row_with_the_key_of_the_progress_row_does_not_replace_it(folder: Path) -> None:
    run_batch(
        sink_options(folder), 7, [pairs({PROGRESS: b"99", b"a": b"1"})], [pairs({b"\0": b"0", b"b": b"1"})]
    )

    assert shown(folder) == {b"\0": b"0", PROGRESS: b"7", b"a": b"1", b"b": b"1"}


def test_the_last_row_of_a_key_in_the_order_of_tasks_and_rows_is_kept(folder: Path) -> None:
    tasks = [
        [{"key": [b"k", b"z", b"k"], "value": [b"1", b"1", b"2"]}, {"key": [b"a"], "value": [b"1"]}],
        [{"key": [b"m", b"z", b"a"], "value": [b"3", b"3", b"3"]}],
        [{"key": [b"m", b"b"], "value": [b"4", b"4"]}],
    ]

    run_batch(sink_options(folder), 0, *tasks)

    assert rows_of(folder) == {b"a": b"3", b"b": b"4", b"k": b"2", b"m": b"4", b"z": b"3"}


def made_of(first: int, width: int) -> MadeSst:
    low, high = bytes([first]), bytes([first + width])
    return MadeSst(SsTable(SYSTEM_IDS.ulid(), SsTableInfo(low, high, 0, 0, 0, 0)), 1, 1)


@given(st.lists(st.builds(made_of, st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_layers_hold_every_sst_once_and_later_ssts_come_first(made: list[MadeSst]) -> None:
    fewest, ordered = plan_layers(made), plan_ordered_layers(made)

    assert len(ordered) >= len(fewest)
    for layers in (fewest, ordered):
        assert sorted(each.sst.id for layer in layers for each in layer) == sorted(
            each.sst.id for each in made
        )
        for layer in layers:
            order_ssts([each.sst for each in layer])  # raises for overlaps
            keys = [each.sst.info.first_entry for each in layer]
            assert keys == sorted(keys)
    position = {each.sst.id: at for at, layer in enumerate(ordered) for each in layer}
    for earlier, later in combinations(made, 2):
        one, two = earlier.sst.info, later.sst.info
        if one.first_entry <= two.last_entry and two.first_entry <= one.last_entry:
            assert position[later.sst.id] < position[earlier.sst.id]


def test_rows_declared_as_sorted_are_checked_and_may_surround_the_progress_row(folder: Path) -> None:
    options = sink_options(folder, sorted="true")
    run_batch(options, 0, [pairs({b"\0": b"before", b"a": b"after"})], [pairs({b"b": b"1"})])
    with pytest.raises(InvalidRequest, match="overlapping keys"):
        run_batch(options, 1, [pairs({b"a": b"1", b"c": b"1"})], [pairs({b"b": b"1"})])
    with pytest.raises(InvalidRequest, match="not sorted by key"):
        run_batch(options, 1, [{"key": [b"b", b"a"], "value": [b"1", b"2"]}])

    assert shown(folder) == {b"\0": b"before", PROGRESS: b"0", b"a": b"after", b"b": b"1"}


def test_deletes_times_and_compression_work_as_in_a_load(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"gone", b"old")
        db.put(b"kept", b"old")
    options = sink_options(folder, compression_codec="Zstd", key_column="id")

    cells = {
        "id": [b"gone", b"late", b"soon"],
        "value": [None, b"1", b"1"],
        "op": ["delete", "put", None],
        "ttl_ms": [None, 3_600_000, 0],
    }
    run_batch(options, 0, [cells])

    assert rows_of(folder) == {b"kept": b"old", b"late": b"1"}
    with pytest.raises(InvalidRequest, match="one row per key"):
        run_batch(sink_options(folder), 1, [merges(b"a", b"a")])


def test_ssts_of_failed_tasks_are_garbage_after_the_next_batch(folder: Path) -> None:
    options = sink_options(folder)
    run_batch(options, 0, [merges(b"a")])
    run_tasks(options, [merges(b"b")])  # never committed or aborted
    run_batch(options, 1, [merges(b"a")], [merges(b"a0", b"b")], [merges(b"aa", b"ab")])

    Admin(folder).collect_garbage(min_age=NOW)

    assert ssts_of(folder) == len(Admin(folder).manifest().value.ssts)
    assert rows_of(folder, merge_operator=Concatenate())[b"a"] == b"xx"
    assert_sound(folder)


def micro_batches(store: Any, failing: Any, first: int) -> None:
    """Run three micro-batches; after a failure, repeat the failed one and the rest on the healthy store."""
    done = first
    with suppress(Crashed, FlagstoneError):
        for batch_id in range(first, 3):
            run_batch(on_store(failing), batch_id, [merges(b"a", b"c")], [merges(b"b", b"%d" % batch_id)])
            done = batch_id + 1
    for batch_id in range(done, 3):
        run_batch(on_store(store), batch_id, [merges(b"a", b"c")], [merges(b"b", b"%d" % batch_id)])


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["error", "lost_reply", "crash", "crash_after"])
def test_a_fault_at_any_store_call_writes_every_change_once(effect: Effect) -> None:
    healthy = FaultyStore(MemoryStore())
    micro_batches(healthy, healthy, 0)
    expected = {b"a": b"xxx", b"b": b"xxx", b"c": b"xxx", b"0": b"x", b"1": b"x", b"2": b"x"}
    # The third batch repeats the calls of the second. Faults that are retried take time, so only some calls get them.
    calls, stride = len(healthy.calls) * 2 // 3, 1 if effect.startswith("crash") else 5
    assert calls > 40
    for nth in struck_calls(calls, stride=stride):
        store = MemoryStore()
        micro_batches(store, FaultyStore(store, [Fault(effect, nth=nth)]), 0)
        with open_reader("db", store=store, mode="latest", merge_operator=Concatenate()) as reader:
            found = dict(reader.scan(b"\1"))
            assert (found, reader.get(PROGRESS)) == (expected, b"2"), (effect, nth)
        with open_database("db", store=store, settings=QUIET) as db:
            db.put(b"after", b"here")
        Admin("db", store=store).collect_garbage(min_age=NOW)
        ssts = sum(meta.path.endswith(".sst") for meta in store.list("db/compacted"))
        assert ssts == len(Admin("db", store=store).manifest().value.ssts), (effect, nth)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qurey": "a"}, "a stream into a database has no option 'qurey'; did you mean 'query'"),
        ({"receipt": "/tmp/x"}, "no option 'receipt'"),
        ({"query": ""}, "option 'query' is empty"),
        ({"mark_prefix": "hex:0"}, "not hexadecimal"),
        ({"duplicates": "first"}, "'last' or 'error'"),
    ],
)
def test_invalid_sink_options_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        sink_options(folder, **options)


def test_an_unsupported_stream_is_refused_before_it_begins_a_load(folder: Path) -> None:
    source = FlagstoneDataSource({"path": str(folder)})
    with pytest.raises(InvalidRequest, match="output mode 'complete' would replace the whole database"):
        source.streamWriter(SINK, True)
    with pytest.raises(InvalidRequest, match="rows need a column 'value'"):
        source.streamWriter(StructType([StructField("key", BinaryType())]), False)
    assert not folder.exists()
    with pytest.raises(InternalError, match="begun no load"):
        StreamSink(None, sink_options(folder)).write(iter([]))
    with pytest.raises(InternalError, match="1 of 1 tasks missing"):
        StreamSink(None, sink_options(folder)).commit([None], 0)


def test_a_progress_row_is_decoded_and_any_other_row_raises_corrupt_data() -> None:
    key = progress_key("q")
    assert StreamProgress.decode(StreamProgress(17).encode(), key) == StreamProgress(17)
    assert StreamProgress.decode(StreamProgress(17, "id").encode(), key) == StreamProgress(17, "id")
    assert not is_written(None, StreamProgress(0), key)
    assert is_written(b"3", StreamProgress(3, "id"), key)
    assert is_written(b"3 id", StreamProgress(2), key)
    assert not is_written(b"3 id", StreamProgress(4, "id"), key)
    for other in (b"", b"-1", b"three"):
        with pytest.raises(CorruptData, match="not the number of a micro-batch"):
            is_written(other, StreamProgress(0), key)


class Frame:
    """The part of a DataFrame that `foreach_batch` uses."""

    def __init__(self, cells: dict[str, list[Any]], schema: StructType, query_id: str | None) -> None:
        self.schema = schema
        self.sparkSession = self.sparkContext = self
        self._cells = cells
        self._query_id = query_id

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 - Spark's name
        assert name == "sql.streaming.queryId"
        return self._query_id

    def toArrow(self) -> pa.Table:  # noqa: N802
        return pa.Table.from_pydict(self._cells, schema=arrow_schema(self.schema))


SINK = StructType(
    [StructField("key", BinaryType()), StructField("value", StringType()), StructField("op", StringType())]
)


def sink_frame(*rows: tuple[bytes | None, str | None, str | None], query_id: str | None = None) -> Any:
    cells = {name: [row[at] for row in rows] for at, name in enumerate(("key", "value", "op"))}
    return Frame(cells, SINK, query_id)


def test_foreach_batch_writes_a_repeated_micro_batch_once(folder: Path) -> None:
    first = sink_frame((b"a", "1", "put"), (b"b", "2", None))
    second = sink_frame((b"a", None, "delete"), (b"c", "3", "put"))
    with flagstone.open(folder, settings=QUIET) as db:
        write = foreach_batch(db, "orders")
        write(first, 0)
        write(second, 1)
    with flagstone.open(folder, settings=QUIET) as db:
        write = foreach_batch(db, "orders")
        write(first, 0)
        write(second, 1)
        write(sink_frame(), 2)
        assert dict(db.scan(b"a")) == {b"b": b"2", b"c": b"3"}
        assert db.status()["committed_seq"] == 2
        with pytest.raises(InvalidRequest, match="has no key or no value"):
            write(sink_frame((b"x", "1", "put"), (b"y", None, "put")), 2)
        with pytest.raises(InvalidRequest, match="column 'op' has 'upsert'"):
            write(sink_frame((b"x", "1", "upsert")), 2)
        assert db.get(b"x") is None
        assert db.get(PROGRESS) == b"1"
        write(sink_frame((b"x", "1", "put"), query_id="first"), 2)
        with pytest.raises(InvalidRequest, match="batch 2 of another query"):
            write(sink_frame((b"x", "1", "put"), query_id="second"), 0)
        with pytest.raises(InvalidRequest, match="needs a name"):
            foreach_batch(db, "")


def test_foreach_batch_returns_only_when_the_rows_are_durable() -> None:
    store = MemoryStore()
    failing = FaultyStore(store)
    frame = sink_frame((b"a", "x", "merge"))
    db = open_database("db", store=failing, settings=QUIET, merge_operator=Concatenate())
    write = foreach_batch(db, "orders")
    failing.faults.append(Fault("crash", op="put*", path="*/wal/*"))
    with pytest.raises((Crashed, FlagstoneError)):
        write(frame, 0)

    # The row is in memory, and the WAL cannot be written: the call must fail again.
    with pytest.raises((Crashed, FlagstoneError)):
        write(frame, 0)

    with suppress(Crashed, FlagstoneError):
        db.close()
    with open_database("db", store=store, settings=QUIET, merge_operator=Concatenate()) as again:
        foreach_batch(again, "orders")(frame, 0)
        assert again.get(b"a") == b"x"


def start(frame: Any, folder: Path, state: Path, *, mode: str = "append", **options: str) -> Any:
    return (
        frame.writeStream.format("flagstone")
        .outputMode(mode)
        .options(checkpointLocation=str(state), **options)
        .trigger(availableNow=True)
        .start(str(folder))
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_a_query_keeps_a_copy_up_to_date_in_commit_order(spark: Any, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    ids = set()
    for turn in range(2):
        with flagstone.open(source, settings=QUIET) as db:
            for number in range(30):
                db.put(b"k%d" % (number % 7), b"%d of %d" % (number, turn))
                db.delete(b"k%d" % (number % 5))
                db.flush("wal")
        changes = (
            spark.readStream.format("flagstone")
            .options(consumer="copy", starting="earliest", max_files_per_trigger="21", partitions="3")
            .load(str(source))
        )
        query = start(changes.select("op", "key", "value"), copy, tmp_path / "state", max_sst_size="4096")
        query.awaitTermination(120)
        assert query.exception() is None
        ids.add(query.id)
        assert rows_of(copy) == shown(source)

    [query_id] = ids
    # Batch 0 is the start position, without rows.
    batch_id, _, owner = shown(copy)[progress_key(query_id)].partition(b" ")
    assert owner.decode() == query_id
    assert int(batch_id) >= 3
    assert_sound(copy)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_an_unsupported_query_fails_with_our_error(spark: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    frame = spark.createDataFrame([(7, "seven"), (8, "eight")], "id long, name string")
    frame.write.parquet(str(rows))
    stream = spark.readStream.schema(frame.schema).parquet(str(rows))
    folder = tmp_path / "db"

    def fails(number: int, streamed: Any, message: str, **options: Any) -> None:
        with pytest.raises(Exception, match=message):
            start(streamed, folder, tmp_path / f"state {number}", **options).awaitTermination(120)

    fails(0, stream, "rows need a column 'key'")
    fails(1, stream, "did you mean 'key.columns'", **{"key.colums": "id"})
    counted = stream.groupBy("name").count().selectExpr("name as key", "cast(count as string) as value")
    fails(2, counted, "output mode 'complete' would replace", mode="complete")
    fails(3, counted, "does not support Update mode", mode="update")
    assert not folder.exists()
    fails(4, stream.selectExpr("name as key", "cast(null as string) as value"), "column 'value' has")
    assert shown(folder) == {}

    query = start(stream, folder, tmp_path / "state", **{"key.columns": "id", "query": "names"})
    query.awaitTermination(120)
    found = spark.read.format("flagstone").schema(frame.schema).option("key.columns", "id")
    start_key = flagstone.keys.encode(0).hex()
    read = found.option("start", f"hex:{start_key}").load(str(folder))
    assert sorted((row.id, row.name) for row in read.collect()) == [(7, "seven"), (8, "eight")]
    assert shown(folder)[progress_key("names")].startswith(b"0 ")
