"""Spark: reading a stream of changes, beside a read of the same rows and a stream of Parquet files.

The rows are those of `bench.spark`. One database has them in its WAL, another one as a bulk load, a third one as rows of
ordinary columns in its WAL. Every stream is one micro-batch from the first change to the last, into the sink `noop`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.harness import FLAGSTONE, PARQUET, Measurement, compared, sized, write_markdown
from bench.machine import scratch_place
from bench.spark import ROUNDS, ROW_BYTES, Taken, key, measure, value

ROWS: Final = int(os.environ.get("FLAGSTONE_BENCH_STREAM_ROWS") or sized(1_000_000, quickly=10_000))
FILE_ROWS: Final = sized(20_000, quickly=1_000)
FEW: Final = 100
"""Rows of a stream that costs little more than the start of a query."""

TYPED: Final = "op string, id long, name string, price double, seq long"


class Streams:
    """A Spark session of two cores, and the databases."""

    def __init__(self, folder: Path) -> None:
        from flagstone.spark import session

        self._folder = folder
        self._runs = 0
        self.spark = session(master="local[2]", spark_log_level="ERROR", spark_driver_memory="4g")
        self._write("wal", lambda row: (key(row), value(row)), ROWS)
        self._write("typed", self._typed(), ROWS)
        self._write("few", lambda row: (key(row), value(row)), FEW)
        self._load()

    def _typed(self) -> Callable[[int], tuple[bytes, bytes]]:
        import pyarrow as pa

        from flagstone import keys, values

        codec = values.codec("row", pa.schema([("name", pa.string()), ("price", pa.float64())]))
        return lambda row: (
            keys.encode(row),
            codec.encode({"name": value(row).hex()[:100], "price": row / 7}),
        )

    def _write(self, name: str, row_of: Callable[[int], tuple[bytes, bytes]], rows: int) -> None:
        import flagstone

        # Nothing is flushed to SSTs or collected, so that the stream begins at the first WAL file.
        settings = flagstone.Settings(
            l0_sst_size_bytes=1 << 40, max_unflushed_bytes=1 << 40, compactor_options=None,
            garbage_collector_options=None,
        )  # fmt: skip
        with flagstone.open(self._folder / name, settings=settings) as db:
            for start in range(0, rows, FILE_ROWS):
                with db.batch() as batch:
                    for row in range(start, min(start + FILE_ROWS, rows)):
                        batch.put(*row_of(row))
                db.flush("wal")

    def _load(self) -> None:
        import flagstone
        from flagstone.spark import bulk_load

        rows = self.spark.read.format("flagstone").load(str(self._folder / "wal"))
        with flagstone.open(self._folder / "load") as db:
            db.put(b"first", b"", await_durable=True)
        rows.write.parquet(str(self._folder / "parquet"))
        bulk_load(self.spark.read.parquet(str(self._folder / "parquet")), self._folder / "load")

    def stream(self, name: str, schema: str | None = None, **options: str) -> None:
        reader = self.spark.readStream.format("flagstone").options(
            starting="earliest", consumer=f"run {self._runs}"
        )
        if schema is not None:
            reader = reader.schema(schema)
        rows = reader.options(**options).load(str(self._folder / name))
        self._consume(rows, FEW if name == "few" else ROWS)

    def parquet(self) -> None:
        self._consume(
            self.spark.readStream.schema("key binary, value binary").parquet(str(self._folder / "parquet"))
        )

    def read(self) -> None:
        rows = self.spark.read.format("flagstone").load(str(self._folder / "load"))
        rows.write.format("noop").mode("overwrite").save()

    def _consume(self, rows: Any, at_least: int = ROWS) -> None:
        state, self._runs = self._folder / f"state {self._runs}", self._runs + 1
        query = (
            rows.writeStream.format("noop")
            .option("checkpointLocation", str(state))
            .trigger(availableNow=True)
        )
        started = query.start()
        assert started.awaitTermination(600)
        delivered = sum(each.numInputRows for each in started.recentProgress)
        assert delivered >= at_least, f"{delivered} of {at_least} rows were delivered"
        shutil.rmtree(state)

    def contenders(self, *, typed: bool = True) -> Mapping[str, Callable[[], None]]:
        found: dict[str, Callable[[], None]] = {
            "start": lambda: self.stream("few"),
            "WAL files": lambda: self.stream("wal"),
            "bulk load": lambda: self.stream("load"),
            "parquet": self.parquet,
            "read": self.read,
        }
        if typed:
            found["columns"] = lambda: self.stream("typed", TYPED, **{"key.columns": "id"})
        return found


def rates(taken: Mapping[str, list[Taken]]) -> dict[str, float]:
    """Thousands of rows per processor second, of all processes, without what the start of a stream costs."""
    cost = {name: statistics.median(one.cpu_seconds for one in runs) for name, runs in taken.items()}
    started = ("WAL files", "bulk load", "columns")
    found = {
        name: ROWS / (cpu_s - (cost["start"] if name in started else 0)) / 1e3 for name, cpu_s in cost.items()
    }
    return found | {"start": cost["start"]}


def measure_streams(*, typed: bool = True) -> dict[str, float]:
    """The rates of one session."""
    with tempfile.TemporaryDirectory(dir=scratch_place(8 * ROWS * ROW_BYTES)) as scratch:
        streams = Streams(Path(scratch))
        try:
            return rates(measure(streams.contenders(typed=typed)))
        finally:
            streams.spark.stop()


def run() -> str:
    found = measure_streams()
    measurements = [
        Measurement(
            f"stream of {ROWS:,} changes, {what}",
            "krows/CPU s",
            {FLAGSTONE: found[name], PARQUET: found["parquet"]},
            "higher",
        )
        for name, what in (
            ("WAL files", "bytes from WAL files"),
            ("bulk load", "bytes from a bulk load"),
            ("columns", "ordinary columns from WAL files"),
            ("read", "a read of the same rows instead"),
        )
    ]
    return write_markdown(
        "spark-stream",
        "Spark: streams of changes",
        *compared(measurements, (PARQUET,)),
        [
            "One session, `local[2]`, one micro-batch into the sink `noop`, a new query each time. Rows per second of",
            "processor time of all processes, JVM and Python workers. The start of a stream of changes, measured with",
            f"{FEW} rows, takes {found['start']:.1f} s of it for new Python processes and is not counted. WAL files have",
            f"{FILE_ROWS:,} rows. Parquet is Spark's own stream of files with the same keys and values; it delivers two",
            "columns, a stream of changes seven.",
        ],
        basis=f"Medians of {ROUNDS} interleaved rounds.",
        measurements=measurements,
    )
