"""Runs real code in every order of its store calls.

Each actor runs in a thread of its own, and exactly one runs at a time. It stops before every call that it makes
through a wrapped object, and the explorer chooses the actor that continues. A run follows one schedule from the start;
the next run repeats the first part of it and then chooses differently. Actors are ordinary blocking code, but must be
deterministic: no clock, no randomness and no thread that the scenario does not control.

Two states are equal if the shared state is equal and every actor got the same answers, because it knows nothing else.
A run ends where it reaches a state seen before. A bound on preemptions limits how often an actor is stopped in favour
of another; that finds most mistakes in far fewer runs. Waiting for an actor to end is no preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flagstone.runtime.sync import Lock, ThreadHandle, start_thread
from interleaving.explorer import Exploration


class Scenario(Protocol):
    """Fresh state for one run. Each of `actors` is called once; what it returns or raises is its outcome."""

    actors: Mapping[str, Callable[[], Any]]

    def state(self) -> Hashable:
        """Everything that the actors share."""
        ...

    def judge(self, outcomes: Mapping[str, Any]) -> str | None:
        """What is wrong after all actors ended; None if nothing is."""
        ...


@dataclass(slots=True)
class Runs(Exploration):
    """What was explored. `schedules` ran to the end; the other runs ended in a state seen before."""

    runs: int = 0

    def __str__(self) -> str:
        return f"{self.runs:,} runs, {self.schedules:,} to the end, {self.states:,} states: {self.verdict}"


def explore_threads(
    make: Callable[[Stage], Scenario], *, preemptions: int | None = None, stop_at_first: bool = False
) -> Runs:
    """Run the scenario in all orders, or in all orders with at most that many preemptions."""
    return _Explorer(make, preemptions).run(stop_at_first=stop_at_first)


class Abandoned(BaseException):
    """Ends an abandoned run. Not an `Exception`, so that the code under test does not catch it."""


class Stage:
    """Controls the actors of one run. `wrap` each shared object once for each actor."""

    def __init__(self) -> None:
        self._players: dict[str, _Player] = {}
        self.parked: Lock = _closed_lock()
        self.abandoned: bool = False
        self.trace: list[str] = []

    def wrap(self, target: Any, actor: str, *, private: Callable[[str], bool] = lambda _: False) -> Any:
        """`target` for that actor: every call of a method is a step.

        A call whose first argument is `private`, because no other actor uses that object, is no step.
        """
        return _Wrapped(target, self._player(actor), private)

    def _player(self, actor: str) -> _Player:
        return self._players.setdefault(actor, _Player(self, actor))

    def start(self, actors: Mapping[str, Callable[[], Any]]) -> list[_Player]:
        """Run every actor up to its first step, one after the other."""
        players = [self._player(actor) for actor in actors]
        for player, run in zip(players, actors.values(), strict=True):
            player.start(run)
            self.parked.acquire()
        return players

    def step(self, player: _Player) -> None:
        """Let one actor take its step and run up to the next one, or to its end."""
        player.gate.release()
        self.parked.acquire()

    def abandon(self, players: list[_Player]) -> None:
        """End all threads."""
        self.abandoned = True
        for player in players:
            if not player.ended:
                self.step(player)


class _Player:
    def __init__(self, stage: Stage, name: str) -> None:
        self.name = name
        self.gate: Lock = _closed_lock()
        self.history: int = 0
        self.ended: bool = False
        self.outcome: Any = None
        self._stage = stage
        self._thread: ThreadHandle | None = None

    def start(self, run: Callable[[], Any]) -> None:
        self._thread = start_thread(lambda: self._run(run), name=f"actor-{self.name}")

    def _run(self, run: Callable[[], Any]) -> None:
        try:
            self.outcome = run()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - the judge decides what it means
            self.outcome = error
        self.ended = True
        self._stage.parked.release()

    def call(self, name: str, request: Callable[[], Any]) -> Any:
        self._stage.parked.release()
        self.gate.acquire()
        if self._stage.abandoned:
            raise Abandoned
        try:
            answer = request()
        except Exception as error:
            self._note(name, (type(error).__name__, str(error)))
            raise
        if isinstance(answer, Iterator):
            answer = tuple(answer)
            self._note(name, answer)
            return iter(answer)
        self._note(name, tuple(answer) if isinstance(answer, list) else answer)
        return answer

    def _note(self, name: str, answer: Hashable) -> None:
        self.history = hash((self.history, name, answer))
        self._stage.trace.append(f"{self.name}: {name}")


class _Wrapped:
    def __init__(self, target: Any, player: _Player, private: Callable[[str], bool]) -> None:
        self._target = target
        self._player = player
        self._private = private

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._target, name)
        if not callable(member):
            return member

        def stepped(*arguments: Any, **options: Any) -> Any:
            if arguments and isinstance(arguments[0], str) and self._private(arguments[0]):
                return member(*arguments, **options)
            return self._player.call(name, lambda: member(*arguments, **options))

        return stepped


class _Explorer:
    def __init__(self, make: Callable[[Stage], Scenario], preemptions: int | None) -> None:
        self._make = make
        self._preemptions = preemptions
        self._seen: set[Hashable] = set()
        self._waiting: list[tuple[int, ...]] = [()]
        self.found = Runs()

    def run(self, *, stop_at_first: bool) -> Runs:
        while self._waiting and not (stop_at_first and self.found.violations):
            self._follow(self._waiting.pop())
        self.found.states = len(self._seen)
        return self.found

    def _follow(self, prefix: tuple[int, ...]) -> None:
        """One run: follow `prefix`, then keep the current actor, and queue the other choices as later runs."""
        self.found.runs += 1
        stage = Stage()
        scenario = self._make(stage)
        players = stage.start(scenario.actors)
        chosen: list[int] = []
        current, spent = -1, 0
        while alive := [index for index, player in enumerate(players) if not player.ended]:
            if len(chosen) < len(prefix):
                choice = prefix[len(chosen)]
            else:
                if not self._is_new(scenario, players, current, spent):
                    stage.abandon(players)
                    return
                choice = current if current in alive else alive[0]
                if current not in alive or self._preemptions is None or spent < self._preemptions:
                    self._waiting += [(*chosen, other) for other in alive if other != choice]
            spent += current in alive and choice != current
            current = choice
            chosen.append(choice)
            stage.step(players[choice])
        self.found.schedules += 1
        outcomes = {player.name: player.outcome for player in players}
        self.found.note(scenario.judge(outcomes), stage.trace)

    def _is_new(self, scenario: Scenario, players: list[_Player], current: int, spent: int) -> bool:
        answers = tuple((player.history, player.ended) for player in players)
        key = (scenario.state(), answers, None if self._preemptions is None else (current, spent))
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _closed_lock() -> Lock:
    gate = Lock()
    gate.acquire()
    return gate
