"""Options of a change stream: which rows, which columns, how many, under which name, and for how long."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import (
    BinaryType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

import flagstone
from flagstone import Admin, InvalidRequest, keys, values
from flagstone.lsm.operators import Counter
from flagstone.spark import stream_status
from flagstone.spark.stream.options import is_stream, parse_stream_options
from flagstone.spark.stream.shape import default_schema
from flagstone.spark.stream.source import ChangeStreamReader
from kit.databases import QUIET
from kit.spark_loads import load, on_spark, pairs
from spark.test_stream_loads import Present
from spark.test_stream_source import applied, follow

NOW = timedelta()
TYPED = "op string, region string, id long, name string, price decimal(10,2), seq long, wal_id long"
KEY = {"key.columns": "region,id"}


class Later(Present):
    """A clock that can be set forward."""

    ahead_s = 0.0

    def now_ms(self) -> int:
        return super().now_ms() + int(self.ahead_s * 1000)


def schema_of(ddl: str) -> StructType:
    """The schema that Spark makes of such a text; Spark's own parser needs a session."""
    kinds = {
        "int": IntegerType(),
        "string": StringType(),
        "long": LongType(),
        "bigint": LongType(),
        "binary": BinaryType(),
    }
    fields = []
    for part in ddl.replace("decimal(10,2)", "price").split(", "):
        name, kind, *rest = part.split()
        fields.append(StructField(name, kinds.get(kind, DecimalType(10, 2)), nullable=not rest))
    return StructType(fields)


def stream_of(
    folder: Path, ddl: str | None = None, *, clock: Any = None, consumer: str | None = "test", **options: str
) -> ChangeStreamReader:
    named = {} if consumer is None else {"consumer": consumer}
    parsed = parse_stream_options({"path": str(folder), **named, **options})
    schema = default_schema(parsed) if ddl is None else schema_of(ddl)
    return ChangeStreamReader(parsed, schema, clock=clock or Present())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "db"


def put(folder: Path, *written: bytes) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for key in written:
            db.put(key, b"v" + key, await_durable=True)


# -- rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"prefix": "b"}, [b"b1", b"b2"]),
        ({"start": "b2"}, [b"b2", b"c1"]),
        ({"stop": "hex:6232"}, [b"a1", b"b1"]),
        ({"start": "a", "stop": "c", "prefix": "b"}, [b"b1", b"b2"]),
        ({"prefix": "x"}, []),
    ],
)
def test_a_range_applies_to_the_copy_to_wal_files_and_to_loads(
    folder: Path, options: dict[str, str], wanted: list[bytes]
) -> None:
    written = (b"a1", b"b1", b"b2", b"c1")
    put(folder, *written)
    reader = stream_of(folder, **options)
    copy, at = follow(reader)
    put(folder, *written)
    load(folder, [pairs(dict.fromkeys(written, b"loaded"))])
    put(folder, b"zzz")

    changes, end = follow(reader, at)

    assert [row["key"] for row in copy] == wanted
    after = [b"zzz"] if options == {"start": "b2"} else []
    assert [row["key"] for row in changes] == [*wanted, *wanted, *after]
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_an_inverted_range_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="inverted"):
        stream_of(folder, start="b", stop="a")


def test_a_limit_of_rows_ends_a_micro_batch_before_the_file_that_exceeds_it(folder: Path) -> None:
    reader = stream_of(folder, starting="1", max_rows_per_trigger="5")
    with flagstone.open(folder, settings=QUIET) as db:
        for rows in (2, 2, 2, 9, 1):
            with db.batch() as batch:
                for row in range(rows):
                    batch.put(b"%d" % row, b"x")
            db.flush("wal")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(5)

    begin = reader.latestOffset(reader.initialOffset(), limit)
    sizes, at = [], begin
    while (end := reader.latestOffset(at, limit)) != at:
        sizes.append(
            sum(batch.num_rows for part in reader.partitions(at, end) for batch in reader.read(part))
        )
        at = end

    assert sizes == [4, 2, 9, 1]


# -- columns --------------------------------------------------------------------------------------------------


