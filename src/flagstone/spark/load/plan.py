"""What the processes of a bulk load share: its plan, its uploaded SSTs, and its report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import UUID

from flagstone.metadata.annotations import load_sst_id
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.ids import Ids
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.job_control import per_second
from flagstone.sst.builder import BuiltSst
from flagstone.sst.output import SstOutput
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import Seq, Ulid


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What `begin_load` decides; every task and the commit get it.

    `record_id` names the load record, and `epoch` is the writer's when the load began. The ids of its SSTs have the
    time `id_ms` and then `tag`. The record was alive at `began_ms`. `owner` is as in `LoadRecord`.
    """

    address: DatabaseAddress
    record_id: UUID
    epoch: int
    seq: Seq
    created_ms: int
    id_ms: int
    tag: int
    began_ms: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class MadeSst:
    """An SST that a task uploaded."""

    sst: SsTable
    rows: int
    bytes: int
    has_merges: bool = False


def load_output(store: ObjectStore, paths: DbPaths, plan: LoadPlan) -> SstOutput:
    """Uploads SSTs of the load under ids with its time and its tag, whatever the clock says here."""
    return SstOutput(store, paths, lambda: load_sst_id(plan.id_ms, plan.tag, plan.address.ids.ulid()))


def commit_sst(output: SstOutput, built: BuiltSst, *, has_merges: bool = False) -> MadeSst:
    """Complete the upload of a finished SST."""
    sst = SsTable(output.commit(built), built.info, built.format_version)
    return MadeSst(sst, built.rows, built.size, has_merges)


def ulid_at(time_ms: int, ids: Ids) -> Ulid:
    """A new ULID with that time."""
    return Ulid((time_ms << 80) | (ids.ulid() & ((1 << 80) - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A finished load: all its rows have the sequence number `seq`, and manifest `manifest_id` has them.

    `tables` is the number of SSTs, and `bytes` is their size. `seconds` is the time of the whole call of `bulk_load`.
    """

    rows: int
    tables: int
    bytes: int
    seq: int
    manifest_id: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def rows_per_s(self) -> float:
        """Rows loaded per second; only valid in the report that `bulk_load` returns."""
        return per_second(self.rows, self.seconds)


def write_report(path: str, report: LoadReport) -> None:
    """Write the report to `path` atomically. A client of Spark Connect may have its folder on another machine."""
    temporary = Path(f"{path}.part")
    if not temporary.parent.is_dir():
        return
    temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    temporary.replace(path)


def read_report(path: str | os.PathLike[str]) -> LoadReport | None:
    """The report; None if the commit ran on a machine that does not share this folder."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return LoadReport(**json.loads(text)) if text else None
