"""Bulk loads as Spark's tasks and driver make them, but in this process: Arrow batches in, one commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flagstone
from flagstone import Admin
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.commit import begin_load, commit_load
from flagstone.spark.load.plan import LoadPlan, LoadReport, MadeSst
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions, parse_write_options

ON_SPARK = [pytest.mark.slow, pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
"""The marks of a test that uses the Spark session."""

Cells = Mapping[str, Sequence[Any]]


def address_of(folder: Path) -> DatabaseAddress:
    return DatabaseAddress(str(folder))


def write_options(folder: Path, **options: str) -> WriteOptions:
    return parse_write_options({"path": str(folder), **options})


def batch_of(cells: Cells) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(dict(cells))


def pairs(rows: Mapping[bytes, bytes]) -> dict[str, list[bytes]]:
    ordered = sorted(rows.items())
    return {"key": [key for key, _ in ordered], "value": [value for _, value in ordered]}


def run_task(plan: LoadPlan, folder: Path, batches: Iterable[Cells], **options: str) -> list[MadeSst]:
    return write_ssts(map(batch_of, batches), plan, write_options(folder, **options))


def load(folder: Path, *tasks: Iterable[Cells], replaces_all: bool = False, **options: str) -> LoadReport:
    """A whole load; every argument is what one task gets."""
    plan = begin_load(address_of(folder))
    made = [table for task in tasks for table in run_task(plan, folder, task, **options)]
    return commit_load(plan, write_options(folder, **options), made, replaces_all=replaces_all)


def shown(folder: Path, **options: Any) -> dict[bytes, bytes]:
    with flagstone.open_reader(folder, mode="latest", **options) as reader:
        return dict(reader.scan(include_system=True))


def on_spark(test: Any) -> Any:
    """The test, with the marks of one that uses the Spark session."""
    for mark in ON_SPARK:
        test = mark(test)
    return test


def ssts_of(folder: Path) -> set[str]:
    """The names of the SSTs of a database."""
    return {path.name for path in (folder / "compacted").iterdir()}


def assert_sound(folder: Path) -> None:
    """Nothing is damaged. SSTs of a compaction that was stopped may wait for garbage collection."""
    report = Admin(folder).verify()
    assert not [finding for finding in report.findings if finding.severity != "note"], report.findings
