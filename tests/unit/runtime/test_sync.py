from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from flagstone.runtime import sync
from flagstone.runtime.pool import shared_pool
from flagstone.runtime.sync import Event, Lock, Queue


class RecordingPrimitives:
    """Returns the standard objects and records the calls."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.objects: dict[Any, Any] = {}

    def lock(self) -> threading.Lock:
        self.made.append("lock")
        return threading.Lock()

    def queue(self) -> SimpleQueue[Any]:
        self.made.append("queue")
        return SimpleQueue()

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        self.made.append(f"thread {name}")
        return threading.Thread(target=run)

    def thread_ident(self) -> int:
        return 7

    def monotonic(self) -> float:
        return 5.0

    def of_process(self, make: Callable[[], Any]) -> Any:
        if make not in self.objects:
            self.objects[make] = make()
        return self.objects[make]


def test_without_a_simulator_the_functions_return_standard_objects() -> None:
    assert type(Lock()) is type(threading.Lock())
    assert type(Queue()) is SimpleQueue
    assert sync.thread_ident() == threading.get_ident()
    assert sync.of_process(object) is None


def test_an_installed_simulator_creates_all_objects_until_it_is_removed() -> None:
    simulator = RecordingPrimitives()
    with sync.install(simulator):
        Lock()
        Queue()
        sync.start_thread(lambda: None, name="actor").join()
        assert (sync.simulated(), sync.thread_ident(), sync.monotonic()) == (True, 7, 5.0)
    Lock()

    assert simulator.made == ["lock", "queue", "thread actor"]
    assert not sync.simulated()


def test_other_threads_keep_the_standard_objects_while_a_simulator_is_installed() -> None:
    # A database that was left open has threads. One of them made the simulator wake a task for no reason.
    simulator = RecordingPrimitives()
    seen: list[object] = []

    def use() -> None:
        seen.extend((type(Lock()), type(Queue()), sync.simulated(), sync.of_process(object)))
        seen.append(sync.thread_ident() == threading.get_ident())
        sync.start_thread(lambda: None, name="other").join()

    with sync.install(simulator):
        outside = threading.Thread(target=use)
        outside.start()
        outside.join()

    assert seen == [type(threading.Lock()), SimpleQueue, False, None, True]
    assert simulator.made == []


def test_a_simulator_is_removed_even_if_the_run_raises() -> None:
    with pytest.raises(RuntimeError, match="boom"), sync.install(RecordingPrimitives()):
        raise RuntimeError("boom")

    assert not sync.simulated()


def test_every_simulated_process_has_a_shared_pool_of_its_own() -> None:
    simulator = RecordingPrimitives()
    with sync.install(simulator):
        first = shared_pool()
        assert shared_pool() is first
        simulator.objects.clear()
        assert shared_pool() is not first
    assert shared_pool() is not first


def test_started_threads_do_not_keep_the_process_alive() -> None:
    seen: list[bool] = []
    sync.start_thread(lambda: seen.append(threading.current_thread().daemon), name="probe").join()

    assert seen == [True]


def test_a_waiting_thread_holds_no_lock_and_sees_a_change_after_notify_all() -> None:
    lock = Lock()
    waiters, seen, state = sync.Waiters(lock), [], {"ready": False}
    thread = threading.Thread(target=lambda: seen.append(waiters.wait_for(lambda: state["ready"], 5)))
    thread.start()
    for _ in range(3):
        with lock:
            # A wake-up without a change of the state does not end the wait.
            waiters.notify_all()
    with lock:
        waiters.notify_all()
        state["ready"] = True
    thread.join(5)
    assert seen == [True]
    assert not lock.locked()


def test_wait_for_returns_false_after_its_timeout() -> None:
    lock = Lock()
    waiters = sync.Waiters(lock)
    assert not waiters.wait_for(lambda: False, 0.01)
    assert not waiters.wait_for(lambda: False, 0)
    assert not waiters.wait_for(lambda: False, -1)
    assert waiters.wait_for(lambda: True, 0)


def test_a_wake_up_before_the_wait_ends_exactly_one_wait() -> None:
    wakeup = sync.Wakeup()
    wakeup.set()
    wakeup.set()
    assert wakeup.wait(0)
    assert not wakeup.wait(0)


def test_an_event_may_be_set_by_a_signal_handler_that_interrupts_its_own_wait() -> None:
    event = Event()
    before = signal.signal(signal.SIGALRM, lambda *_: event.set())
    try:
        for _ in range(50):
            event.clear()
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.001))
            assert event.wait(5)
            assert event.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_event_wakes_all_waiting_threads() -> None:
    event, seen = Event(), []
    threads = [threading.Thread(target=lambda: seen.append(event.wait(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not event.wait(0.01)
    event.set()
    for thread in threads:
        thread.join(5)
    assert seen == [True] * 4


def test_waiting_aside_ends_when_the_lock_is_free() -> None:
    lock = Lock()
    lock.acquire()
    timer = threading.Timer(0.001, lock.release)
    timer.start()
    sync.wait_aside(lock)
    timer.join()
    assert not lock.locked()


def test_waiting_aside_for_a_lock_that_stays_taken_ends_within_a_second() -> None:
    lock = Lock()
    lock.acquire()
    started = sync.monotonic()
    sync.wait_aside(lock)
    assert sync.monotonic() - started < 1
    assert lock.locked()


def test_a_simulated_thread_does_not_wait_aside() -> None:
    lock = Lock()
    lock.acquire()
    simulator = RecordingPrimitives()
    with sync.install(simulator):
        sync.wait_aside(lock)
    assert lock.locked()


def test_tasks_wait_for_a_change_that_a_thread_makes_without_missing_it() -> None:
    lock = Lock()
    waiters, state = sync.Waiters(lock), {"ready": 0}

    def change() -> None:
        with lock:
            waiters.notify_all()
            state["ready"] += 1

    async def main() -> None:
        assert not await waiters.wait_for_async(lambda: state["ready"] > 0, 0.01)
        for number in range(1, 200):
            tasks = [
                asyncio.ensure_future(
                    waiters.wait_for_async(lambda number=number: state["ready"] >= number, 20)
                )
                for _ in range(3)
            ]
            threading.Thread(target=change).start()
            assert await asyncio.gather(*tasks) == [True] * 3
        cancelled = asyncio.ensure_future(waiters.wait_for_async(lambda: False))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])

    asyncio.run(main())
    assert waiters._gates == []


def test_a_task_whose_loop_was_closed_does_not_disturb_others() -> None:
    lock = Lock()
    waiters = sync.Waiters(lock)
    loop = asyncio.new_event_loop()
    task = loop.create_task(waiters.wait_for_async(lambda: False))
    loop.run_until_complete(asyncio.sleep(0))
    assert len(waiters._gates) == 1
    loop.close()
    with lock:
        waiters.notify_all()
        # As the garbage collector does, in whatever thread runs.
        task.get_coro().close()
    assert waiters._gates == []
    task._log_destroy_pending = False
