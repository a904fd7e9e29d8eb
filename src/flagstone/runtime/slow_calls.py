"""Reports calls that have not returned for a while, while they still run.

A server that accepts connections and never answers raises no error before the timeout of its client. The caller's
thread waits inside of that client, so another thread has to look. There is one for the process; it looks once a second
while there are calls, and ends after some seconds without any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, Generic, TypeVar

from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.sync import Lock, start_thread

_T = TypeVar("_T")

_IDLE_LOOKS: Final = 5


class SlowCalls(Generic[_T]):
    """The calls that run now. `report(about, elapsed_s)` is called once for each that takes longer than `after_s`."""

    def __init__(
        self,
        report: Callable[[_T, float], None],
        *,
        after_s: float,
        every_s: float = 1.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.after_s = after_s
        self.every_s = every_s
        self._report = report
        self._clock = clock
        self._numbers = count()
        self._lock = Lock()
        self._running: dict[int, tuple[float, _T]] = {}
        self._looking = False
        os.register_at_fork(after_in_child=self._forget_all)

    @contextmanager
    def watched(self, about: _T) -> Iterator[None]:
        """The block is one call."""
        number = next(self._numbers)
        with self._lock:
            self._running[number] = (self._clock.monotonic(), about)
            if not self._looking:
                self._looking = self._started()
        try:
            yield
        finally:
            self._running.pop(number, None)

    def look(self) -> None:
        """Report the calls that are overdue by now."""
        now_s = self._clock.monotonic()
        for number, (began_s, about) in list(self._running.items()):
            if now_s - began_s >= self.after_s and self._running.pop(number, None) is not None:
                self._report(about, now_s - began_s)

    def _started(self) -> bool:
        try:
            start_thread(self._look_on, name="flagstone-slow-calls")
        except RuntimeError:  # the interpreter is exiting
            return False
        return True

    def _look_on(self) -> None:
        idle = 0
        while True:
            self._clock.sleep(self.every_s)
            self.look()
            idle = 0 if self._running else idle + 1
            with self._lock:
                if idle >= _IDLE_LOOKS and not self._running:
                    self._looking = False
                    return

    def _forget_all(self) -> None:
        """In a forked child, which has neither the calls nor the thread of its parent."""
        self._lock = Lock()
        self._running = {}
        self._looking = False
