"""The end: the steps, the requests to the object store, and their cost at S3's prices."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table

from stage import MB, Stage, folder_bytes, folder_objects

PER_REQUEST = {"put": 0.005 / 1000, "list": 0.005 / 1000, "copy": 0.005 / 1000, "get": 0.0004 / 1000}
"""Dollars, S3's standard class in us-east-1. Deleting is free; a head request costs as much as a get."""

KINDS = ("put", "get", "list", "delete")
PER_GB_MONTH = 0.023
DAYS = 30


class Counted(Protocol):
    def metrics(self) -> dict[str, Any]: ...


def count_requests(db: Counted) -> Counter[str]:
    """The requests of a database to its store so far, by kind."""
    found: Counter[str] = Counter()
    for name, value in db.metrics().items():
        if name.startswith("slatedb.object_store.request_count") and (kind := re.search(r"\bop=(\w+)", name)):
            found["get" if kind[1] == "head" else kind[1]] += value
    return found


def summarize(stage: Stage, folder: Path, counted: Counter[str]) -> None:
    steps = Table("what was done", box=SIMPLE_HEAD)
    for heading in ("rows", "MB", "seconds", "rate"):
        steps.add_column(heading, justify="right")
    for lap in stage.laps:
        if lap.rate:
            rows, mb = f"{lap.rows:,}" if lap.rows else "", f"{lap.bytes / MB:,.1f}" if lap.bytes else ""
            steps.add_row(lap.name, rows, mb, f"{lap.seconds:.2f}", lap.rate)
    stage.console.print()
    stage.console.print(steps)

    # Objects that are minutes old are not collected yet, so Spark and the tools wrote all objects not counted here.
    size, objects = folder_bytes(folder), folder_objects(folder)
    others = Counter({"put": objects - counted["put"]})
    requests = Table("requests", box=SIMPLE_HEAD)
    for kind in KINDS:
        requests.add_column(kind, justify="right")
    requests.add_row("of the service and the clone", *(f"{counted[kind]:,}" for kind in KINDS))
    requests.add_row("of Spark and tools: objects written", f"{others['put']:,}")
    stage.console.print(requests)
    run = sum(PER_REQUEST.get(kind, 0.0) * number for kind, number in (counted + others).items())
    stored = size / 1e9 * PER_GB_MONTH
    stage.console.print(
        f"  {size / MB:,.0f} MB in {objects:,} objects. On S3 that is ${stored:.4f} a month to keep, and ${run:.4f} "
        f"for the requests;\n  with this run every day, [bold]${stored + DAYS * run:.2f} a month[/]. (Reads by Spark's "
        "tasks are not counted: a few requests per SST.)",
        soft_wrap=True,
    )
