"""Reports requests to a service that have had no answer for a while: by a warning, while they still wait."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.slow_calls import SlowCalls

_SILENT_S: Final = 5.0
_WARN_EVERY_S: Final = 10.0
_log = logging.getLogger("flagstone.store")
_warned: dict[str, float] = {}
"""When a request of a store was last reported. Only the thread that looks for slow calls uses it."""


class Request(NamedTuple):
    """One request, as the warning names it."""

    verb: str
    path: str
    store: str


def _report(request: Request, elapsed_s: float) -> None:
    """Of all requests of a store one in ten seconds."""
    now_s = SYSTEM_CLOCK.monotonic()
    if now_s - _warned.get(request.store, -_WARN_EVERY_S) < _WARN_EVERY_S:
        return
    _warned[request.store] = now_s
    _log.warning(
        "a request to the store has no answer yet, still waiting request=%s path=%s store=%s seconds=%.0f",
        request.verb,
        request.path,
        request.store,
        elapsed_s,
    )


REQUESTS: Final[SlowCalls[Request]] = SlowCalls(_report, after_s=_SILENT_S)
"""The requests of this process that wait for an answer."""
