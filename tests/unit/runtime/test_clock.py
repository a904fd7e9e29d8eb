from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK, NonDecreasingClock, VirtualClock


class RecordingClock(VirtualClock):
    def __init__(self, start_ms: int) -> None:
        super().__init__(start_ms)
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        super().sleep(seconds)


def test_the_system_clock_moves_forward() -> None:
    before = SYSTEM_CLOCK.monotonic()
    SYSTEM_CLOCK.sleep(0.002)

    assert SYSTEM_CLOCK.monotonic() > before
    assert SYSTEM_CLOCK.now_ms() > 1_700_000_000_000


def test_ticks_follow_the_wall_clock_without_sleeping_while_it_is_ahead() -> None:
    wall = RecordingClock(1_000)
    clock = NonDecreasingClock(wall, floor_ms=900)

    assert clock.tick() == 1_000
    wall.advance(5)
    assert clock.tick() == 1_005
    assert clock.tick() == 1_005
    assert wall.slept == []


def test_after_a_small_step_back_tick_sleeps_for_twice_the_lag() -> None:
    wall = RecordingClock(1_000)
    clock = NonDecreasingClock(wall)
    clock.tick()

    wall.shift_wall(-300)

    assert clock.tick() == 1_300
    assert wall.slept == [0.6]


def test_after_a_large_step_back_tick_raises_after_one_sleep_of_ten_seconds() -> None:
    wall = RecordingClock(1_000_000)
    clock = NonDecreasingClock(wall)
    clock.tick()

    wall.shift_wall(-60_000)

    with pytest.raises(InvalidRequest, match=r"invalid clock tick: .* 50000 ms before .* correct the clock"):
        clock.tick()
    assert wall.slept == [10.0]


def test_the_floor_of_a_former_writer_counts_like_a_tick() -> None:
    wall = RecordingClock(1_000)

    assert NonDecreasingClock(wall, floor_ms=1_010).tick() == 1_020


def test_an_unset_floor_of_a_new_database_is_behind_every_clock() -> None:
    assert NonDecreasingClock(VirtualClock(5), floor_ms=-(2**63)).tick() == 5


def test_each_thread_sees_ticks_that_never_decrease() -> None:
    clock = NonDecreasingClock(SYSTEM_CLOCK)
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: [clock.tick() for _ in range(500)], range(4)))

    assert all(run == sorted(run) for run in runs)


def test_sleeping_on_a_virtual_clock_advances_it_without_waiting() -> None:
    clock = VirtualClock(start_ms=10)

    clock.sleep(3_600)

    assert clock.now_ms() == 3_600_010
    assert clock.monotonic() == 3_600


def test_shifting_the_wall_clock_does_not_change_elapsed_time() -> None:
    clock = VirtualClock(start_ms=1_000)

    clock.shift_wall(-400)

    assert clock.now_ms() == 600
    assert clock.monotonic() == 0


def test_a_blocking_sleeper_wakes_exactly_when_time_has_advanced_far_enough() -> None:
    clock = VirtualClock(blocking=True)
    woken: list[str] = []
    long = Thread(target=lambda: (clock.sleep(2), woken.append("long")))
    short = Thread(target=lambda: (clock.sleep(1), woken.append("short")))
    long.start()
    short.start()
    assert clock.wait_for_sleepers(2)

    clock.advance(1_000)
    short.join(5)
    assert woken == ["short"]

    clock.advance(1_000)
    long.join(5)
    assert woken == ["short", "long"]


def test_waiting_for_sleepers_returns_false_after_its_timeout() -> None:
    assert not VirtualClock(blocking=True).wait_for_sleepers(timeout=0.01)
