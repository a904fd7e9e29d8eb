"""Measures several contenders in turn, so that a noisy neighbour hurts all of them alike.

Each round runs every contender once, in a fresh random order; what counts is the median over the rounds.
"""

from __future__ import annotations

import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender: the median of its rounds, and their spread."""

    median: float
    fastest: float
    slowest: float


def interleave(contenders: Mapping[str, Callable[[], object]], *, rounds: int = 7) -> dict[str, Timing]:
    """Time every contender `rounds` times. A first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name in random.sample(list(contenders), len(contenders)):
            gc.collect()
            started = time.perf_counter()
            contenders[name]()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: Timing(statistics.median(taken), min(taken), max(taken)) for name, taken in seconds.items()}


def machine() -> str:
    """Where the numbers come from."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, Python {platform.python_version()}, {platform.system()}"


def write_markdown(
    name: str,
    title: str,
    header: list[str],
    rows: list[list[str]],
    remarks: list[str],
    *,
    basis: str = "Medians of interleaved rounds.",
) -> str:
    """Keep a table under `bench/results/NAME.md`; returns its text. `basis` says what its numbers are."""
    lines = [
        f"# {title}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {machine()}. {basis}",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *remarks,
    ]
    text = "\n".join(lines).rstrip() + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    return text
