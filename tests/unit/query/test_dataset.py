"""`flagstone.dataset` and `flagstone.scan_polars`: what they show, what they hold, what they refuse."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pytest

import flagstone
from flagstone import keys
from flagstone.config import ReaderSettings
from flagstone.db.admin.admin import Admin
from flagstone.db.frozen import open_frozen
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.errors import Closed, InvalidRequest
from flagstone.lsm.operators import Concatenate
from flagstone.runtime.clock import VirtualClock
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

KEY = pc.field("key")


def stored(rows: dict[bytes, bytes]) -> MemoryStore:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL) as db:
        for key, value in rows.items():
            db.put(key, value)
    return store


def pairs(dataset: Any) -> list[tuple[bytes, bytes]]:
    return [tuple(row.values()) for row in dataset.to_table(columns=["key", "value"]).to_pylist()]


def test_a_dataset_holds_a_checkpoint_until_it_is_closed() -> None:
    store = stored({b"a": b"1"})
    admin = Admin("db", store=store)
    with flagstone.dataset("db", store=store) as dataset:
        assert [checkpoint.expires_s is not None for checkpoint in admin.checkpoints()] == [True]
        assert pairs(dataset) == [(b"a", b"1")]
    assert not admin.checkpoints()
    with pytest.raises(Closed, match="open another one"):
        dataset.to_table()
    dataset.close()


def test_settings_may_be_a_mapping() -> None:
    store = stored({b"a": b"1"})
    with flagstone.dataset("db", store=store, settings={"manifest_poll_interval": "1s"}) as dataset:
        assert pairs(dataset) == [(b"a", b"1")]
    with pytest.raises(InvalidRequest, match="did you mean manifest_poll_interval"):
        flagstone.dataset("db", store=store, settings={"manifest_pol_interval": "1s"})


def test_a_collection_is_a_dataset_of_its_columns() -> None:
    with open_database("db", store=MemoryStore(), settings=MANUAL) as db:
        rows = db.collection("c", key=(str, int), value={"n": int})
        rows.update({("a", 1): {"n": 1}, ("b", 2): {"n": 2}})
        db.collection("cd", key=str, value="json")["x"] = 1
        with flagstone.dataset(rows) as dataset:
            found = dataset.to_table(filter=pc.field("key1") == "b").to_pylist()
            assert found == [{"key1": "b", "key2": 2, "n": 2}]
        frame = flagstone.scan_polars(rows)
        assert frame.filter(pl.col("key2") < 2).collect().rows() == [("a", 1, 1)]
        with db.snapshot() as before:
            del rows["a", 1]
            with flagstone.dataset(rows.within(before)) as dataset:
                assert dataset.count_rows() == 2
        with pytest.raises(InvalidRequest, match="leave prefix out"):
            flagstone.dataset(rows, prefix=b"a")


@pytest.mark.parametrize(
    "arguments", [{"mode": "latest"}, {"checkpoint": True}], ids=["latest", "checkpoint"]
)
def test_a_dataset_without_a_checkpoint_of_its_own_writes_nothing(arguments: dict[str, Any]) -> None:
    store = stored({b"a": b"1"})
    if "checkpoint" in arguments:
        arguments = {"checkpoint": Admin("db", store=store).create_checkpoint().id}
    counting = CountingStore(store, component="test")
    with flagstone.dataset("db", store=counting, **arguments) as dataset:
        assert pairs(dataset) == [(b"a", b"1")]
    assert set(counting.totals()["requests"]) <= {"get", "get_range", "get_ranges", "head", "list"}


@pytest.mark.parametrize("mode", ["managed", "latest"])
def test_a_dataset_shows_one_moment_while_the_database_changes(mode: str) -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        db.flush()
        db.put(b"b", b"only in the WAL", await_durable=True)
        with flagstone.dataset("db", store=store, mode=mode) as dataset:
            before = pairs(dataset)
            db.put(b"a", b"2")
            db.delete(b"b")
            db.flush()
            assert pairs(dataset) == before == [(b"a", b"1"), (b"b", b"only in the WAL")]


def test_a_managed_dataset_survives_compaction_and_garbage_collection() -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL) as db:
        for number in range(4):
            db.put(b"k%d" % number, b"old")
            db.flush()
        with flagstone.dataset("db", store=store) as dataset:
            for number in range(4):
                db.put(b"k%d" % number, b"new")
            db.flush()
            admin = Admin("db", store=store)
            admin.compact(full=True)
            admin.collect_garbage(min_age=timedelta(0))
            assert [value for _, value in pairs(dataset)] == [b"old"] * 4


def test_the_checkpoint_of_a_dataset_is_refreshed_while_it_is_open() -> None:
    store, clock = stored({b"a": b"1"}), VirtualClock(start_ms=1_800_000_000_000)
    lifetime = timedelta(minutes=10)
    reader = open_frozen(
        "db", store=store, clock=clock, settings=ReaderSettings(checkpoint_lifetime=lifetime)
    )
    with reader:
        before = reader.status()["checkpoint_expires_s"]
        clock.advance(6 * 60_000)
        reader.refresh()
        assert reader.status()["checkpoint_expires_s"] == before + 360
        assert reader.status()["mode"] == "frozen"


def test_a_dataset_of_a_former_moment_shows_it() -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL) as db:
        seq = db.put(b"a", b"1").seq
        db.put(b"a", b"2", await_durable=True)
        with flagstone.dataset("db", store=store, as_of=seq) as dataset:
            assert pairs(dataset) == [(b"a", b"1")]


def test_open_handles_are_sources() -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        db.flush()
        with db.snapshot() as snapshot, open_reader("db", store=store) as reader:
            datasets = [flagstone.dataset(source) for source in (db, snapshot, reader)]
            db.put(b"a", b"2")
            db.flush()
            reader.refresh()
            assert [pairs(dataset) for dataset in datasets] == [[(b"a", b"1")]] * 3
            for dataset in datasets:
                dataset.close()
            assert snapshot.get(b"a") == b"1"
            assert reader.get(b"a") == b"2"
        with pytest.raises(InvalidRequest, match="not Transaction"):
            flagstone.dataset(db.transaction())  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="checkpoint belongs to an address"):
            flagstone.dataset(db, checkpoint="01740ee5-6459-44af-9a45-85deb6e468e3")


def test_pyarrow_methods_work() -> None:
    store = stored({b"k%d" % number: b"v%d" % (number % 2) for number in range(10)})
    with flagstone.dataset("db", store=store) as dataset:
        assert isinstance(dataset, pads.Dataset)
        assert dataset.schema.names == ["key", "value", "seq", "created_ms", "expires_ms"]
        assert dataset.count_rows() == 10
        assert dataset.count_rows(filter=KEY >= b"k5") == 5
        assert dataset.head(2, columns=["key"]).to_pydict() == {"key": [b"k0", b"k1"]}
        assert dataset.take(pa.array([1, 3]), columns=["key"]).to_pydict() == {"key": [b"k1", b"k3"]}
        assert sum(batch.num_rows for batch in dataset.to_batches(filter=pc.field("seq") > 5)) == 5
        computed = dataset.to_table(columns={"next": pc.field("seq") + 1}, filter=KEY == b"k0")
        assert computed.to_pydict() == {"next": [2]}
        filtered = dataset.filter(KEY >= b"k5").filter(pc.field("value") == b"v0")
        assert filtered.to_table(columns=["key"]).to_pydict() == {"key": [b"k6", b"k8"]}
        assert filtered.count_rows(filter=KEY < b"k8") == 1
        assert dataset.sort_by([("key", "descending")]).head(1, columns=["key"]).to_pydict() == {
            "key": [b"k9"]
        }
        other = pads.InMemoryDataset(pa.table({"key": [b"k3"], "label": ["three"]}))
        assert dataset.join(other, "key", join_type="inner").to_table()["label"].to_pylist() == ["three"]


def test_what_a_dataset_cannot_do_is_refused_with_what_to_do() -> None:
    with flagstone.dataset("db", store=stored({b"a": b"1"})) as dataset:
        with pytest.raises(InvalidRequest, match="no column 'price'; there are key"):
            dataset.to_table(columns=["price"])
        with pytest.raises(InvalidRequest, match="no column 'price'; there are key"):
            dataset.to_table(filter=pc.field("price") > 1)
        with pytest.raises(InvalidRequest, match="has no files"):
            dataset.get_fragments()
        with pytest.raises(InvalidRequest, match="schema="):
            dataset.replace_schema(dataset.schema)
        with pytest.raises(InvalidRequest, match="pass the address"):
            pickle.dumps(dataset)
        other = pads.InMemoryDataset(pa.table({"key": [b"a"]}))
        with pytest.raises(FileNotFoundError, match="has no files"):
            other.join(dataset, "key").to_table()  # Arrow's own code, which knows nothing of databases


def test_keys_and_values_may_be_read_as_text() -> None:
    schema = {"key": pa.string(), "value": pa.string()}
    with flagstone.dataset("db", store=stored({b"a": "ä".encode(), b"b": b"2"}), schema=schema) as dataset:
        assert dataset.to_table(filter=KEY == "a").to_pylist() == [{"key": "a", "value": "ä"}]
        assert flagstone.scan_polars(dataset).filter(pl.col("key") > "a").collect().rows() == [("b", "2")]
    with (
        flagstone.dataset("db", store=stored({b"a": b"\xff"}), schema=schema) as dataset,
        pytest.raises(InvalidRequest, match="column 'value' does not fit string"),
    ):
        dataset.to_table()


def test_keys_of_the_dataset_may_be_limited() -> None:
    store = stored({b"a1": b"", b"b1": b"", b"b2": b"", b"c1": b""})
    with flagstone.dataset("db", store=store, prefix=b"b", stop=b"b2") as dataset:
        assert dataset.to_table(columns=["key"])["key"].to_pylist() == [b"b1"]
        assert dataset.count_rows(filter=KEY.isin([b"a1", b"b1", b"b2"])) == 1


def test_merge_operands_and_expired_rows_are_shown_as_in_every_read() -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL, merge_operator=Concatenate()) as db:
        db.merge(b"a", b"1")
        db.flush()
        db.merge(b"a", b"2")
        db.put(b"gone", b"", expire_at=db.put(b"z", b"").created_ms + 1)
        db.flush()
        with flagstone.dataset(db) as dataset:
            assert dataset.to_table(filter=KEY == b"a")["value"].to_pylist() == [b"12"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": {"price": pa.int64()}}, "no column 'price' to read"),
        ({"schema": {"key": pa.int64()}}, "column 'key' is binary"),
        ({"key_columns": ["id"]}, "give schema="),
        ({"schema": {"id": pa.int64()}, "key_columns": "id"}, "list of names"),
        ({"schema": {"id": pa.int64()}, "key_columns": ["day"]}, "no key column 'day'"),
        ({"schema": {"id": pa.list_(pa.int64())}, "key_columns": ["id"]}, "cannot be part of a key"),
        (
            {"schema": {"id": pa.int64(), "x": pa.int64()}, "key_columns": ["id"], "value_format": "xml"},
            "xml",
        ),
        ({"mode": "newest"}, "mode is"),
        ({"start": b"b", "stop": b"a"}, "inverted"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        flagstone.dataset("db", store=stored({b"a": b"1"}), **options)


def test_a_table_may_have_only_key_columns() -> None:
    store = stored({keys.encode(number, "x"): b"" for number in (3, 1, 2)})
    schema = {"id": pa.int64(), "name": pa.string()}
    with flagstone.dataset("db", store=store, schema=schema, key_columns=["id", "name"]) as dataset:
        assert dataset.to_table(filter=pc.field("id") >= 2)["id"].to_pylist() == [2, 3]
        assert dataset.count_rows() == 3


def test_a_polars_frame_takes_the_options_of_a_dataset_and_shows_one_moment() -> None:
    store = stored({b"a": b"1", b"b": b"2"})
    frame = flagstone.scan_polars("db", store=store, schema={"key": pa.string(), "seq": pa.uint64()})
    with open_database("db", store=store, settings=MANUAL) as db:
        db.delete(b"a")
        db.flush()
    assert frame.collect().rows() == frame.filter(pl.col("seq") < 9).collect().rows() == [("a", 1), ("b", 2)]
    assert frame.head(1).select("seq").collect().rows() == [(1,)]
    with flagstone.dataset("db", store=store) as dataset, pytest.raises(InvalidRequest, match="already open"):
        flagstone.scan_polars(dataset, prefix=b"a")


def test_a_dataset_imports_no_other_engine() -> None:
    program = """if True:
        import sys
        import flagstone
        import pyarrow.compute as pc

        with flagstone.open("memory://shop/db") as db:
            db.put(b"a", b"1")
            with flagstone.dataset(db) as dataset:
                assert dataset.count_rows() == 1
        print([name for name in ("polars", "duckdb", "pyspark") if name in sys.modules])
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr
