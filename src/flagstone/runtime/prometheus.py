"""Metrics as the text that Prometheus scrapes (exposition format 0.0.4). Pure: values in, text out.

`slatedb.db.write_ops` becomes `slatedb_db_write_ops_total`: dots become underscores, and a counter ends in `_total`, as
Prometheus recommends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from flagstone.runtime.metric_help import HELP
from flagstone.runtime.metrics import Distribution, Labels, Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_:]")
_NOT_IN_LABELS: Final = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPED_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def render(metrics: Iterable[Metric], *, labels: Mapping[str, str] | None = None) -> str:
    """The metrics as text. `labels` are added to every sample; a metric's own label of that name wins."""
    return render_several([(metrics, labels or {})])


def render_several(sources: Iterable[tuple[Iterable[Metric], Mapping[str, str]]]) -> str:
    """The metrics of several databases as one text, each with labels of its own.

    All samples of a metric are together, as the format demands, whichever database they are of.
    """
    families: dict[str, tuple[Metric, list[str]]] = {}
    for metrics, labels in sources:
        for metric in metrics:
            name = family_name(metric)
            first, samples = families.setdefault(name, (metric, []))
            if first.kind == metric.kind:
                samples += _samples(name, metric, labels)
    lines: list[str] = []
    for name, (metric, samples) in sorted(families.items()):
        sentence = HELP.get(metric.name, metric.name).translate(_ESCAPED_HELP)
        lines += [f"# HELP {name} {sentence}", f"# TYPE {name} {metric.kind}", *samples]
    return "".join(f"{line}\n" for line in lines)


def family_name(metric: Metric) -> str:
    """The name of a metric in Prometheus."""
    name = _NOT_IN_NAMES.sub("_", metric.name)
    return f"{name}_total" if metric.kind == "counter" else name


def _samples(name: str, metric: Metric, added: Mapping[str, str]) -> list[str]:
    labels = tuple({**added, **dict(metric.labels)}.items())
    value = metric.value
    if not isinstance(value, Distribution):
        return [f"{name}{_braces(labels)} {_number(value)}"]
    lines, below = [], 0
    for boundary, count in zip((*value.boundaries, float("inf")), value.bucket_counts, strict=True):
        below += count
        lines.append(f"{name}_bucket{_braces((*labels, ('le', _number(boundary))))} {below}")
    return [
        *lines,
        f"{name}_sum{_braces(labels)} {_number(value.sum)}",
        f"{name}_count{_braces(labels)} {below}",
    ]


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    inside = ",".join(f'{_label(name)}="{value.translate(_ESCAPED)}"' for name, value in labels)
    return f"{{{inside}}}"


def _label(name: str) -> str:
    found = _NOT_IN_LABELS.sub("_", name)
    return f"_{found}" if found[:1].isdigit() else found


def _number(value: float) -> str:
    if value != value:  # noqa: PLR0124 - true for "not a number" alone
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, int) else repr(value)
