from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from flagstone.errors import Closed, CorruptData, FlagstoneError, InternalError, Unavailable
from flagstone.runtime.service import Supervisor

LONG = 3_600.0


class Steps:
    """A service that runs a function per step."""

    def __init__(self, step: Callable[[], float | None], name: str = "steps") -> None:
        self.name = name
        self._step = step

    def run_once(self) -> float | None:
        return self._step()


class Counting(Steps):
    """Counts its steps and sleeps long between them."""

    def __init__(self, name: str = "counting") -> None:
        super().__init__(self._count, name)
        self.steps = 0
        self._stepped = threading.Condition()

    def _count(self) -> float:
        with self._stepped:
            self.steps += 1
            self._stepped.notify_all()
        return LONG

    def wait_for(self, steps: int) -> bool:
        with self._stepped:
            return self._stepped.wait_for(lambda: self.steps >= steps, 5)


class OddConstructor(Unavailable):
    """An error whose constructor does not accept the exception's `args`."""

    def __init__(self, *, part: int) -> None:
        super().__init__(f"part {part} does not answer")
        self.part = part


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop(5)


def fail_with(supervisor: Supervisor, error: BaseException, name: str = "flusher") -> None:
    failed = threading.Event()
    supervisor.on_failure(lambda _: failed.set())

    def step() -> float | None:
        raise error

    supervisor.start(Steps(step, name))
    assert failed.wait(5)


def test_a_service_does_its_first_step_at_once(supervisor: Supervisor) -> None:
    service = Counting()
    supervisor.start(service)

    assert service.wait_for(1)


def test_a_service_without_delay_runs_step_after_step_until_it_is_finished(supervisor: Supervisor) -> None:
    finished = threading.Event()
    left = [0.0, 0.0, 0.001, None]

    def step() -> float | None:
        delay = left.pop(0)
        if delay is None:
            finished.set()
        return delay

    supervisor.start(Steps(step))

    assert finished.wait(5)
    assert left == []


def test_waking_a_service_ends_its_pause(supervisor: Supervisor) -> None:
    service = Counting()
    supervisor.start(service)
    service.wait_for(1)

    supervisor.wake(service)

    assert service.wait_for(2)


def test_waking_a_service_during_its_step_causes_another_step(supervisor: Supervisor) -> None:
    entered, leave, again = threading.Event(), threading.Event(), threading.Event()

    def step() -> float:
        if entered.is_set():
            again.set()
        entered.set()
        leave.wait(5)
        return LONG

    service = Steps(step)
    supervisor.start(service)
    entered.wait(5)
    supervisor.wake(service)
    leave.set()

    assert again.wait(5)


def test_waking_a_service_that_does_not_run_has_no_effect(supervisor: Supervisor) -> None:
    supervisor.wake(Counting())


def test_a_failure_keeps_its_kind_and_has_a_note_with_the_service(supervisor: Supervisor) -> None:
    fail_with(supervisor, CorruptData("checksum is wrong", object="wal/7.sst", offset=12))

    with pytest.raises(CorruptData) as caught:
        supervisor.raise_failure()

    assert str(caught.value) == "wal/7.sst at byte 12: checksum is wrong"
    assert caught.value.offset == 12
    assert caught.value.__notes__ == ["in background service flusher"]
    assert caught.value.__cause__ is supervisor.failure


def test_each_caller_gets_a_new_exception(supervisor: Supervisor) -> None:
    fail_with(supervisor, Closed("fenced by epoch 3", reason="fenced"))
    caught: list[FlagstoneError] = []
    for _ in range(2):
        try:
            supervisor.raise_failure()
        except Closed as error:
            error.add_note("seen by a caller")
            caught.append(error)

    assert caught[0] is not caught[1]
    assert [error.__notes__ for error in caught] == [
        ["in background service flusher", "seen by a caller"]
    ] * 2
    assert supervisor.failure is not None
    assert supervisor.failure.__notes__ == ["in background service flusher"]
    assert [error.reason for error in caught if isinstance(error, Closed)] == ["fenced", "fenced"]


def test_an_error_with_an_unusual_constructor_still_reaches_the_caller(supervisor: Supervisor) -> None:
    fail_with(supervisor, OddConstructor(part=4))

    with pytest.raises(OddConstructor, match="part 4 does not answer") as caught:
        supervisor.raise_failure()
    assert caught.value.part == 4


def test_an_exception_of_another_library_becomes_an_internal_error(supervisor: Supervisor) -> None:
    original = KeyError("row")
    fail_with(supervisor, original)

    with pytest.raises(InternalError, match="background service flusher failed: KeyError: 'row'"):
        supervisor.raise_failure()
    assert supervisor.failure is not None
    assert supervisor.failure.__cause__ is original


