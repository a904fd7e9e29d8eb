"""Invalid input to Spark raises an error that names it, before any task if possible."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkImportError
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.spark import sessions
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.spark.error_translation import find_cause, in_task
from flagstone.spark.options import parse_read_options, parse_write_options
from flagstone.spark.stream.options import parse_stream_options
from flagstone.store.port import AccessRefused
from kit.databases import QUIET
from kit.spark_loads import load, pairs, shown

PLAIN = {"key": BinaryType(), "value": BinaryType()}
SECRET = "do-not-show"


def schema_of(columns: dict[str, DataType]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def source(folder: Path, **options: str) -> FlagstoneDataSource:
    return FlagstoneDataSource({"path": str(folder), **options})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"key": BinaryType()}, {}, "rows need a column 'value'; there are key"),
        ({}, {}, "rows need a column 'key'; there are none"),
        ({"id": BinaryType(), "value": BinaryType()}, {}, "rows need a column 'key'; there are id, value"),
        (PLAIN, {"key_column": "id"}, "rows need a column 'id'"),
        ({"key": LongType(), "value": BinaryType()}, {}, "'key' is bigint; it must be binary or string"),
        ({"key": BinaryType(), "value": DoubleType()}, {}, "'value' is double; it must be binary or string"),
        (PLAIN | {"n": IntegerType()}, {}, "unexpected columns 'n'"),
        (PLAIN | {"op": IntegerType()}, {}, "column 'op' is int; it must be string"),
        (PLAIN | {"ttl_ms": DoubleType()}, {}, "column 'ttl_ms' is double; it must be a whole number"),
        (PLAIN | {"ttl_ms": LongType(), "expires_ms": LongType()}, {}, "keep one of them"),
        (PLAIN, {"key.columns": "id"}, "there is no column 'id'; there are key, value"),
        (PLAIN, {"key.columns": "key", "value.columns": "key,value"}, "'key' is in the key and in the value"),
        (PLAIN, {"key.columns": "key", "value.format": "xml"}, "formats are row, json"),
        (PLAIN, {"value.format": "json"}, r"'value\.format' needs 'key\.columns'"),
        ({"seq": LongType(), "v": LongType()}, {"key.columns": "seq"}, "'seq' is reserved"),
        ({"id": LongType(), "created_ms": LongType()}, {"key.columns": "id"}, "'created_ms' is reserved"),
        (PLAIN | {"op": StringType()}, {"key.columns": "key,op"}, "'op' is reserved"),
        ({"id": ArrayType(LongType()), "v": LongType()}, {"key.columns": "id"}, "id"),
        ({"id": MapType(StringType(), LongType()), "v": LongType()}, {"key.columns": "id"}, "id"),
        (PLAIN, {"max_sst_sise": "1"}, "no option 'max_sst_sise'; did you mean 'max_sst_size'"),
        (PLAIN, {"key_colum": "k"}, "did you mean 'key_column'"),
        (PLAIN, {"max_sst_size": "lots"}, "option 'max_sst_size' is 'lots': use a whole number from 1"),
        (PLAIN, {"sorted": "yes"}, "option 'sorted' is 'yes': use true or false"),
        (PLAIN, {"duplicates": "first"}, "'last' or 'error', not 'first'"),
        (PLAIN, {"compression_codec": "gzip"}, "'gzip' is not one of Snappy, Zlib, Lz4, Zstd"),
        (PLAIN, {"sst_block_size": "7"}, "7 is not one of 1024"),
        (PLAIN, {"store.fsnyc": "false"}, "folders have no option 'fsnyc'; did you mean 'fsync'"),
    ],
)
def test_an_invalid_load_is_refused_before_it_claims_the_database(
    tmp_path: Path, columns: dict[str, DataType], options: dict[str, str], message: str
) -> None:
    folder = tmp_path / "db"

    with pytest.raises(InvalidRequest, match=message):
        source(folder, **options).writer(schema_of(columns), overwrite=False)

    assert not folder.exists()


def test_a_refused_load_does_not_fence_the_writer(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        with pytest.raises(InvalidRequest, match="rows need a column 'value'"):
            source(tmp_path / "db").writer(schema_of({"key": BinaryType()}), overwrite=True)

        db.put(b"still", b"the owner").wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_column": "k"}, "reading has no option 'key_column'; did you mean 'key.columns'"),
        ({"colums": "key"}, "did you mean 'columns'"),
        ({"keys": "hex:0"}, "not hexadecimal"),
        ({"pushdown": "on"}, "option 'pushdown' is 'on': use true or false"),
        ({"batch_rows": "-1"}, "whole number from 1"),
        ({"as_of": "soon"}, "sequence number, or a time"),
    ],
)
def test_a_read_with_an_invalid_option_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_read_options({"path": "db", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consumer": ""}, "consumer"),
        ({"consumer": "c", "startign": "latest"}, "did you mean 'starting'"),
        ({"consumer": "c", "starting": "now"}, "use snapshot, earliest, latest"),
        ({"consumer": "c", "max_files_per_trigger": "0"}, "whole number from 1"),
        ({"consumer": "c", "max_files_per_trigger": "1", "max_bytes_per_trigger": "1"}, "keep one of them"),
        ({"consumer": "c", "columns": "key"}, "a stream of changes has no option 'columns'"),
    ],
)
def test_a_stream_with_an_invalid_option_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_stream_options({"path": "db", **options})


@pytest.mark.parametrize("address", ["nothing", "file", "folder"])
def test_a_path_without_a_database_is_named_in_the_error(tmp_path: Path, address: str) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part-0.parquet").write_bytes(b"PAR1")

    with pytest.raises(InvalidRequest, match=f"no database at '{address}' in file://"):
        source(tmp_path / address).schema()
    with pytest.raises(InvalidRequest, match=f"no database at '{address}' in file://"):
        Admin(tmp_path / address).compact()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_invalid_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no store for hdfs://"):
        FlagstoneDataSource({"path": "hdfs://name/db"}).schema()
    with pytest.raises(InvalidRequest, match="there is no path to a database"):
        FlagstoneDataSource({}).schema()
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(InvalidRequest, match="Not a directory"):
        source(tmp_path / "file").writer(schema_of(PLAIN), overwrite=False)


def test_a_task_refuses_invalid_rows(tmp_path: Path) -> None:
    load(tmp_path / "db", [pairs({b"before": b"here"})])
    nulls = [{"key": pa.array(["a", None, None]), "value": pa.array(["1", "2", "3"])}]

    with pytest.raises(InvalidRequest, match="column 'key' has 2 nulls; every row needs one"):
        load(tmp_path / "db", nulls)

    assert shown(tmp_path / "db") == {b"before": b"here"}


def test_a_batch_read_with_a_consumer_and_a_stream_without_one_are_refused(tmp_path: Path) -> None:
    load(tmp_path / "db", [pairs({b"k": b"v"})])

    with pytest.raises(
        InvalidRequest, match=r"options are those of a stream of changes: use spark\.readStream"
    ):
        source(tmp_path / "db", consumer="c").reader(schema=schema_of(PLAIN))
    with pytest.raises(InvalidRequest, match="needs an option that no read has"):
        source(tmp_path / "db").streamReader(schema_of(PLAIN))


@pytest.mark.parametrize("parse", [parse_read_options, parse_write_options])
def test_the_text_of_options_contains_no_secret(parse: Any) -> None:
    secrets = {"store.secret_access_key": SECRET, "store.session_token": SECRET, "store.account_key": SECRET}
    options = parse({"path": "s3://bucket/db", **secrets})

    assert SECRET not in repr(options) + str(options) + repr(options.address) + repr(
        pickle.loads(pickle.dumps(options))
    )
    assert dict(options.address.store_options)["secret_access_key"] == SECRET
    with pytest.raises(InvalidRequest) as caught:
        parse({"path": "s3://bucket/db", **secrets, "nothing": SECRET})
    assert SECRET not in str(caught.value)


def test_a_task_without_access_names_itself_as_a_task() -> None:
    with (
        pytest.raises(InvalidRequest, match=r"a task on .+ has no access to the store: 403\. The driver has"),
        in_task(),
    ):
        raise AccessRefused("403")
    with pytest.raises(InvalidRequest, match=r"^nulls$"), in_task():
        raise InvalidRequest("nulls")


def test_of_chained_python_errors_the_last_one_is_reported() -> None:
    text = (
        "Traceback (most recent call last):\nflagstone.store.port.AccessRefused: 403\n\nThe above exception was the "
        "direct cause of the following exception:\n\nTraceback (most recent call last):\n"
        "flagstone.errors.InvalidRequest: a task on x has no access\n\n\tat org.apache.spark"
    )

    assert str(find_cause(text)) == "a task on x has no access"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ModuleNotFoundError: No module named 'flagstone'\n SQLSTATE: 38000", "has no module 'flagstone'"),
        ("ModuleNotFoundError: No module named 'flagstone.spark'\n\n\tat org", "has no module 'flagstone'"),
        ("ModuleNotFoundError: No module named 'obstore'", "PYSPARK_PYTHON"),
    ],
)
def test_a_worker_without_the_package_is_named_as_the_cause(text: str, message: str) -> None:
    found = find_cause(
        f"An exception was thrown from the Python worker:\nTraceback (most recent call last):\n{text}"
    )

    assert isinstance(found, InvalidRequest)
    assert message in str(found)
    assert find_cause("ModuleNotFoundError: No module named 'flagstones'") is None
    assert find_cause("ModuleNotFoundError: No module named 'mine'") is None


def test_a_setting_that_spark_would_ignore_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'memory' is no setting of Spark.* app_name, master, remote"):
        sessions.session(memory="4g")


class Builder:
    """Accepts settings as Spark's builder does, and fails to create a session of Spark Connect."""

    def __init__(self, **options: str) -> None:
        self._options = options

    def config(self, name: str, value: str) -> Builder:
        return Builder(**{**self._options, name: value})

    def getOrCreate(self) -> None:  # noqa: N802 - Spark's name
        raise PySparkImportError(
            errorClass="PACKAGE_NOT_INSTALLED",
            messageParameters={"package_name": "grpcio", "minimum_version": "1.48.1"},
        )


def test_spark_connect_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_builder", Builder)

    with pytest.raises(InvalidRequest, match=r"grpcio .*pip install 'pyspark\[connect\]'"):
        sessions.session(remote="sc://host")


def test_a_client_of_spark_connect_needs_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    remote = {"spark.remote": "sc://host:15002"}

    assert sessions.configure(Builder(**remote))._options == {**remote, sessions.PUSHDOWN: "true"}
    monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    assert sessions.configure(Builder())._options == {sessions.PUSHDOWN: "true"}
    monkeypatch.delenv("SPARK_REMOTE")
    with pytest.raises(InvalidRequest, match="JAVA_HOME is /nowhere"):
        sessions.configure(Builder(**{"spark.remote": "local[2]"}))


def test_a_local_server_of_spark_connect_stays_on_the_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "find_java_home", lambda: None)
    for name in ("PYSPARK_PYTHON", "SPARK_LOCAL_IP"):
        monkeypatch.setenv(name, "set")

    local = sessions.configure(Builder(**{"spark.remote": "local[2]"}))._options

    assert local["spark.connect.grpc.binding.address"] == local["spark.driver.host"] == "127.0.0.1"
    assert "spark.master" not in local
