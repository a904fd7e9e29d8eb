"""Act 4: Spark streams the changes of the database to Parquet while they are made, in commit order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds

import flagstone
from shop import Shop, order_value
from stage import Stage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Change = tuple[int, str, bytes, bytes | None]
PATIENCE_S = 120


def follow(stage: Stage, spark: SparkSession, db: flagstone.Db, shop: Shop, *, url: Path, lake: Path) -> None:
    stage.act("4 Follow", "every change once and in order, into the lake, while writes continue")
    changes = spark.readStream.format("flagstone").options(consumer="lake", starting="latest").load(str(url))
    query = (
        changes.writeStream.format("parquet")
        .option("checkpointLocation", str(lake / "checkpoint"))
        .trigger(processingTime="200 milliseconds")
        .start(str(lake / "changes"))
    )
    try:
        with stage.step("start the stream"):
            _wait(query, lambda: query.lastProgress is not None)
        with stage.step("changes written and streamed") as (lap, _):
            written = _write(db, shop)
            lap.rows = len(written)
            _wait(query, lambda: _streamed(query) >= len(written))
    finally:
        query.stop()
    table = ds.dataset(lake / "changes", format="parquet").to_table(columns=["seq", "op", "key", "value"])
    streamed = sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))
    stage.check("the changes in the lake", streamed, sorted(written))
    stage.tell(
        f"{len(streamed):,} changes in Parquet, equal to those written: op, key, value and sequence number."
    )


def _write(db: flagstone.Db, shop: Shop) -> list[Change]:
    """Move orders away and back, so that the totals at the end stay; returns the changes as the WAL has them."""
    written: list[Change] = []
    rounds = min(2000, shop.orders // 10)
    paid = [number for number in range(5 * rounds) if shop.state_of(number) == "paid"][:rounds]
    for number in paid:
        key = shop.order_key(number)
        away, back = flagstone.WriteBatch(), order_value(number, "paid")
        away.delete(key)
        away.put(b"basket/" + key, back)
        seq = db.write(away).seq
        written += [(seq, "delete", key, None), (seq, "put", b"basket/" + key, back)]
        home = flagstone.WriteBatch()
        home.put(key, back)
        home.delete(b"basket/" + key)
        seq = db.write(home).seq
        written += [(seq, "put", key, back), (seq, "delete", b"basket/" + key, None)]
    db.flush("wal")
    return written


def _streamed(query: Any) -> int:
    return sum(progress.numInputRows for progress in query.recentProgress)


def _wait(query: Any, done: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the stream did not finish within {PATIENCE_S} seconds: {query.status}")
        time.sleep(0.05)
