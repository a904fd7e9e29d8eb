"""`Db.write_arrow`: what it accepts, what it refuses, and what others see of its rows."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest, TransactionConflict
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.lsm.operators import Concatenate
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.write.columns import GROUP_BYTES, GROUP_ROWS, ColumnNames, row_groups
from kit.databases import MANUAL, eventually

ROWS = {"key": [b"a", b"c", b"b"], "value": [b"1", b"", b"3"]}
STORED = [(b"a", b"1"), (b"b", b"3"), (b"c", b"")]


@pytest.fixture
def db() -> Iterator[Db]:
    with open_database("db", store=MemoryStore(), settings=MANUAL, merge_operator=Concatenate()) as opened:
        yield opened


class Stream:
    """A producer of another library: nothing but the Arrow C stream."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class Columns:
    """A producer of another library: nothing but the Arrow C array."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return self._batch.__arrow_c_array__(requested_schema)


def table_of(kind: pa.DataType) -> pa.Table:
    cast = (lambda raw: raw.decode()) if "string" in str(kind) else (lambda raw: raw)
    return pa.table({name: pa.array([cast(raw) for raw in column], kind) for name, column in ROWS.items()})


@pytest.mark.parametrize(
    "rows",
    [
        pa.table(ROWS),
        pa.record_batch(ROWS),
        pa.table(ROWS).to_reader(),
        pa.table(ROWS).to_batches(2),
        iter(pa.table(ROWS).to_batches(1)),
        Stream(pa.table(ROWS)),
        Columns(pa.record_batch(ROWS)),
        pd.DataFrame(ROWS),
        pl.DataFrame(ROWS),
        pl.DataFrame(ROWS).cast(pl.String),
        duckdb.sql("select * from (values ('a'::blob, '1'), ('c', ''), ('b', '3')) rows(key, value)"),
        pa.table({"before": [1, 2, 3], **ROWS}).slice(0, 3),
        pa.concat_tables([pa.table(ROWS), pa.table(ROWS)]).slice(3, 3),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_it_accepts_everything_that_exports_arrow_data(db: Db, rows: Any) -> None:
    assert db.write_arrow(rows) == 3
    assert list(db.scan()) == STORED


def test_arrow_data_goes_in_and_out_without_importing_pandas() -> None:
    program = """if True:
        import sys
        import flagstone
        import polars as pl

        columns = {"key": [b"a", b"b", b"c"], "value": [b"1", b"2", None], "op": ["put", None, "delete"],
            "expires_ms": [None, 1 << 50, None]}
        with flagstone.open("memory://shop/db") as db:
            db.put(b"c", b"3")
            assert db.write_arrow(pl.DataFrame(columns), op="op", expires_ms="expires_ms") == 3
            every = ("key", "value", "seq", "created_ms", "expires_ms")
            assert db.scan_arrow(columns=every).read_all().num_rows == 2
            db.flush()
            db.put(b"a", b"newer")
            assert db.scan_arrow(columns=every).read_all()["expires_ms"].to_pylist() == [None, 1 << 50]
        print([name for name in ("pandas", "pyspark") if name in sys.modules])
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string(), pa.string_view()],
    ids=str,
)
def test_it_accepts_every_type_of_bytes_and_text(db: Db, kind: pa.DataType) -> None:
    long = pa.table({"key": pa.array(["k" * 40], kind), "value": pa.array(["v" * 400], kind)})
    assert db.write_arrow([table_of(kind), long]) == 4
    assert list(db.scan()) == [*STORED, (b"k" * 40, b"v" * 400)]


def test_keys_may_have_a_fixed_size(db: Db) -> None:
    keys = pa.array([b"%016d" % number for number in range(3)], pa.binary(16))
    db.write_arrow(pa.table({"id": keys, "value": ["x", "y", "z"]}), key="id")
    assert db.get(b"%016d" % 2) == b"z"


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_binary(), pa.string_view(), pa.binary_view()], ids=str
)
def test_categories_are_written_as_their_words(db: Db, kind: pa.DataType) -> None:
    words = pa.array([b"a", b"b", b"c"], pa.binary()).cast(kind)
    column = pa.DictionaryArray.from_arrays(pa.array([2, 0, 1], pa.int8()), words)
    rows = pa.table({"key": column, "value": column}).slice(0, 2)
    assert db.write_arrow(rows) == 2
    assert list(db.scan()) == [(b"a", b"a"), (b"c", b"c")]
    with pytest.raises(InvalidRequest, match="column 'key' is null in row 1"):
        db.write_arrow(pa.table({"key": pa.array(["x", None]).dictionary_encode(), "value": ["1", "2"]}))


