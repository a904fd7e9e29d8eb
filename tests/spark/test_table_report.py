"""`table_report`, `view` and Hadoop's settings for S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin, InvalidRequest
from flagstone import spark as fs
from flagstone.spark.frames.plan import plan_read
from flagstone.spark.frames.report import TableReport, threshold
from flagstone.spark.hadoop_options import session_options, store_options
from flagstone.spark.options import parse_read_options
from kit.databases import QUIET
from kit.spark_loads import load, on_spark, pairs

ROWS = {b"k%05d" % number: b"%d" % number * 20 for number in range(5000)}
SIZE = sum(len(key) + len(value) for key, value in ROWS.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "db"
    load(folder, [pairs(ROWS)], max_sst_size="60000")
    return folder


def test_a_report_estimates_rows_and_bytes_of_a_range(folder: Path) -> None:
    whole = fs.table_report(folder)

    assert (whole.rows, whole.exact, whole.sources) == (5000, False, 1)
    assert whole.bytes == SIZE
    assert whole.ssts == len(list(Admin(folder).manifest().value.views))
    part = fs.table_report(folder, prefix=b"k01")
    assert 1000 <= part.rows < 1150
    assert SIZE / 6 < part.bytes < SIZE / 3
    assert part.ssts < whole.ssts
    assert fs.table_report(folder, where="key >= 'k01' and key < 'k02'").rows == part.rows
    assert fs.table_report(folder, keys=[b"k00001"]).rows < 100
    nothing = fs.table_report(folder, prefix=b"z")
    assert (nothing.rows, nothing.exact, nothing.bytes) == (0, True, 0)
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"k00000", b"only in the WAL")
        db.flush("wal")
        report = fs.table_report(folder)
        assert report.wal_bytes > 0
        assert not report.exact


@on_spark
def test_a_counted_table_is_reported_exactly_and_compared_with_the_broadcast_limit(
    spark: Any, folder: Path
) -> None:
    fs.count(spark, folder)
    report = fs.table_report(folder, spark=spark)

    assert (report.rows, report.exact) == (5000, True)
    assert report.broadcastable(spark)
    large = TableReport(rows=10**9, exact=False, bytes=10**11, stored_bytes=1, ssts=1, sources=1, wal_bytes=0)
    assert not large.broadcastable(spark)
    view = fs.view(spark, "report_rows", folder, columns=["key"])
    query = "select count(*) from report_rows"
    load(folder, [pairs({b"new": b"1"})])
    assert spark.sql(query).first()[0] == 5000
    view.refresh()
    assert spark.sql(query).first()[0] == 5001
    view.drop()
    assert not spark.catalog.tableExists("report_rows")
    spark.conf.set("spark.hadoop.fs.s3a.endpoint.region", "eu-north-1")
    assert session_options(spark, "s3a://shop/db") == {"region": "eu-north-1"}
    spark.conf.unset("spark.hadoop.fs.s3a.endpoint.region")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10485760b", 10485760), ("10MB", 10 * 1024**2), ("-1", -1), ("2g", 2 * 1024**3), ("7", 7)],
)
def test_sizes_of_spark_are_understood(text: str, expected: int) -> None:
    assert threshold(text) == expected


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a size"):
        threshold("many")


HADOOP = {
    "fs.s3a.access.key": "general",
    "spark.hadoop.fs.s3a.secret.key": "secret",
    "fs.s3a.endpoint": "minio:9000",
    "fs.s3a.endpoint.region": "eu-central-1",
    "fs.s3a.path.style.access": "true",
    "fs.s3a.connection.ssl.enabled": "false",
    "fs.s3a.bucket.shop.access.key": "special",
    "fs.s3a.bucket.other.access.key": "other",
    "fs.s3a.threads.max": "96",
}


def test_settings_of_hadoop_become_options_of_the_store() -> None:
    assert store_options(HADOOP, "s3a://shop/db") == {
        "access_key_id": "special",
        "secret_access_key": "secret",
        "endpoint": "http://minio:9000",
        "region": "eu-central-1",
        "virtual_hosted_style_request": False,
        "allow_http": True,
    }
    assert store_options(HADOOP, "s3://elsewhere/db")["access_key_id"] == "general"
    assert store_options(HADOOP, "/folder/db") == {}
    anonymous = {
        "fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
    }
    assert store_options(anonymous, "s3a://shop/db") == {"skip_signature": True}


def test_options_of_a_read_may_be_those_of_hadoop_and_never_appear_in_its_text() -> None:
    options = parse_read_options(
        {
            "path": "s3a://shop/db",
            "store.region": "us-east-1",
            **{k: v for k, v in HADOOP.items() if "." in k},
        }
    )

    assert options.address.store_options["access_key_id"] == "special"
    assert options.address.store_options["region"] == "us-east-1"
    assert "secret" not in repr(options)


def test_the_settings_of_a_session_are_defaults_of_a_read() -> None:
    class Session:
        class conf:  # noqa: N801
            getAll = HADOOP  # noqa: N815

    plan = plan_read(
        "s3a://shop/db", {"raw": True, "store_options": {"access_key_id": "mine"}}, spark=Session()
    )

    assert plan.options.address.store_options["access_key_id"] == "mine"
    assert plan.options.address.store_options["secret_access_key"] == "secret"
