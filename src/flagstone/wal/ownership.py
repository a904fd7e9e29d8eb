"""Whether this process still is the writer: what makes a log file count once fences may be collected.

Creating a file of the log only if it is absent stops a replaced writer as long as the fence stands that was put in
its way. If garbage collection has removed the fence, behind the start of the log, the create succeeds and the rows are
where nobody will ever look. Therefore a writer looks at the manifest after the create and before it reports
anything as durable: as long as the manifest shows no newer writer, there was no fence that could have been removed.

The look costs two small requests, so it is not made after every file. It holds for a while: a fence that did not
exist when it was made is not collected before it has a minimum age (a minute here, five by default), so a
writer that is quicker than that must have met it. This counts on clocks running at about the same speed. Where it must
not, because machines may be paused without their clocks noticing, a `limit_s` of 0 asks after every file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flagstone.config import Settings
from flagstone.runtime.clock import Clock

TRUSTED_S: Final = 20.0
"""How long a look at the manifest is trusted; a third of the youngest age at which fences are collected."""


def trusted_s(settings: Settings) -> float:
    """How long a writer with these settings trusts a look: not at all where they have fences deleted."""
    collector = settings.garbage_collector_options
    fences = None if collector is None else collector.wal_fence_options
    return TRUSTED_S if fences is None or fences.dry_run else 0.0


class Ownership:
    """Asks `confirm`, which raises `Closed` when a newer writer is there, if the last answer is too old."""

    def __init__(self, confirm: Callable[[], None], *, clock: Clock, limit_s: float = TRUSTED_S) -> None:
        self._confirm = confirm
        self._clock = clock
        self._limit_s = limit_s
        self._confirmed_at: tuple[float, int] | None = None

    def ensure(self) -> None:
        """Return if this process was the writer all the time until now; to be called after a file was created.

        Raises:
            Closed: it is not; what was just created may be in a place where nobody looks.
            Unavailable: nobody knows; ask again before reporting anything.

        """
        # Taken before the question: the answer is about some moment after it.
        asked_at = (self._clock.monotonic(), self._clock.now_ms())
        if self._confirmed_at is not None and self._elapsed_s(self._confirmed_at, asked_at) < self._limit_s:
            return
        self._confirm()
        self._confirmed_at = asked_at

    @staticmethod
    def _elapsed_s(since: tuple[float, int], now: tuple[float, int]) -> float:
        # A machine that was suspended may not count that time as elapsed; its wall clock is set right sooner.
        return max(now[0] - since[0], (now[1] - since[1]) / 1000)