def test_categories_of_dataframes_are_written(db: Db) -> None:
    frame = pl.DataFrame({"key": ["a"], "value": ["1"]}, schema={"key": pl.Categorical, "value": pl.String})
    assert db.write_arrow(frame) == 1
    assert db.write_arrow(pd.DataFrame({"key": pd.Categorical(["b"]), "value": ["2"]})) == 1
    assert list(db.scan()) == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.parametrize(
    "rows", [{"key": ["a"]}, [("a", "b")], "text", pa.array(["a"]), pl.Series("key", ["a"])], ids=type
)
def test_what_is_no_table_is_refused(db: Db, rows: Any) -> None:
    with pytest.raises(InvalidRequest, match="rows are"):
        db.write_arrow(rows)


def test_no_rows_are_nothing_to_write(db: Db) -> None:
    assert db.write_arrow(pa.table(ROWS).slice(0, 0)) == 0
    assert db.write_arrow([]) == 0


def test_operations_and_expiries_come_from_columns(db: Db) -> None:
    db.put(b"gone", b"1")
    db.put(b"sum", b"1")
    rows = pa.table(
        {
            "key": [b"gone", b"sum", b"sum", b"new", b"ends"],
            "value": [None, b"2", b"3", b"n", b"e"],
            "what": ["delete", "merge", "merge", None, "put"],
            "until": [None, None, None, None, 9_000_000_000_000],
        }
    )
    assert db.write_arrow(rows, op="what", expires_ms="until") == 5
    assert dict(db.scan()) == {b"sum": b"123", b"new": b"n", b"ends": b"e"}
    row = db.get_row(b"ends")
    assert row is not None
    assert row.expires_ms == 9_000_000_000_000


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({"key": [b"a", None], "value": [b"1", b"2"]}, {}, "column 'key' is null in row 1"),
        ({"key": [b"a", b"b"], "value": [b"1", None]}, {}, "column 'value' is null in row 1"),
        (
            {"key": [b"a", b""], "value": [b"1", b"2"]},
            {},
            "column 'key' has 0 bytes in row 1; it has 1 to 65535",
        ),
        ({"key": [b"k" * 65_536], "value": [b"1"]}, {}, "column 'key' has 65536 bytes in row 0"),
        ({"key": [1], "value": [b"1"]}, {}, "column 'key' is int64; it must be binary or string"),
        ({"k": [b"a"], "value": [b"1"]}, {}, "no single column 'key'; there are k, value"),
        ({**ROWS, "op": ["put", "upsert", "put"]}, {"op": "op"}, "column 'op' is 'upsert' in row 1"),
        ({**ROWS, "ttl": [1, 0, 1]}, {"ttl_ms": "ttl"}, "column 'ttl' is 0 in row 1; choose 1 to"),
        ({**ROWS, "end": [1, -1, 1]}, {"expires_ms": "end"}, "column 'end' is -1 in row 1; choose 0 to"),
        ({**ROWS, "end": [1.5, 1.0, 1.0]}, {"ttl_ms": "end"}, "column 'end' is double"),
        ({**ROWS, "t": [1, 1, 1]}, {"ttl_ms": "t", "expires_ms": "t"}, "not both"),
    ],
)
def test_it_refuses_what_is_no_row_and_names_column_and_row(
    db: Db, rows: dict[str, Any], options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        db.write_arrow(pa.table(rows), **options)
    assert list(db.scan()) == []


def test_rows_are_counted_over_all_batches(db: Db) -> None:
    good = pa.table({"key": ["k"] * 5000, "value": ["v"] * 5000})
    bad = pa.table({"key": pa.array(["a", None]), "value": ["1", "2"]})
    with pytest.raises(InvalidRequest, match="row 5001"):
        db.write_arrow([good, bad])
    # The groups before the bad one are written, and the row before it is not.
    assert list(db.scan()) == [(b"k", b"v")]


def test_it_refuses_what_is_not_arrow_data(db: Db) -> None:
    with pytest.raises(InvalidRequest, match="not int"):
        db.write_arrow(17)


def test_a_merge_without_an_operator_is_refused() -> None:
    with (
        open_database("db", store=MemoryStore(), settings=MANUAL) as db,
        pytest.raises(InvalidRequest, match="no merge operator"),
    ):
        db.write_arrow(pa.table({**ROWS, "op": ["put", "merge", "put"]}), op="op")


def test_groups_are_limited_by_rows_and_by_bytes() -> None:
    names = ColumnNames("key", "value")
    small = pa.table({"key": ["k"] * 10_000, "value": [""] * 10_000})
    assert [len(group) for group in row_groups(small, names)] == [
        GROUP_ROWS,
        GROUP_ROWS,
        10_000 - 2 * GROUP_ROWS,
    ]
    sizes = [10, GROUP_BYTES // 2, GROUP_BYTES // 3, GROUP_BYTES // 2, 3 * GROUP_BYTES, 10]
    large = pa.table({"key": ["k"] * 6, "value": ["v" * size for size in sizes]})
    assert [len(group) for group in row_groups(large, names)] == [3, 1, 1, 1]


def test_a_group_is_visible_at_once_and_a_snapshot_does_not_see_it(db: Db) -> None:
    db.put(b"a", b"0")
    with db.snapshot() as snapshot:
        db.write_arrow(pa.table({"key": ["c", "b", "a", "a"], "value": ["1", "2", "3", "4"]}))
        assert list(snapshot.scan()) == [(b"a", b"0")]
        assert list(db.scan()) == [(b"a", b"4"), (b"b", b"2"), (b"c", b"1")]


def test_a_transaction_conflicts_with_every_row_of_a_group(db: Db) -> None:
    for key in (b"a", b"b", b"c"):
        transaction = db.transaction()
        transaction.put(key, b"mine")
        db.write_arrow(pa.table(ROWS))
        with pytest.raises(TransactionConflict, match=repr(key)):
            transaction.commit()
    transaction = db.transaction()
    transaction.put(b"d", b"mine")
    db.write_arrow(pa.table(ROWS))
    transaction.commit()


def test_with_synchronous_commit_a_group_is_visible_only_when_all_of_it_is_durable() -> None:
    store = FaultyStore(MemoryStore())
    settings = MANUAL.replace(synchronous_commit=True)
    with open_database("db", store=store, settings=settings) as db:
        store.faults.append(Fault("unavailable", op="put_if_absent", path="*wal*"))
        writer = threading.Thread(target=db.write_arrow, args=(pa.table(ROWS),))
        writer.start()
        eventually(lambda: db.status()["last_seq"] == 2)
        assert list(db.scan()) == []
        assert list(db.scan(dirty=True)) == STORED
        store.faults.clear()
        writer.join(20)
        assert list(db.scan()) == STORED


def test_groups_wait_for_room_as_puts_do() -> None:
    settings = MANUAL.replace(l0_sst_size_bytes=200_000, max_unflushed_bytes=400_000, l0_max_ssts=1000)
    rows = {"key": [b"%08d" % number for number in range(20_000)], "value": [b"v" * 100] * 20_000}
    with open_database("db", store=MemoryStore(), settings=settings.replace(l0_max_ssts_per_key=1000)) as db:
        assert db.write_arrow(pa.table(rows)) == 20_000
        assert db.metrics()["slatedb.db.immutable_memtable_flushes"] > 2
        assert sum(1 for _ in db.scan()) == 20_000


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in (load_interpreted("memtable"), load_compiled("memtable")) if kernel]
)
def test_a_sequence_number_is_given_to_ascending_keys_and_only_once(kernel: Any) -> None:
    memtable = kernel.Memtable()
    (group,) = row_groups(
        pa.table({"key": ["b", "c", "a", "a", "d"], "value": list("12345")}), ColumnNames("key", "value")
    )
    assert group.insert(memtable, 5, 77, None) == memtable.size()
    assert memtable.newest_seq() == 7
    assert [memtable.get(key, 100)[1] for key in (b"a", b"b", b"c", b"d")] == [7, 5, 5, 7]
    assert [row[:4] for row in memtable.versions(b"a", 100)] == [(b"a", 7, 0, b"4"), (b"a", 6, 0, b"3")]
    assert group.insert(memtable, 7, 77, None) == -1
    assert len(memtable) == 5
