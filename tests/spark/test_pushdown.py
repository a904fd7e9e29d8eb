"""Filters, options and columns reduce the bytes that are fetched, and never lose a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as ds

from flagstone import Admin, InvalidRequest
from flagstone.runtime.ids import ulid_text
from flagstone.spark import filters
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.options import parse_read_options
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.scan import FlagstoneReader, PushingReader
from flagstone.store.local import LocalStore
from flagstone.store.port import Range, StoredObject
from kit.spark_loads import load, pairs

COUNT = 30_000
ROWS = {b"k%06d" % number: b"%09d" % number * 20 for number in range(COUNT)}
SIZE = sum(len(key) + len(value) for key, value in ROWS.items())
KEY = ("key",)


class Meter:
    """Counts the bytes fetched from SSTs: of blocks, and of indexes and filters."""

    def __init__(self, folder: Path) -> None:
        manifest = Admin(folder).manifest().value
        self._ends = {
            ulid_text(sst.id): sst.info.filter_offset or sst.info.index_offset
            for sst in map(manifest.sst, manifest.views)
        }
        self.reset()

    def reset(self) -> None:
        self.blocks = self.rest = 0

    def count(self, path: str, start: int, fetched: bytes) -> None:
        end = self._ends.get(Path(path).stem)
        if end is not None:
            self.blocks += max(0, min(len(fetched), end - start))
            self.rest += len(fetched) - max(0, min(len(fetched), end - start))


@pytest.fixture
def meter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Meter:
    meter, plain, plain_tail = Meter(folder), LocalStore.get_ranges, LocalStore.get_tail

    def get_ranges(self: LocalStore, path: str, ranges: Sequence[Range]) -> list[bytes]:
        fetched = plain(self, path, ranges)
        for (start, _), part in zip(ranges, fetched, strict=True):
            meter.count(path, start, part)
        return fetched

    def get_tail(self: LocalStore, path: str, length: int) -> StoredObject:
        assert not path.endswith(".sst"), "SSTs are read in ranges only"
        return plain_tail(self, path, length)

    monkeypatch.setattr(LocalStore, "get_ranges", get_ranges)  # get_range calls it
    monkeypatch.setattr(LocalStore, "get_tail", get_tail)
    return meter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two overlapping sorted runs: the rows, and older rows of other keys in the same range."""
    folder = tmp_path_factory.mktemp("pushdown") / "db"
    load(folder, [pairs({key + b"+": b"other" for key in sorted(ROWS)[::3]})])
    load(folder, [pairs(ROWS)], max_sst_size="2000000")
    return folder


def reader_of(folder: Path, *pushed: ds.Filter, **options: str) -> FlagstoneReader:
    held = hold_checkpoint(parse_read_options({"path": str(folder), **options}))
    reader = PushingReader(held, read_schema(held.options.columns))
    assert list(reader.pushFilters(list(pushed))) == []
    return reader


def batches_of(reader: FlagstoneReader) -> Iterator[pa.RecordBatch]:
    for part in reader.partitions():
        yield from reader.read(part)


def keys_of(reader: FlagstoneReader) -> list[bytes]:
    return [key for batch in batches_of(reader) for key in batch["key"].to_pylist() if not key.endswith(b"+")]


HUNDREDTH = (b"k010000", b"k010300")


@pytest.mark.parametrize(
    "pushed",
    [
        [ds.GreaterThanOrEqual(KEY, HUNDREDTH[0]), ds.LessThan(KEY, HUNDREDTH[1])],
        [ds.GreaterThan(KEY, b"k009999"), ds.LessThanOrEqual(KEY, b"k010299")],
    ],
    ids=["from, below", "above, up to"],
)
def test_a_hundredth_of_the_keys_costs_a_hundredth_of_the_bytes(
    folder: Path, meter: Meter, pushed: list[ds.Filter]
) -> None:
    assert len(keys_of(reader_of(folder, *pushed))) == 300
    assert meter.blocks < SIZE * 0.02
    # Twice, for planning and for reading, the index of each SST with such keys: nothing of the third SST.
    assert meter.rest < SIZE * 0.02


def test_range_options_read_as_few_bytes_as_filters(folder: Path, meter: Meter) -> None:
    start, stop = (key.decode() for key in HUNDREDTH)

    assert len(keys_of(reader_of(folder, start=start, stop=stop))) == 300
    assert meter.blocks < SIZE * 0.02
    meter.reset()
    assert len(keys_of(reader_of(folder, prefix="k0123"))) == 100
    assert meter.blocks < SIZE * 0.02


