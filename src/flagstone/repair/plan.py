"""The plan of a repair, the manifest that applies it, and the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal
from uuid import UUID

from flagstone.lsm import tree as trees
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Manifest, SsTable, edit_tree, replace_trees
from flagstone.runtime.ids import ulid_ms
from flagstone.store.paths import BoundaryOf
from flagstone.types import EntryTuple, Seq, Ulid, WalId

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

CLOCK_TOLERANCE_MS: Final = 10_000
"""A writer waits this long for a clock that is behind; a time further ahead stops it."""

_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect, its remedy, and what the remedy gives up ("": nothing).

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

    `sequences` are inclusive ranges of sequence numbers that hold the lost rows; a range has no end if no later row is
    known.
    """

    sequences: tuple[tuple[int, int | None], ...] = ()
    wal_ids: tuple[int, ...] = ()
    ssts: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """An object that is moved aside: copied first, deleted after the new manifest is created."""

    folder: Folder
    id: int
    path: str


@dataclass(frozen=True, slots=True)
class Renumbered:
    """Batches of one WAL file that get another sequence number."""

    wal_id: int
    path: str
    old_seq: int
    new_seq: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The rows that only the WAL holds, in commit order and with ascending sequence numbers."""

    rows: tuple[EntryTuple, ...]
    last_seq: int
    renumbered: tuple[Renumbered, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """All defects, and the changes that repair those with a remedy.

    `base` is the state that the new manifest starts from, `next_id` the new manifest's id. `wal_rows` are the rows that
    go from the WAL into SSTs, or None if the WAL stays as it is. `rebuilt` are the rows, still in the WAL, of SSTs that
    are missing.
    """

    database: str
    manifest_id: int | None
    defects: tuple[Defect, ...] = ()
    losses: Losses = Losses()
    base: Manifest | None = None
    next_id: int = 1
    writer_epoch: int = 0
    compactor_epoch: int = 0
    wal_rows: OrderedRows | None = None
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
        """There is no defect."""
        return not self.defects

    @property
    def repairable(self) -> bool:
        """There is a defect with a remedy."""
        return any(defect.remedy for defect in self.defects)


@dataclass(slots=True)
class RepairReport:
    """What was found and, if `applied`, done. `kept_aside` are the copies of all removed objects.

    `remaining` are the defects without a remedy; before the repair is applied, all defects.
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
        """There is no defect, or every defect is repaired."""
        return not self.remaining

    @property
    def remaining(self) -> tuple[Defect, ...]:
        """The defects that are not repaired."""
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


@dataclass(slots=True)
class Findings:
    """The defects, losses and removals found so far."""

    defects: list[Defect] = field(default_factory=list)
    sequences: list[tuple[int, int | None]] = field(default_factory=list)
    wal_ids: list[int] = field(default_factory=list)
    ssts: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)

    def add(self, defect: Defect) -> None:
        self.defects.append(defect)

    @property
    def losses(self) -> Losses:
        return Losses(tuple(self.sequences), tuple(self.wal_ids), tuple(self.ssts), tuple(self.checkpoints))


def name_some(names: list[str]) -> str:
    """The first few of the names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def apply_repair(
    base: Manifest,
    plan: RepairPlan,
    *,
    fence_id: WalId,
    added: Iterable[tuple[bytes, SsTable]] = (),
    replaced: Mapping[Ulid, SsTable] | None = None,
) -> Manifest:
    """The manifest that applies the plan.

    `fence_id` ends the old WAL. `added` are the SSTs of its rows by segment, oldest first. `replaced` are the SSTs that
    replace others: copies under a new id, or built again from the WAL.
    """
    edited = _edit_trees(base, plan, replaced or {})
    for prefix, sst in added:
        view = SstView.whole(sst.id)
        edited = edit_tree(edited, prefix, partial(trees.apply_flush, view=view), added=(sst,))
    edited = replace(
        edited,
        writer_epoch=plan.writer_epoch,
        compactor_epoch=plan.compactor_epoch,
        wal_id_last_seen=max(base.wal_id_last_seen, fence_id),
        checkpoints=tuple(entry for entry in base.checkpoints if entry.id not in plan.lost_checkpoints),
        external_dbs=tuple(
            entry for entry in edited.external_dbs if entry.path not in plan.gone_lenders or entry.sst_ids
        ),
    )
    if plan.wal_rows is not None:
        times = [row[4] for row in plan.wal_rows.rows if row[4] is not None]
        edited = replace(
            edited,
            replay_after_wal_id=fence_id,
            last_l0_seq=Seq(max(base.last_l0_seq, plan.wal_rows.last_seq)),
            recent_snapshot_min_seq=Seq(max(base.last_l0_seq, plan.wal_rows.last_seq)),
            last_l0_clock_tick=max([base.last_l0_clock_tick, *times]),
        )
    if plan.reset_clock_ms is not None:
        edited = _reset_clock(edited, plan.reset_clock_ms)
    return edited


def _edit_trees(base: Manifest, plan: RepairPlan, replaced: Mapping[Ulid, SsTable]) -> Manifest:
    def renamed(view: SstView) -> SstView:
        new = replaced.get(view.sst_id)
        if new is None:
            return view
        return replace(view, id=new.id if view.id == view.sst_id else view.id, sst_id=new.id)

    def edit(tree: Tree) -> Tree:
        runs = (
            replace(
                run, views=tuple(renamed(view) for view in run.views if view.sst_id not in plan.lost_ssts)
            )
            for run in tree.runs
        )
        return replace(
            tree,
            l0=tuple(renamed(view) for view in tree.l0 if view.sst_id not in plan.lost_ssts),
            runs=tuple(run for run in runs if run.views),
        )

    return replace_trees(
        base,
        tree=edit(base.tree),
        segments=[replace(segment, tree=edit(segment.tree)) for segment in base.segments],
        added=list(replaced.values()),
    )


def _reset_clock(manifest: Manifest, now_ms: int) -> Manifest:
    """The manifest without a time in the future, for which a writer would have to wait."""
    tracker = manifest.sequence_tracker
    limit_s = now_ms // 1000
    points = [point for point in zip(tracker.sequences, tracker.seconds, strict=True) if point[1] <= limit_s]

    def marked(tree: Tree) -> Tree:
        marker = tree.last_compacted_l0
        if marker is None or ulid_ms(marker) <= now_ms + CLOCK_TOLERANCE_MS:
            return tree
        return replace(tree, last_compacted_l0=Ulid((now_ms << 80) | (marker & ((1 << 80) - 1))))

    return replace(
        manifest,
        tree=marked(manifest.tree),
        segments=tuple(replace(segment, tree=marked(segment.tree)) for segment in manifest.segments),
        last_l0_clock_tick=min(manifest.last_l0_clock_tick, now_ms),
        sequence_tracker=SequenceTracker(
            tuple(point[0] for point in points), tuple(point[1] for point in points)
        ),
    )
