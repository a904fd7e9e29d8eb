"""Worker processes of Spark: what they leave out of garbage collections."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import flagstone
from flagstone.spark import map_arrow
from flagstone.spark.scan import plan_count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIB = 1024 * 1024


def test_a_worker_of_spark_leaves_its_modules_out_of_collections(spark: SparkSession, tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db") as db:
        db.put(b"key", b"value")

    def frozen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        assert sum(batch.num_rows for batch in batches) == 1
        yield pa.RecordBatch.from_pydict({"objects": pa.array([gc.get_freeze_count()], pa.int64())})

    [row] = map_arrow(spark, tmp_path / "db", frozen, "objects long").collect()
    assert row.objects > 10_000
    assert gc.get_freeze_count() == 0  # the driver is left as it is


@pytest.mark.parametrize(("name", "settled"), [("pyspark.daemon", True), ("app.daemon", False)])
def test_only_the_daemon_of_spark_is_settled(name: str, *, settled: bool) -> None:
    program = (
        "import gc, sys, types; from flagstone.spark.worker_process import settle; "
        f"sys.modules['__main__'].__spec__ = types.SimpleNamespace(name={name!r}); "
        "settle(); first = gc.get_freeze_count(); settle(); "
        "print(first > 0, gc.get_freeze_count() == first)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(settled), "True"]


@pytest.mark.parametrize(
    ("total", "parallelism", "expected"),
    [
        (0, 4, 1),
        (10 * MIB, 4, 1),
        (20 * MIB, 4, 2),
        (300 * MIB, 2, 4),
        (300 * MIB, 3, 3),
        (540 * MIB, 2, 6),
        (540 * MIB, 1, 5),
        (540 * MIB, 1000, 67),
    ],
)
def test_partitions_are_a_multiple_of_the_cores_unless_they_would_be_tiny(
    total: int, parallelism: int, expected: int
) -> None:
    count = plan_count(total, partitions=None, partition_bytes=128 * MIB, parallelism=parallelism)
    assert count == expected
    assert plan_count(total, partitions=7, partition_bytes=128 * MIB, parallelism=parallelism) == 7
