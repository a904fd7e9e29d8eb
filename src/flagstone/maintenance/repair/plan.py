"""What a repair would do, and what it would give up. Pure: decided from facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from flagstone.maintenance.repair.wal_order import OrderedRows
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Manifest
from flagstone.store.paths import BoundaryOf
from flagstone.types import EntryTuple, Ulid

DefectKind = Literal[
    "wal order",
    "wal hole",
    "wal damage",
    "clock",
    "missing sst",
    "damaged sst",
    "checkpoint",
    "lender",
    "manifest",
    "compactions",
    "boundary",
    "half-made",
]

Folder = Literal["manifest", "compactions", "wal"]


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing that is wrong, what repair does about it, and what that gives up ("": nothing).

    Without a `remedy` repair leaves it alone, and `problem` says what an operator can do.
    """

    kind: DefectKind
    object: str
    problem: str
    remedy: str = ""
    gives_up: str = ""


@dataclass(frozen=True, slots=True)
class Losses:
    """What a repair gives up, or what is lost already.

    Sequence numbers are inclusive ranges that the lost rows are in; without an end where no later row is known.
    """

    sequences: tuple[tuple[int, int | None], ...] = ()
    wal_ids: tuple[int, ...] = ()
    ssts: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """An object that is moved aside: copied first, deleted after the new manifest is there."""

    folder: Folder
    id: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """All that is wrong, and one set of changes that mends what can be mended.

    `base` is the state the new manifest starts from, `next_id` the number that manifest gets. `log` holds the rows
    that go from the WAL into SSTs, or is None when the WAL stays as it is. `rebuilt` are the rows, still in the WAL, of
    SSTs that are gone.
    """

    database: str
    manifest_id: int | None
    defects: tuple[Defect, ...] = ()
    losses: Losses = Losses()
    base: Manifest | None = None
    next_id: int = 1
    writer_epoch: int = 0
    compactor_epoch: int = 0
    log: OrderedRows | None = None
    lost_ssts: frozenset[Ulid] = frozenset()
    rebuilt: Mapping[Ulid, tuple[EntryTuple, ...]] = field(default_factory=dict)
    lost_checkpoints: frozenset[UUID] = frozenset()
    gone_lenders: frozenset[str] = frozenset()
    restamped: frozenset[Ulid] = frozenset()
    reset_clock_ms: int | None = None
    removals: tuple[Removal, ...] = ()
    compactions: Compactions | None = None
    next_compactions_id: int = 1
    boundaries: tuple[tuple[BoundaryOf, int], ...] = ()
    finish_clone: bool = False
    new_manifest: bool = False

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not self.defects

    @property
    def repairable(self) -> bool:
        """There is something that repair can mend."""
        return any(defect.remedy for defect in self.defects)


@dataclass(slots=True)
class RepairReport:
    """What was found and, if `applied`, done. `kept_aside` are copies of every object that was removed.

    `remaining` are defects that repair cannot mend; all of them until it is applied.
    """

    database: str
    manifest_id: int | None
    defects: tuple[Defect, ...]
    losses: Losses
    applied: bool = False
    kept_aside: list[str] = field(default_factory=list)
    fenced_wal_id: int | None = None

    @property
    def sound(self) -> bool:
        """Nothing is wrong, or what was wrong is mended."""
        return not self.remaining

    @property
    def remaining(self) -> tuple[Defect, ...]:
        """What is still wrong."""
        if not self.applied:
            return self.defects
        return tuple(defect for defect in self.defects if not defect.remedy)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "database": self.database,
            "manifest_id": self.manifest_id,
            "sound": self.sound,
            "applied": self.applied,
            "defects": [
                {
                    "kind": defect.kind,
                    "object": defect.object,
                    "problem": defect.problem,
                    "remedy": defect.remedy or None,
                    "gives_up": defect.gives_up or None,
                }
                for defect in self.defects
            ],
            "gives_up": {
                "sequences": [list(span) for span in self.losses.sequences],
                "wal_ids": list(self.losses.wal_ids),
                "ssts": list(self.losses.ssts),
                "checkpoints": list(self.losses.checkpoints),
            },
            "fenced_wal_id": self.fenced_wal_id,
            "kept_aside": list(self.kept_aside),
        }


def report_of(plan: RepairPlan) -> RepairReport:
    """The report of a plan that was not carried out."""
    return RepairReport(plan.database, plan.manifest_id, plan.defects, plan.losses)