def test_a_stream_of_bytes_has_the_columns_that_its_schema_names(folder: Path) -> None:
    put(folder, b"a")

    rows, _ = follow(stream_of(folder, "value string, key string, op string"))

    assert rows == [{"value": "va", "key": "a", "op": "put"}]
    with pytest.raises(InvalidRequest, match="has no column 'vaule'; choose from op, key, value"):
        stream_of(folder, "vaule string")
    with pytest.raises(InvalidRequest, match="column 'seq' of a stream of changes is bigint, not string"):
        stream_of(folder, "key binary, seq string")
    with pytest.raises(InvalidRequest, match="column 'expires_ms' must be nullable"):
        stream_of(folder, "key binary, expires_ms bigint not null")


def test_bytes_that_are_no_text_raise_instead_of_becoming_text(folder: Path) -> None:
    put(folder, b"\xff\xfe")

    with pytest.raises(InvalidRequest, match="does not fit the schema of the stream, in column 'key'"):
        follow(stream_of(folder, "op string, key string"))


def structured(region: str, number: int, name: str | None, price: str) -> tuple[bytes, bytes]:
    schema = pa.schema([("name", pa.string()), ("price", pa.decimal128(10, 2))])
    row = {"name": name, "price": Decimal(price)}
    return keys.encode(region, number), values.codec("row", schema).encode(row)


def test_a_typed_stream_has_the_columns_of_key_and_value_and_nulls_for_deletes(folder: Path) -> None:
    first, second = structured("eu", 1, "flag", "1.20"), structured("us", -2, None, "3.00")
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(*first)
    reader = stream_of(folder, TYPED, **KEY)
    copy, at = follow(reader)
    with flagstone.open(folder, settings=QUIET) as db:
        db.delete(first[0])
        db.put(*second)
        db.delete(keys.encode(None, 3))
        db.put(*first)

    changes, at = follow(reader, at)
    with flagstone.open(folder, settings=QUIET) as db:
        db.delete(second[0])
    deletes, _ = follow(reader, at)

    flag = {"region": "eu", "id": 1, "name": "flag", "price": Decimal("1.20")}
    assert copy == [{"op": "put", **flag, "seq": 1, "wal_id": None}]
    without = {"name": None, "price": None}
    wal_id = changes[0]["wal_id"]
    assert changes == [
        {"op": "delete", "region": "eu", "id": 1, **without, "seq": 2, "wal_id": wal_id},
        {
            "op": "put",
            "region": "us",
            "id": -2,
            "name": None,
            "price": Decimal(3),
            "seq": 3,
            "wal_id": wal_id,
        },
        {"op": "delete", "region": None, "id": 3, **without, "seq": 4, "wal_id": wal_id},
        {"op": "put", **flag, "seq": 5, "wal_id": wal_id},
    ]
    assert [(row["op"], row["region"], row["name"]) for row in deletes] == [("delete", "us", None)]


def test_a_typed_stream_delivers_loads_with_deletes(folder: Path) -> None:
    cells = {
        "region": ["eu", "us"],
        "id": [1, 2],
        "name": ["a", "b"],
        "price": [Decimal("1.00"), Decimal("2.00")],
    }
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(*structured("eu", 9, "old", "9.00"))
    reader = stream_of(folder, TYPED, **KEY)
    _, at = follow(reader)
    typed = {**cells, "price": pa.array(cells["price"], pa.decimal128(10, 2)), "op": ["put", "delete"]}
    load(folder, [typed], **KEY, **{"value.columns": "name,price"})

    changes, _ = follow(reader, at)

    assert [(row["op"], row["region"], row["id"], row["name"]) for row in changes] == [
        ("put", "eu", 1, "a"),
        ("delete", "us", 2, None),
    ]


