"""Processes are interleaved call by call, some crash, and some copies arrive late: the object stays linearizable.

A scheduler lets exactly one process take one step at a time, in an order drawn from a seed. A copy is two
steps, the read and the write, so outdated copies do land. The history of answers must then be explainable by
a single register whose operations happen one after the other (linearizability), and after recovery the base
must hold what that register holds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing
from flagstone.store.two_phase import TwoPhaseStore
from kit.two_phase import Crash, PlainStore, Stepped, TwoPhaseWorld

pytestmark = pytest.mark.slow

PATH = "gc/boundary"
FOREVER = 1_000_000
UNKNOWN = "unknown"


@dataclass
class Operation:
    """One call by one process. `answer` is UNKNOWN if the process crashed; the write may happen at any time."""

    kind: str
    value: str | None
    expected: str | None
    began: int
    ended: int = FOREVER
    answer: str | None = UNKNOWN


class Scheduler:
    """Runs processes one step at a time, in seeded order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self._turns: dict[str, threading.Semaphore] = {}
        self._dying: set[str] = set()
        self._resume = threading.Semaphore(0)
        self._running: set[str] = set()
        self.failures: list[BaseException] = []

    def run(self, processes: dict[str, Callable[[Callable[..., None]], None]], *, deaths: float) -> None:
        threads = [threading.Thread(target=self._body, args=item, daemon=True) for item in processes.items()]
        for name in processes:
            self._turns[name] = threading.Semaphore(0)
            self._running.add(name)
        for thread in threads:
            thread.start()
        while self._running:
            name = self.random.choice(sorted(self._running))
            if self.random.random() < deaths:
                self._dying.add(name)
            self.now += 1
            self._turns[name].release()
            assert self._resume.acquire(timeout=20), "a process does not end"
        for thread in threads:
            thread.join(20)

    def _body(self, name: str, process: Callable[[Callable[..., None]], None]) -> None:
        def step(*_: str) -> None:
            self._resume.release()
            self._turns[name].acquire()
            if name in self._dying:
                raise Crash(name)

        self._turns[name].acquire()
        try:
            process(step)
        except Crash:
            pass
        except BaseException as failure:  # noqa: BLE001 - handed to the test
            self.failures.append(failure)
        finally:
            self._running.discard(name)
            self._resume.release()


class SlowCopies(Stepped):
    """A base whose copies read now and write later, even if their process has crashed in between."""

    def copy(self, source: str, destination: str) -> None:
        self._hook("copy", "before")
        data = self._target.get(source).data
        try:
            self._hook("copy", "between")
        finally:
            self._target.put(destination, data)


def _perform(store: TwoPhaseStore, operation: Operation) -> str | None:
    try:
        match operation.kind:
            case "get":
                return store.get(PATH).data.decode()
            case "head":
                return store.head(PATH).token
            case "create":
                assert operation.value is not None
                store.put_if_absent(PATH, operation.value.encode(), token=operation.value)
            case "put":
                assert operation.value is not None
                store.put(PATH, operation.value.encode())
            case "delete":
                store.delete(PATH)
            case "recover":
                store.recover()
    except ObjectMissing:
        return None
    except ObjectExists:
        return "exists"
    return "done"


def _process(
    world: TwoPhaseWorld, scheduler: Scheduler, history: list[Operation], name: str, kinds: list[str]
) -> Callable[[Callable[..., None]], None]:
    def begin(kind: str, value: str | None, expected: str | None = None) -> Operation:
        operation = Operation(kind, value, expected, scheduler.now)
        history.append(operation)
        return operation

    def body(step: Callable[..., None]) -> None:
        store = TwoPhaseStore(SlowCopies(world.base, step), Stepped(world.log, step))  # type: ignore[arg-type]
        for number, kind in enumerate(kinds):
            value = f"{name}{number}"
            if kind == "update":
                read = begin("get", None)
                try:
                    seen = store.get(PATH)
                except ObjectMissing:
                    read.answer, read.ended = None, scheduler.now
                    continue
                read.answer, read.ended = seen.data.decode(), scheduler.now
                # The version may be older than the bytes, and then the update must be refused; it must not be newer.
                swap = begin("update", value, read.answer)
                try:
                    store.put_if_match(PATH, value.encode(), seen.meta.version, token=value)
                    swap.answer = "done"
                except ObjectChanged:
                    swap.answer = "changed"
                swap.ended = scheduler.now
            else:
                operation = begin(kind, value)
                operation.answer = _perform(store, operation)
                operation.ended = scheduler.now

    return body


