"""Clocks. Code gets its clock as an argument, so that tests can control time."""

from __future__ import annotations

import time
from typing import Final, Protocol

from flagstone.runtime.sync import Condition


class Clock(Protocol):
    """Wall-clock time in milliseconds, elapsed time in seconds, and sleep."""

    def now_ms(self) -> int: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Final = SystemClock()


class HeldClock:
    """A wall clock that repeats its last time, at least `floor_ms`, while the machine's clock is behind it.

    Times never go back and no call waits. Not thread-safe: the owner calls `now_ms` under its own lock.
    """

    def __init__(self, inner: Clock, *, floor_ms: int) -> None:
        self._inner = inner
        self._last_ms = floor_ms

    def now_ms(self) -> int:
        self._last_ms = max(self._last_ms, self._inner.now_ms())
        return self._last_ms

    def monotonic(self) -> float:
        return self._inner.monotonic()

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class VirtualClock:
    """A clock for tests that advances only on request.

    By default `sleep` advances the clock and returns at once, so a test never waits; with threads, the sleep of one
    thread advances the time of all. With `blocking=True` a sleeping thread waits until another thread has called
    `advance` far enough. That thread calls `wait_for_sleepers` first.
    """

    def __init__(self, start_ms: int = 1_700_000_000_000, *, blocking: bool = False) -> None:
        self._changed = Condition()
        self._elapsed_ns = 0
        self._wall_offset_ms = start_ms
        self._blocking = blocking
        self._sleepers = 0

    def now_ms(self) -> int:
        return self._wall_offset_ms + self._elapsed_ns // 1_000_000

    def monotonic(self) -> float:
        return self._elapsed_ns / 1e9

    def sleep(self, seconds: float) -> None:
        with self._changed:
            wake_ns = self._elapsed_ns + max(0, round(seconds * 1e9))
            if not self._blocking:
                self._elapsed_ns = wake_ns
                return
            self._sleepers += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._elapsed_ns >= wake_ns)
            finally:
                self._sleepers -= 1

    def advance(self, ms: float) -> None:
        """Advance the clock by `ms` milliseconds and wake the threads whose sleep is over."""
        with self._changed:
            self._elapsed_ns += round(ms * 1e6)
            self._changed.notify_all()

    def shift_wall(self, ms: int) -> None:
        """Set the wall clock forward, or back with a negative `ms`; elapsed time does not change."""
        with self._changed:
            self._wall_offset_ms += ms

    def wait_for_sleepers(self, count: int = 1, *, timeout: float = 5.0) -> bool:
        """Wait in real time until at least `count` threads sleep; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sleepers >= count, timeout)
