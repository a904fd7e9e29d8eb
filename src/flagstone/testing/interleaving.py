"""Every order in which processes can take their steps: an exhaustive check of small protocols.

A process is a generator. It yields one operation at a time, a function from the shared state to (the state after, the
answer), and is sent the answer. An operation is one atomic step; between any two of them anything may happen to the
process, including nothing for ever: a process that stalls, for however long, is one of the orders.

Two situations are the same when the shared states and the local variables of all processes are. So each is visited
once, and the number of orders that lead through it is counted, not walked. For that to be right, a process keeps all
it knows in hashable local variables (a `while` with a counter, not a `for`, whose position is not a variable), and
shared states are immutable. A model in which a process can run in circles without end is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

Operation = Callable[[Any], tuple[Any, Any]]
Process = Generator[Operation, Any, Any]
Judge = Callable[[Any], str | None]
"""What is wrong with a shared state; None when it is fine."""


@dataclass(slots=True)
class Exploration:
    """What was seen: distinct situations, steps between them, and complete orders of all steps.

    `violations` counts the situations that the judge found wrong; `trace` leads to the first of them.
    """

    states: int = 0
    steps: int = 0
    schedules: int = 0
    violations: int = 0
    finding: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = (
            f"{self.violations} violations, the first: {self.finding}" if self.finding else "no violation"
        )
        return f"{self.schedules:,} schedules, {self.states:,} states, {self.steps:,} steps: {verdict}"


def explore(shared: Any, processes: Mapping[str, Callable[[], Process]], judge: Judge) -> Exploration:
    """Run the processes from `shared` in all orders, and look at every situation that can come up."""
    return _Explorer(processes, judge).run(shared)


_Local = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class _Actor:
    """A process somewhere on its way: the answers it got, and what it knows by now (None: it has ended)."""

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
        """The number of orders from here to the end of all processes."""
        key = (shared, tuple(actor.local for actor in actors))
        if key in self._counts:
            count = self._counts[key]
            if count is None:
                raise AssertionError(f"the model runs in circles: {' > '.join(self._path)}")
            return count
        self._counts[key] = None
        self._look_at(shared)
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

    def _look_at(self, shared: Any) -> None:
        problem = self._judge(shared)
        if problem is not None:
            self.found.violations += 1
            if self.found.finding is None:
                self.found.finding, self.found.trace = problem, list(self._path)

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
        """The process as it is after it got those answers, and the step it wants to take."""
        process = self._processes[index]()
        operation = next(process)
        for answer in answers:
            operation = process.send(answer)
        return process, operation


def _local(process: Process) -> _Local:
    """Where a process is and what it knows, in it and in the generators it has delegated to."""
    known: list[Hashable] = []
    inner: Any = process
    while inner is not None:
        frame = inner.gi_frame
        known += [frame.f_lasti, *sorted(frame.f_locals.items())]
        inner = inner.gi_yieldfrom
    return tuple(known)
