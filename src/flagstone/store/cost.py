"""What requests to an object store cost, by purpose, and what that is a month. Pure.

Requests are counted where the engine makes them, with those that are repeated. The service also charges for every page
of a long listing, for the start of a large upload, and for bytes that are sent again, so a bill may be a little higher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flagstone.runtime import metric_names as names
from flagstone.runtime.metrics import Distribution, Labels, Metric
from flagstone.store.paths import (
    COMPACTIONS_FOLDER,
    GC_FOLDER,
    MANIFEST_FOLDER,
    SST_FOLDER,
    WAL_FOLDER,
    folder_of,
)
from flagstone.store.prices import GIGABYTE, PRICE_LISTS, SECONDS_A_MONTH

Component = Literal["wal", "sst", "reads", "manifest", "compaction", "gc", "other"]

COMPONENTS: Final[tuple[Component, ...]] = ("wal", "sst", "reads", "manifest", "compaction", "gc", "other")
"""WAL files; SSTs that flushes write; reads of SSTs; manifests; the compactor; garbage collection; the rest."""

SHORTEST_PROJECTION_S: Final = 10.0
"""A shorter time says nothing about a month."""

USAGE_NAMES: Final = (
    names.COST_REQUESTS,
    names.COST_BYTES,
    names.DB_WRITE_OPS,
    names.DB_REQUEST_COUNT,
    names.DB_LIVE_BYTES,
    names.DB_UPTIME_SECONDS,
)
"""The metrics that tell the usage of a database."""

_OF_FOLDER: Final[Mapping[str, Component]] = {
    WAL_FOLDER: "wal",
    SST_FOLDER: "sst",
    MANIFEST_FOLDER: "manifest",
    COMPACTIONS_FOLDER: "compaction",
    GC_FOLDER: "gc",
}


def component_of(path: str, *, reads: bool) -> Component:
    """The purpose of a request by the object or the folder that it concerns."""
    found = _OF_FOLDER.get(folder_of(path)) or _OF_FOLDER.get(path.rstrip("/").rpartition("/")[2], "other")
    return "reads" if found == "sst" and reads else found


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests by component and kind, bytes by component, and the calls of the database that caused them."""

    requests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)
    operations: int = 0
    """Rows written, gets and scans."""
    stored_bytes: int = 0
    seconds: float = 0.0
    """How long this was counted."""

    @classmethod
    def of(cls, metrics: Iterable[Metric]) -> Usage:
        """The usage that the metrics of a database tell."""
        return cls.of_samples((each.name, each.labels, each.value) for each in metrics)

    @classmethod
    def of_samples(cls, samples: Iterable[tuple[str, Labels, float | Distribution]]) -> Usage:
        """The usage from names, labels and values; unknown names are ignored."""
        requests: dict[str, dict[str, int]] = {}
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        operations = stored = 0
        seconds = 0.0
        for name, pairs, value in samples:
            if isinstance(value, Distribution):
                continue
            labels = dict(pairs)
            component = labels.get("component", "other")
            match name:
                case names.COST_REQUESTS:
                    kinds = requests.setdefault(component, {})
                    kinds[labels["kind"]] = kinds.get(labels["kind"], 0) + int(value)
                case names.COST_BYTES:
                    moved = sent if labels["direction"] == "write" else received
                    moved[component] = moved.get(component, 0) + int(value)
                case names.DB_WRITE_OPS:
                    operations += int(value)
                case names.DB_REQUEST_COUNT if labels.get("op") != "flush":
                    operations += int(value)
                case names.DB_LIVE_BYTES:
                    stored += int(value)
                case names.DB_UPTIME_SECONDS:
                    seconds = max(seconds, float(value))
        return cls(requests, sent, received, operations, stored, seconds)

    def by_kind(self) -> dict[str, int]:
        """The requests of all components by kind."""
        found: dict[str, int] = {}
        for kinds in self.requests.values():
            for kind, count in kinds.items():
                found[kind] = found.get(kind, 0) + count
        return found


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars of a usage at one price list. A projection is None if too little was counted."""

    price_list: str
    usage: Usage
    dollars: float
    """For requests and transfer so far."""
    by_component: Mapping[str, float]
    storage_a_month: float
    requests_a_month: float | None
    """At the rate so far, opening included."""
    per_million_operations: float | None

    @property
    def dollars_a_month(self) -> float | None:
        """Requests, transfer and storage."""
        return None if self.requests_a_month is None else self.requests_a_month + self.storage_a_month

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `status()` and JSON."""
        usage = self.usage
        return {
            "price_list": self.price_list,
            "seconds": usage.seconds,
            "operations": usage.operations,
            "requests": {name: dict(kinds) for name, kinds in usage.requests.items()},
            "bytes_sent": dict(usage.sent),
            "bytes_received": dict(usage.received),
            "live_bytes": usage.stored_bytes,
            "dollars": self.dollars,
            "dollars_by_component": dict(self.by_component),
            "storage_dollars_a_month": self.storage_a_month,
            "request_dollars_a_month": self.requests_a_month,
            "dollars_a_month": self.dollars_a_month,
            "dollars_per_million_operations": self.per_million_operations,
        }


def plan_cost(usage: Usage, price_list: str) -> Cost:
    """What a usage costs at the price list of this name."""
    prices = PRICE_LISTS[price_list]
    by_component = {
        name: prices.requests(usage.requests.get(name, {}))
        + prices.moved(sent=usage.sent.get(name, 0), received=usage.received.get(name, 0))
        for name in sorted({*usage.requests, *usage.sent, *usage.received})
    }
    dollars = sum(by_component.values())
    long_enough = usage.seconds >= SHORTEST_PROJECTION_S
    return Cost(
        price_list=price_list,
        usage=usage,
        dollars=dollars,
        by_component=by_component,
        storage_a_month=prices.stored_gb * usage.stored_bytes / GIGABYTE,
        requests_a_month=dollars * SECONDS_A_MONTH / usage.seconds if long_enough else None,
        per_million_operations=dollars * 1e6 / usage.operations if usage.operations else None,
    )
