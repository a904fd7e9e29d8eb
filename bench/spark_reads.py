"""Spark: reads, filtered aggregates and counts next to the decoder, beside Parquet in the same session.

The raw rows are those of `bench.spark`. The structured rows have nine columns, loaded in key order; Parquet has the same rows in
the same order. All reads open their DataFrame again. Everything goes to the sink `noop`, but for aggregates and counts, which are
collected. Counts are shown twice: the first one of a process reads the SSTs, later ones know them.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.harness import FLAGSTONE, PARQUET, Measurement, compared, sized, write_markdown
from bench.machine import scratch_place
from bench.spark import ROW_BYTES, ROWS, Session, Taken, measure

STRUCTURED_ROWS: Final = int(os.environ.get("FLAGSTONE_BENCH_SPARK_ROWS") or sized(4_000_000, quickly=20_000))
KEY_COLUMNS: Final = ["region", "id"]
SCHEMA: Final = (
    "region string, id long, price double, quantity int, cents decimal(12,2), day date, flag boolean, note string, "
    "payload binary"
)
TWO: Final = ["price", "quantity"]
WHERE: Final = "quantity >= 900 and region < 'r5'"
MEASURES: Final = {"total": "sum(price)", "rows": "count(*)", "top": "max(id)"}


class Reads:
    """The databases and Parquet files, and the queries on both."""

    def __init__(self, session: Session, folder: Path) -> None:
        from flagstone.spark import bulk_load

        self.spark = session.spark
        self.raw, self.raw_parquet = session.database, session.parquet
        session.load(session.ordered, presorted=True)
        session.write_parquet(session.ordered)
        session.ordered.unpersist(blocking=True)
        self.rows, self.rows_parquet = folder / "rows", folder / "rows.parquet"
        made = self._made().repartitionByRange(8, *KEY_COLUMNS).sortWithinPartitions(*KEY_COLUMNS)
        made.write.parquet(str(self.rows_parquet))
        report = bulk_load(
            self.spark.read.parquet(str(self.rows_parquet)), self.rows, key_columns=KEY_COLUMNS
        )
        assert report is not None
        assert report.rows == STRUCTURED_ROWS

    def _made(self) -> Any:
        from pyspark.sql import functions as F  # noqa: N812

        number = F.col("id")
        return self.spark.range(0, STRUCTURED_ROWS, 1, 8).select(
            F.concat(F.lit("r"), number % 10).alias("region"),
            number,
            (F.hash(number) / 1000.0).alias("price"),
            F.pmod(F.hash(number, F.lit(1)), F.lit(1000)).cast("int").alias("quantity"),
            (number / 7).cast("decimal(12,2)").alias("cents"),
            F.date_add(F.lit("2026-01-01").cast("date"), (number % 365).cast("int")).alias("day"),
            (number % 3 == 0).alias("flag"),
            F.concat(F.lit("note "), F.md5(number.cast("string"))).alias("note"),
            F.substring(F.unhex(F.sha2(number.cast("string"), 512)), 1, 48).alias("payload"),
        )

    @property
    def structured(self) -> dict[str, Any]:
        return {"key_columns": KEY_COLUMNS, "schema": SCHEMA}

    def consume(self, frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def queries(self) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
        """For each comparison ours and Parquet's; both return what must be equal, or None."""
        from pyspark.sql import functions as F  # noqa: N812

        from flagstone import spark as fs

        spark = self.spark

        def parquet(path: Path) -> Any:
            return spark.read.parquet(str(path))

        def ours_aggregated() -> list[Any]:
            found = fs.aggregate(
                spark, self.rows, MEASURES, group_by=["region"], where=WHERE, **self.structured
            )
            return sorted((row.region, row.rows, row.top, round(row.total, 3)) for row in found.collect())

        def parquet_aggregated() -> list[Any]:
            measures = [F.expr(text).alias(name) for name, text in MEASURES.items()]
            found = parquet(self.rows_parquet).where(WHERE).groupBy("region").agg(*measures)
            return sorted((row.region, row.rows, row.top, round(row.total, 3)) for row in found.collect())

        return {
            "raw": (
                lambda: self.consume(fs.read(spark, self.raw)),
                lambda: self.consume(parquet(self.raw_parquet)),
            ),
            "2 of 9 columns": (
                lambda: self.consume(fs.read(spark, self.rows, columns=TWO, **self.structured)),
                lambda: self.consume(parquet(self.rows_parquet).select(*TWO)),
            ),
            "filtered aggregate": (ours_aggregated, parquet_aggregated),
            "count, known": (
                lambda: fs.count(spark, self.rows, **self.structured),
                lambda: parquet(self.rows_parquet).count(),
            ),
            "count, first": (self.first_count, lambda: parquet(self.rows_parquet).count()),
        }

    def first_count(self) -> int:
        """A count in a process that knows nothing of the SSTs."""
        from flagstone import spark as fs
        from flagstone.spark.frames import count

        count.FACTS.forget()
        return fs.count(self.spark, self.rows, **self.structured)


def run() -> str:
    size = 5 * ROWS * ROW_BYTES + 4 * STRUCTURED_ROWS * 150
    with tempfile.TemporaryDirectory(dir=scratch_place(size)) as scratch:
        session = Session(Path(scratch))
        reads = Reads(session, Path(scratch))
        queries = reads.queries()
        for name, (ours, theirs) in queries.items():
            assert ours() == theirs(), f"{name}: the answers differ"
        contenders: dict[str, Callable[[], object]] = {}
        for name, (ours, theirs) in queries.items():
            contenders[f"{name}|ours"], contenders[f"{name}|theirs"] = ours, theirs
        taken = measure(contenders)
        session.spark.stop()
    measurements = []
    for name in queries:
        ours, theirs = taken[f"{name}|ours"], taken[f"{name}|theirs"]
        for what, pick in (("seconds", _wall), ("processor seconds", _cpu)):
            values = {FLAGSTONE: pick(ours), PARQUET: pick(theirs)}
            measurements.append(Measurement(f"{name}, {what}", "s", values, "lower"))
    return write_markdown(
        "spark-reads",
        "Spark: reads next to the decoder",
        *compared(measurements, (PARQUET,)),
        [
            f"One session, `local[2]`: {ROWS:,} raw rows of 120 bytes, {STRUCTURED_ROWS:,} structured rows of nine columns.",
            "Parquet as Spark writes it by default. The answers of both are compared before the first round.",
            "Of our processor seconds on this machine, profiled, the Java process takes 1.1 for raw rows and 0.5 for two columns:",
            "it makes rows of Arrow batches, as for every Python data source. Parquet's whole query takes less. The workers read",
            "and check all bytes of the rows, also for two columns.",
        ],
        basis=f"Medians of {len(next(iter(taken.values())))} interleaved rounds.",
        measurements=measurements,
    )


def _wall(taken: list[Taken]) -> float:
    return statistics.median(one.seconds for one in taken)


def _cpu(taken: list[Taken]) -> float:
    return max(statistics.median(one.cpu_seconds for one in taken), 0.01)  # a tick of the clock


if __name__ == "__main__":
    random.seed(16)
    print(run())
