"""Reads as Spark plans and runs them, but in this process: checkpoint, plan, partitions, Arrow batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as ds
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.compaction.inputs import Anchor
from flagstone.metadata.manifest import SEQ_GAP
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.options import key_text, parse_read_options
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.scan import (
    FlagstoneReader,
    PushingReader,
    fetch_anchors,
    plan_partitions,
    split_points,
)
from flagstone.spark.selection import Wanted
from flagstone.types import KeyRange
from kit.databases import QUIET
from kit.spark_loads import load, pairs, shown

ROWS = {b"k%05d" % number: b"%d" % number * 20 for number in range(5000)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two overlapping sorted runs, an L0, and rows that are only in the WAL."""
    folder = tmp_path_factory.mktemp("read") / "db"
    keys = sorted(ROWS)
    load(folder, [pairs(dict.fromkeys(keys[::3], b"old"))])
    load(folder, [pairs({key: ROWS[key] for key in keys[:4000]})], max_sst_size="50000")
    db = flagstone.open(folder, settings=QUIET)
    for key in keys[4000:4500]:
        db.put(key, ROWS[key])
    db.flush()
    for key in keys[4500:]:
        db.put(key, ROWS[key])
    db.flush("wal")
    yield folder
    # Open until now: closing the database flushes the rows that are only in the WAL.
    db.close()


def reader_of(folder: Path, kind: type[FlagstoneReader] = FlagstoneReader, **options: str) -> Any:
    held = hold_checkpoint(parse_read_options({"path": str(folder), **options}))
    return pickle.loads(pickle.dumps(kind(held, read_schema(held.options.columns))))


def rows_of(reader: Any) -> list[pa.RecordBatch]:
    partitions = pickle.loads(pickle.dumps(reader.partitions()))
    return [batch for partition in partitions for batch in reader.read(partition)]


def pairs_of(reader: Any) -> dict[bytes, bytes]:
    table = pa.Table.from_batches(rows_of(reader))
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


@pytest.mark.slow
def test_every_row_is_read_once_with_any_number_of_partitions(folder: Path) -> None:
    for partitions in ("1", "2", "7"):
        reader = reader_of(folder, partitions=partitions)
        table = pa.Table.from_batches(rows_of(reader))
        assert table.num_rows == len(ROWS)
        assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)) == ROWS
        assert len(reader.partitions()) == int(partitions)


def test_partitions_have_about_the_same_number_of_bytes(folder: Path) -> None:
    options = parse_read_options({"path": str(folder), "partitions": "4"})
    held = hold_checkpoint(options)
    with held.open() as open_reader:
        anchors = list(fetch_anchors(options, open_reader.manifest(), Wanted()))
    sizes = [
        sum(anchor.size for anchor in anchors if anchor.key in partition.wanted.keys)
        for partition in FlagstoneReader(held, read_schema(("key",))).partitions()
    ]

    assert max(sizes) < 1.3 * min(sizes)
    assert sum(sizes) == pytest.approx(
        sum(sst.info.filter_offset or sst.info.index_offset for sst in _ssts(folder)), rel=0.02
    )


def _ssts(folder: Path) -> list[Any]:
    manifest = Admin(folder).manifest().value
    return [manifest.sst(view) for view in manifest.views]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prefix": "k0001"}, lambda key: key.startswith(b"k0001")),
        ({"start": "k00100", "stop": "k00200"}, lambda key: b"k00100" <= key < b"k00200"),
        ({"start": key_text(b"k04600")}, lambda key: key >= b"k04600"),
        ({"prefix": "nothing"}, lambda key: False),
    ],
)
def test_range_options_select_keys(folder: Path, options: dict[str, str], expected: Any) -> None:
    found = {row.as_py() for batch in rows_of(reader_of(folder, **options)) for row in batch["key"]}

    assert found == {key for key in ROWS if expected(key)}


