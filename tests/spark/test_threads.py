"""Loads and reads in new threads, which have no active session: Spark finds data sources through it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flagstone.spark import LoadReport, bulk_load, register

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


def test_load_and_read_work_in_another_thread(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "db"

    def load() -> LoadReport | None:
        rows = spark.range(10).selectExpr("cast(id as string) as key", "'v' as value")
        return bulk_load(rows, folder, partitions=1)

    def count() -> int:
        register(spark)
        return int(spark.read.format("flagstone").load(str(folder)).count())

    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(load).result(timeout=280)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(count).result(timeout=280)

    assert report is not None
    assert report.rows == found == 10
