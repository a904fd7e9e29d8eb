"""Descriptions of Spark's jobs, addresses for executors, and the summary at the end of a job."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from flagstone.errors import InvalidRequest
from flagstone.spark.address import DatabaseAddress, shared_address
from flagstone.spark.job_control import described, log_done, per_second, session_ended
from flagstone.spark.load.plan import LoadReport


class RemoteSession:
    """A session as in Spark Connect: with tags, without a context."""

    def __init__(self) -> None:
        self.tags: list[str] = []

    def addTag(self, tag: str) -> None:  # noqa: N802
        self.tags.append(tag)

    def removeTag(self, tag: str) -> None:  # noqa: N802
        self.tags.remove(tag)


def test_operations_of_spark_connect_carry_a_tag() -> None:
    remote: Any = RemoteSession()
    with described(remote, "compact shop, range 1 of 2"):
        assert remote.tags == ["flagstone: compact shop; range 1 of 2"]
    assert remote.tags == []
    assert not session_ended(remote)


@pytest.mark.parametrize(
    ("path", "name"), [("s3://bucket/a/shop", "shop"), ("/data/shop/", "shop"), ("shop", "shop"), ("/", "/")]
)
def test_a_database_is_called_by_the_end_of_its_path(path: str, name: str) -> None:
    assert DatabaseAddress(path).name == name


def test_executors_get_an_absolute_database_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shared_address("shop") == DatabaseAddress(str(tmp_path / "shop"))
    assert shared_address("a/shop", store="data", wal_store="wal") == DatabaseAddress(
        "a/shop", str(tmp_path / "data"), str(tmp_path / "wal")
    )
    assert shared_address("s3://bucket/shop", store_options={"region": "x"}).path == "s3://bucket/shop"
    with pytest.raises(InvalidRequest, match="memory of this process"):
        shared_address("memory://here/shop")
    with pytest.raises(InvalidRequest, match="memory of this process"):
        shared_address("shop", store="memory://here")


def test_the_summary_of_a_job_has_counts_and_rates(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flagstone.spark")
    log_done("loaded", database="shop", rows=10, bytes=4_000_000, seconds=2.0)
    log_done("moved", bytes=0, seconds=0.0)
    assert caplog.messages == [
        "loaded database=shop rows=10 rows_per_s=5 bytes=4000000 seconds=2.00 mb_per_s=2.0",
        "moved bytes=0 seconds=0.00 mb_per_s=0.0",
    ]
    assert per_second(10, 0.0) == 10_000


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_jobs_of_loads_exports_and_verifications_have_descriptions(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from flagstone.spark import bulk_load, export, verify

    caplog.set_level(logging.INFO, "flagstone.spark")
    context = spark.sparkContext
    context.setJobDescription("mine")
    try:
        rows = spark.range(100).selectExpr("cast(id as string) key", "cast(id as string) value")
        report = bulk_load(rows, tmp_path / "shop")
        export(spark, tmp_path / "shop", tmp_path / "files")
        verify(spark, tmp_path / "shop")
        assert context.getLocalProperty("spark.job.description") == "mine"
    finally:
        context.setLocalProperty("spark.job.description", None)

    assert isinstance(report, LoadReport)
    assert report.seconds > 0
    assert report.rows_per_s == pytest.approx(100 / report.seconds)
    assert [line.split(" ")[:2] for line in caplog.messages] == [
        [event, "database=shop"] for event in ("loaded", "exported", "verified")
    ]
    found = spark._jsc.sc().statusStore().jobsList(None)
    descriptions = [found.apply(at).description() for at in range(found.size())]
    texts = [description.get() for description in descriptions if description.isDefined()]
    assert "flagstone: load shop" in texts
    assert "flagstone: export shop to parquet" in texts
    assert any(each.startswith("flagstone: verify shop, ") and each.endswith(" MB") for each in texts)
    assert not session_ended(spark)
