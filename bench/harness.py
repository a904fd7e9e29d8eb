"""Measures several contenders in turn, so that other load on the machine affects all of them alike, and stores the results.

Each round runs every contender once, in a new random order; the result is the median over the rounds.

A comparison is a module of this folder with `run() -> str`. It ends with `write_markdown`, which keeps two files:
`NAME.md` for people and `NAME.json` for charts and the summary.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, TypeVar

from bench.machine import machine, machine_facts

RESULTS: Final = Path(__file__).parent / "results"

QUICK_VARIABLE: Final = "FLAGSTONE_BENCH_QUICK"
RESULTS_VARIABLE: Final = "FLAGSTONE_BENCH_RESULTS"
"""Set by the runner for its child processes and theirs."""

FLAGSTONE: Final = "flagstone"
WHEEL: Final = "slatedb 0.17"
ROCKS: Final = "rocksdict"
PARQUET: Final = "parquet"
PEERS: Final = {WHEEL: "wheel", ROCKS: "rocksdict", PARQUET: "Parquet"}
"""The engines that Flagstone is compared with, and their column headings."""

_STARTED: Final = time.perf_counter()
"""About when the process began; each comparison has a process of its own."""

Better = Literal["higher", "lower"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender: the median of its rounds, and their spread."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Measurement:
    """One thing that was measured for several engines, in one unit."""

    what: str
    unit: str
    values: dict[str, float]
    better: Better = "lower"

    def ratio(self, other: str) -> float | None:
        """How many times better Flagstone is than `other`; None if one of them was not measured."""
        ours, theirs = self.values.get(FLAGSTONE), self.values.get(other)
        if not ours or not theirs:
            return None
        return ours / theirs if self.better == "higher" else theirs / ours


@dataclass(frozen=True)
class Curve:
    """One figure of several engines by number of rows, and what limits it."""

    name: str
    title: str
    unit: str
    points: dict[str, list[tuple[float, float]]]
    limit: str
    better: Better = "lower"


@dataclass(frozen=True)
class Bars:
    """Figures of one engine side by side, for a chart: label -> case -> figure."""

    name: str
    title: str
    unit: str
    rows: dict[str, dict[str, float]] = field(default_factory=dict)


def quick() -> bool:
    """Whether this is a smoke run: everything at tiny sizes, numbers without meaning."""
    return bool(os.environ.get(QUICK_VARIABLE))


def sized(full: _T, *, quickly: _T) -> _T:
    """The size for a real run, or the one for a smoke run."""
    return quickly if quick() else full


def results_folder() -> Path:
    """The folder of the results."""
    return Path(os.environ.get(RESULTS_VARIABLE) or RESULTS)


def interleave(contenders: Mapping[str, Callable[[], object]], *, rounds: int = 7) -> dict[str, Timing]:
    """Time every contender `rounds` times. A first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(sized(rounds, quickly=1) + 1):
        for name in random.sample(list(contenders), len(contenders)):
            gc.collect()
            started = time.perf_counter()
            contenders[name]()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: Timing(statistics.median(taken), min(taken), max(taken)) for name, taken in seconds.items()}


def formatted(figure: float | None, unit: str) -> str:
    """A figure with its unit, rounded to at most two decimals; counts have no unit. Empty for None."""
    if figure is None:
        return ""
    digits = 0 if figure >= 100 or (not unit and figure == round(figure)) else 1 if figure >= 10 else 2
    return f"{figure:,.{digits}f} {unit}".rstrip()


def compared(
    measurements: Sequence[Measurement], peers: Sequence[str] = (WHEEL, ROCKS)
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: Flagstone, the peers, and how many times better Flagstone is than each."""
    header = ["what", FLAGSTONE, *peers, *(f"× {PEERS[peer]}" for peer in peers)]
    rows = []
    for one in measurements:
        ratios = [one.ratio(peer) for peer in peers]
        rows.append(
            [
                one.what,
                *(formatted(one.values.get(engine), one.unit) for engine in (FLAGSTONE, *peers)),
                *("" if ratio is None else formatted(ratio, "×").replace(" ", "") for ratio in ratios),
            ]
        )
    return header, rows


def write_markdown(
    name: str,
    title: str,
    header: list[str],
    rows: list[list[str]],
    remarks: list[str],
    *,
    basis: str = "Medians of interleaved rounds.",
    measurements: Sequence[Measurement] = (),
    curves: Sequence[Curve] = (),
    bars: Sequence[Bars] = (),
) -> str:
    """Keep a table under `NAME.md` of the results, and the same as data under `NAME.json`; returns the table's text.

    `basis` describes the numbers. `measurements` join the comparison of the summary, `curves` and `bars` become
    charts; a comparison without any of them is shown there by its table.
    """
    now = datetime.now(UTC)
    text = "\n".join(
        [
            f"# {title}",
            "",
            f"{now:%Y-%m-%d}, {machine()}. {basis}",
            "",
            *markdown_table(header, rows),
            "",
            *remarks,
        ]
    )
    text = text.rstrip() + "\n"
    kept = {
        "name": name,
        "title": title,
        "date": f"{now:%Y-%m-%d}",
        "seconds": round(time.perf_counter() - _STARTED),
        "quick": quick(),
        "machine": machine_facts(),
        "basis": basis,
        "header": header,
        "rows": rows,
        "remarks": remarks,
        "measurements": [asdict(one) for one in measurements],
        "curves": [asdict(one) for one in curves],
        "bars": [asdict(one) for one in bars],
    }
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return text


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
