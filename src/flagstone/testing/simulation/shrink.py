"""From a world with a problem to a smaller one: fewer machines, clients and keys, fewer kinds of faults, less time.

Every step tries one reduction and keeps it if the same kind of problem still shows up, with fewer events. A reduction
changes what later draws decide, so each is tried under a few seeds.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from flagstone.testing.simulation.plan import NEVER_S
from flagstone.testing.simulation.world import Outcome

_SEEDS: Final = 6
_TAIL: Final = 60
_REDUCTIONS: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("hours", (0.05, 0.1, 0.2, 0.5, 1.0)),
    ("trouble", (0.0, 0.3)),
    ("readers", (0, 1)),
    ("writers", (1, 2)),
    ("clients", (1, 2)),
    ("keys", (1, 3, 12)),
    *((name, (0.0,)) for name in ("refused", "lost_reply", "late", "repeated", "slow", "full")),
    *((name, (NEVER_S,)) for name in ("crash_every_s", "pause_every_s", "jump_every_s", "outage_every_s")),
    ("collector", (False,)),
    ("compactor", (False,)),
    ("l0_flush_parallelism", (1,)),
    ("max_subcompactions", (1,)),
    ("switch_rate", (0.0, 0.02)),
)


class Live(Protocol):
    """Lives through the world of a seed and of chosen values."""

    def __call__(self, seed: int, values: Mapping[str, Any], trace: Callable[[str], None], /) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Failing:
    """A world with a problem: how many events lead to it, and the last of them."""

    seed: int
    chosen: Mapping[str, Any]
    problem: str
    events: int
    simulated_s: float
    tail: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The problem without its particulars."""
        return " ".join(re.sub(r"\d+", "#", self.problem).split()[:3])


def shrink(
    live: Live, seed: int, values: Mapping[str, Any], *, say: Callable[[str], None] = lambda _: None
) -> Failing | None:
    """The smallest world found with the problem of this one; None if this one is sound."""
    found = _attempt(live, seed, values)
    if found is None:
        return None
    say(f"{found.events} events: {found.problem}")
    best, improved = found, True
    while improved:
        improved = False
        for name, choices in _REDUCTIONS:
            for value in choices:
                smaller = _reduced(live, best, name, value)
                if smaller is not None:
                    best, improved = smaller, True
                    say(f"{best.events} events with seed {best.seed} and {name}={value}")
                    break
    return best


def _reduced(live: Live, best: Failing, name: str, value: Any) -> Failing | None:
    if best.chosen.get(name) == value or (name == "hours" and value * 3600 > best.simulated_s):
        return None
    for seed in dict.fromkeys((best.seed, *range(1, _SEEDS))):
        found = _attempt(live, seed, {**best.chosen, name: value}, limit=best.events)
        if found is not None and found.kind == best.kind and found.events < best.events:
            return found
    return None


def _attempt(live: Live, seed: int, values: Mapping[str, Any], *, limit: int | None = None) -> Failing | None:
    events = 0
    tail: deque[str] = deque(maxlen=_TAIL)

    def trace(line: str) -> None:
        nonlocal events
        events += 1
        tail.append(line)

    outcome = live(seed, values, trace)
    if outcome.problem is None or (limit is not None and events >= limit):
        return None
    return Failing(seed, dict(values), outcome.problem, events, outcome.simulated_s, tuple(tail))
