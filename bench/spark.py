"""Spark: bulk load and DataFrame read beside Parquet in the same session, and beside a load through the wheel.

The rows are the same for all: 20-byte keys that no two rows share, 100-byte values that do not compress. There are
two inputs, the same for Flagstone and Parquet: rows sorted by key in Spark's cache, so that
only writing is measured, and unordered rows from Parquet files, so that Spark sorts them for both. The wheel takes the rows
as Python objects in batches of a thousand. It loads only a part of the rows; the slices of that part show that its rate does
not depend on their number. Afterwards the wheel opens the database that Flagstone loaded and checks the rows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.harness import FLAGSTONE, PARQUET, WHEEL, Measurement, compared, formatted, sized, write_markdown
from bench.machine import scratch_place

ROWS: Final = int(os.environ.get("FLAGSTONE_BENCH_SPARK_ROWS") or sized(5_000_000, quickly=20_000))
WHEEL_ROWS: Final = min(ROWS, sized(200_000, quickly=2_000))
SLICES: Final = 4
GETS: Final = sized(10_000, quickly=500)
ROUNDS: Final = sized(5, quickly=1)
ROW_BYTES: Final = 120
SORTED_LOAD: Final = "load of {:,} sorted rows"
UNORDERED_LOAD: Final = "load of {:,} rows in no order"
READ: Final = "DataFrame read of {:,} rows"
SPACE: Final = 1 << 32
"""Keys are numbers below this, spread evenly by `STRIDE`, which is odd: no two rows get the same."""
STRIDE: Final = 2_654_435_761


class Taken(NamedTuple):
    """The cost of one run, over all processes."""

    seconds: float
    cpu_seconds: float


def key(row: int) -> bytes:
    return b"key-%016d" % (row * STRIDE % SPACE)


def value(row: int) -> bytes:
    return hashlib.sha512(b"%d" % row).digest() + hashlib.sha512(b"-%d" % row).digest()[:36]


class Session:
    """A Spark session of two cores, unless another is given, and the rows in both orders."""

    def __init__(self, folder: Path, *, spark: Any = None, rows: int = ROWS) -> None:
        from flagstone.spark import session

        self.spark = spark or session(master="local[2]", spark_log_level="ERROR", spark_driver_memory="6g")
        self.rows = rows
        self.database, self.parquet = folder / "database", folder / "parquet"
        self._source = folder / "source"
        self._write_source()
        self.unordered = self.spark.read.parquet(str(self._source))
        # 64 MiB each: as Spark sizes an uncached shuffle by default.
        by_key = self.unordered.repartitionByRange(max(2, rows * ROW_BYTES >> 26), "key")
        self.ordered = by_key.sortWithinPartitions("key").cache()
        assert self.ordered.count() == rows

    def _write_source(self) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        number = F.col("id")
        spread = ((number * F.lit(STRIDE)) % F.lit(SPACE)).cast("string")
        digest = F.unhex(F.sha2(number.cast("string").cast("binary"), 512))
        more = F.unhex(F.sha2(F.concat(F.lit("-"), number.cast("string")).cast("binary"), 512))
        rows = self.spark.range(0, self.rows, 1, 8).select(
            F.concat(F.lit("key-"), F.lpad(spread, 16, "0")).cast("binary").alias("key"),
            F.concat(digest, F.substring(more, 1, 36)).alias("value"),
        )
        rows.write.parquet(str(self._source))

    def sorted_anew(self) -> Any:
        return self.unordered.repartitionByRange("key").sortWithinPartitions("key")

    def load(self, rows: Any, *, presorted: bool) -> None:
        from flagstone.spark import bulk_load

        shutil.rmtree(self.database, ignore_errors=True)
        report = bulk_load(rows, self.database, presorted=presorted)
        assert report is not None
        assert report.rows == self.rows

    def write_parquet(self, rows: Any) -> None:
        shutil.rmtree(self.parquet, ignore_errors=True)
        rows.write.parquet(str(self.parquet))

    def read(self) -> None:
        self._consume(self.spark.read.format("flagstone").load(str(self.database)))

    def read_parquet(self) -> None:
        self._consume(self.spark.read.parquet(str(self.parquet)))

    def _consume(self, rows: Any) -> None:
        rows.write.format("noop").mode("overwrite").save()


def measure(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int = ROUNDS
) -> dict[str, list[Taken]]:
    """Run all in turn, each round in another order; the first round warms up and is not counted."""
    found: dict[str, list[Taken]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name in random.sample(list(contenders), len(contenders)):
            cpu, started = cpu_seconds(), time.perf_counter()
            contenders[name]()
            taken = Taken(time.perf_counter() - started, cpu_seconds() - cpu)
            if turn:
                found[name].append(taken)
    return found


def cpu_seconds() -> float:
    """Processor seconds of this process and its descendants, the JVM and the Python workers included."""
    spent: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has just ended
            spent[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    ours = {os.getpid()}
    while more := {pid for pid, (parent, _) in spent.items() if parent in ours} - ours:
        ours |= more
    ticks = sum(spent[pid][1] for pid in ours if pid in spent)
    return ticks / os.sysconf("SC_CLK_TCK")


def load_with_wheel(folder: Path) -> list[float]:
    """In a process of its own: seconds of each slice of the rows, the last with the flush that ends the load."""
    from slatedb import uniffi

    values = json.loads(uniffi.Settings.default().to_json_string())
    values.update(compactor_options=None, garbage_collector_options=None)
    values.update(l0_max_ssts=1000, l0_max_ssts_per_key=1000)
    rows = [(key(row), value(row)) for row in range(WHEEL_ROWS)]
    step = WHEEL_ROWS // SLICES

    async def work() -> list[float]:
        store = uniffi.ObjectStoreBuilder.from_url(f"file://{folder}").build()
        builder = uniffi.DbBuilder("db", store)
        builder.with_settings(uniffi.Settings.from_json_string(json.dumps(values)))
        db = await builder.build()
        taken = []
        for first in range(0, step * SLICES, step):
            started = time.perf_counter()
            for start in range(first, first + step, 1000):
                batch = uniffi.WriteBatch()
                for one in rows[start : min(start + 1000, first + step)]:
                    batch.put(*one)
                await db.write(batch)
            if first == step * (SLICES - 1):
                await db.flush()
            taken.append(time.perf_counter() - started)
        await db.shutdown()
        return taken

    return asyncio.run(work())


def get_with_wheel(folder: Path, name: str, keys: list[bytes]) -> list[bytes | None]:
    """In a process of its own: the rows that the wheel finds."""
    from slatedb import uniffi

    async def work() -> list[bytes | None]:
        store = uniffi.ObjectStoreBuilder.from_url(f"file://{folder}").build()
        reader = await uniffi.DbReaderBuilder(name, store).build()
        found = [await reader.get(one) for one in keys]
        await reader.shutdown()
        return found

    return asyncio.run(work())


def _apart(name: str, *arguments: Any) -> Any:
    """Call one of the two above in a fresh process, because the wheel's threads do not end."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.spark"],
        input=pickle.dumps((name, arguments)),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    return pickle.loads(done.stdout)


