from __future__ import annotations

from threading import Thread

from flagstone.runtime.clock import SYSTEM_CLOCK, VirtualClock


def test_the_system_clock_moves_forward() -> None:
    before = SYSTEM_CLOCK.monotonic()
    SYSTEM_CLOCK.sleep(0.002)

    assert SYSTEM_CLOCK.monotonic() > before
    assert SYSTEM_CLOCK.now_ms() > 1_700_000_000_000


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
