"""Everyday arguments of `bulk_load`: modes, codec names and operations in any case, times of expiry as timestamps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.format.codec import Codec
from flagstone.spark import bulk_load
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import begin_load
from flagstone.spark.load.task import as_rows
from flagstone.spark.stream.foreach_batch import _add
from flagstone.write.batch import WriteBatch
from kit.databases import QUIET
from kit.spark_loads import address_of, on_spark, pairs, run_task, shown, write_options

LATE = datetime(2040, 1, 1, 12, 0, 0, 123_456, tzinfo=UTC)
LATE_MS = int(datetime(2040, 1, 1, 12, tzinfo=UTC).timestamp() * 1000) + 123


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


@pytest.mark.parametrize(
    ("name", "codec"),
    [("lz4", "LZ4"), ("ZSTD", "ZSTD"), ("Snappy", "SNAPPY"), ("none", "NONE"), ("NONE", "NONE")],
)
def test_a_codec_may_be_written_in_any_case(folder: Path, name: str, codec: str) -> None:
    assert write_options(folder, compression_codec=name).sst_options.codec is Codec[codec]


def test_an_unknown_codec_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="lz5"):
        write_options(folder, compression_codec="lz5")


def test_operations_may_be_written_in_any_case(folder: Path) -> None:
    cells = {"key": [b"a", b"b", b"c"], "value": [b"1", None, b"3"], "op": ["PUT", "Delete", "mErge"]}
    rows = as_rows(pa.RecordBatch.from_pydict(cells), write_options(folder), 0)
    assert rows["kind"].to_pylist() == [0, 1, 8]
    batch = WriteBatch()
    _add(batch, cells, "key", "value")
    assert len(batch) == 3


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_timestamp_is_a_time_of_expiry_rounded_down_to_milliseconds(folder: Path, unit: str) -> None:
    times = pa.array(
        [LATE, None, datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)], pa.timestamp("us", "UTC")
    )
    batch = pa.RecordBatch.from_pydict(
        {
            "key": [b"a", b"b", b"c"],
            "value": [b""] * 3,
            "expires_ms": times.cast(pa.timestamp(unit, "UTC"), safe=False),
        }
    )
    first, none, old = as_rows(batch, write_options(folder), 0)["expires_ms"].to_pylist()
    assert first == (LATE_MS if unit != "s" else LATE_MS // 1000 * 1000)
    assert none is None
    assert old in (-1, 0, -1000)


def test_a_load_for_new_databases_only_is_refused_at_its_begin_or_at_its_commit(folder: Path) -> None:
    only = {"only_if_new": "true"}
    one, two = (begin_load(address_of(folder), only_if_new=True) for _ in range(2))
    for plan in (two, one):
        made = run_task(plan, folder, [pairs({b"a": b"1"})])
        if plan is two:
            commit_load(plan, write_options(folder, **only), made)
        else:
            with pytest.raises(InvalidRequest, match="has been written to before"):
                commit_load(plan, write_options(folder, **only), made)
    with pytest.raises(InvalidRequest, match="has been written to before"):
        begin_load(address_of(folder), only_if_new=True)
    assert shown(folder) == {b"a": b"1"}


def test_rows_that_are_only_in_the_wal_count_as_written_before(folder: Path) -> None:
    db = flagstone.open(folder, settings=QUIET)
    db.put(b"a", b"row", await_durable=True)
    with pytest.raises(InvalidRequest, match="has been written to before"):
        begin_load(address_of(folder), only_if_new=True)
    db.close()


@on_spark
def test_bulk_load_refuses_or_ignores_a_database_that_was_written_before(folder: Path, spark: Any) -> None:
    frame = spark.createDataFrame(
        [(b"a", "1", "PUT", LATE), (b"b", "2", None, None)],
        "key binary, value string, op string, expires_ms timestamp",
    )
    report = bulk_load(frame, folder, mode="error", compression_codec="lz4")
    assert report is not None
    assert report.rows == 2
    with pytest.raises(InvalidRequest, match="has been written to before"):
        bulk_load(frame, folder, mode="error")
    assert bulk_load(frame, folder, mode="ignore") is None
    assert bulk_load(frame, folder.parent / "other", mode="ignore") is not None
    with flagstone.open_reader(folder, mode="latest") as reader:
        row = reader.get_row(b"a")
        assert row is not None
        assert (
            timedelta(0)
            <= LATE - datetime.fromtimestamp((row.expires_ms or 0) / 1000, UTC)
            < timedelta(milliseconds=1)
        )
        assert dict(reader.scan()) == {b"a": b"1", b"b": b"2"}
    assert {sst.info.codec for sst in Admin(folder).manifest().value.ssts.values()} == {Codec.LZ4}
    with pytest.raises(InvalidRequest, match="mode is"):
        bulk_load(frame, folder, mode="upsert")  # type: ignore[arg-type]
