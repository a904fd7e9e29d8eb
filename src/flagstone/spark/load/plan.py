"""What a load has fixed when it begins, and what its tasks hand back: small values that travel between processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import UUID

from flagstone.metadata.manifest import SsTable
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.job_control import per_second
from flagstone.types import Seq, Ulid


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What was fixed when a load began. Travels to every task and to the commit.

    Without a `mark` the load has claimed the database as its writer, under `epoch`; with one it is handed over to the
    writer of that epoch, or a later one.
    """

    address: DatabaseAddress
    epoch: int
    seq: Seq
    created_ms: int
    id_ms: int
    mark: UUID | None = None


@dataclass(frozen=True, slots=True)
class MadeSst:
    """A table that a task uploaded."""

    sst: SsTable
    rows: int
    bytes: int
    has_merges: bool = False


def new_sst_id(plan: LoadPlan) -> Ulid:
    """A fresh id, stamped with the begin of the load whatever the clock of this machine says."""
    return stamped(plan.id_ms)


def stamped(time_ms: int) -> Ulid:
    """A fresh id of that very millisecond."""
    return Ulid((time_ms << 80) | (SYSTEM_IDS.ulid() & ((1 << 80) - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A finished load: all its rows have the sequence number `seq`, and are in manifest `manifest_id`.

    `bytes` are those of the tables. `seconds` is how long the whole of it took whoever asked for it.
    """

    rows: int
    tables: int
    bytes: int
    seq: int
    manifest_id: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def rows_per_s(self) -> float:
        """How many rows were loaded per second; only where the whole was timed."""
        return per_second(self.rows, self.seconds)


def write_receipt(path: str, report: LoadReport) -> None:
    """Leave the report at `path`: whole, or not at all. A client of Spark Connect may have its folders elsewhere."""
    temporary = Path(f"{path}.part")
    if not temporary.parent.is_dir():
        return
    temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    temporary.replace(path)


def read_receipt(path: str | os.PathLike[str]) -> LoadReport | None:
    """The report, if the commit ran on a machine that shares this folder with us."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return LoadReport(**json.loads(text)) if text else None
