"""Calls that take long are reported while they run, each once."""

from __future__ import annotations

import os
import threading

import pytest

from flagstone.runtime import slow_calls
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.slow_calls import SlowCalls
from kit.databases import eventually


def watchers() -> int:
    return sum(thread.name == "flagstone-slow-calls" for thread in threading.enumerate())


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(slow_calls, "start_thread", refuse)


@pytest.mark.usefixtures("no_thread")
def test_a_call_is_reported_once_when_it_is_overdue_also_without_a_thread() -> None:
    clock, reported = VirtualClock(), list[tuple[str, float]]()
    calls = SlowCalls[str](
        lambda about, elapsed_s: reported.append((about, elapsed_s)), after_s=5, clock=clock
    )
    with calls.watched("first"):
        clock.advance(3000)
        with calls.watched("second"):
            calls.look()
            assert reported == []
            clock.advance(2000)
            calls.look()
            calls.look()
            assert reported == [("first", 5.0)]
        clock.advance(9000)
        calls.look()
    assert reported == [("first", 5.0)]


@pytest.mark.usefixtures("no_thread")
def test_a_call_that_raises_has_ended() -> None:
    clock, reported = VirtualClock(), list[str]()
    calls = SlowCalls[str](lambda about, _: reported.append(about), after_s=5, clock=clock)
    with pytest.raises(ZeroDivisionError), calls.watched("x"):
        raise ZeroDivisionError
    clock.advance(6000)
    calls.look()
    assert reported == []


def test_the_thread_ends_without_calls_and_starts_again() -> None:
    before, reported = watchers(), threading.Event()
    calls = SlowCalls[str](lambda about, _: reported.set(), after_s=0.02, every_s=0.01)
    for _ in range(2):
        reported.clear()
        with calls.watched("x"):
            assert watchers() == before + 1
            assert reported.wait(10)
        eventually(lambda: watchers() == before)


def test_a_forked_child_has_no_calls_and_a_thread_of_its_own() -> None:
    reported = threading.Event()
    calls = SlowCalls[str](lambda *_: reported.set(), after_s=0.02, every_s=0.01)
    with calls.watched("of the parent"):
        child = os.fork()
        if child == 0:
            with calls.watched("of the child"):
                os._exit(0 if reported.wait(10) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
