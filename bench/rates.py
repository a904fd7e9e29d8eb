"""Flagstone's column of the table in the project's README, measured on this machine in seconds: for `make demo`.

The functions that measure the rows for `bench/results` measure them here, with the same keys, values and definitions,
but without the other engines and with fewer rounds. Spark has 600,000 rows instead of five million, which share the fixed
costs of its jobs.

`python -m bench.rates FOLDER` prints the rows of the engine as JSON. It is a process of its own, as each comparison is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench import compaction, engine, spark
from bench.front_page import LINES, published
from bench.harness import FLAGSTONE, RESULTS, Measurement, sized
from bench.machine import scratch_place
from bench.summary import load_results

ROUNDS: Final = sized(3, quickly=1)
SPARK_ROWS: Final = sized(600_000, quickly=3_000)
SPARK_ROUNDS: Final = sized(2, quickly=1)


@dataclass(frozen=True)
class Row:
    """One line of the README's table: Flagstone's figure there, and the one that was measured here.

    `here` is None if it was not measured, and `ratio` is how many times better it is.
    """

    label: str
    readme: Measurement
    date: str
    machine: Mapping[str, Any]
    here: Measurement | None

    @property
    def ratio(self) -> float | None:
        found, expected = self.here and self.here.values[FLAGSTONE], self.readme.values[FLAGSTONE]
        if not found:
            return None
        return found / expected if self.readme.better == "higher" else expected / found


def beside(measured: Iterable[Measurement]) -> list[Row]:
    """All lines of the README's table, each with what was measured here, also if that has another number of rows."""
    there, here = published(load_results(RESULTS)), {_without_numbers(one.what): one for one in measured}
    rows = []
    for label, _, what in LINES:
        result, readme = there[label]
        rows.append(Row(label, readme, result["date"], result["machine"], here.get(_without_numbers(what))))
    return rows


def _without_numbers(what: str) -> str:
    return re.sub(r"\d[\d,]*", "N", what)


def engine_rates(folder: Path) -> list[Measurement]:
    """Puts, gets, scan, durable puts, flush and compaction, in a process of its own, on databases in `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.rates", str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parent.parent,
    )
    if done.returncode:
        raise RuntimeError(f"the measurement failed: {done.stderr[-2000:]}")
    return [Measurement(**one) for one in json.loads(done.stdout)]


def measure_engine(folder: Path) -> list[Measurement]:
    """The same in this process, in the order of `engine.run`. Compactions have processes of their own."""
    ours = [engine.Flagstone]
    found = [
        *engine.point_operations(folder, ours),
        engine.flush(folder, ours, rounds=ROUNDS),
        engine.durable_puts(folder, ours, fsync=True),
    ]
    with tempfile.TemporaryDirectory(dir=scratch_place(1 << 30)) as scratch:
        taken = compaction.timed(Path(scratch), 100, [FLAGSTONE], rounds=ROUNDS)
    return [*found, compaction.throughput(100, taken)]


def spark_rates(session: Any) -> list[Measurement]:
    """Loads and reads in a session that is warm already."""
    with tempfile.TemporaryDirectory(dir=scratch_place(5 * SPARK_ROWS * spark.ROW_BYTES)) as scratch:
        work = spark.Session(Path(scratch), spark=session, rows=SPARK_ROWS)
        taken = spark.measure(
            {
                spark.SORTED_LOAD: lambda: work.load(work.ordered, presorted=True),
                spark.UNORDERED_LOAD: lambda: work.load(work.unordered, presorted=False),
            },
            rounds=SPARK_ROUNDS,
        )
        work.ordered.unpersist(blocking=True)
        taken |= spark.measure({spark.READ: work.read}, rounds=SPARK_ROUNDS)
    return [
        Measurement(
            what.format(SPARK_ROWS), "krows/s", {FLAGSTONE: spark.rate(found, rows=SPARK_ROWS)}, "higher"
        )
        for what, found in taken.items()
    ]


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in measure_engine(Path(sys.argv[1]))]))
