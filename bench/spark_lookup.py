"""Spark: a lookup join beside Spark's own joins over Parquet of the same rows.

The rows are those of `bench.spark`. The keys are random, nine of ten present, and come from Parquet. A shuffle join sorts both
sides; a broadcast join sends the keys to all tasks, which read all rows. `FLAGSTONE_BENCH_LOOKUP_KEYS` sets the number of keys
(several with commas), `FLAGSTONE_BENCH_SPARK_ROWS` that of rows.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.harness import FLAGSTONE, Measurement, formatted, sized, write_markdown
from bench.machine import scratch_place
from bench.spark import ROW_BYTES, ROWS, SPACE, STRIDE, Session, Taken, measure

KEYS: Final = tuple(
    int(text)
    for text in os.environ.get("FLAGSTONE_BENCH_LOOKUP_KEYS", f"{sized(1_000_000, quickly=2_000)}").split(",")
)
SHUFFLE: Final = "shuffle join"
BROADCAST: Final = "broadcast join"


class Joins:
    """The database, the Parquet files and the keys."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.spark, self.database, self.parquet = session.spark, session.database, session.parquet
        self._folder = folder
        session.load(session.ordered, presorted=True)
        session.write_parquet(session.ordered)
        session.ordered.unpersist(blocking=True)
        self.present: dict[int, int] = {}
        for count in KEYS:
            self._write_keys(count)

    def _write_keys(self, count: int) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        # A tenth of the numbers is above those of the rows.
        row = F.floor(F.rand(7) * F.lit(ROWS * 10 // 9)).cast("long")
        spread = ((row * F.lit(STRIDE)) % F.lit(SPACE)).cast("string")
        key = F.concat(F.lit("key-"), F.lpad(spread, 16, "0")).cast("binary")
        numbers = self.spark.range(0, count, 1, 4).select(key.alias("key"), F.col("id").alias("n"))
        numbers.write.parquet(str(self._folder / f"keys-{count}"))

    def keys(self, count: int) -> Any:
        return self.spark.read.parquet(str(self._folder / f"keys-{count}"))

    def lookup(self, count: int) -> Any:
        from flagstone import spark as fs

        return fs.lookup(self.keys(count), self.database, on="key", how="inner")

    def join(self, count: int, hint: str) -> Any:
        rows = self.spark.read.parquet(str(self.parquet))
        return rows.join(self.keys(count).hint(hint), "key").select("key", "n", "value")

    def consume(self, frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def bytes_read(self, count: int) -> tuple[int, int, int]:
        """What one task that has all keys reads: bytes, those of the touched blocks, and those of all SSTs."""
        import pyarrow.compute as pc

        from flagstone.db.reader.reader import open_reader
        from flagstone.spark.address import DatabaseAddress, open_store
        from flagstone.spark.sorted_lookup import SortedLookup
        from flagstone.store.counting import CountingStore
        from flagstone.store.local import LocalStore

        store, paths = open_store(DatabaseAddress(str(self.database)))
        counting: Any = CountingStore(store, component="bench")
        asked = pc.unique(self.keys(count).select("key").toArrow().column("key"))
        asked = asked.take(pc.sort_indices(asked))
        with open_reader(self.database, mode="latest") as reader:
            lookup = SortedLookup(reader, counting, paths, now_ms=0, include_expired=False)
            for start in range(0, len(asked), 65_536):
                lookup.find(asked.slice(start, 65_536))
        stored = sum(meta.size for meta in LocalStore(self.database).list("compacted"))
        return counting.totals()["bytes_read"], lookup.touched_bytes, stored


def run() -> str:
    with tempfile.TemporaryDirectory(dir=scratch_place(5 * ROWS * ROW_BYTES)) as scratch:
        session = Session(Path(scratch))
        joins = Joins(session, Path(scratch))
        contenders: dict[str, Callable[[], object]] = {}
        read: dict[int, tuple[int, int, int]] = {}
        for count in KEYS:
            expected = joins.join(count, "merge").count()
            assert joins.lookup(count).count() == expected, "the lookup and the join differ"
            read[count] = joins.bytes_read(count)
            contenders[f"{count}|{FLAGSTONE}"] = lambda count=count: joins.consume(joins.lookup(count))
            for name, hint in ((SHUFFLE, "merge"), (BROADCAST, "broadcast")):
                contenders[f"{count}|{name}"] = lambda count=count, hint=hint: joins.consume(
                    joins.join(count, hint)
                )
        taken = measure(contenders)
        session.spark.stop()
    measurements = []
    for count in KEYS:
        for what, pick in (("seconds", _wall), ("processor seconds", _cpu)):
            values = {name: pick(taken[f"{count}|{name}"]) for name in (FLAGSTONE, SHUFFLE, BROADCAST)}
            measurements.append(Measurement(f"{count:,} keys, {what}", "s", values, "lower"))
    return write_markdown(
        "spark-lookup",
        f"Spark: lookup of random keys in {ROWS:,} rows",
        ["what", FLAGSTONE, SHUFFLE, BROADCAST, f"× {SHUFFLE}", f"× {BROADCAST}"],
        [_row(one) for one in measurements],
        [
            "One session, `local[2]`, 20-byte keys, 100-byte values that do not compress. A tenth of the keys is absent.",
            *(
                f"{count:,} keys in one task read {all_bytes / 1e6:,.1f} MB: {touched / 1e6:,.1f} MB of touched blocks "
                f"({all_bytes / touched:.2f}×), of {stored / 1e6:,.0f} MB of SSTs."
                for count, (all_bytes, touched, stored) in read.items()
            ),
        ],
        basis=f"Medians of {len(next(iter(taken.values())))} interleaved rounds.",
        measurements=measurements,
    )


def _row(one: Measurement) -> list[str]:
    values = [formatted(one.values[name], one.unit) for name in (FLAGSTONE, SHUFFLE, BROADCAST)]
    return [
        one.what,
        *values,
        *(f"{one.values[name] / one.values[FLAGSTONE]:.2f}×" for name in (SHUFFLE, BROADCAST)),
    ]


def _wall(taken: list[Taken]) -> float:
    return statistics.median(one.seconds for one in taken)


def _cpu(taken: list[Taken]) -> float:
    return statistics.median(one.cpu_seconds for one in taken)


if __name__ == "__main__":
    print(run())
