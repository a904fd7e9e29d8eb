"""Runs small models of protocols in every order of their steps.

A process is a generator. It yields one operation at a time, a function from the shared state to (the state after, the
answer), and receives the answer. An operation is one atomic step. Between two steps the process may stall for any
time, also for ever.

Two states are equal if the shared states and the local variables of all processes are equal. The explorer visits each
state once and counts the schedules that lead through it. So a process must keep all that it knows in hashable local
variables (a `while` with a counter, not a `for`, whose position is not a variable), and shared states must be
immutable. The explorer refuses a model in which a process can loop for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

Operation = Callable[[Any], tuple[Any, Any]]
Process = Generator[Operation, Any, Any]
Judge = Callable[[Any], str | None]
"""Describes what is wrong with a shared state; None if nothing is."""


@dataclass(slots=True)
class Exploration:
    """What was explored: distinct states, steps between them, and complete schedules.

    `violations` counts the states that the judge rejected; `trace` leads to the first of them.
    """

    states: int = 0
    steps: int = 0
    schedules: int = 0
    violations: int = 0
    finding: str | None = None
    trace: list[str] = field(default_factory=list)

    def note(self, problem: str | None, trace: list[str]) -> None:
        """Count a problem, and keep the first one."""
        if problem is not None:
            self.violations += 1
            if self.finding is None:
                self.finding, self.trace = problem, list(trace)

    @property
    def verdict(self) -> str:
        return f"{self.violations} violations, the first: {self.finding}" if self.finding else "no violation"

    def __str__(self) -> str:
        return f"{self.schedules:,} schedules, {self.states:,} states, {self.steps:,} steps: {self.verdict}"


def explore(shared: Any, processes: Mapping[str, Callable[[], Process]], judge: Judge) -> Exploration:
    """Run the processes from `shared` in all orders, and judge every reachable state."""
    return _Explorer(processes, judge).run(shared)


_Local = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class _Actor:
    """A process between two steps: the answers it got, and its local variables (None: it has ended)."""

    answers: tuple[Any, ...]
    local: _Local | None


class _Explorer:
    def __init__(self, processes: Mapping[str, Callable[[], Process]], judge: Judge) -> None:
        self._names = tuple(processes)
        self._processes = tuple(processes.values())
        self._judge = judge
        self._counts: dict[Hashable, int | None] = {}
        self._path: list[str] = []
        self.found = Exploration()

    def run(self, shared: Any) -> Exploration:
        actors = tuple(
            _Actor((), _local(self._resume(index, ())[0])) for index in range(len(self._processes))
        )
        self.found.schedules = self._visit(shared, actors)
        self.found.states = len(self._counts)
        return self.found

    def _visit(self, shared: Any, actors: tuple[_Actor, ...]) -> int:
        """The number of schedules from this state to the end of all processes."""
        key = (shared, tuple(actor.local for actor in actors))
        if key in self._counts:
            count = self._counts[key]
            if count is None:
                raise AssertionError(f"the model runs in circles: {' > '.join(self._path)}")
            return count
        self._counts[key] = None
        self.found.note(self._judge(shared), self._path)
        alive = [index for index, actor in enumerate(actors) if actor.local is not None]
        total = 0 if alive else 1
        for index in alive:
            after, moved, label = self._step(shared, index, actors[index])
            self.found.steps += 1
            self._path.append(f"{self._names[index]}: {label}")
            total += self._visit(after, (*actors[:index], moved, *actors[index + 1 :]))
            self._path.pop()
        self._counts[key] = total
        return total

    def _step(self, shared: Any, index: int, actor: _Actor) -> tuple[Any, _Actor, str]:
        process, operation = self._resume(index, actor.answers)
        after, answer = operation(shared)
        label = f"{operation.__qualname__.partition('.')[0]} -> {answer!r}"
        try:
            process.send(answer)
        except StopIteration:
            return after, _Actor((), None), label
        return after, _Actor((*actor.answers, answer), _local(process)), label

    def _resume(self, index: int, answers: tuple[Any, ...]) -> tuple[Process, Operation]:
        """The process after it got those answers, and its next step."""
        process = self._processes[index]()
        operation = next(process)
        for answer in answers:
            operation = process.send(answer)
        return process, operation


def _local(process: Process) -> _Local:
    """The position and the local variables of a process and of the generators it delegated to."""
    known: list[Hashable] = []
    inner: Any = process
    while inner is not None:
        frame = inner.gi_frame
        known += [frame.f_lasti, *sorted(frame.f_locals.items())]
        inner = inner.gi_yieldfrom
    return tuple(known)
