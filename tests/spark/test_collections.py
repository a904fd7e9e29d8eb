"""Typed collections of Python and typed frames of Spark are the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import keys

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PREFIX = f"hex:{keys.encode('orders').hex()}"


@dataclass
class Order:
    customer: str
    total: float
    note: str | None = None


def test_spark_reads_a_collection_as_a_typed_frame_and_writes_into_it(spark: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "shop")
    key = {"region": str, "id": int}
    with flagstone.open(url) as db:
        orders = db.collection("orders", key=key, value=Order)
        orders.update({("eu", 1): Order("alice", 9.5), ("us", 2): Order("bob", 1.0, "gift")})
        db[b"beside"] = b"other"

    frame = spark.read.format("flagstone").option("prefix", PREFIX).load(url)
    assert frame.columns == ["region", "id", "customer", "total", "note"]
    assert [tuple(row) for row in frame.orderBy("region").collect()] == [
        ("eu", 1, "alice", 9.5, None),
        ("us", 2, "bob", 1.0, "gift"),
    ]

    more = spark.createDataFrame(
        [("eu", 3, "carol", 2.5, None)], "region string, id long, customer string, total double, note string"
    )
    more.write.format("flagstone").option("key.prefix", PREFIX).option("key.columns", "region,id").mode(
        "append"
    ).save(url)

    with flagstone.open(url) as db:
        orders = db.collection("orders", key=key, value=Order)
        assert orders["eu", 3] == Order("carol", 2.5)
        assert list(orders) == [("eu", 1), ("eu", 3), ("us", 2)]
