"""Two-phase stores over a base without conditional writes, and hooks that stop a writer at a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.store.commit_log import CommitLog
from flagstone.store.intents import staged_destination
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectVersion
from flagstone.store.two_phase import TwoPhaseStore

Hook = Callable[[str, str], None]
"""Called with the name of the call and "before" or "after" it."""


class PlainStore(MemoryStore):
    """A store without conditional writes: it proves that the two-phase store makes none."""

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        raise AssertionError("the base store got a conditional write")

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        raise AssertionError("the base store got a conditional write")

    def temporaries(self) -> list[str]:
        return [meta.path for meta in self.list("") if staged_destination(meta.path) is not None]

    def contents(self) -> dict[str, bytes]:
        """Every object but the temporaries, read without the two-phase store."""
        return {
            meta.path: self.get(meta.path).data
            for meta in self.list("")
            if staged_destination(meta.path) is None
        }


class Stepped:
    """A store or a commit log that calls a hook before and after every call."""

    def __init__(self, target: Any, hook: Hook) -> None:
        self._target = target
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._target, name)
        if not callable(member):
            return member

        def stepped(*args: Any, **options: Any) -> Any:
            self._hook(name, "before")
            answer = member(*args, **options)
            self._hook(name, "after")
            return answer

        return stepped


class Crash(BaseException):
    """The process crashed here. Not an `Exception`, so that no handler of the code under test catches it."""


class FailAt:
    """A hook that raises an error once, before or after the n-th call, counted from 0."""

    def __init__(self, call: int, moment: str, error: type[BaseException] = Crash) -> None:
        self.happened = False
        self._call = call
        self._moment = moment
        self._error = error
        self._calls = 0

    def __call__(self, name: str, moment: str) -> None:
        if moment == self._moment and self._calls == self._call and not self.happened:
            self.happened = True
            raise self._error(f"{moment} call {self._call}: {name}")
        if moment == "after":
            self._calls += 1


class TwoPhaseWorld:
    """One base and one commit log, for any number of independent processes."""

    def __init__(self, log: CommitLog, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.base = PlainStore(clock=clock)
        self.log = log

    def process(self, hook: Hook | None = None) -> TwoPhaseStore:
        if hook is None:
            return TwoPhaseStore(self.base, self.log, clock=self.clock)
        return TwoPhaseStore(Stepped(self.base, hook), Stepped(self.log, hook), clock=self.clock)  # type: ignore[arg-type]

    def check_settled(self) -> None:
        """No intent is pending, and every temporary is the source of a current version."""
        assert self.log.pending("") == []
        kept = {record.source for record in self.log.records("") if record.version > 1}
        assert set(self.base.temporaries()) <= kept
        for record in self.log.records(""):
            if record.version > 1 and record.state == "committed":
                assert self.base.get(record.destination).data == self.base.get(record.source).data