State = tuple[str | None, bool]
"""The value, and whether a record exists (a deleted path is refused to creators)."""


def _apply(state: State, operation: Operation) -> State | None:
    """The state after the operation, or None when it cannot have given its answer in this state."""
    value, recorded = state
    unknown = operation.answer == UNKNOWN
    match operation.kind:
        case "get":
            return state if unknown or operation.answer == value else None
        case "create":
            if recorded:
                return state if unknown or operation.answer == "exists" else None
            return (operation.value, True) if unknown or operation.answer == "done" else None
        case "update":
            if operation.answer == "changed":
                # An update with bytes newer than their version may be refused although the bytes are current.
                return state
            return (operation.value, True) if value == operation.expected else (state if unknown else None)
        case "put":
            return (operation.value, recorded)
        case "delete":
            return (None, recorded)
    return state


def _explainable(history: list[Operation], initial: State, final: str | None) -> bool:
    """Whether some order of the operations, one after the other, gives exactly these answers."""
    operations = sorted(history, key=lambda operation: operation.began)
    full = (1 << len(operations)) - 1
    known = sum(1 << index for index, operation in enumerate(operations) if operation.answer != UNKNOWN)
    tried: set[tuple[int, State]] = set()

    def search(done: int, state: State) -> bool:
        if done & known == known and state[0] == final:
            return True
        if (done, state) in tried:
            return False
        tried.add((done, state))
        waiting = [index for index in range(len(operations)) if not done & 1 << index]
        horizon = min((operations[index].ended for index in waiting), default=FOREVER)
        for index in waiting:
            if operations[index].began > horizon:
                break
            after = _apply(state, operations[index])
            if after is not None and search(done | 1 << index, after):
                return True
        return False

    return full == 0 or search(0, initial)


MENUS = {
    # Plain writes and deletions are exact only once the path has a record, so they start with one.
    "creators": (False, ["create", "get", "update", "head", "recover"]),
    "updaters": (True, ["update", "update", "get", "recover"]),
    "everything": (True, ["update", "put", "delete", "get", "create", "recover"]),
}


@pytest.mark.parametrize("deaths", [0.0, 0.02])
@pytest.mark.parametrize("menu", MENUS)
def test_every_interleaving_is_linearizable(tmp_path: Path, menu: str, deaths: float) -> None:
    exists, kinds = MENUS[menu]
    world = TwoPhaseWorld(SqliteCommitLog(tmp_path / "commits.db", synchronous="OFF"))
    for seed in range(120):
        world.base = PlainStore()
        for record in list(world.log.records("")):
            assert world.log.remove(record)
        scheduler = Scheduler(seed)
        if exists:
            world.process().put_if_absent(PATH, b"first", token="first")
        history: list[Operation] = []
        scheduler.run(
            {
                name: _process(world, scheduler, history, name, scheduler.random.choices(kinds, k=3))
                for name in "abc"
            },
            deaths=deaths,
        )
        assert scheduler.failures == [], f"seed {seed}"
        survivor = world.process()
        survivor.recover()
        survivor.collect_garbage(min_age_ms=0)
        final = world.base.contents().get(PATH)
        answer = _perform(survivor, Operation("get", None, None, scheduler.now))
        assert answer == (None if final is None else final.decode()), f"seed {seed}"
        answered = [operation for operation in history if operation.kind not in ("head", "recover")]
        initial: State = ("first", True) if exists else (None, False)
        assert _explainable(answered, initial, answer), f"seed {seed}: {history}, finally {answer}"
        world.check_settled()
    world.log.close()


def test_the_linearizability_check_rejects_a_lost_update() -> None:
    history = [
        Operation("get", None, None, 0, 1, "first"),
        Operation("update", "a", "first", 2, 3, "done"),
        Operation("get", None, None, 4, 5, "first"),
    ]
    assert not _explainable(history, ("first", True), "a")
    history[2].answer = "a"
    assert _explainable(history, ("first", True), "a")
    assert not _explainable(history, ("first", True), "first")
