"""Each figure by number of rows, from 10⁵ to 10⁷: put, get, scan, compaction, opening, memory.

Every step of every engine runs in a process of its own (`bench.scaling_steps`), so that memory is that step's. The wheel
compacts and reads the same files that Flagstone loaded (hard links: objects are never changed in place), because
its own load would take too long; rocksdict has its own files. A peer that does not load a size within its budget skips
larger ones.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

from bench.harness import FLAGSTONE, ROCKS, WHEEL, Better, Curve, formatted, sized, write_markdown
from bench.machine import scratch_place
from bench.scaling_steps import KEY_BYTES, VALUE_BYTES, Figures, make_keys

SIZES: Final = sized({100_000: 3, 300_000: 3, 1_000_000: 3, 3_000_000: 1, 10_000_000: 1}, quickly={2_000: 1})
"""Rows -> rounds."""
ENGINES: Final = (FLAGSTONE, WHEEL, ROCKS)
BUDGET_S: Final = {FLAGSTONE: 300.0, WHEEL: 75.0, ROCKS: 150.0}
"""How long a load may take."""
STEP_TIMEOUT_S: Final = 400

LIMITS: Final = {
    "put": (
        "Rows per second until all rows are in SSTs, compaction in the background. Small loads are a Python call and an "
        "insertion into the memtable per row, and end with waiting for one flush; from a few memtables of 64 MB on, the WAL, "
        "flushes and compactions take turns with the puts: what is not in a kernel shares the interpreter's lock, so "
        "little more than one core is in use."
    ),
    "cold get": (
        "The engine's caches are empty, the operating system's are not. A get that has to fetch leaves the compiled path: about "
        "a hundred Python calls plan, count, read and check one block of 4 KiB; the first one also reads the index and the "
        "filter of its SST, which grow with the number of its rows. On a remote store all this is one round trip; see the "
        "latency profile."
    ),
    "warm get": (
        "The call from Python and a search in a cached block. The slow rise is the processor's caches: with more rows the "
        "same number of gets touches as many blocks, but filters and indexes that no longer fit."
    ),
    "scan": (
        "Nothing is cached: a thread reads ahead, checks and cuts blocks, and takes turns at the interpreter's lock with the "
        "making of two Python objects per row. It hardly depends on how many rows there are. With all blocks in memory a scan "
        "is more than twice as fast; see `full scan` in the engine comparison. The wheel's scan is its binding's copying of each "
        "byte."
    ),
    "compaction": (
        "A call of `Admin.compact(full=True)` with its protocol: claim, manifests, half a second of polling at most. That is "
        "all there is to small databases; large ones run at the speed of the merging kernel, checksums and the page faults "
        "of SSTs built in memory."
    ),
    "open": (
        "About a dozen small requests (manifest, fence of the WAL, markers) and the start of the background threads, whatever "
        "is stored: the manifest lists SSTs, not rows. Replaying the WAL after a crash comes on top; see `reopen` in the "
        "engine comparison."
    ),
    "put memory": (
        "Memtables that wait to be flushed, and what flushes and compactions beside the load take. From four memtables "
        "of 64 MB on, writers that are ahead of the flushes slow down."
    ),
    "compaction memory": (
        "Sub-compactions run side by side, each with its output SST in memory until it is uploaded; bounded by their "
        "number and the size of an SST, four and 256 MB by default."
    ),
    "get memory": "The block cache, indexes and filters that the gets touched: bounded by the cache settings.",
    "scan memory": "Read-ahead and the cached indexes of the SSTs; the scanned rows are not kept.",
}
CURVES: Final[dict[str, tuple[str, str, Better]]] = {
    "put": ("Put", "rows/s", "higher"),
    "cold get": ("Get, cold cache", "µs", "lower"),
    "warm get": ("Get, warm cache", "µs", "lower"),
    "scan": ("Scan", "rows/s", "higher"),
    "compaction": ("Full compaction", "MB/s", "higher"),
    "open": ("Opening a database", "ms", "lower"),
    "put memory": ("Peak memory while loading", "MB", "lower"),
    "compaction memory": ("Peak memory of a compaction", "MB", "lower"),
    "get memory": ("Peak memory of gets", "MB", "lower"),
    "scan memory": ("Peak memory of a scan", "MB", "lower"),
}

Found = dict[tuple[str, int], dict[str, list[float]]]
"""(engine, rows) -> figure -> its rounds."""


def run() -> str:
    """Measure every size, write `results/scaling.md`."""
    started = time.perf_counter()
    rounds = _Rounds()
    largest = max(SIZES) * (KEY_BYTES + VALUE_BYTES)
    with tempfile.TemporaryDirectory(dir=scratch_place(5 * largest)) as scratch:
        keys, place = Path(scratch, "keys"), Path(scratch, "round")
        for rows, count in SIZES.items():
            make_keys(keys, rows)
            for turn in range(count):
                rounds.measure(place, keys, rows, wheel_loads=turn == 0)
                shutil.rmtree(place)
    return _report(rounds.found, rounds.unable, time.perf_counter() - started)


class _Rounds:
    """The results so far, and the engines that were too slow, by size."""

    def __init__(self) -> None:
        self.found: Found = defaultdict(lambda: defaultdict(list))
        self.unable: dict[str, int] = {}

    def measure(self, place: Path, keys: Path, rows: int, *, wheel_loads: bool) -> None:
        """One round of one size: each step for all engines in random order, before the next step.

        The wheel's own load takes by far the longest, so it runs once for each size.
        """
        folders = {engine: place / engine.replace(" ", "-") for engine in ENGINES}
        for folder in folders.values():
            folder.mkdir(parents=True)
        for engine in random.sample(ENGINES, len(ENGINES)):
            if engine in self.unable or (engine == WHEEL and not wheel_loads):
                continue
            if not self._keep(engine, "load", folders[engine], keys, rows):
                assert engine != FLAGSTONE, (
                    f"loading {rows:,} rows takes longer than {BUDGET_S[engine]:.0f} s"
                )
                self.unable[engine] = rows
        shutil.rmtree(folders[WHEEL])
        shutil.copytree(folders[FLAGSTONE], folders[WHEEL], copy_function=_link)
        for step in ("compact", "use"):
            for engine in random.sample(ENGINES, len(ENGINES)):
                if engine == ROCKS and ROCKS in self.unable:
                    continue
                self._keep(engine, step, folders[engine], keys, rows)

    def _keep(self, engine: str, step: str, folder: Path, keys: Path, rows: int) -> bool:
        """Run a step; returns whether it ended within its time."""
        figures = _step(engine, step, folder, keys, rows)
        for name, figure in figures.items():
            self.found[engine, rows][name].append(figure)
        return bool(figures)


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _step(engine: str, step: str, folder: Path, keys: Path, rows: int) -> Figures:
    """The figures of one step; none if it did not end within its time."""
    command = [sys.executable, "-m", "bench.scaling_steps", engine, step]
    command += [str(folder), str(keys), str(rows), str(BUDGET_S[engine])]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode:
        problem = f"{engine}, {step} of {rows:,} rows failed:\n{done.stderr}"
        if engine == FLAGSTONE:
            raise RuntimeError(problem)
        print(problem, file=sys.stderr)  # a gap in its line; the caller reports it
        return {}
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _report(found: Found, unable: dict[str, int], seconds: float) -> str:
    medians = {
        place: {name: statistics.median(rounds) for name, rounds in figures.items()}
        for place, figures in found.items()
    }
    header = ["what", "engine", *(f"{rows:,}" for rows in SIZES)]
    table, curves = [], []
    for name, (title, unit, better) in CURVES.items():
        points = {
            engine: [
                (float(rows), medians[engine, rows][name])
                for rows in SIZES
                if name in medians.get((engine, rows), {})
            ]
            for engine in ENGINES
        }
        for engine, line in points.items():
            at = dict(line)
            table.append([title, engine, *(formatted(at.get(float(rows)), unit) for rows in SIZES)])
        drawn = {engine: line for engine, line in points.items() if line}
        curves.append(Curve(name.replace(" ", "-"), title, unit, drawn, LIMITS[name], better))
    for name in ("put", "compaction"):
        cores = [medians[FLAGSTONE, rows].get(f"{name} cores") for rows in SIZES]
        table.append(
            [f"Cores used, {CURVES[name][0].lower()}", FLAGSTONE, *(formatted(used, "") for used in cores)]
        )
    missing = [
        f"{engine} did not load {rows:,} rows within {BUDGET_S[engine]:.0f} s, so its line ends before."
        for engine, rows in unable.items()
    ]
    return write_markdown(
        "scaling",
        "Scaling: from 10⁵ to 10⁷ rows",
        header,
        table,
        [
            f"Keys of {KEY_BYTES} bytes in random order, values of {VALUE_BYTES}; default settings of each engine, so the sizes of",
            "the caches differ; no fsync; folders in memory where they fit. Puts one by one, the wheel's in batches of 1,000 rows,",
            "its fastest way. The wheel compacts and reads the files that Flagstone loaded. Scans end after 10 s at the latest.",
            "Memory is the peak of the process in that step, with the interpreter.",
            *missing,
            "",
            "What limits Flagstone's figures:",
            "",
            *(f"- **{title}**: {LIMITS[name]}" for name, (title, _, _) in CURVES.items()),
        ],
        basis=(
            f"Medians of {max(SIZES.values())} rounds, of {min(SIZES.values())} for the largest sizes; {seconds / 60:.0f} minutes "
            "in all."
        ),
        curves=curves,
    )


if __name__ == "__main__":
    print(run())