def test_supported_filters_are_applied_exactly_and_others_are_returned_to_spark(folder: Path) -> None:
    key = ("key",)
    cases: list[tuple[list[ds.Filter], Any]] = [
        ([ds.EqualTo(key, b"k00017")], lambda k: k == b"k00017"),
        ([ds.EqualTo(key, b"absent")], lambda k: False),
        ([ds.In(key, [b"k00001", b"k04999", b"missing", None])], lambda k: k in (b"k00001", b"k04999")),  # type: ignore[arg-type]
        ([ds.GreaterThan(key, b"k00010"), ds.LessThan(key, b"k00013")], lambda k: b"k00010" < k < b"k00013"),
        (
            [ds.GreaterThanOrEqual(key, b"k00010"), ds.LessThanOrEqual(key, b"k00013")],
            lambda k: b"k00010" <= k <= b"k00013",
        ),
        ([ds.In(key, [b"k00001", b"k00002"]), ds.GreaterThan(key, b"k00001")], lambda k: k == b"k00002"),  # type: ignore[arg-type]
        ([ds.LessThan(key, b"a")], lambda k: False),
        ([ds.EqualTo(key, b"a"), ds.EqualTo(key, b"b")], lambda k: False),
        ([ds.StringStartsWith(key, "k0001")], lambda k: k.startswith(b"k0001")),
        ([ds.EqualTo(("value",), ROWS[b"k00017"])], lambda k: k == b"k00017"),
    ]
    other = ds.StringContains(("value",), "x")
    for filters, expected in cases:
        reader = reader_of(folder, PushingReader)
        assert list(reader.pushFilters([*filters, other])) == [other]
        assert {row.as_py() for batch in rows_of(reader) for row in batch["key"]} == {
            k for k in ROWS if expected(k)
        }, filters


def test_a_filter_that_cannot_be_applied_exactly_is_returned_to_spark(folder: Path) -> None:
    refused: list[ds.Filter] = [
        ds.Not(ds.EqualTo(("key",), b"a")),
        ds.EqualTo(("key", "part"), b"a"),
        ds.EqualTo(("key",), 17),
        ds.StringEndsWith(("key",), "a"),
        ds.EqualTo(("nothing",), b"a"),
    ]
    for each in refused:
        assert list(reader_of(folder, PushingReader).pushFilters([each])) == [each]
    reader = reader_of(folder, PushingReader)
    assert list(reader.pushFilters([ds.EqualTo(("key",), "ä")])) == []
    assert reader._wanted == Wanted(points=("ä".encode(),))


def test_a_narrow_range_reads_few_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flagstone.store.local import LocalStore

    read = 0
    plain = LocalStore.get_range

    def counted(self: Any, path: str, start: int, stop: int) -> bytes:
        nonlocal read
        data = plain(self, path, start, stop)
        read += len(data)
        return data

    reader = reader_of(folder, PushingReader)
    list(reader.pushFilters([ds.GreaterThanOrEqual(("key",), b"k02000"), ds.LessThan(("key",), b"k02050")]))
    [partition] = reader.partitions()
    monkeypatch.setattr(LocalStore, "get_range", counted)

    assert sum(batch.num_rows for batch in reader.read(partition)) == 50
    assert read < sum(len(key) + len(value) for key, value in ROWS.items()) / 5


def test_metadata_columns_and_schemas_of_the_user_choose_the_columns(folder: Path) -> None:
    [row] = [
        row
        for batch in rows_of(reader_of(folder, columns="seq,key,created_ms,expires_ms", prefix="k04999"))
        for row in batch.to_pylist()
    ]
    assert (row["key"], row["expires_ms"]) == (b"k04999", None)
    assert row["seq"] == 2 * SEQ_GAP + 1000, "after two loads, the last row of a thousand"
    assert abs(datetime.now(UTC).timestamp() * 1000 - row["created_ms"]) < 600_000

    schema = StructType(
        [StructField("value", StringType()), StructField("key", StringType(), nullable=False)]
    )
    reader = FlagstoneReader(
        hold_checkpoint(parse_read_options({"path": str(folder), "prefix": "k00003"})), schema
    )
    [batch] = rows_of(reader)
    assert batch.to_pylist() == [{"value": "3" * 20, "key": "k00003"}]


