"""The background service that learns what others did to a database: a compactor, an operator, a newer writer."""

from __future__ import annotations

import logging
from typing import Final, Protocol

from flagstone.errors import Unavailable
from flagstone.write.durability import DurabilityTracker

_log = logging.getLogger("flagstone.db")

_SLOWDOWN: Final = 10
_SLOWEST_S: Final = 10.0


class Following(Protocol):
    """What it needs of the engine."""

    durability: DurabilityTracker

    def awaits_news(self) -> bool:
        """Whether writes are held up by something that others are expected to change."""
        ...

    def poll(self) -> bool:
        """Learn of manifests that others wrote; whether there was one."""
        ...

    def expire_read_points(self) -> None: ...


class Loads(Protocol):
    """What it needs of those who take bulk loads in."""

    def announce(self) -> None: ...

    def run(self) -> None: ...


class ManifestFollower:
    """A background service that looks for manifests others wrote, and ends what was left open too long.

    Bulk loads that wait for this writer are taken in here.

    It looks once per interval while something is written, here or by others, or is waited for, and less and less
    often while nothing is: a sole writer would pay for thousands of answers a day that are all the same. Nothing that
    must not wait depends on it: a writer that was replaced learns so from its next log file, at once, and one that
    only reads within ten seconds. Whoever flushes meets the newest manifest anyway.
    """

    name = "manifest-follower"

    def __init__(self, engine: Following, loads: Loads, *, interval_s: float) -> None:
        self._engine = engine
        self._loads = loads
        self._interval_s = interval_s
        self._quiet = 0
        self._last_seq = engine.durability.last_seq
        self._just_opened = True

    def run_once(self) -> float | None:
        """Look once. A store that does not answer is asked again at the next turn."""
        self._loads.announce()
        if self._just_opened:
            self._just_opened = False
            return self._interval_s
        self._engine.expire_read_points()
        try:
            news = self._engine.poll()
            self._loads.run()
        except Unavailable as error:
            _log.warning("cannot look for a newer manifest error=%s", error)
            news = True
        last_seq, self._last_seq = self._last_seq, self._engine.durability.last_seq
        busy = news or self._engine.awaits_news() or last_seq != self._last_seq
        self._quiet = 0 if busy else self._quiet + 1
        return plan_delay(self._interval_s, self._quiet)


def plan_delay(interval_s: float, quiet: int) -> float:
    """Seconds until the next look after `quiet` ones in vain: the interval, doubling up to ten of them.

    Never more than ten seconds, a reader's own rhythm, unless the interval itself is longer.
    """
    slowed_s = interval_s * min(1 << min(quiet, 8), _SLOWDOWN)
    return min(slowed_s, max(interval_s, _SLOWEST_S))
