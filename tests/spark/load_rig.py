"""Loads as Spark's tasks and driver make them, in this process: Arrow batches in, one commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import flagstone
from flagstone import Settings
from flagstone.spark.loading import begin_load, commit_load
from flagstone.spark.options import Place, WriteOptions, parse_write_options
from flagstone.spark.plan import LoadPlan, MadeTable
from flagstone.spark.receipt import LoadReport
from flagstone.spark.tables import write_tables

QUIET = Settings(compactor_options=None, garbage_collector_options=None)

Cells = Mapping[str, Sequence[Any]]


def place_of(folder: Path) -> Place:
    return Place(str(folder))


def write_options(folder: Path, **options: str) -> WriteOptions:
    return parse_write_options({"path": str(folder), **options})


def batch_of(cells: Cells) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(dict(cells))


def pairs(rows: Mapping[bytes, bytes]) -> dict[str, list[bytes]]:
    ordered = sorted(rows.items())
    return {"key": [key for key, _ in ordered], "value": [value for _, value in ordered]}


def run_task(plan: LoadPlan, folder: Path, batches: Iterable[Cells], **options: str) -> list[MadeTable]:
    return write_tables(map(batch_of, batches), plan, write_options(folder, **options))


def load(folder: Path, *tasks: Iterable[Cells], replaces_all: bool = False, **options: str) -> LoadReport:
    """A whole load; every argument is what one task gets."""
    plan = begin_load(place_of(folder))
    made = [table for task in tasks for table in run_task(plan, folder, task, **options)]
    return commit_load(plan, write_options(folder, **options), made, replaces_all=replaces_all)


def shown(folder: Path, **options: Any) -> dict[bytes, bytes]:
    with flagstone.open_reader(folder, mode="latest", **options) as reader:
        return dict(reader.scan())
