"""Operations that wait for the store: each is timed, and is a span of OpenTelemetry if the application traces.

This package never imports OpenTelemetry. An application that traces has imported it, and then it is among the loaded
modules; without an SDK its spans record nothing. A get or a put in memory takes about a
microsecond, to which two readings of the clock would add much: it is counted and not timed.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Final, Self

from flagstone.runtime.metrics import Histogram, Timer

_API: Final = "opentelemetry.trace"
SYSTEM: Final = "flagstone"
"""The name of the tracer, and the value of the attribute `db.system.name`."""


class Operation:
    """One kind of operation. `with operation.measure():` times one of them."""

    __slots__ = ("_attributes", "_histogram", "_name")

    def __init__(self, histogram: Histogram, name: str) -> None:
        self._histogram = histogram
        self._name = f"{SYSTEM}.{name}"
        self._attributes = {"db.system.name": SYSTEM, "db.operation.name": name}

    def measure(self) -> Timer | _Traced:
        """A context manager for one operation. An error that leaves its block is part of the span."""
        api = sys.modules.get(_API)
        if api is None:
            return self._histogram.timer()
        return _Traced(self._histogram.timer(), api, self._name, self._attributes)

    def record(self, seconds: float) -> None:
        """Count an operation that was timed elsewhere. It has no span."""
        self._histogram.record(seconds)


class _Traced:
    """A timer inside of a span, which is the parent of the spans that begin in its block."""

    __slots__ = ("_span", "_timer")

    def __init__(self, timer: Timer, api: Any, name: str, attributes: dict[str, str]) -> None:
        self._timer = timer
        self._span = api.get_tracer(SYSTEM).start_as_current_span(name, attributes=attributes)

    def __enter__(self) -> Self:
        self._span.__enter__()
        self._timer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._timer.__exit__(kind, error, trace)
        finally:
            self._span.__exit__(kind, error, trace)