def test_a_typed_stream_refuses_what_has_no_columns(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"needs the types of all columns, .* add .schema"):
        stream_of(folder, None, **KEY)
    with pytest.raises(InvalidRequest, match="there is no column 'id'"):
        stream_of(folder, "op string, region string, name string", **KEY)
    with pytest.raises(
        InvalidRequest, match=r"column 'name' must be nullable: .* a delete, which has no value"
    ):
        stream_of(folder, "op string, region string, id long, name string not null", **KEY)

    put(folder, b"not a tuple")
    with pytest.raises(flagstone.FlagstoneError):
        follow(stream_of(folder, TYPED, **KEY))


def test_a_typed_stream_refuses_a_merge_operand_which_is_no_row(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(*structured("eu", 1, "flag", "1.20"), await_durable=True)
    reader = stream_of(folder, TYPED, **KEY)
    _, at = follow(reader)
    with flagstone.open(folder, settings=QUIET, merge_operator=Counter()) as db:
        db.merge(keys.encode("eu", 2), bytes(8))

    with pytest.raises(InvalidRequest, match="sequence number 2 is a merge: its operand is no row"):
        follow(reader, at)


# -- names and lifetimes --------------------------------------------------------------------------------------


def test_a_query_without_a_consumer_gets_a_name_that_its_offsets_keep(folder: Path) -> None:
    put(folder, b"a")
    reader = stream_of(folder, consumer=None, changes="true")
    _, at = follow(reader)
    assert at["consumer"].startswith("spark query ")
    reader.stop()
    put(folder, b"b")

    again = stream_of(folder, consumer=None, changes="true")
    rows, end = follow(again, at)

    assert [row["key"] for row in rows] == [b"b"]
    assert end["consumer"] == at["consumer"]
    assert stream_status(folder, at["consumer"]).consumer == at["consumer"]
    other = stream_of(folder, consumer=None, changes="true").initialOffset()
    assert other["consumer"] != at["consumer"]
    names = [entry.name or "" for entry in Admin(folder).checkpoints()]
    assert sum(name.startswith("flagstone.log-pin/") for name in names) == 1


def test_a_query_that_loses_its_consumer_option_is_refused(folder: Path) -> None:
    put(folder, b"a")
    _, at = follow(stream_of(folder))

    with pytest.raises(InvalidRequest, match="began with the option 'consumer'"):
        follow(stream_of(folder, consumer=None, changes="true"), at)


def test_options_of_a_stream_are_recognised_by_one_that_no_read_has() -> None:
    assert is_stream({"path": "x", "changes": "true"})
    assert is_stream({"path": "x", "Starting": "latest"})
    assert not is_stream({"path": "x", "prefix": "a", "key.columns": "a"})
    with pytest.raises(InvalidRequest, match="'changes' is false"):
        parse_stream_options({"path": "x", "changes": "false"})


def test_an_abandoned_query_expires_after_a_week_and_the_error_says_how_to_start_over(folder: Path) -> None:
    put(folder, b"a")
    clock = Later()
    reader = stream_of(folder, clock=clock)
    _, at = follow(reader)
    for turn in range(3):
        put(folder, b"%d" % turn)
    clock.ahead_s = 8 * 24 * 3600
    expires = stream_status(folder, "test").expires
    assert expires is not None
    assert expires.timestamp() * 1000 == pytest.approx(Present().now_ms() + 7 * 24 * 3600 * 1000, abs=60_000)
    held = [
        entry for entry in Admin(folder).checkpoints() if (entry.name or "").startswith("flagstone.log-pin/")
    ]
    Admin(folder).delete_checkpoint(held[0].id)  # as a collector does with an expired one
    Admin(folder).collect_garbage(min_age=NOW)

    with pytest.raises(InvalidRequest) as raised:
        follow(stream_of(folder, clock=clock), at)

    message = str(raised.value)
    assert "removed by garbage collection" in message
    assert (
        "retention checkpoint of its consumer 'test' was gone: it had expired, 7 days, 0:00:00 after"
        in message
    )
    assert "empty checkpointLocation and starting=snapshot" in message


def test_a_running_query_renews_its_retention_checkpoint_and_unlimited_has_no_end(folder: Path) -> None:
    put(folder, b"a")
    clock = Later()
    reader, unlimited = (
        stream_of(folder, clock=clock, pin_lifetime="2days"),
        stream_of(folder, consumer="other", pin_lifetime="unlimited"),
    )
    _, at = follow(reader)
    follow(unlimited)
    before = stream_status(folder, "test").expires
    clock.ahead_s = 25 * 3600

    assert reader.latestOffset(at, ReadAllAvailable()) == at

    after = stream_status(folder, "test").expires
    assert before is not None
    assert after is not None
    assert after - before > timedelta(hours=24)
    assert stream_status(folder, "other").expires is None


# -- lag ------------------------------------------------------------------------------------------------------


def test_the_lag_is_what_the_present_micro_batch_leaves(folder: Path) -> None:
    put(folder, b"a")
    reader = stream_of(folder, max_files_per_trigger="1")
    assert reader.reportLatestOffset() is None
    _, at = follow(reader)
    at = reader.latestOffset(at, ReadAllAvailable())
    reader.stop()
    put(folder, b"b", b"c", b"d")
    load(folder, [pairs({b"l": b"x"})])

    while reader.latestOffset(at, reader.getDefaultReadLimit())["seq"] < 2:
        at = reader.latestOffset(at, reader.getDefaultReadLimit())
    report = reader.reportLatestOffset()
    status = stream_status(folder, "test")

    assert report is not None
    assert report["files_behind"] == 2
    assert report["bytes_behind"] > 0
    assert report["loads_behind"] == 1
    assert status.files_behind == 3
    assert status.loads_behind == 1
    assert status.bytes_behind > report["bytes_behind"]
    assert 0 <= status.seconds_behind < 600
    rows, _ = follow(reader, at)
    assert applied(rows) == {b"b": b"vb", b"c": b"vc", b"d": b"vd", b"l": b"x"}
    left = reader.reportLatestOffset()
    assert left is not None
    assert (left["files_behind"], left["bytes_behind"], left["loads_behind"]) == (0, 0, 0)


def test_the_status_of_an_unknown_consumer_names_those_there_are(folder: Path) -> None:
    put(folder, b"a")
    follow(stream_of(folder))

    with pytest.raises(InvalidRequest, match=r"for a consumer 'tset': .* there are: 'test'"):
        stream_status(folder, "tset")


@on_spark
def test_a_query_shows_its_lag_and_keeps_its_name_and_its_former_values(spark: Any, tmp_path: Path) -> None:
    folder, state, out = tmp_path / "db", tmp_path / "state", tmp_path / "out"
    key, value = structured("eu", 1, "flag", "1.20")

    def run() -> dict[str, Any]:
        query = (
            spark.readStream.format("flagstone")
            .schema("op string, region string, id long, name string, price decimal(10,2), before_name string")
            .options(before="true", **KEY)
            .load(str(folder))
            .writeStream.format("parquet")
            .option("checkpointLocation", str(state))
            .trigger(availableNow=True)
            .start(str(out))
        )
        query.awaitTermination(120)
        assert query.exception() is None
        return next(json.loads(each.json) for each in query.recentProgress if each.sources[0].latestOffset)

    with flagstone.open(folder, settings=QUIET) as db:
        db.put(key, value)
    run()
    with flagstone.open(folder, settings=QUIET) as db:
        db.delete(key)
    progress = run()

    (source,) = progress["sources"]
    name = source["endOffset"]["consumer"]
    assert source["latestOffset"]["files_behind"] == 0
    assert stream_status(folder, name).files_behind <= 1  # the file since the base
    consumers = [
        entry for entry in Admin(folder).checkpoints() if (entry.name or "").startswith("flagstone.log")
    ]
    assert len(consumers) == 1
    found = sorted(
        (row.op, row.region, row.id, row.name, row.before_name)
        for row in spark.read.parquet(str(out)).collect()
    )
    assert found == [("delete", "eu", 1, None, "flag"), ("put", "eu", 1, "flag", None)]
    nameless = spark.readStream.format("flagstone").option("changes", "true").load(str(folder))
    assert nameless.columns == ["op", "key", "value", "seq", "created_ms", "expires_ms", "wal_id"]
