"""Counters, gauges and histograms, cheap enough for a hot path.

`value += n` in Python is a read, an addition and a write, and a thread switch between them loses a count. Therefore
every instrument has a lock, which costs about 0.1 µs if it is free and is never held during a wait. These are plain
`threading` locks on purpose: a simulator need not explore their order.

Look an instrument up once and keep it: the lookup takes several times as long as the count.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Final, Literal, Self, TypeVar
from weakref import WeakSet

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]
"""Label names and values, sorted by name."""

SECONDS_BOUNDARIES: Final = (1e-4, 1e-3, 2.5e-3, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Inclusive upper bounds of histogram buckets, from a local read to a request with many retries."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The observations of a histogram. `bucket_counts` has one more element than `boundaries`: the overflow.

    `minimum` and `maximum` are None until the first observation.
    """

    count: int
    sum: float
    minimum: float | None
    maximum: float | None
    boundaries: tuple[float, ...]
    bucket_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """The value of one instrument at the time of a snapshot."""

    name: str
    kind: Kind
    labels: Labels
    value: float | Distribution

    @property
    def key(self) -> str:
        """`name{label=value,…}`, or the bare name without labels."""
        if not self.labels:
            return self.name
        return f"{self.name}{{{','.join(f'{label}={value}' for label, value in self.labels)}}}"


class Counter:
    """A number that only grows."""

    __slots__ = ("_lock", "_value")
    kind: Final[Kind] = "counter"

    def __init__(self) -> None:
        self._lock = Lock()
        self._value = 0

    def add(self, n: int = 1) -> None:
        """Count `n` more. A negative `n` is not checked, because this is a hot path."""
        with self._lock:
            self._value += n

    def raise_to(self, total: int) -> None:
        """Set the counter to a total that is counted elsewhere; a smaller total is ignored."""
        with self._lock:
            self._value = max(self._value, total)

    @property
    def value(self) -> int:
        return self._value


class Gauge:
    """A number that is set, or moved up and down."""

    __slots__ = ("_lock", "_value")
    kind: Final[Kind] = "gauge"

    def __init__(self) -> None:
        self._lock = Lock()
        self._value: float = 0

    def set(self, value: float) -> None:
        """Replace the value."""
        with self._lock:
            self._value = value

    def add(self, n: float = 1) -> None:
        """Move the value by `n`, which may be negative."""
        with self._lock:
            self._value += n

    @property
    def value(self) -> float:
        return self._value


class Histogram:
    """The number of observations in each of several fixed buckets."""

    __slots__ = ("_boundaries", "_buckets", "_clock", "_lock", "_maximum", "_minimum", "_sum")
    kind: Final[Kind] = "histogram"

    def __init__(self, clock: Clock, boundaries: tuple[float, ...] = SECONDS_BOUNDARIES) -> None:
        self._lock = Lock()
        self._clock = clock
        self._boundaries = boundaries
        self._buckets = [0] * (len(boundaries) + 1)
        self._sum = 0.0
        self._minimum = float("inf")
        self._maximum = float("-inf")

    def record(self, x: float) -> None:
        """Count one observation of `x`."""
        bucket = bisect_left(self._boundaries, x)
        with self._lock:
            self._buckets[bucket] += 1
            self._sum += x
            self._minimum = min(self._minimum, x)
            self._maximum = max(self._maximum, x)

    def timer(self) -> Timer:
        """A context manager that records the seconds its block takes, also if the block raises."""
        return Timer(self, self._clock)

    @property
    def value(self) -> Distribution:
        with self._lock:
            buckets = tuple(self._buckets)
            total, low, high = self._sum, self._minimum, self._maximum
        count = sum(buckets)
        return Distribution(
            count, total, low if count else None, high if count else None, self._boundaries, buckets
        )


class Timer:
    """Measures one block; must not be entered again while it runs."""

    __slots__ = ("_clock", "_histogram", "_started")

    def __init__(self, histogram: Histogram, clock: Clock) -> None:
        self._histogram = histogram
        self._clock = clock
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = self._clock.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._histogram.record(self._clock.monotonic() - self._started)


_Instrument = Counter | Gauge | Histogram
_AnyInstrument = TypeVar("_AnyInstrument", Counter, Gauge, Histogram)


class Metrics:
    """A registry of instruments, usually one per open database.

    The same name and labels always return the same instrument. Values are in memory only and are lost in a crash. A
    pickled copy is a new, empty registry, because each process counts for itself.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = Lock()
        self._instruments: dict[tuple[str, Labels], _Instrument] = {}
        _registries.add(self)

    def __reduce__(self) -> tuple[type[Metrics], tuple[()]]:
        return (Metrics, ())

    def counter(self, name: str, /, **labels: object) -> Counter:
        """The counter with this name and these labels, created at its first use."""
        return self._instrument(Counter(), name, labels)

    def gauge(self, name: str, /, **labels: object) -> Gauge:
        """The gauge with this name and these labels, created at its first use."""
        return self._instrument(Gauge(), name, labels)

    def histogram(self, name: str, /, **labels: object) -> Histogram:
        """The histogram with this name and these labels, created at its first use; its buckets are for seconds."""
        return self._instrument(Histogram(self._clock), name, labels)

    def snapshot(self) -> list[Metric]:
        """The values of all instruments, sorted by name and labels. Each is exact, but they are not of one moment."""
        with self._lock:
            instruments = sorted(self._instruments.items(), key=lambda item: item[0])
        return [
            Metric(name, instrument.kind, labels, instrument.value)
            for (name, labels), instrument in instruments
        ]

    def named(self, *names: str) -> list[Metric]:
        """The values of the instruments with these names, in no order."""
        with self._lock:
            found = [(key, each) for key, each in self._instruments.items() if key[0] in names]
        return [Metric(name, each.kind, labels, each.value) for (name, labels), each in found]

    def as_dict(self) -> dict[str, float | Distribution]:
        """The snapshot as a dictionary with keys such as `slatedb.db.request_count{op=get}`."""
        return {metric.key: metric.value for metric in self.snapshot()}

    def _instrument(self, fresh: _AnyInstrument, name: str, labels: dict[str, object]) -> _AnyInstrument:
        key = (name, tuple(sorted((label, str(value)) for label, value in labels.items())))
        with self._lock:
            known = self._instruments.setdefault(key, fresh)
        if not isinstance(known, type(fresh)):
            raise InvalidRequest(f"metric {name} is already a {known.kind}; it cannot also be a {fresh.kind}")
        return known

    def _renew_locks(self) -> None:
        self._lock = Lock()
        for instrument in self._instruments.values():
            instrument._lock = Lock()  # noqa: SLF001


_registries: WeakSet[Metrics] = WeakSet()


def _after_fork_in_child() -> None:
    # A thread of the parent may have held any of these locks at the fork; no thread of the child would release it.
    for registry in _registries:
        registry._renew_locks()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork_in_child)
