"""The stored schema: every append and every read is right, or refused with a sentence; none is wrong in silence.

Rows are written as Spark's tasks and driver write them, but in this process: by a load, by a stream sink, by
`foreach_batch`, and by Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

import flagstone
from flagstone import Admin, CorruptData, InvalidRequest, TransactionConflict, Unavailable
from flagstone.loads.notice import load_notice
from flagstone.schema import SchemaChanged, TableWriter, given_columns, schema_key
from flagstone.spark import foreach_batch
from flagstone.spark.address import DatabaseAddress, open_store
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.load.adoption import ConditionFailed
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import parse_read_options, parse_write_options
from flagstone.spark.row_mapping import arrow_schema
from flagstone.spark.scan import FlagstoneReader
from flagstone.spark.stored_schema import plan_types, read_types
from flagstone.spark.stream.sink import StreamSink, parse_sink_options
from kit.databases import QUIET, eventually
from spark.stream_rig import PROGRESS

LIVE = QUIET.replace(manifest_poll_interval=timedelta(seconds=0.1))
BASE = "region string, id long, qty int, price decimal(10,2), rate float"
FIRST = [
    {"region": "eu", "id": 1, "qty": 5, "price": Decimal("1.20"), "rate": 0.5},
    {"region": "us", "id": 2, "qty": None, "price": None, "rate": None},
]
Row = dict[str, Any]


TYPES = {
    "string": StringType(),
    "long": LongType(),
    "int": IntegerType(),
    "smallint": ShortType(),
    "float": FloatType(),
    "double": DoubleType(),
    "binary": BinaryType(),
    "decimal(10,2)": DecimalType(10, 2),
    "decimal(10,3)": DecimalType(10, 3),
    "decimal(12,2)": DecimalType(12, 2),
}


def types_of(ddl: str) -> StructType:
    """As `StructType.fromDDL`, which needs a running Spark."""
    found = StructType()
    for field in ddl.split(", "):
        name, kind, *rest = field.split(" ")
        found.add(name.strip("`"), TYPES[kind], not rest)
    return found


def batch_of(ddl: str, rows: list[Row]) -> pa.RecordBatch:
    table = pa.Table.from_pylist(rows, schema=arrow_schema(types_of(ddl)))
    return table.combine_chunks().to_batches()[0]


def by_load(folder: Path, ddl: str, rows: list[Row], *, overwrite: bool = False, **options: str) -> None:
    source = FlagstoneDataSource({"path": str(folder), **options})
    writer = source.writer(types_of(ddl), overwrite)
    writer.commit([writer.write(iter([batch_of(ddl, rows)]))])


def by_sink(folder: Path, ddl: str, rows: list[Row], **options: str) -> None:
    given = {"path": str(folder), "query": "orders", **options}
    sink = FlagstoneDataSource(given).streamWriter(types_of(ddl), False)
    last = progress(folder)
    StreamSink(None, parse_sink_options(given)).commit([sink.write(iter([batch_of(ddl, rows)]))], last + 1)


def progress(folder: Path) -> int:
    with flagstone.open_reader(folder, mode="latest") as reader:
        return int((reader.get(PROGRESS) or b"-1").split()[0])


class Frame:
    """The part of a DataFrame that `foreach_batch` uses."""

    def __init__(self, ddl: str, rows: list[Row]) -> None:
        self.schema = types_of(ddl)
        self.sparkSession = self.sparkContext = self
        self._batch = batch_of(ddl, rows)

    def getLocalProperty(self, name: str) -> None:  # noqa: N802 - Spark's name
        return None

    def toArrow(self) -> pa.Table:  # noqa: N802
        return pa.Table.from_batches([self._batch])


def by_foreach_batch(folder: Path, ddl: str, rows: list[Row], **options: str) -> None:
    keys = [name for name in options.get("key.columns", "").split(",") if name]
    with flagstone.open(folder, settings=QUIET) as db:
        batch_id = int((db.get(PROGRESS) or b"-1").split()[0]) + 1
        frame: Any = Frame(ddl, rows)
        foreach_batch(db, "orders", key_columns=keys)(frame, batch_id)


def by_python(folder: Path, ddl: str, rows: list[Row], **options: str) -> None:
    batch = batch_of(ddl, rows)
    with flagstone.open(folder, settings=QUIET) as db:
        stored = db.schema()
        keys = options.get("key.columns", "region,id").split(",")
        with db.transaction() as transaction:
            given = given_columns(batch.schema, stored.key_names if stored else keys, nullable=True)
            planned = transaction.ensure_schema(given)
            writer = TableWriter(planned.schema, planned.version)
            for row in batch.to_pylist():
                transaction.put(*writer.encode(row))


Writer = Callable[..., None]
WRITERS: list[Any] = [by_load, by_sink, by_foreach_batch, by_python]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "db"
    by_load(folder, BASE, FIRST, **{"key.columns": "region,id"})
    return folder


def read(folder: Path, ddl: str | None = None, **options: str) -> list[Row]:
    """What Spark would show: the partitions of a read, decoded."""
    held = hold_checkpoint(parse_read_options({"path": str(folder), **options}))
    types = plan_types(held.options, held.table) if ddl is None else types_of(ddl)
    reader = FlagstoneReader(held, types)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def filled(rows: list[Row], *names: str) -> list[Row]:
    return [{name: row.get(name) for name in names} for row in rows]


NEW = {"region": "zz", "id": 9, "qty": 7, "price": Decimal("3.00"), "rate": 1.5}
ACCEPTED = {
    "same": (BASE, NEW, ["region", "id", "qty", "price", "rate"]),
    "reordered": (
        "rate float, price decimal(10,2), id long, qty int, region string",
        NEW,
        ["region", "id", "qty", "price", "rate"],
    ),
    "added": (
        BASE + ", note string",
        NEW | {"note": "n"},
        ["region", "id", "qty", "price", "rate", "note"],
    ),
    "added in front": (
        "note string, " + BASE,
        NEW | {"note": "n"},
        ["region", "id", "qty", "price", "rate", "note"],
    ),
    "widened": (
        BASE.replace("qty int", "qty long").replace("rate float", "rate double"),
        NEW | {"qty": 2**40},
        ["region", "id", "qty", "price", "rate"],
    ),
    "dropped": (
        "region string, id long, qty int, rate float",
        {name: cell for name, cell in NEW.items() if name != "price"},
        ["region", "id", "qty", "rate"],
    ),
    "swapped by position": (
        "region string, id long, price decimal(10,2), qty int, rate float",
        NEW,
        ["region", "id", "qty", "price", "rate"],
    ),
}
REFUSED = {
    "narrowed": (BASE.replace("qty int", "qty smallint"), NEW, "'qty' is stored as int32, and the rows have int16"),
    "float for int": (BASE.replace("qty int", "qty float"), NEW, "'qty' is stored as int32"),
    "int for float": (BASE.replace("rate float", "rate int"), NEW | {"rate": 1}, "'rate' is stored as float32"),
    "string for int": (BASE.replace("qty int", "qty string"), NEW | {"qty": "7"}, "'qty' is stored as int32"),
    "renamed": (
        BASE.replace("qty int", "amount int"),
        {"amount": 7, **{name: cell for name, cell in NEW.items() if name != "qty"}},
        "never renamed",
    ),
    "names swapped": (
        "region string, id long, price int, qty decimal(10,2), rate float",
        NEW | {"price": 7, "qty": Decimal("3.00")},
        "stored as",
    ),
    "decimal scale": (BASE.replace("(10,2)", "(10,3)"), NEW, r"'price' is stored as decimal\(10,2\)"),
    "decimal precision": (BASE.replace("(10,2)", "(12,2)"), NEW, r"'price' is stored as decimal\(10,2\)"),
    "key type": (BASE.replace("id long", "id int"), NEW, "key column 'id' is stored as int64"),
}  # fmt: skip


@pytest.mark.parametrize("change", ACCEPTED)
@pytest.mark.parametrize("write", WRITERS)
def test_an_append_that_fits_is_read_back_with_the_rows_before_it(
    folder: Path, write: Writer, change: str
) -> None:
    ddl, row, names = ACCEPTED[change]

    write(folder, ddl, [row])

    assert read(folder) == filled([*FIRST, row], *names)


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("write", WRITERS)
def test_any_other_append_is_refused_and_changes_nothing(folder: Path, write: Writer, change: str) -> None:
    ddl, row, said = REFUSED[change]

    with pytest.raises(InvalidRequest, match=said):
        write(folder, ddl, [row])

    assert read(folder) == FIRST


@pytest.mark.parametrize("write", WRITERS)
def test_the_first_structured_write_stores_the_schema(tmp_path: Path, write: Writer) -> None:
    by_load(tmp_path / "db", "key binary, value binary", [{"key": b"\x01", "value": b"x"}])
    write(tmp_path / "fresh", BASE, FIRST, **{"key.columns": "region,id"})

    assert read(tmp_path / "fresh") == FIRST
    assert Admin(tmp_path / "db").schema() is None
    schema = Admin(tmp_path / "fresh").schema()
    assert schema is not None
    assert [str(column) for column in schema.columns] == [
        "region string", "id int64", "qty int32", "price decimal(10,2)", "rate float32",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ddl", "wanted"),
    [
        ("id long, region string", ["id", "region"]),
        ("rate float", ["rate"]),
        ("qty long, rate double", ["qty", "rate"]),
        ("price decimal(10,2), id long", ["price", "id"]),
    ],
)
def test_a_reader_names_the_columns_it_wants_in_any_order(folder: Path, ddl: str, wanted: list[str]) -> None:
    assert read(folder, ddl) == filled(FIRST, *wanted)
    assert read(folder, columns=",".join(wanted)) == filled(FIRST, *wanted)


def test_a_reader_may_ask_for_sequence_numbers_and_times(folder: Path) -> None:
    seq = Admin(folder).manifest().value.last_l0_seq
    assert read(folder, "seq long, id long") == [{"seq": seq, "id": 1}, {"seq": seq, "id": 2}]
    assert read(folder, columns="id,seq") == [{"id": 1, "seq": seq}, {"id": 2, "seq": seq}]


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("qty smallint", "'qty' is stored as int32 and cannot be read as int16"),
        ("qty float", "cannot be read as float32"),
        ("amount int", "no column 'amount'"),
        ("price decimal(10,3)", r"cannot be read as decimal\(10,3\)"),
        ("id int", "'id' is stored as int64"),
    ],
)
def test_a_reader_with_other_columns_is_refused(folder: Path, ddl: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read(folder, ddl)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": "id,amount"}, "no column 'amount'; it has region, id, qty, price, rate, seq"),
        ({"columns": "id,key"}, "raw=true reads keys and values as bytes"),
        ({"key.columns": "id,region"}, "the key columns are region, id, in this order"),
        ({"raw": "true", "key.columns": "id"}, "keep one of them"),
        ({"mode": "lenient"}, "modes are PERMISSIVE"),
    ],
)
def test_options_that_do_not_fit_the_schema_are_refused(
    folder: Path, options: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read(folder, **options)


def test_raw_reads_show_bytes_and_hide_system_rows(folder: Path) -> None:
    by_sink(folder, BASE, [NEW])
    assert len(read(folder, raw="true")) == 3
    assert read(folder, columns="key,value") == read(folder, raw="true")
    assert read(folder, "key binary, value binary") == read(folder, raw="true")
    keys = [bytes(row["key"]) for row in read(folder, raw="true", include_system="true")]
    assert keys[:2] == [schema_key(), PROGRESS]
    assert len(keys) == 5
    assert read(folder) == [*FIRST, NEW]
    shown = read(folder, raw="true", keys="hex:" + PROGRESS.hex())
    assert shown == []


def test_rows_as_bytes_are_refused_in_a_structured_database_unless_raw(folder: Path) -> None:
    rows = [{"key": b"k", "value": b"v"}]
    with pytest.raises(InvalidRequest, match="holds structured rows with the key columns region, id"):
        by_load(folder, "key binary, value binary", rows)
    by_load(folder, "key binary, value binary", rows, raw="true")
    assert len(read(folder, raw="true")) == 3


def test_a_column_that_came_back_shows_its_old_values(folder: Path) -> None:
    by_load(folder, "region string, id long, qty int", [{"region": "x", "id": 3, "qty": 1}])
    assert read(folder) == filled([*FIRST, {"region": "x", "id": 3, "qty": 1}], "region", "id", "qty")
    by_load(folder, "region string, id long, qty int, price decimal(10,2)", [NEW])
    shown = filled([*FIRST, {"region": "x", "id": 3, "qty": 1}, NEW], "region", "id", "qty", "price")
    assert read(folder) == shown
    rates = [(row["id"], row["rate"]) for row in read(folder, "rate float, id long")]
    assert rates == [(1, 0.5), (2, None), (3, None), (9, None)]


def test_an_overwrite_may_have_other_columns_and_readers_of_the_past_still_read(folder: Path) -> None:
    before = Admin(folder).create_checkpoint()
    by_load(folder, "n int, m string", [{"n": 1, "m": "a"}], overwrite=True, **{"key.columns": "n"})

    assert read(folder) == [{"n": 1, "m": "a"}]
    assert read(folder, checkpoint=str(before.id)) == FIRST
    schema = Admin(folder).schema()
    assert schema is not None
    assert [version.number for version in schema.versions] == [2]


def test_key_only_tables_hold_rows_and_may_get_columns(tmp_path: Path) -> None:
    folder, rows = tmp_path / "db", [{"a": "x", "b": 1}, {"a": "y", "b": 2}]
    by_load(folder, "a string, b int", rows, **{"key.columns": "a,b"})
    assert read(folder) == rows
    assert [bytes(row["value"]) for row in read(folder, raw="true")] == [b"", b""]

    by_load(folder, "a string, b int, `c.d` string", [{"a": "z", "b": 3, "c.d": "new"}])
    assert read(folder) == filled([*rows, {"a": "z", "b": 3, "c.d": "new"}], "a", "b", "c.d")


def test_a_schema_may_belong_to_a_prefix(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"other", b"bytes")
    by_load(folder, "id long, n int", [{"id": 1, "n": 2}], **{"key.columns": "id", "key.prefix": "orders/"})
    by_load(folder, "n int, id long", [{"id": 3, "n": 4}], **{"key.prefix": "orders/"})

    assert read(folder, prefix="orders/") == [{"id": 1, "n": 2}, {"id": 3, "n": 4}]
    assert next(bytes(row["key"]) for row in read(folder)) == b"orders/*\x01"
    assert list(Admin(folder).schemas()) == [b"orders/"]


def test_an_overwrite_of_one_table_among_others_is_refused(folder: Path) -> None:
    before = read(folder)
    with pytest.raises(InvalidRequest, match=r"replaces all rows of the database.*delete_prefix"):
        by_load(folder, BASE, [NEW], overwrite=True, **{"key.prefix": "t/", "key.columns": "region,id"})
    assert read(folder) == before


def test_columns_of_python_that_spark_has_no_name_or_type_for_are_read_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    types = pa.schema(
        [("id", pa.uint64()), ("seq", pa.uint8()), ("at", pa.timestamp("ms")), ("tag", pa.binary(2))]
    )
    row = {"id": 2**64 - 1, "seq": 200, "at": datetime(2026, 1, 2), "tag": b"ab"}
    with flagstone.open(folder, settings=QUIET) as db:
        planned = db.ensure_schema(given_columns(types, ["id"]))
        db.put(*TableWriter(planned.schema).encode(row))

    assert read(folder) == [row | {"id": Decimal(2**64 - 1)}]
    assert read(folder, columns="seq") == [{"seq": 200}]


@pytest.mark.parametrize("write", [by_load, by_sink, by_foreach_batch])
def test_deletions_may_lack_values_that_never_are_null(tmp_path: Path, write: Writer) -> None:
    folder = tmp_path / "db"
    types = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int32(), nullable=False)])
    with flagstone.open(folder, settings=QUIET) as db:
        planned = db.ensure_schema(given_columns(types, ["id"]))
        for number in range(3):
            db.put(*TableWriter(planned.schema).encode({"id": number, "n": number}))

    with_op = "id long, n int, op string"
    write(folder, with_op, [{"id": 1, "n": None, "op": "delete"}])
    assert read(folder) == [{"id": 0, "n": 0}, {"id": 2, "n": 2}]
    write(folder, with_op, [{"id": 2, "n": None, "op": "Delete"}])
    assert read(folder) == [{"id": 0, "n": 0}]
    with pytest.raises(InvalidRequest, match="'n' has nulls"):
        write(folder, with_op, [{"id": 1, "n": None, "op": None}])


@pytest.mark.parametrize("write", [by_load, by_sink, by_foreach_batch])
@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("OP string", "delete", "'OP' is 'op' in another case"),
        ("Expires_ms long", 5, "'Expires_ms' is 'expires_ms' in another case"),
        ("op int", 1, "'op' is int; it must be string"),
        ("expires_ms string", "5", "'expires_ms' is string"),
        ("ttl_ms double", 1.5, "'ttl_ms' is double"),
        ("ttl_ms long, expires_ms long", 5, "keep one of them"),
    ],
)
def test_columns_that_almost_control_a_row_are_refused(
    folder: Path, write: Writer, column: str, cell: Any, said: str
) -> None:
    names = [part.split()[0] for part in column.split(", ")]
    row = NEW | dict.fromkeys(names, cell)

    with pytest.raises(InvalidRequest, match=said):
        write(folder, f"{BASE}, {column}", [row])


def test_stored_json_values_follow_the_schema_too(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    by_load(folder, BASE, FIRST, **{"key.columns": "region,id", "value.format": "json"})
    by_load(folder, BASE + ", note string", [NEW | {"note": "n"}])

    assert read(folder) == filled(
        [*FIRST, NEW | {"note": "n"}], "region", "id", "qty", "price", "rate", "note"
    )
    with pytest.raises(InvalidRequest, match="'qty' is stored as int32"):
        by_load(folder, BASE.replace("qty int", "qty string"), [NEW | {"qty": "7"}])
    with pytest.raises(InvalidRequest, match="the format 'json'"):
        by_load(folder, BASE, [NEW], **{"key.columns": "region,id", "value.format": "row"})


def test_a_damaged_schema_row_is_damage(folder: Path) -> None:
    by_load(folder, "key binary, value binary", [{"key": schema_key(), "value": b"{}"}], raw="true")

    with pytest.raises(CorruptData, match="damaged"):
        read(folder)
    with pytest.raises(CorruptData, match="damaged"):
        by_load(folder, BASE, [NEW])
    assert len(read(folder, raw="true")) == 2


# -- two at once -----------------------------------------------------------------------------------------------


def await_announced(db: flagstone.Db, folder: Path) -> None:
    """Wait until loads find this writer: the load of the fixture was a writer, too."""
    store, paths = open_store(DatabaseAddress(str(folder)))
    eventually(lambda: load_notice(store, paths).epoch == db.status()["writer_epoch"])


def begun(folder: Path, ddl: str) -> Any:
    return FlagstoneDataSource({"path": str(folder)}).writer(types_of(ddl), False)


def finish(writer: Any, ddl: str, row: Row) -> None:
    writer.commit([writer.write(iter([batch_of(ddl, [row])]))])


NOTE, SIZE = BASE + ", note string", BASE + ", size int"


def test_a_load_that_was_planned_before_another_change_is_refused_beside_a_writer(folder: Path) -> None:
    with flagstone.open(folder, settings=LIVE) as db:
        await_announced(db, folder)
        late = begun(folder, NOTE)
        finish(begun(folder, SIZE), SIZE, NEW | {"size": 1})
        with pytest.raises(SchemaChanged):
            finish(late, NOTE, NEW | {"note": "n"})
        finish(begun(folder, NOTE + ", size int"), NOTE + ", size int", NEW | {"note": "n", "size": 2})
        eventually(lambda: db.schema() is not None and len(db.schema().versions) == 3)
    assert read(folder)[-1] == NEW | {"size": 2, "note": "n"}


def test_the_writer_refuses_a_load_whose_schema_is_another_one_when_it_adopts_the_load(folder: Path) -> None:
    """The driver has compared the schema a moment before."""
    address = DatabaseAddress(str(folder))
    with flagstone.open(folder, settings=LIVE) as db:
        await_announced(db, folder)
        for expected in (None, b"another schema"):
            plan = begin_load(address)
            options = parse_write_options({"path": str(folder)})
            made = write_ssts([pa.RecordBatch.from_pydict({"key": [b"k"], "value": [b"v"]})], plan, options)
            with pytest.raises(ConditionFailed):
                commit_load(plan, options, made, expects=[(schema_key(), expected)])
        db.put(b"after", b"", await_durable=True)
        assert db.get(b"k") is None


def test_rows_of_python_conflict_with_a_load_that_replaces_everything(folder: Path) -> None:
    with flagstone.open(folder, settings=LIVE) as db:
        await_announced(db, folder)
        transaction = db.transaction()
        planned = transaction.ensure_schema(
            given_columns(arrow_schema(types_of(BASE)), ["region", "id"], nullable=True)
        )
        transaction.put(*TableWriter(planned.schema, planned.version).encode(NEW))
        by_load(folder, "n int, m string", [{"n": 1, "m": "a"}], overwrite=True, **{"key.columns": "n"})
        eventually(lambda: db.schema() is not None and db.schema().key_names == ("n",))
        with pytest.raises(TransactionConflict):
            transaction.commit()
    assert read(folder) == [{"n": 1, "m": "a"}]


def test_loads_and_writes_that_all_change_the_schema_never_give_a_version_two_meanings(folder: Path) -> None:
    """Every process adds its own column, beside a writer that does the same, until all columns are there."""
    done: list[str] = []

    def add(name: str) -> None:
        for _ in range(40):
            schema = Admin(folder).schema()
            assert schema is not None
            given = read_types(schema)
            if name not in given.fieldNames():
                given.add(name, IntegerType())
            row = dict.fromkeys(given.fieldNames()) | {"region": name, "id": 100, name: 1}
            try:
                writer = FlagstoneDataSource({"path": str(folder)}).writer(given, False)
                batch = pa.Table.from_pylist([row], schema=arrow_schema(given)).to_batches()[0]
                writer.commit([writer.write(iter([batch]))])
            except (TransactionConflict, InvalidRequest, Unavailable):  # another process came first
                continue
            done.append(name)
            return

    with flagstone.open(folder, settings=LIVE) as db:
        await_announced(db, folder)
        threads = [threading.Thread(target=add, args=(f"c{at}",)) for at in range(3)]
        for thread in threads:
            thread.start()
        for at in range(3):
            schema = db.schema()
            assert schema is not None
            types = arrow_schema(read_types(schema).add(f"w{at}", IntegerType()))
            planned = None
            while planned is None:
                try:
                    planned = db.ensure_schema(given_columns(types, ["region", "id"], nullable=True))
                except InvalidRequest:  # a load has added a column since
                    schema = db.schema()
                    assert schema is not None
                    types = arrow_schema(read_types(schema).add(f"w{at}", IntegerType()))
            row = {"region": f"w{at}", "id": 100, f"w{at}": 1}
            db.put(*TableWriter(planned.schema, planned.version).encode(row))
        for thread in threads:
            thread.join()
    names = {f"c{at}" for at in range(3)} | {f"w{at}" for at in range(3)}
    assert sorted(done) == ["c0", "c1", "c2"]
    mine = {row["region"]: row for row in read(folder) if row["id"] == 100}
    assert set(mine) == names
    for name in names & set(next(iter(mine.values()))):
        assert [region for region, row in mine.items() if row.get(name) is not None] == [name]


# -- malformed rows --------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(folder: Path) -> Path:
    """The rows, and beside them a value that is no row, a value of a version to come, and a key that is no key."""
    with flagstone.open(folder, settings=QUIET) as db:
        key = b"Xm\x00*\x05"
        db.put(key, b"garbage")
        db.put(b"Xn\x00*\x06", b"\x02\x09\x03\x07")
        db.put(b"\x99", next(value for _, value in db.scan(b"X")))
    return folder


def test_permissive_reads_give_nulls_and_the_bytes(mixed: Path) -> None:
    rows = read(mixed, BASE + ", _corrupt binary")
    nothing = dict.fromkeys(["qty", "price", "rate"])

    assert rows == [
        FIRST[0] | {"_corrupt": None},
        {"region": "m", "id": 5, **nothing, "_corrupt": b"garbage"},
        {"region": "n", "id": 6, **nothing, "_corrupt": b"\x02\x09\x03\x07"},
        FIRST[1] | {"_corrupt": None},
        {"region": None, "id": None, **{name: FIRST[0][name] for name in nothing}, "_corrupt": b"\x99"},
    ]
    assert [row["bad"] for row in read(mixed, columnNameOfCorruptRecord="bad")] == [
        None, b"garbage", b"\x02\x09\x03\x07", None, b"\x99",
    ]  # fmt: skip
    assert len(read(mixed)) == 5
    assert [row["bad"] for row in read(mixed, "bad binary", columnNameOfCorruptRecord="bad")].count(None) == 2


def test_malformed_rows_are_dropped_or_fail_the_read(mixed: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "flagstone.spark")
    assert read(mixed, mode="DropMalformed") == FIRST
    assert "malformed rows=3 database=db mode=DROPMALFORMED" in caplog.text
    with pytest.raises(CorruptData):
        read(mixed, mode="failfast")
    with pytest.raises(CorruptData, match="'qty' is not nullable"):
        read(mixed, "qty int not null")


def test_damage_of_a_block_fails_a_read_in_every_mode(folder: Path) -> None:
    largest = max((folder / "compacted").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[4] ^= 0xFF
    largest.write_bytes(data)

    for mode in ("PERMISSIVE", "DROPMALFORMED", "FAILFAST"):
        with pytest.raises(CorruptData):
            read(folder, mode=mode)


def test_rows_without_a_version_are_read_by_the_columns_that_the_reader_names(tmp_path: Path) -> None:
    """A database from before schemas were stored, and then a load that stores one."""
    from flagstone import keys, values

    folder, types = tmp_path / "db", arrow_schema(types_of(BASE))
    batch = batch_of(BASE, FIRST)
    old = {
        "key": keys.encode_arrow(batch.columns[:2]).to_pylist(),
        "value": values.codec("row", pa.schema(list(types)[2:])).encode_arrow(batch).to_pylist(),
    }
    rows = [{"key": key, "value": value} for key, value in zip(*old.values(), strict=True)]
    by_load(folder, "key binary, value binary", rows)

    assert read(folder, BASE, **{"key.columns": "region,id"}) == FIRST
    by_load(folder, BASE, [NEW], **{"key.columns": "region,id"})
    assert read(folder, BASE, **{"key.columns": "region,id"}) == [*FIRST, NEW]
    assert [row["qty"] for row in read(folder)] == [None, None, 7]
    with pytest.raises(InvalidRequest, match="names no version"):
        read(folder, mode="FAILFAST")


def test_a_clone_of_a_key_range_is_read_by_the_schema_of_its_source(folder: Path) -> None:
    clone = folder.parent / "part"
    Admin(folder).clone("part", range=(b"Xu", None))

    assert len(read(clone)) == 1
    assert read(clone, **{"schema.of": str(folder)}) == FIRST[1:]
    with pytest.raises(InvalidRequest, match=r"schema\.of"):
        read(clone, BASE, **{"key.columns": "region,id"})
    with pytest.raises(InvalidRequest, match="stores no schema"):
        read(clone, **{"schema.of": str(clone)})
    by_load(clone, BASE, [NEW], **{"key.columns": "region,id"})
    assert Admin(clone).schema() is None
    assert read(clone, "id long", **{"schema.of": str(folder)}) == [{"id": 2}, {"id": 9}]
    with flagstone.open(clone, settings=QUIET) as db, pytest.raises(InvalidRequest, match="writable range"):
        db.ensure_schema(given_columns(arrow_schema(types_of(BASE)), ["region", "id"]))


def test_a_read_by_stored_schema_of_a_database_without_one_needs_types(tmp_path: Path) -> None:
    by_load(tmp_path / "db", "key binary, value binary", [{"key": b"a", "value": b"b"}])
    with pytest.raises(InvalidRequest, match="needs the types of all columns"):
        read(tmp_path / "db", **{"key.columns": "id"})
    assert read(tmp_path / "db") == [{"key": b"a", "value": b"b"}]


def test_fields_of_a_struct_may_be_null_although_the_first_rows_had_none(tmp_path: Path) -> None:
    def batch(row: Row, *, nullable: bool) -> pa.RecordBatch:
        inner = pa.struct([pa.field("x", pa.int32(), nullable), pa.field("y", pa.string(), nullable)])
        types = [pa.field("id", pa.int64()), pa.field("s", inner), pa.field("l", pa.list_(inner))]
        return pa.RecordBatch.from_pylist([row], schema=pa.schema(types))

    rows = [
        {"id": 1, "s": {"x": 1, "y": "a"}, "l": [{"x": 1, "y": "b"}]},
        {"id": 2, "s": {"x": None, "y": None}, "l": [{"x": None, "y": None}]},
        {"id": 3, "s": {"x": 3, "y": "c"}, "l": []},
    ]
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        exact = given_columns(batch(rows[0], nullable=False).schema, ["id"])
        planned = db.ensure_schema(exact)
        made = TableWriter(planned.schema).encode_arrow(batch(rows[0], nullable=False))
        db.put(made[0][0].as_py(), made[1][0].as_py())
    for nullable, row in zip((True, False), rows[1:], strict=True):
        given = batch(row, nullable=nullable)
        source = FlagstoneDataSource({"path": str(folder)})
        writer = source.writer(from_arrow_schema(given.schema), overwrite=False)
        writer.commit([writer.write(iter([given]))])

    assert read(folder) == rows
    with flagstone.open_reader(folder) as reader:
        assert reader.schema().current.number == 2


def test_a_batch_of_malformed_rows_only_is_read_with_some_of_its_columns(folder: Path) -> None:
    with flagstone.open(folder, settings=QUIET) as db:
        for key, _ in list(db.scan()):
            db.put(key, b"no row")

    rows = read(folder, "id long, _corrupt binary")

    assert {(type(row["id"]), row["_corrupt"]) for row in rows} == {(int, b"no row")}
