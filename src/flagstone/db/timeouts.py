"""How long a snapshot or a transaction may stay open, and when that time has passed.

The deadline is checked whenever one is used, and by the follower for those that nothing uses. It counts elapsed time:
a wall clock that is set forward ends no transaction early, and one that is set back keeps none alive.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from flagstone.config.durations import as_duration
from flagstone.runtime.clock import Clock

Timeout = timedelta | str
"""A timedelta, or text such as "30s"; `timedelta.max` stands for no limit."""

DEFAULT_TIMEOUT: Final = timedelta(hours=1)
"""Old versions are kept while a snapshot or a transaction is open: a forgotten one must not keep them for ever."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_DEFAULT_MS: Final = DEFAULT_TIMEOUT // _MILLISECOND


def elapsed_ms(clock: Clock) -> int:
    """The time that deadlines are compared with."""
    return int(clock.monotonic() * 1000)


def deadline_ms(clock: Clock, timeout: Timeout | None) -> int | None:
    """When a snapshot or transaction that begins now expires; None for never. Raises `InvalidRequest`."""
    if timeout is None:
        return elapsed_ms(clock) + _DEFAULT_MS
    lifetime = as_duration(timeout, "timeout", minimum=_MILLISECOND)
    return None if lifetime == timedelta.max else elapsed_ms(clock) + lifetime // _MILLISECOND