@pytest.mark.parametrize(
    "field",
    [StructField("keys", BinaryType()), StructField("key", LongType()), StructField("seq", StringType())],
)
def test_an_unsupported_schema_is_refused(folder: Path, field: StructField) -> None:
    with pytest.raises(InvalidRequest):
        FlagstoneReader(hold_checkpoint(parse_read_options({"path": str(folder)})), StructType([field]))


@pytest.mark.slow
def test_a_read_shows_the_state_of_its_checkpoint_which_expires(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs({b"a": b"1"})])
    reader = reader_of(folder, checkpoint_lifetime="120s")
    load(folder, [pairs({b"a": b"2", b"b": b"2"})])
    Admin(folder).compact(full=True)
    Admin(folder).collect_garbage(min_age=timedelta())

    assert pairs_of(reader) == {b"a": b"1"}
    [held] = Admin(folder).checkpoints("spark read")
    assert held.expires_s == held.created_s + 120


@pytest.mark.slow
def test_a_checkpoint_and_a_former_state_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
        kept = db.checkpoint()
        db.put(b"a", b"2")
        db.put(b"a", b"3")
        db.flush("wal")
        assert pairs_of(reader_of(folder, checkpoint=str(kept.id))) == {b"a": b"1"}
        assert pairs_of(reader_of(folder, as_of="2")) == {b"a": b"2"}
        assert pairs_of(reader_of(folder, as_of=datetime.now(UTC).isoformat())) == {b"a": b"3"}
    assert shown(folder) == {b"a": b"3"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefx": "a"}, "did you mean 'prefix'"),
        ({"columns": "key,valu"}, "choose from key, value, seq"),
        ({"columns": "key,key"}, "each once"),
        ({"partitions": "0"}, "whole number from 1"),
        ({"start": "b", "stop": "a"}, "inverted"),
        ({"start": "hex:0g"}, "not hexadecimal"),
        ({"checkpoint": "17"}, "no checkpoint has the id or name '17'"),
        ({"checkpoint": "00000000-0000-4000-8000-000000000000"}, "no checkpoint"),
        ({"as_of": "yesterday"}, "sequence number, or a time"),
        ({"as_of": "2026-01-01T00:00:00"}, "needs its zone"),
        ({"as_of": str(1 << 50)}, "has not come yet"),
        ({"checkpoint_lifetime": "0"}, "has no unit"),
        ({"include_expired": "yes"}, "true or false"),
        ({"merge_operator": "nothing"}, "module:name"),
        ({"merge_operator": "nowhere:nothing"}, "cannot be imported"),
    ],
)
def test_invalid_read_options_are_refused_before_any_task_runs(
    folder: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        reader_of(folder, **options)


def test_a_path_without_a_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no database"):
        reader_of(tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="there is no path to a database"):
        parse_read_options({})


def test_ranges_are_adjacent_and_cover_all_keys() -> None:
    anchors = [Anchor(b"%03d" % number, 10) for number in range(100)]

    cut = plan_partitions(anchors, KeyRange(b"010", b"090"), 4)

    assert (cut[0].start, cut[-1].stop, len(cut)) == (b"010", b"090", 4)
    assert [one.stop for one in cut[:-1]] == [one.start for one in cut[1:]]
    assert [sum(anchor.key in one for anchor in anchors) for one in cut] == [20, 20, 20, 20]
    assert plan_partitions([], KeyRange(), 8) == [KeyRange()]
    assert len(plan_partitions([Anchor(b"a", 5)] * 9, KeyRange(), 8)) <= 2


def test_single_keys_are_distributed_evenly() -> None:
    points = [b"%d" % number for number in range(10)]

    assert [len(group) for group in split_points(points, 3)] == [3, 3, 4]
    assert len(split_points(points, 99)) == 10
