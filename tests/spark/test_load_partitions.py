"""The number of tasks of a load: computed if the size of its rows is known, else chosen by Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flagstone.spark.load.bulk_load import PART_BYTES, known_partitions, plan_parts, sort_by_key


@pytest.mark.parametrize(
    ("size", "cores", "parts"),
    [
        (0, 8, 1),
        (1000, 8, 1),
        (3 << 20, 8, 3),
        (40 << 20, 8, 8),
        (PART_BYTES * 10, 8, 10),
        (PART_BYTES * 10 + 1, 8, 11),
        (PART_BYTES * 199, 8, 199),
        (PART_BYTES * 200, 8, None),
        (1 << 62, 8, None),
        (1000, 400, 1),
        (1 << 40, 400, None),
    ],
)
def test_shuffle_partitions_have_the_usual_size_and_use_all_cores(
    size: int, cores: int, parts: int | None
) -> None:
    assert plan_parts(size, cores=cores, most=200) == parts


@pytest.mark.long
@pytest.mark.slow
def test_only_plans_with_a_known_size_are_partitioned_by_it(spark: Any, tmp_path: Path) -> None:
    made = spark.range(300_000).selectExpr(
        "cast(cast(id as string) as binary) as key", "cast(concat(id, '-', id) as binary) as value"
    )
    made.write.parquet(str(tmp_path / "rows"))
    stored = spark.read.parquet(str(tmp_path / "rows"))
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "200")
    try:
        assert known_partitions(stored) == 2
        assert known_partitions(stored.limit(5)) is None
        assert known_partitions(stored.where("key > X'30'")) is None
        assert known_partitions(stored.join(stored.select("key"), "key")) is None
        assert known_partitions(stored.mapInArrow(lambda batches: batches, stored.schema)) is None
        ordered = sort_by_key(stored, "key", ["value"], None)
        assert ordered.rdd.getNumPartitions() == 2
        assert sort_by_key(stored, "key", [], 5).rdd.getNumPartitions() == 5
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    keys = [bytes(row.key) for row in ordered.select("key").collect()]
    assert keys == sorted(keys)
    assert len(keys) == 300_000