def check_with_wheel(database: Path) -> int:
    """How many random gets agree: of present rows, and of a tenth as many absent ones."""
    chosen = random.Random(8).sample(range(ROWS), GETS - GETS // 11)
    absent = random.Random(9).sample(range(ROWS, 2 * ROWS), GETS // 11)
    wanted: list[tuple[bytes, bytes | None]] = [(key(row), value(row)) for row in chosen]
    wanted += [(key(row), None) for row in absent]
    found = _apart("get_with_wheel", database.parent, database.name, [one for one, _ in wanted])
    agree = sum(one == expected for one, (_, expected) in zip(found, wanted, strict=True))
    assert agree == GETS, f"the wheel finds {GETS - agree} rows that differ from what was loaded"
    return agree


def range_bytes(database: Path) -> tuple[int, int, int]:
    """Read one key of a hundred as a task does: rows, bytes read including planning, and bytes of all SSTs."""
    from pyspark.sql.datasource import GreaterThanOrEqual, LessThan

    from flagstone.spark.address import DatabaseAddress
    from flagstone.spark.held_state import hold_checkpoint
    from flagstone.spark.options import parse_read_options
    from flagstone.spark.row_mapping import read_schema
    from flagstone.spark.scan import PushingReader
    from flagstone.store.counting import CountingStore
    from flagstone.store.local import LocalStore

    store: Any = CountingStore(LocalStore(database.parent), component="bench")
    options = replace(
        parse_read_options({"path": str(database)}), address=DatabaseAddress(database.name, store)
    )
    low, high = (b"key-%016d" % (SPACE * percent // 100) for percent in (40, 41))
    reader = PushingReader(hold_checkpoint(options), read_schema(options.columns))
    left = list(reader.pushFilters([GreaterThanOrEqual(("key",), low), LessThan(("key",), high)]))
    assert not left
    rows = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))
    stored = sum(meta.size for meta in LocalStore(database).list("compacted"))
    return rows, store.totals()["bytes_read"], stored


def rate(taken: Sequence[Taken], *, rows: int = ROWS) -> float:
    """Thousands of rows per second."""
    return rows / statistics.median(one.seconds for one in taken) / 1e3


def _cpu(taken: list[Taken]) -> float:
    return statistics.median(one.cpu_seconds for one in taken) / ROWS * 1e6


def run() -> str:
    with tempfile.TemporaryDirectory(dir=scratch_place(5 * ROWS * ROW_BYTES)) as scratch:
        folder = Path(scratch)
        session = Session(folder)
        slices: list[list[float]] = []

        def wheel() -> None:
            at = folder / "wheel"
            at.mkdir()
            slices.append(_apart("load_with_wheel", at))
            shutil.rmtree(at)

        wrote = measure(
            {
                "load, unordered": lambda: session.load(session.unordered, presorted=False),
                "parquet, unordered": lambda: session.write_parquet(session.sorted_anew()),
                "load, ordered": lambda: session.load(session.ordered, presorted=True),
                "parquet, ordered": lambda: session.write_parquet(session.ordered),
                "wheel": wheel,
            }
        )
        session.ordered.unpersist(blocking=True)
        read = measure({"read": session.read, "parquet": session.read_parquet})
        agreed = check_with_wheel(session.database)
        rows, read_bytes, stored_bytes = range_bytes(session.database)
        session.spark.stop()
    wheel_rate = WHEEL_ROWS / statistics.median(sum(one) for one in slices[1:]) / 1e3
    by_slice = [statistics.median(one[at] for one in slices[1:]) for at in range(SLICES)]
    measurements = [
        Measurement(
            SORTED_LOAD.format(ROWS),
            "krows/s",
            {
                FLAGSTONE: rate(wrote["load, ordered"]),
                WHEEL: wheel_rate,
                PARQUET: rate(wrote["parquet, ordered"]),
            },
            "higher",
        ),
        Measurement(
            UNORDERED_LOAD.format(ROWS),
            "krows/s",
            {
                FLAGSTONE: rate(wrote["load, unordered"]),
                WHEEL: wheel_rate,
                PARQUET: rate(wrote["parquet, unordered"]),
            },
            "higher",
        ),
        Measurement(
            READ.format(ROWS),
            "krows/s",
            {FLAGSTONE: rate(read["read"]), PARQUET: rate(read["parquet"])},
            "higher",
        ),
        *(
            Measurement(
                f"processor seconds per million rows, {what}", "s", {FLAGSTONE: ours, PARQUET: theirs}
            )
            for what, ours, theirs in (
                ("load, sorted", _cpu(wrote["load, ordered"]), _cpu(wrote["parquet, ordered"])),
                ("load, no order", _cpu(wrote["load, unordered"]), _cpu(wrote["parquet, unordered"])),
                ("read", _cpu(read["read"]), _cpu(read["parquet"])),
            )
        ),
    ]
    return write_markdown(
        "spark",
        "Spark: bulk load and DataFrame read",
        *compared(measurements, (PARQUET, WHEEL)),
        [
            "One session, `local[2]`, 20-byte keys, 100-byte values that do not compress; Parquet as Spark writes it by",
            "default. Sorted rows come from Spark's cache, those in no order from Parquet files, and are sorted by Spark",
            f"for both. The wheel writes {WHEEL_ROWS:,} of the rows in batches of 1,000, without compaction; its",
            f"{SLICES} quarters took {', '.join(formatted(one, 's') for one in by_slice)}, the last with the closing flush.",
            "",
            f"The wheel opens the result: {agreed:,} of {GETS:,} random gets agree. One percent of the keys ({rows:,} rows)",
            f"reads {100 * read_bytes / stored_bytes:.2f} % of the {stored_bytes / 1e6:,.0f} MB of all SSTs, planning",
            "included. Reads go to the sink `noop`, from the opening of the DataFrame on.",
        ],
        basis=f"Medians of {ROUNDS} interleaved rounds.",
        measurements=measurements,
    )  # fmt: skip


if __name__ == "__main__":
    called, given = pickle.loads(sys.stdin.buffer.read())
    result = {"load_with_wheel": load_with_wheel, "get_with_wheel": get_with_wheel}[called](*given)
    sys.stdout.buffer.write(pickle.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the wheel's threads would keep the process alive
