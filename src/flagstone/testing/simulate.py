"""`python -m flagstone.testing.simulate`: live through simulated worlds, replay one with its trace, or shrink it.

--seed 7 --trace                    replay a world with every event
--runs 100 --jobs 2                 a hundred seeds in two processes
--minutes 30 --jobs 2               as many seeds as fit
--seed 7 --shrink                   find a shorter world with the same problem
--mutant skip_fence_check           with a planted bug, in the world that is recorded for it
--minutes 30 --wheel-every 20       SlateDB's wheel shows the same rows in the end, in every twentieth world
--hunt                              the table of planted bugs: search a world for each
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from typing import Any, Final

from flagstone.runtime.allocator import trim
from flagstone.testing.simulation.mutants import MUTANTS, planted
from flagstone.testing.simulation.plan import plan_world
from flagstone.testing.simulation.recorded import FOUND, Found
from flagstone.testing.simulation.shrink import shrink
from flagstone.testing.simulation.wheel import find_difference
from flagstone.testing.simulation.world import Outcome, World

_HOURS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Run:
    """One world to live through."""

    seed: int
    hours: float | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)
    mutant: str | None = None
    wheel: bool = False
    """Whether the wheel reads the end state, too."""

    @property
    def command(self) -> str:
        """The command that replays it."""
        parts = ["python -m flagstone.testing.simulate", f"--seed {self.seed}"]
        parts += [] if self.hours is None else [f"--hours {self.hours:g}"]
        parts += [f"--set {name}={json.dumps(value)}" for name, value in sorted(self.chosen.items())]
        parts += [] if self.mutant is None else [f"--mutant {self.mutant}"]
        parts += ["--wheel-every 1"] if self.wheel else []
        return " ".join([*parts, "--trace"])

    def live(self, trace: Any = None) -> Outcome:
        """Live through it."""
        with nullcontext() if self.mutant is None else planted(self.mutant):
            outcome = World(plan_world(self.seed, hours=self.hours, chosen=self.chosen), trace=trace).run()
        if self.wheel and outcome.problem is None:
            outcome.problem = find_difference(outcome)
            outcome.operations["read by the wheel"] += 1
        return outcome

    def find_s(self) -> float:
        """The simulated seconds until a problem shows; 0 if none does."""
        outcome = self.live()
        return 0.0 if outcome.problem is None else max(1.0, outcome.simulated_s)


@dataclass(slots=True)
class Totals:
    """What many worlds did together."""

    worlds: int = 0
    cpu_s: float = 0.0
    simulated_s: float = 0.0
    switches: int = 0
    requests: int = 0
    acknowledged: int = 0
    reads: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome, cpu_s: float) -> None:
        self.worlds += 1
        self.cpu_s += cpu_s
        self.simulated_s += outcome.simulated_s
        self.switches += outcome.switches
        self.requests += outcome.requests
        self.acknowledged += outcome.acknowledged
        self.reads += outcome.reads
        self.operations += outcome.operations
        self.faults += outcome.faults

    def __str__(self) -> str:
        minutes = max(self.cpu_s / 60, 1e-9)
        figures = {
            "simulated hours": self.simulated_s / 3600,
            "operations": self.operations.total(),
            "faults": self.faults.total(),
            "crashes": self.faults["crash"],
            "requests": self.requests,
            "switches": self.switches,
            "writes acknowledged as durable": self.acknowledged,
            "reads checked": self.reads,
        }
        lines = [f"{self.worlds} worlds in {minutes:.1f} CPU minutes"]
        lines += [
            f"  {name:32}{value:16,.0f}{value / minutes:14,.0f} per CPU minute"
            for name, value in figures.items()
        ]
        for title, counter in (("operations", self.operations), ("faults", self.faults)):
            lines.append(f"  {title}: " + ", ".join(f"{name} {n:,}" for name, n in counter.most_common()))
        return "\n".join(lines)


def main() -> int:
    chosen = _parse()
    given = dict(chosen.set)
    if chosen.hunt:
        return _hunt(chosen)
    if chosen.mutant is not None and chosen.seed is None:
        found = FOUND[chosen.mutant]
        runs = [Run(found.seed, found.hours, MUTANTS[chosen.mutant].world, chosen.mutant)]
    else:
        first = 1 if chosen.seed is None else chosen.seed
        every = chosen.wheel_every
        endless = (
            Run(seed, chosen.hours, given, chosen.mutant, wheel=every > 0 and seed % every == 0)
            for seed in count(first)
        )
        runs = endless if chosen.minutes and chosen.runs is None else islice(endless, chosen.runs or 1)  # type: ignore[assignment]
    if chosen.shrink:
        return _shrink(next(iter(runs)))
    if chosen.trace:
        for run in runs:
            print(_line(run, run.live(print), 0.0))
        return 0
    return _live_all(runs, jobs=chosen.jobs, minutes=chosen.minutes, quiet=chosen.quiet)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="the first seed (default 1)")
    parser.add_argument("--runs", type=int, help="how many seeds (default 1)")
    parser.add_argument(
        "--hours", type=float, help="simulated hours of trouble; drawn from the seed if not given"
    )
    parser.add_argument("--minutes", type=float, help="begin no world after that much time")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument(
        "--set", type=_assignment, action="append", default=[], metavar="NAME=VALUE",
        help="a value of the plan instead of the drawn one, as JSON; may be repeated",
    )  # fmt: skip
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug")
    parser.add_argument(
        "--wheel-every",
        type=int,
        default=0,
        metavar="N",
        help="SlateDB's wheel reads every Nth end state, too",
    )
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--shrink", action="store_true", help="find a shorter world with the same problem")
    parser.add_argument(
        "--hunt", action="store_true", help="search a world for every planted bug, or for --mutant"
    )
    parser.add_argument("--quiet", action="store_true", help="print no line for a world that is sound")
    return parser.parse_args()


def _assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _line(run: Run, outcome: Outcome, cpu_s: float) -> str:
    return (
        f"seed {run.seed}: {outcome.problem or 'sound'} | {outcome.simulated_s / 3600:.1f} h in {cpu_s:.1f} s, "
        f"{outcome.operations.total()} operations, {outcome.requests} requests, {outcome.faults.total()} faults, "
        f"{outcome.acknowledged} acknowledged, {outcome.reads} reads checked, digest {outcome.digest:08x}"
    )


# -- many worlds ----------------------------------------------------------------------------------------------


def _lived(run: Run) -> tuple[Run, Outcome, float]:
    started = time.process_time()
    outcome = run.live()
    outcome.store = outcome.wal_store = None
    # The objects of a world refer to each other, and a large world takes a gigabyte.
    gc.collect()
    trim()
    return run, outcome, time.process_time() - started


def live_all(runs: Iterable[Run], *, jobs: int) -> Iterator[tuple[Run, Outcome, float]]:
    """Live through worlds in several processes; each with its outcome and the CPU seconds it took."""
    if jobs <= 1:
        yield from map(_lived, runs)
        return
    waiting = iter(runs)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        under_way: set[Future[tuple[Run, Outcome, float]]] = set()
        while True:
            under_way.update(pool.submit(_lived, run) for run in islice(waiting, 2 * jobs - len(under_way)))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _live_all(runs: Iterable[Run], *, jobs: int, minutes: float | None, quiet: bool) -> int:
    end = None if minutes is None else time.monotonic() + 60 * minutes

    def in_time() -> Iterator[Run]:
        for run in runs:
            if end is not None and time.monotonic() >= end:
                return
            yield run

    totals = Totals()
    bad: list[Run] = []
    for run, outcome, cpu_s in live_all(in_time(), jobs=jobs):
        totals.add(outcome, cpu_s)
        if outcome.problem is not None:
            bad.append(run)
        if outcome.problem is not None or not quiet:
            print(_line(run, outcome, cpu_s), flush=True)
    print(totals)
    for run in bad:
        print(f"violation; replay it with\n  {run.command}")
    return 1 if bad else 0


# -- planted bugs and shrinking -------------------------------------------------------------------------------


def _hunt(chosen: argparse.Namespace) -> int:
    """Search the first seed that finds each planted bug, and print the entries of `recorded.py`."""
    names = [chosen.mutant] if chosen.mutant else list(MUTANTS)
    search = partial(find_world, seeds=chosen.runs or 60)
    missed = 0
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        for name, found in zip(names, pool.map(search, names), strict=True):
            missed += found is None
            entry = f'"{name}": {found},' if found is not None else f"# {name} was not found"
            print(f"    {entry}", flush=True)
    return 1 if missed else 0


def find_world(name: str, *, seeds: int) -> Found | None:
    """A world that finds the bug and is sound without it: the first that does so before the quiet time, or any."""
    mutant, in_the_end = MUTANTS[name], None
    for seed in range(1, seeds + 1):
        after_s = int(Run(seed, mutant.hours, mutant.world, name).find_s())
        soon = 0 < after_s < 3600 * mutant.hours
        if after_s and (soon or in_the_end is None):
            hours = (
                next((each for each in _HOURS if after_s < 3600 * each), mutant.hours)
                if soon
                else mutant.hours
            )
            if Run(seed, hours, mutant.world).live().problem is None:
                if soon:
                    return Found(seed, hours, after_s)
                in_the_end = Found(seed, hours, after_s)
    return in_the_end


def _shrink(run: Run) -> int:
    def live(seed: int, values: Mapping[str, Any], trace: Any) -> Outcome:
        return Run(seed, None, values, run.mutant).live(trace)

    values = dict(run.chosen)
    if run.hours is not None:
        values["hours"] = run.hours
    smallest = shrink(live, run.seed, values, say=lambda line: print(line, flush=True))
    if smallest is None:
        print(f"seed {run.seed} is sound")
        return 0
    print(*smallest.tail, sep="\n")
    print(f"{smallest.problem}\n{smallest.events} events; replay it with")
    print(f"  {Run(smallest.seed, None, smallest.chosen, run.mutant).command}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
