"""The demo's output: a line per step with its rate, progress bars, and the number of checks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
MB = 1_000_000


class WrongResult(Exception):
    """A check of the demo failed."""


@dataclass
class Lap:
    """One line of the closing table."""

    act: str
    name: str
    seconds: float = 0.0
    rows: int = 0
    bytes: int = 0

    @property
    def rate(self) -> str:
        if self.rows:
            return f"{self.rows / self.seconds:,.0f} rows/s"
        return f"{self.bytes / MB / self.seconds:,.0f} MB/s" if self.bytes else ""


@dataclass
class Stage:
    """The console, the finished steps and the number of checks."""

    console: Console = field(default_factory=lambda: Console(highlight=False))
    laps: list[Lap] = field(default_factory=list)
    checks: int = 0
    _act: str = ""

    def act(self, title: str, sentence: str) -> None:
        self._act = title
        self.console.print(f"\n[bold cyan]{title}[/]  [dim]{sentence}[/]", soft_wrap=True)

    def tell(self, text: str) -> None:
        self.console.print(f"    {text}", soft_wrap=True)

    def check(self, what: str, found: object, expected: object) -> None:
        """Count a check; the two must be equal.

        Raises:
            WrongResult: they are not equal.

        """
        if found != expected:
            raise WrongResult(f"{what}: found {_short(found)}, expected {_short(expected)}")
        self.checks += 1

    @contextmanager
    def step(self, name: str, *, rows: int = 0) -> Iterator[tuple[Lap, Callable[[int], None]]]:
        """Time the block. Yields the lap, to be filled in, and a function that moves the bar to a row."""
        lap = Lap(self._act, name, rows=rows)
        with self._bar(name) as (bar, shown):
            bar.update(shown, total=rows or None)
            started = time.perf_counter()
            yield lap, lambda done: bar.update(shown, completed=done)
            lap.seconds = time.perf_counter() - started
        self._finish(lap)

    def spark_step(
        self, name: str, spark: SparkSession, folder: Path, work: Callable[[Lap], T], *, rows: int = 0
    ) -> T:
        """The same for one call that runs Spark jobs; the bar shows tasks, and how much the folder has grown."""
        lap = Lap(self._act, name, rows=rows)
        tracker = spark.sparkContext.statusTracker()
        before = folder_bytes(folder)
        with self._bar(name) as (bar, shown), ThreadPoolExecutor(1) as pool:
            started = time.perf_counter()
            call = pool.submit(work, lap)
            while not wait([call], timeout=0.15).done:
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                tasks = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage is not None]
                done, total = (sum(column) for column in zip(*tasks, strict=True)) if tasks else (0, None)
                grown = (folder_bytes(folder) - before) / MB
                note = f"{done}/{total} tasks, " if total else ""
                bar.update(shown, completed=done, total=total, description=f"{name}: {note}{grown:,.0f} MB")
            lap.seconds = time.perf_counter() - started
            result = call.result()
        self._finish(lap)
        return result

    @contextmanager
    def _bar(self, name: str) -> Iterator[tuple[Progress, Any]]:
        columns = (
            TextColumn("   "),
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
        )
        quiet = not self.console.is_terminal
        # Removed at the end: the line of the step replaces it.
        with Progress(*columns, console=self.console, transient=True, disable=quiet) as bar:
            yield bar, bar.add_task(name, total=None)

    def _finish(self, lap: Lap) -> None:
        self.laps.append(lap)
        amount = f"{lap.rows:,} rows" if lap.rows else f"{lap.bytes / MB:,.0f} MB" if lap.bytes else ""
        self.console.print(
            f"  [green]✓[/] {lap.name:<36}{amount:>16}  {lap.seconds:7.2f} s  {lap.rate:>18}", soft_wrap=True
        )


@contextmanager
def java_output_in(log: Path) -> Iterator[None]:
    """Redirect the messages of a Java process that is started inside into a file, away from the progress bars."""
    ours = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(ours, 2)
            os.close(ours)


def folder_bytes(folder: Path) -> int:
    return sum(size for _, size in _files(folder))


def folder_objects(folder: Path) -> int:
    return sum(1 for _ in _files(folder))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                yield name, (Path(at) / name).stat().st_size
            except FileNotFoundError:
                continue  # a temporary file that was renamed meanwhile


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