@pytest.mark.parametrize("by", ["filter", "option"])
def test_filters_on_single_keys_fetch_only_the_blocks_of_present_keys(
    folder: Path, meter: Meter, by: str
) -> None:
    def wanted(*keys: bytes) -> FlagstoneReader:
        if by == "option":
            return reader_of(folder, keys=",".join(key.decode() for key in keys))
        return reader_of(folder, ds.EqualTo(KEY, keys[0]) if len(keys) == 1 else ds.In(KEY, keys))

    assert keys_of(wanted(b"k000017")) == [b"k000017"]
    assert 0 < meter.blocks < 5000
    meter.reset()
    assert keys_of(wanted(b"k000016", b"k000017", b"k000018")) == [b"k000016", b"k000017", b"k000018"]
    assert 0 < meter.blocks < 5000  # they share their block
    meter.reset()
    assert keys_of(wanted(b"k000017x", b"k010018x", b"k020019x")) == []
    assert meter.rest
    assert meter.blocks == 0  # bloom filters exclude them


@pytest.mark.slow
def test_a_read_of_only_keys_or_sequence_numbers_returns_no_values(folder: Path) -> None:
    found = list(batches_of(reader_of(folder, columns="key")))

    assert {batch.schema.names[0] for batch in found} == {"key"}
    assert sum(batch.num_rows for batch in found) == COUNT + COUNT // 3
    assert sum(batch.nbytes for batch in found) < SIZE * 0.15
    seqs = list(batches_of(reader_of(folder, columns="seq")))
    assert sum(batch.nbytes for batch in seqs) == 8 * (COUNT + COUNT // 3)


def test_keys_of_an_option_are_restricted_to_its_range(folder: Path) -> None:
    assert keys_of(reader_of(folder, keys="k000001, k000002,hex:6b303030303033", prefix="k00000")) == [
        b"k000001",
        b"k000002",
        b"k000003",
    ]
    assert keys_of(reader_of(folder, keys="k000001,k020000", stop="k01")) == [b"k000001"]
    assert keys_of(reader_of(folder, ds.EqualTo(KEY, b"k000002"), keys="k000001,k000002")) == [b"k000002"]


@pytest.mark.parametrize(
    ("apart", "option", "pushes"),
    [(True, None, True), (False, None, False), (True, "true", True), (True, "false", False)],
)
def test_filters_are_pushed_down_if_spark_keeps_scans_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, apart: bool, option: str | None, pushes: bool
) -> None:
    monkeypatch.setattr("flagstone.spark.datasource.SCANS_ARE_APART", apart)
    options = {"path": str(folder)} | ({} if option is None else {"pushdown": option})
    source = FlagstoneDataSource(options)
    # Called as from Spark's worker for push-down, the only one that gets a reader with filters.
    worker = compile("reader = source.reader(schema)", "data_source_pushdown_filters.py", "exec")
    scope: dict[str, Any] = {"source": source, "schema": read_schema(("key", "value"))}
    exec(worker, scope)

    assert isinstance(scope["reader"], PushingReader) is pushes
    assert not isinstance(source.reader(read_schema(("key", "value"))), PushingReader)
    assert hasattr(ds.DataSourceReader, "pushLimit") is filters.SCANS_ARE_APART


def test_push_down_on_request_is_refused_where_spark_mixes_up_scans(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flagstone.spark.datasource.SCANS_ARE_APART", False)
    source = FlagstoneDataSource({"path": str(folder), "pushdown": "true"})

    with pytest.raises(InvalidRequest, match=r"flagstone.spark.read\(spark, url, where="):
        source.reader(read_schema(("key", "value")))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_two_uses_of_one_frame_do_not_share_filters(spark: Any, folder: Path) -> None:
    """Spark 4.3 uses the last planned read for all of them if the source accepts filters."""
    frame = spark.read.format("flagstone").option("columns", "key").load(str(folder))
    few = frame.where("key < cast('k000010' as binary)")
    end = frame.where("key >= cast('k029990' as binary)")
    whole = COUNT + COUNT // 3

    assert few.count() == 10 + 4
    assert frame.count() == whole
    assert few.union(frame).count() == whole + 14
    assert frame.join(few, "key", "left_anti").count() == whole - 14
    both = [bytes(row.key) for row in few.union(end).collect()]
    assert (len(both), sum(key < b"k000010" for key in both)) == (14 + 13, 14)
    frame.createOrReplaceTempView("pushed")
    query = "(select count(*) from pushed where key < cast('k000010' as binary))"
    [row] = spark.sql(f"select {query} as few, (select count(*) from pushed) as whole").collect()
    assert (row.few, row.whole) == (14, whole)
