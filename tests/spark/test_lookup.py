"""Lookups of many keys give the answers of single gets, and fetch only the blocks that they touch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import flagstone
from flagstone import Admin, CorruptData, InvalidRequest
from flagstone import spark as fs
from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.db.reader.reader import open_reader
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.spark import sorted_lookup
from flagstone.spark.address import open_store
from flagstone.spark.frames.lookup import LookupTask, check_keys, joined_batches
from flagstone.spark.sorted_lookup import SortedLookup, TooManyValues, plan_spans
from flagstone.store.counting import CountingStore
from flagstone.store.paths import DbPaths
from kit.databases import QUIET, Append
from kit.spark_loads import address_of, load, on_spark, pairs


def keys_of(*keys: bytes) -> pa.Array:
    return pa.array(sorted(set(keys)), pa.binary())


def looked_up(
    folder: Path, keys: pa.Array, *, include_expired: bool = False, operator: Any = None
) -> list[Any]:
    store, paths = open_store(address_of(folder))
    with open_reader(folder, mode="latest", merge_operator=operator) as reader:
        now_ms = reader._context.clock.now_ms()
        lookup = SortedLookup(reader, store, paths, now_ms=now_ms, include_expired=include_expired)
        found: list[Any] = lookup.find(keys).to_pylist()
        usable = [key for key in keys.to_pylist() if key]
        plain = dict(zip(usable, reader.multi_get(usable, include_expired=include_expired), strict=True))
        assert found == [plain.get(key) for key in keys.to_pylist()]
    return found


@pytest.fixture(params=["compiled", "interpreted"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = load_compiled("lookup") if request.param == "compiled" else load_interpreted("lookup")
    if loaded is None:
        pytest.skip("no compiled kernels here")
    monkeypatch.setattr(sorted_lookup, "lookup", loaded)
    return loaded


@pytest.mark.parametrize("codec", [None, "Lz4"])
def test_a_lookup_returns_what_single_gets_return(tmp_path: Path, form: Any, codec: Any) -> None:
    """Several sources, versions across blocks, tombstones, expiry, operands, and rows that are only in the WAL."""
    folder, chance = tmp_path / "db", random.Random(7)
    db = flagstone.open(folder, settings=QUIET, merge_operator=Append())
    held = []
    for turn in range(6):
        for _ in range(150):
            key = b"k%03d" % chance.randrange(300) + b"x" * chance.randrange(3)
            match chance.randrange(6):
                case 0:
                    db.delete(key)
                case 1:
                    db.merge(key, b"+%d" % turn)
                case 2:
                    db.put(key, b"short", ttl=timedelta(milliseconds=1))
                case 3:
                    db.put(key, b"long" * chance.randrange(200), ttl=timedelta(hours=1))
                case _:
                    db.put(key, b"%d" % turn)
        for number in range(300):  # versions of one key that fill several blocks
            db.put(b"k150", b"%d" % number * 40)
        held.append(db.snapshot())
        if turn == 3:
            db.flush()
            work = CompactionWorkerOptions(max_sst_size=20_000, compression_codec=codec)
            Admin(folder).compact(full=True, options=CompactorOptions(worker=work), merge_operator=Append())
        elif turn < 5:
            db.flush()
    db.flush("wal")
    every = keys_of(
        *(b"k%03d" % number + b"x" * more for number in range(-1, 301) for more in range(3)), b"", b"\xff"
    )
    for _ in range(4):
        some = [key for key in every.to_pylist() if chance.randrange(3) == 0]
        looked_up(folder, keys_of(*some), operator=Append())
    assert sum(value is not None for value in looked_up(folder, every, operator=Append())) > 200
    looked_up(folder, every, include_expired=True, operator=Append())
    for snapshot in held:
        snapshot.close()
    db.close()
    looked_up(folder, every, operator=Append())


ROWS = {b"k%06d" % number: b"%09d" % number * 20 for number in range(20_000)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup") / "db"
    load(folder, [pairs({key + b"+": b"other" for key in sorted(ROWS)[::3]})])
    load(folder, [pairs(ROWS)], max_sst_size="1500000")
    return folder


def metered(folder: Path, keys: pa.Array) -> tuple[list[Any], int, int]:
    """The values, the bytes read, and the bytes of the blocks that were searched."""
    store, _ = open_store(address_of(folder))
    counting: Any = CountingStore(store, component="test")
    with open_reader(folder, mode="latest") as reader:
        lookup = SortedLookup(reader, counting, DbPaths("db"), now_ms=0, include_expired=False)
        found = lookup.find(keys).to_pylist()
    return found, counting.totals()["bytes_read"], lookup.touched_bytes


def test_a_lookup_fetches_little_more_than_the_blocks_that_it_touches(folder: Path) -> None:
    wanted = [b"k%06d" % number for number in range(0, 20_000, 400)]

    found, read, touched = metered(folder, keys_of(*wanted))

    assert found == [ROWS[key] for key in sorted(wanted)]
    assert touched < 60 * 2 * 4300
    assert read < touched + 200_000  # the indexes and filters
    dense, read, touched = metered(folder, keys_of(*sorted(ROWS)))
    assert dense == [ROWS[key] for key in sorted(ROWS)]
    assert read < touched * 1.1


def test_filters_save_blocks_of_missing_keys(folder: Path) -> None:
    absent = keys_of(*(b"k%06dy" % number for number in range(20_000)))

    found, _, touched = metered(folder, absent)

    assert found == [None] * len(absent)
    assert touched < sum(map(len, ROWS.values())) * 0.5


def test_requests_join_near_blocks_and_have_a_bounded_size() -> None:
    index: Any = SimpleNamespace(offsets=range(0, 40_960_000, 4096), stops=range(4096, 40_964_096, 4096))
    assert list(plan_spans(index, [1, 2, 4, 90])) == [[1, 2, 4], [90]]
    assert list(plan_spans(index, [])) == []
    spans = list(plan_spans(index, range(2000)))
    assert [number for span in spans for number in span] == list(range(2000))
    assert max(len(span) for span in spans) * 4096 <= sorted_lookup.MAX_REQUEST_BYTES


def test_a_damaged_block_raises_corrupt_data_with_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [pairs(dict(list(ROWS.items())[:900]))])
    [sst] = (folder / "compacted").iterdir()
    stored = sst.read_bytes()
    sst.write_bytes(stored[:5000] + bytes([stored[5000] ^ 1]) + stored[5001:])

    with pytest.raises(CorruptData, match=sst.name):
        metered(folder, keys_of(*list(ROWS)[:900]))


def test_blocks_that_do_not_parse_are_left_to_the_slow_path(form: Any) -> None:
    from array import array

    offsets, data = memoryview(array("q", [0, 1])), memoryview(b"a")
    for block in (b"", b"\0", b"\0\0", b"\xff" * 40, b"\0\1a\0" + bytes(9) + b"\0\0\0\1", bytes(30)):
        status, places, sizes = bytearray(1), array("q", [0]), array("q", [0])
        bounds, one = memoryview(array("q", [0, len(block)])), memoryview(array("q", [0]))
        found = form.find(block, bounds, one, one, 0, offsets, data, 9, 0, False, status, places, sizes)
        assert found == -1 or status[0] in (0, 1, 2, 3)
        assert found <= len(block)


def answers(task: LookupTask, batch: pa.RecordBatch, known: dict[bytes, bytes]) -> list[dict[str, Any]]:
    def find(keys: pa.Array) -> pa.Array:
        asked = keys.to_pylist()
        assert asked == sorted(set(asked))
        if len(asked) > 3:
            raise TooManyValues
        return pa.array([known.get(key) for key in asked], pa.binary())

    return [row for part in task.answer(batch, find) for row in part.to_pylist()]


def test_duplicates_nulls_and_missing_keys_are_answered(folder: Path) -> None:
    schema = StructType([StructField("key", StringType()), StructField("n", LongType())])
    batch = pa.RecordBatch.from_pydict({"key": ["b", "a", None, "x", "b", "c", "d", "a"], "n": range(8)})
    known = {b"a": b"1", b"b": b"2", b"c": b"3"}
    task = fs.lookup_batches(folder, schema, on="key", snapshot="latest")

    rows = answers(task, batch, known)
    assert sorted((row["n"], row["value"]) for row in rows) == [
        (0, b"2"), (1, b"1"), (2, None), (3, None), (4, b"2"), (5, b"3"), (6, None), (7, b"1")
    ]  # fmt: skip
    inner = fs.lookup_batches(folder, schema, on="key", how="inner", snapshot="latest")
    assert sorted(row["n"] for row in answers(inner, batch, known)) == [0, 1, 4, 5, 7]
    assert answers(task, batch.slice(0, 0), known) == []
    assert answers(task, batch.slice(2, 1), known) == [{"key": None, "n": 2, "value": None}]


def test_small_batches_are_joined() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(7):
            yield pa.RecordBatch.from_pydict({"n": [number] * 10})

    assert [batch.num_rows for batch in joined_batches(batches(), 25)] == [30, 30, 10]
    assert list(joined_batches(iter([]), 25)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "nothing"}, "no column 'nothing'"),
        ({"on": "n"}, "bytes or text, not n bigint"),
        ({"on": ["key", "n"]}, "bytes or text"),
        ({"on": "key", "how": "outer"}, "'left' or 'inner'"),
        ({"on": "key", "columns": ["seq"]}, "cannot add 'seq'"),
        ({"on": "key", "where": "n = 1"}, "no where"),
        ({"on": "key", "prefix": b"a"}, "no prefix"),
        ({"on": "key", "columns": ["value", "value"]}, "each once"),
        ({"on": "value"}, "has a column 'value' already"),
        ({"on": "n", "key_columns": ["k"], "schema": "x"}, "schema"),
    ],
)
def test_a_lookup_that_cannot_work_is_refused(folder: Path, arguments: Any, message: str) -> None:
    fields = [
        StructField("key", StringType()),
        StructField("n", LongType()),
        StructField("value", StringType()),
    ]
    schema = StructType(fields[: 3 if arguments["on"] == "value" else 2])
    with pytest.raises(InvalidRequest, match=message):
        fs.lookup_batches(folder, schema, snapshot="latest", **arguments)


def test_key_columns_must_have_the_types_of_the_key() -> None:
    from flagstone.spark.row_mapping import RowMapping

    mapping = RowMapping(("region", "id"), ("price",))
    types = pa.schema([("region", pa.string()), ("id", pa.int64()), ("price", pa.float64())])
    frame = StructType(
        [StructField("r", StringType()), StructField("i", LongType()), StructField("t", StringType())]
    )

    check_keys(frame, ["r", "i"], types, mapping)
    with pytest.raises(InvalidRequest, match="'t' is string, and the key column 'id' int64"):
        check_keys(frame, ["r", "t"], types, mapping)
    with pytest.raises(InvalidRequest, match="on= has 1"):
        check_keys(frame, ["r"], types, mapping)


@on_spark
def test_a_lookup_equals_a_join(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    folder = tmp_path / "orders"
    orders = spark.range(2000).select(
        F.concat(F.lit("r"), F.col("id") % 7).alias("region"),
        F.col("id"),
        (F.col("id") / 4).alias("price"),
        F.when(F.col("id") % 3 == 0, F.concat(F.lit("n"), "id")).alias("note"),
    )
    fs.bulk_load(orders, folder, key_columns=["region", "id"])
    asked = spark.range(1, 4000, 3, 4).select(
        F.when(F.col("id") % 11 > 0, F.concat(F.lit("r"), F.col("id") % 7)).alias("where_sold"),
        F.col("id").cast("int").alias("order_id"),
        (F.col("id") * 2).alias("extra"),
    )
    asked = asked.union(asked.limit(50))
    structured: dict[str, Any] = {"key_columns": ["region", "id"], "schema": orders.schema}
    on = (asked.where_sold == orders.region) & (asked.order_id == orders.id)
    for how, presorted in (("left", None), ("inner", False), ("left", True)):
        found = fs.lookup(
            asked,
            folder,
            on=["where_sold", "order_id"],
            how=how,
            presorted=presorted,
            columns=["note", "price"],
            **structured,
        )
        expected = asked.join(orders, on, how).select(*asked.columns, "note", "price")
        assert found.columns == expected.columns
        assert sorted(map(repr, found.collect())) == sorted(map(repr, expected.collect()))
    raw = fs.lookup(spark.createDataFrame([("a",), (None,)], "key string"), folder, on="key", raw=True)
    assert [row.value for row in raw.collect()] == [None, None]
    with pytest.raises(InvalidRequest, match="already"):
        fs.lookup(orders.drop("note"), folder, on=["region", "id"], **structured)


@on_spark
def test_a_stream_is_looked_up_batch_by_batch(spark: Any, tmp_path: Path) -> None:
    folder, incoming = tmp_path / "db", tmp_path / "incoming"
    load(folder, [pairs({b"a": b"1", b"b": b"2"})])
    incoming.mkdir()
    (incoming / "1.json").write_text('{"key": "a"}\n{"key": "x"}\n')
    stream = spark.readStream.schema("key string").json(str(incoming))
    seen: list[tuple[str, str | None]] = []

    def keep(batch: Any, _: int) -> None:
        load(folder, [pairs({b"x": b"new"})])
        seen.extend((row.key, row.value.decode()) for row in fs.lookup(batch, folder, on="key").collect())

    writer = stream.writeStream.trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "one")).foreachBatch(keep).start()
    query.awaitTermination(60)
    assert sorted(seen) == [("a", "1"), ("x", "new")]

    with pytest.raises(InvalidRequest, match="call lookup in foreachBatch"):
        fs.lookup(stream, folder, on="key")
    work = fs.lookup_batches(folder, stream.schema, on="key", how="inner", snapshot="latest")
    found = stream.mapInArrow(work, work.schema).writeStream.trigger(availableNow=True)
    into = (
        found.format("parquet")
        .option("checkpointLocation", str(tmp_path / "two"))
        .start(str(tmp_path / "out"))
    )
    into.awaitTermination(60)
    assert spark.read.parquet(str(tmp_path / "out")).count() == 2
