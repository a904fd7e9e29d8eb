"""Time, as something that can be passed in."""

from __future__ import annotations

import time
from threading import Condition
from typing import Final, Protocol

from flagstone.errors import InvalidRequest
from flagstone.runtime.sync import Lock

_MAX_LAG_SLEEP_SECONDS: Final = 10.0


class Clock(Protocol):
    """Tells wall-clock time in milliseconds, elapsed time in seconds, and waits."""

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


class NonDecreasingClock:
    """Stamps rows: never a time before one it gave earlier, nor before `floor_ms`.

    `floor_ms` is the last stamp that a former writer left behind. Retention and expiry compare stamps, so a
    writer whose machine is behind must not go on as if nothing were wrong. A small lag is waited out; a
    large one is an error, as in SlateDB.
    """

    def __init__(self, inner: Clock, *, floor_ms: int = 0) -> None:
        self._inner = inner
        self._lock = Lock()
        self._last_ms = floor_ms

    def tick(self) -> int:
        """The wall clock in milliseconds.

        Behind the last tick it sleeps once, twice the lag but at most ten seconds, and looks again. May be
        called from many threads; none of them waits for another's sleep.

        Raises:
            InvalidRequest: the wall clock is still behind after the sleep.

        """
        with self._lock:
            now_ms = self._inner.now_ms()
            lag_ms = self._last_ms - now_ms
            if lag_ms <= 0:
                self._last_ms = now_ms
                return now_ms
        self._inner.sleep(min(_MAX_LAG_SLEEP_SECONDS, 2 * lag_ms / 1000))
        with self._lock:
            now_ms = self._inner.now_ms()
            if now_ms < self._last_ms:
                raise InvalidRequest(
                    f"invalid clock tick: this machine's clock says {now_ms} ms, "
                    f"which is {self._last_ms - now_ms} ms before the last write at {self._last_ms} ms; "
                    "set the clock right and open the database again"
                )
            self._last_ms = now_ms
            return now_ms


class HeldClock:
    """A wall clock that stands still while the machine's is behind a time it gave earlier, or behind `floor_ms`.

    Times never go back and nothing waits. The owner asks for the time under a lock of its own.
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
    """Time that moves only when told to, for tests.

    By default `sleep` itself moves time on and returns at once: a single-threaded test never waits, and in a
    test with threads whoever sleeps drags everybody's time along. With `blocking=True` a sleeper waits until
    another thread has called `advance` far enough; `wait_for_sleepers` tells that thread when to do so.
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
        """Let `ms` milliseconds pass, waking the sleepers whose time has come."""
        with self._changed:
            self._elapsed_ns += round(ms * 1e6)
            self._changed.notify_all()

    def shift_wall(self, ms: int) -> None:
        """Set the wall clock forward, or back with a negative `ms`; elapsed time does not notice."""
        with self._changed:
            self._wall_offset_ms += ms

    def wait_for_sleepers(self, count: int = 1, *, timeout: float = 5.0) -> bool:
        """Wait (in real time) until at least `count` threads sleep; False when they do not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sleepers >= count, timeout)
