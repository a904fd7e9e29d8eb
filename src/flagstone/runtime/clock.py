"""Time, as something that can be passed in."""

from __future__ import annotations

import time
from typing import Final, Protocol


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
