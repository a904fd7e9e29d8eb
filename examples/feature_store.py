"""A feature store: Spark computes the features of every user and loads them, Python serves them by key.

    python examples/feature_store.py

A load is one commit, so a model never sees half of a refresh. Training reads the same database as a consistent
DataFrame; serving decodes single rows. The first load stores the schema in the database, and both sides read by it.
"""

from __future__ import annotations

import tempfile
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flagstone
import flagstone.spark as fs
from flagstone import keys
from flagstone.schema import TableReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEY_COLUMNS = ["view", "user"]


def compute(spark: SparkSession, users: int, until: date) -> DataFrame:
    """The features of all users, from the orders up to a day. The orders are made up here; yours are in the lake."""
    spark.range(users * 8).selectExpr(
        f"id * 7919 % {users} as user",
        "date_add(date'2026-01-01', cast(id * 31 % 300 as int)) as day",
        "cast(id * 37 % 9991 as double) / 100 as amount",
    ).createOrReplaceTempView("orders")
    return spark.sql(
        f"""select 'spending' as view, user, count(*) as orders, sum(amount) as spent, max(amount) as biggest,
                   max(day) as last_day
            from orders where day <= date'{until}' group by user"""
    )


class FeatureServer:
    """Serves features to a model. It follows the database: the next poll, or `refresh`, shows a new load."""

    def __init__(self, url: Path) -> None:
        self._reader = flagstone.open_reader(url)
        schema = self._reader.schema()
        assert schema is not None, "structured loads store their schema"
        self._rows = TableReader(schema)

    def features(self, users: list[int]) -> list[dict[str, Any] | None]:
        """The features of many users, with requests shared between them; None for unknown users."""
        found = self._reader.multi_get([keys.encode("spending", user) for user in users])
        return [None if value is None else self._rows.decode_value(value) for value in found]

    def refresh(self) -> None:
        self._reader.refresh()

    def close(self) -> None:
        self._reader.close()


def main(spark: SparkSession, folder: Path, *, users: int = 20_000) -> None:
    url = folder / "features"
    may, june = date(2026, 5, 1), date(2026, 6, 1)
    report = fs.bulk_load(compute(spark, users, may), url, key_columns=KEY_COLUMNS)
    print(f"loaded the features of {'?' if report is None else report.rows:,} users")

    server = FeatureServer(url)
    asked = [number * 97 % users for number in range(100)]
    server.features(asked)
    started = time.perf_counter()
    before = server.features(asked)
    print(f"{len(asked)} users served in {(time.perf_counter() - started) * 1e3:.2f} ms, e.g. {before[0]}")
    assert server.features([users + 1]) == [None]

    # The next refresh is one commit; a concurrent reader sees the previous one.
    fs.bulk_load(compute(spark, users, june), url, key_columns=KEY_COLUMNS)
    server.refresh()
    after = server.features(asked)
    newer = sum(old != new for old, new in zip(before, after, strict=True))
    print(f"after the next load {newer} of {len(asked)} have changed")
    assert newer > 0

    # Training: the same rows as a DataFrame, with their original columns.
    training = fs.read(spark, url, where="view = 'spending'")
    row = training.where(f"user = {asked[0]}").drop(*KEY_COLUMNS).collect()[0].asDict()
    assert row == after[0]
    print(f"the training set has {training.count():,} rows; training uses the rows that were served")
    server.close()


if __name__ == "__main__":
    session = fs.session(app_name="feature store", spark_log_level="ERROR")
    with tempfile.TemporaryDirectory() as made:
        main(session, Path(made))
    session.stop()
