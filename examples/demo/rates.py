"""Act 8: the rows of the README's table, measured as `make bench` measures them, beside the README's figures.

The acts before do everything once, on the shop's rows: their times are those of a first call. Here every measurement
has a first round that is not counted, and the code that measures is that of `bench/`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from stage import Stage

sys.path.append(str(Path(__file__).parents[2]))  # where `bench` is

from bench.front_page import figure_text
from bench.harness import FLAGSTONE, Measurement
from bench.machine import BUSY_VARIABLE, busy_percent, machine, machine_line
from bench.rates import Row, beside, engine_rates, spark_rates
from bench.requests import IdleDatabase

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["IdleDatabase", "measure_engine", "measure_spark", "note_load", "show_rates"]
BUSY = "busy_before_percent"


def note_load() -> None:
    """Measure how busy the machine is before the demo starts; the closing line says it."""
    busy = busy_percent(0.3)
    if busy is not None:
        os.environ[BUSY_VARIABLE] = f"{busy:.1f}"


def measure_spark(stage: Stage, spark: SparkSession) -> list[Measurement]:
    stage.act(
        "8 Rates", "the README's table on this machine: warm, medians, measured by the code of `make bench`"
    )
    with stage.step("the rows of Spark"):
        return spark_rates(spark)


def measure_engine(stage: Stage, folder: Path) -> list[Measurement]:
    """In a process of its own: puts, gets, a scan, durable puts, flushes and compactions."""
    os.sync()  # a disk that still writes what Spark made would slow this down
    with stage.step("the rows of the engine"):
        return engine_rates(folder)


def show_rates(stage: Stage, measured: list[Measurement]) -> None:
    rows = beside(measured)
    table = Table("the README's table", box=SIMPLE_HEAD)
    for heading in ("here", "README", "here is"):
        table.add_column(heading, justify="right")
    for row in rows:
        there = figure_text(row.readme.values[FLAGSTONE], row.readme.unit)
        table.add_row(row.label, _here(row), there, "" if row.ratio is None else f"{row.ratio:.2f}×")
    stage.console.print()
    stage.console.print(table)
    smaller = [row.here.what for row in rows if row.here is not None and row.here.what != row.readme.what]
    if smaller:
        stage.tell(f"Here with fewer rows, so that a job's fixed costs weigh more: {'; '.join(smaller)}.")
    stage.tell(
        "Durable puts measure the disk: the same disk gave between 760 and 1,670 a second within an hour."
    )
    dates = " and ".join(sorted({row.date for row in rows}))
    machines = " and ".join(sorted({machine_line({**row.machine, BUSY: None}) for row in rows}))
    stage.tell(f"here:   {machine()}")
    stage.tell(f"README: {machines}; {dates}. More than 1× is better than the README's figure.")


def _here(row: Row) -> str:
    if row.here is None:
        return "not measured"
    return figure_text(row.here.values[FLAGSTONE], row.here.unit)
