"""Metrics for OpenTelemetry: `flagstone.telemetry.export_metrics(db)`. Needs the package `opentelemetry-api`.

Spans need no call: see "Traces" in the documentation. Only this module imports OpenTelemetry, and no other module of
Flagstone imports this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

from flagstone.db.reporting import measure
from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.metric_help import HELP
from flagstone.runtime.metrics import Distribution, Metric

if TYPE_CHECKING:
    from flagstone.db.aio.database import AsyncDb
    from flagstone.db.aio.reader import AsyncDbReader
    from flagstone.db.reader.reader import DbReader
    from flagstone.db.writer.database import Db

__all__ = ["export_metrics"]

_SAME_COLLECTION_S = 0.1


def export_metrics(
    handle: Db | DbReader | AsyncDb | AsyncDbReader,
    *,
    meter: Any = None,
    attributes: Mapping[str, str] | None = None,
) -> None:
    """Register the metrics of an open database with a meter, by default that of the global meter provider.

    Names are those of `metrics()`. A histogram becomes two counters, `.count` and `.sum`, because OpenTelemetry takes
    observations of histograms one by one only. `attributes` are added to every observation; give them if the process
    exports several databases. Nothing is reported any more when the handle is closed or dropped.

    Raises:
        InvalidRequest: `opentelemetry-api` is not installed.

    """
    try:
        from opentelemetry import metrics as api  # noqa: PLC0415
    except ImportError:
        raise InvalidRequest("OpenTelemetry is not installed; pip install opentelemetry-api") from None
    meter = api.get_meter("flagstone") if meter is None else meter
    source = _Source(handle, dict(attributes or {}))
    kinds = {metric.name: metric.kind for metric in measure(handle)}
    for name, kind in sorted(kinds.items()):
        about = HELP.get(name, name)
        match kind:
            case "counter":
                meter.create_observable_counter(name, [source.of(name, _value, api)], description=about)
            case "gauge":
                meter.create_observable_gauge(name, [source.of(name, _value, api)], description=about)
            case "histogram":
                for part, value in (("count", _count), ("sum", _sum)):
                    meter.create_observable_counter(
                        f"{name}.{part}", [source.of(name, value, api)], description=about
                    )


class _Source:
    """The metrics of one handle. One collection asks for each instrument, and measures once."""

    def __init__(self, handle: Any, attributes: dict[str, str]) -> None:
        self._handle = ref(handle)
        self._attributes = attributes
        self._measured_at = float("-inf")
        self._metrics: dict[str, list[Metric]] = {}

    def of(self, name: str, value: Callable[[Metric], float], api: Any) -> Callable[[Any], Iterable[Any]]:
        """A callback that observes the metrics of one name."""

        def observe(_options: Any) -> list[Any]:
            return [
                api.Observation(value(metric), {**self._attributes, **dict(metric.labels)})
                for metric in self._now().get(name, ())
            ]

        return observe

    def _now(self) -> dict[str, list[Metric]]:
        handle = self._handle()
        if handle is None or handle.closed:
            return {}
        now = SYSTEM_CLOCK.monotonic()
        if now - self._measured_at > _SAME_COLLECTION_S:
            found: dict[str, list[Metric]] = {}
            for metric in measure(handle):
                found.setdefault(metric.name, []).append(metric)
            self._metrics, self._measured_at = found, now
        return self._metrics


def _value(metric: Metric) -> float:
    assert not isinstance(metric.value, Distribution)
    return metric.value


def _count(metric: Metric) -> float:
    assert isinstance(metric.value, Distribution)
    return metric.value.count


def _sum(metric: Metric) -> float:
    assert isinstance(metric.value, Distribution)
    return metric.value.sum
