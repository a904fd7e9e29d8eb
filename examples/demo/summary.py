"""The end: the steps, the requests to the object store, and their cost at S3's prices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flagstone.cost import PRICE_LISTS
from stage import MB, Stage, folder_bytes, folder_objects

PRICES = PRICE_LISTS["s3-standard"]
KINDS = ("put", "get", "list", "delete")
DAYS = 30


class Counted(Protocol):
    def status(self) -> Any: ...


def count_requests(db: Counted) -> Counter[str]:
    """The requests of a database to its store so far, by kind."""
    found: Counter[str] = Counter()
    for kinds in db.status()["cost"]["requests"].values():
        for kind, count in kinds.items():
            found["get" if kind == "head" else kind] += count
    return found


def summarize(stage: Stage, folder: Path, counted: Counter[str]) -> None:
    steps = Table("what was done, once", box=SIMPLE_HEAD)
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
    run = PRICES.requests(counted + others)
    stored = size / (1 << 30) * PRICES.stored_gb
    stage.console.print(
        f"  {size / MB:,.0f} MB in {objects:,} objects. On S3 that is ${stored:.4f} a month to keep, and ${run:.4f} "
        f"for the requests;\n  with this run every day, [bold]${stored + DAYS * run:.2f} a month[/]. (Reads by Spark's "
        "tasks are not counted: a few requests per SST.)",
        soft_wrap=True,
    )