def test_a_system_exit_in_a_service_is_a_failure(supervisor: Supervisor) -> None:
    fail_with(supervisor, SystemExit(3))

    with pytest.raises(InternalError, match="SystemExit"):
        supervisor.raise_failure()


def test_one_failure_stops_the_other_services_and_start_raises_it(supervisor: Supervisor) -> None:
    other = Counting("other")
    supervisor.start(other)
    other.wait_for(1)

    fail_with(supervisor, Unavailable("no answer"))
    supervisor.stop(5)

    assert other.steps == 1
    with pytest.raises(Unavailable, match="no answer"):
        supervisor.start(Counting("late"))


def test_a_second_failure_becomes_a_note_of_the_first(supervisor: Supervisor) -> None:
    entered, leave = threading.Event(), threading.Event()

    def step() -> float:
        entered.set()
        leave.wait(5)
        raise ValueError("late")

    supervisor.start(Steps(step, "second"))
    entered.wait(5)
    fail_with(supervisor, Unavailable("early"), "first")
    leave.set()
    supervisor.stop(5)

    assert supervisor.failure is not None
    assert supervisor.failure.__notes__ == [
        "in background service first",
        "then background service second failed too: ValueError: late",
    ]


def test_every_callback_is_called_even_if_another_one_raises(supervisor: Supervisor) -> None:
    def broken(_: FlagstoneError) -> None:
        raise RuntimeError("no phone")

    supervisor.on_failure(broken)
    fail_with(supervisor, Unavailable("no answer"))
    late: list[FlagstoneError] = []
    supervisor.on_failure(late.append)

    assert late == [supervisor.failure]
    assert "and a callback for this failure failed: RuntimeError: no phone" in late[0].__notes__


def test_without_a_failure_raise_failure_does_nothing(supervisor: Supervisor) -> None:
    supervisor.start(Counting())

    assert supervisor.failure is None
    supervisor.raise_failure()


def test_stopping_ends_pauses_and_refuses_new_services() -> None:
    supervisor = Supervisor()
    services = [Counting(f"s{n}") for n in range(3)]
    for service in services:
        supervisor.start(service)
        service.wait_for(1)

    supervisor.stop(5)
    supervisor.stop(5)

    assert [service.steps for service in services] == [1, 1, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flagstone-s")]
    with pytest.raises(Closed, match="open it again"):
        supervisor.start(Counting())


def test_stop_names_a_service_that_does_not_end() -> None:
    supervisor = Supervisor()
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        entered.set()
        leave.wait(5)

    supervisor.start(Steps(step, "wal-flush"))
    entered.wait(5)

    with pytest.raises(Unavailable, match=r"wal-flush did not stop within 0\.01 s"):
        supervisor.stop(0.01)

    leave.set()
    supervisor.stop(5)


def test_a_failing_service_may_stop_its_own_supervisor() -> None:
    supervisor = Supervisor()
    stopped = threading.Event()

    def stop(_: FlagstoneError) -> None:
        supervisor.stop()
        stopped.set()

    supervisor.on_failure(stop)
    fail_with(supervisor, Unavailable("no answer"))

    assert stopped.wait(5)


def test_the_same_service_cannot_run_twice(supervisor: Supervisor) -> None:
    service = Counting()
    supervisor.start(service)
    service.wait_for(1)

    with pytest.raises(InternalError, match="started twice"):
        supervisor.start(service)


def test_in_a_forked_child_every_call_of_the_supervisor_raises_closed(
    run_script: Callable[[str], str],
) -> None:
    answer = run_script(
        """
        import os
        from flagstone.errors import Closed
        from flagstone.runtime.service import Supervisor
        class Idle:
            name = "idle"
            def run_once(self):
                return 3600.0
        supervisor, idle = Supervisor(), Idle()
        supervisor.start(idle)
        supervisor._lock.acquire()
        child = os.fork()
        if child == 0:
            answers = 0
            for call in (
                supervisor.raise_failure, supervisor.stop, lambda: supervisor.wake(idle),
                lambda: supervisor.start(Idle()), lambda: supervisor.on_failure(print),
            ):
                try:
                    call()
                except Closed as closed:
                    answers += closed.reason == "failed"
            raise SystemExit(answers)
        supervisor._lock.release()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        supervisor.stop(5)
        """
    )

    assert answer == "5"


def test_running_services_do_not_keep_the_interpreter_from_exiting(run_script: Callable[[str], str]) -> None:
    answer = run_script(
        """
        import threading
        from flagstone.runtime import service
        service.EXIT_GRACE_SECONDS = 0.02
        class Stuck:
            name = "stuck"
            def run_once(self):
                entered.set()
                threading.Event().wait()
        class Idle:
            name = "idle"
            def run_once(self):
                return 3600.0
        entered = threading.Event()
        supervisor = service.Supervisor()
        supervisor.start(Stuck())
        supervisor.start(Idle())
        entered.wait()
        print("exiting")
        """
    )

    assert answer == "exiting"
