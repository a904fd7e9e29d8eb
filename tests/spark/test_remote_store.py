"""Spark and a database on S3: executors read and write the bucket themselves, and no output contains secrets."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone.spark import bulk_load, compact
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.store.port import AccessRefused
from servers.s3 import SECRET, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAIRS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
BATCH = pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "value": [b"1", b"2"]})


def texts(server: S3Server) -> dict[str, str]:
    """The options of the store as strings, as Spark has them."""
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in server.options().items()
    }


def dotted(options: dict[str, str]) -> dict[str, str]:
    return {f"store.{name}": value for name, value in options.items()}


@pytest.fixture
def url(seaweedfs: S3Server) -> str:
    return f"{seaweedfs.url}/spark-{uuid4().hex}"


@pytest.fixture
def environment(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in texts(seaweedfs).items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    # S3 clients without credentials request them here; this server has none.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", seaweedfs.endpoint)


def load(url: str) -> None:
    writer = FlagstoneDataSource({"path": url}).writer(PAIRS, overwrite=False)
    writer.commit([pickle.loads(pickle.dumps(writer)).write(iter([BATCH]))])


def read(url: str, **options: str) -> dict[bytes, bytes]:
    reader = FlagstoneDataSource({"path": url, **options}).reader(PAIRS)
    parts = reader.partitions()
    table = pa.Table.from_batches(
        [batch for part in parts for batch in pickle.loads(pickle.dumps(reader)).read(part)]
    )
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


@pytest.mark.usefixtures("environment")
def test_credentials_of_the_environment_suffice_and_are_not_sent_to_executors(url: str) -> None:
    load(url)

    assert read(url) == {b"a": b"1", b"b": b"2"}
    writer = FlagstoneDataSource({"path": url}).writer(PAIRS, overwrite=False)
    assert SECRET.encode() not in pickle.dumps(writer)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("problem", ["wrong", "missing"])
def test_an_executor_without_credentials_is_named_in_the_error(
    url: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(url)
    before = Admin(url).manifest().id
    writer = FlagstoneDataSource({"path": url}).writer(PAIRS, overwrite=False)
    reader = FlagstoneDataSource({"path": url}).reader(PAIRS)
    [part] = reader.partitions()
    with monkeypatch.context() as elsewhere:
        if problem == "wrong":
            elsewhere.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-one")
        else:
            elsewhere.delenv("AWS_SECRET_ACCESS_KEY")
            elsewhere.delenv("AWS_ACCESS_KEY_ID")
        message = r"a task on .+ has no access to the store: .+ The driver has: give the executors"
        with pytest.raises(InvalidRequest, match=message) as caught:
            writer.write(iter([BATCH]))
        with pytest.raises(InvalidRequest, match=message):
            list(reader.read(part))
        # The driver checks its access before any task runs.
        with pytest.raises(AccessRefused, match="credentials"):
            FlagstoneDataSource({"path": url}).schema()
        with pytest.raises(AccessRefused, match="credentials"):
            FlagstoneDataSource({"path": url}).writer(PAIRS, overwrite=False)
    assert "not-the-right-one" not in "".join(traceback.format_exception(caught.value))
    writer.abort([None])
    assert read(url) == {b"a": b"1", b"b": b"2"}
    assert Admin(url).manifest().id > before  # the claims, and the checkpoint of the read


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_load_read_stream_and_compaction_work_on_a_bucket(
    spark: Any, seaweedfs: S3Server, url: str, tmp_path: Path
) -> None:
    options = texts(seaweedfs)
    frame = spark.range(3000).selectExpr(
        "concat('k', lpad(cast(id as string), 6, '0')) as key", "cast(id as string) as value"
    )
    expected = {b"k%06d" % number: b"%d" % number for number in range(3000)}

    report = bulk_load(frame, url, store_options=options, partitions=2)
    frame.where("id < 100").write.format("flagstone").options(**dotted(options)).mode("append").save(url)

    assert report is not None
    assert report.rows == 3000
    back = spark.read.format("flagstone").options(**dotted(options)).option("partitions", 2).load(url)
    assert {bytes(row.key): bytes(row.value) for row in back.collect()} == expected
    assert compact(spark, url, full=True, store_options=options)
    assert len(Admin(url, store_options=options).manifest().value.tree.runs) == 1
    with flagstone.open(url, store_options=options) as db:
        db.put(b"live", b"row")
    changes = spark.readStream.format("flagstone").options(**dotted(options))
    query = (
        changes.option("consumer", "lake").option("starting", "snapshot").load(url).writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "state")).trigger(availableNow=True)
        .start(str(tmp_path / "changes"))
    )  # fmt: skip
    query.awaitTermination(120)
    assert query.exception() is None
    assert spark.read.parquet(str(tmp_path / "changes")).count() == 3001

    shown = StringIO()
    with redirect_stdout(shown):
        back.where("key > cast('k' as binary)").explain(True)
        query.explain(True)
    view = ", ".join(
        f"`{name}` '{value}'" for name, value in [*dotted(options).items(), ("store.sas_key", SECRET)]
    )
    plan = spark.sql(
        f"explain create or replace temporary view v using flagstone options (path '{url}', {view})"
    )
    outputs = [
        plan.collect()[0].plan,
        shown.getvalue(),
        repr(back),
        str(query.lastProgress),
        *_failures(spark, url, options),
    ]
    assert all("flagstone" in each for each in outputs[-3:])
    assert not [each for each in outputs if SECRET in each]
    assert not [path for path in _files(tmp_path) if SECRET.encode() in path.read_bytes()]


def _failures(spark: Any, url: str, options: dict[str, str]) -> Iterator[str]:
    """The errors of Spark about a wrong option, a refused credential and an invalid row."""
    read = spark.read.format("flagstone").options(**dotted(options))
    nulls = spark.createDataFrame([(b"k", None)], "key binary, value binary")
    write = nulls.write.format("flagstone").options(**dotted(options)).mode("append")
    for attempt in (
        lambda: read.option("prefx", "k").load(url),
        lambda: read.option("store.secret_access_key", f"{SECRET}-no-more").load(url),
        lambda: write.save(url),
    ):
        with pytest.raises(Exception) as caught:
            attempt()
        yield "".join(traceback.format_exception(caught.value))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
