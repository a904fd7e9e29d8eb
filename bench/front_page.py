"""The table "Performance" of the project's README, made from the stored results, so that both agree.

`python -m bench summary` replaces the text between the two comments; a test finds a README that is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness import FLAGSTONE, PARQUET, ROCKS, WHEEL, Measurement, formatted, markdown_table

PAGE: Final = Path(__file__).parent.parent / "README.md"
BEGIN: Final = "<!-- measured: made by `python -m bench summary` -->"
END: Final = "<!-- end of measured -->"
ENGINES: Final = {
    FLAGSTONE: "Flagstone",
    WHEEL: "SlateDB's Python binding",
    ROCKS: "RocksDB (rocksdict)",
    PARQUET: "Parquet",
}
LINES: Final = (
    ("put, not waiting", "engine", "put, no durability wait"),
    ("get, from memory", "engine", "get, in the memtable"),
    ("get, from a warm SST", "engine", "get, in an SST, warm"),
    ("full scan", "engine", "full scan"),
    ("durable put, one caller, fsync", "engine", "durable put, one caller, fsync"),
    ("flush", "engine", "flush of 56 MB"),
    ("compaction", "compaction", "compaction, 100 B values"),
    ("Spark: load 5 M sorted rows", "spark", "load of 5,000,000 sorted rows"),
    ("Spark: load 5 M rows in no order", "spark", "load of 5,000,000 rows in no order"),
    ("Spark: read 5 M rows", "spark", "DataFrame read of 5,000,000 rows"),
    ("requests of an idle minute", "requests", "requests, idle minute, default settings"),
)
"""The label of a line here, the result it comes from, and its name there."""


def front_page(page: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table of these results. Pure. Raises `KeyError` for a result that is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"no {BEGIN} on the page"
    assert end, f"no {END} on the page"
    return "\n".join([before + BEGIN, *_lines(results), END + after])


def published(results: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Mapping[str, Any], Measurement]]:
    """The lines of the table: label -> the result that a figure comes from, and its measurement."""
    found = {
        (result["name"], one["what"]): (result, Measurement(**one))
        for result in results
        for one in result["measurements"]
    }
    return {label: found[result, what] for label, result, what in LINES}


def _lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    chosen = published(results)
    dates = sorted({result["date"] for result, _ in chosen.values()})
    cores = sorted({result["machine"]["cores"] for result, _ in chosen.values()})
    table = markdown_table(
        ["", *ENGINES.values()],
        [[label, *_cells(one)] for label, (_, one) in chosen.items()],
    )
    return [
        f"Measured on {' and '.join(dates)} on one small machine ({' or '.join(map(str, cores))} cores), medians of interleaved rounds.",
        "",
        *table,
    ]


def _cells(one: Measurement) -> list[str]:
    """A figure for each engine, the best of them bold."""
    present = {engine: one.values[engine] for engine in ENGINES if engine in one.values}
    best = (max if one.better == "higher" else min)(present.values())
    cells = {engine: figure_text(figure, one.unit) for engine, figure in present.items()}
    return [
        f"**{cells[engine]}**" if present.get(engine) == best else cells.get(engine, "") for engine in ENGINES
    ]


def figure_text(figure: float, unit: str) -> str:
    """A figure as the table shows it."""
    return f"{figure / 1000:.2f} M rows/s" if unit == "krows/s" else formatted(figure, unit)
