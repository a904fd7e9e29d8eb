"""What a round of garbage collection did, kind by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flagstone.gc.plan import Kind, Plan


@dataclass(slots=True)
class KindReport:
    """What a round did with the objects of one kind.

    `deleted`, `bytes` and `paths` are what was deleted or, in a dry run, what would have been. `reasons` counts the
    objects by the reason of the decision. `errors` are the failures; the next round deletes what they kept.
    """

    kind: Kind
    dry_run: bool = False
    examined: int = 0
    deleted: int = 0
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    paths: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return self.examined - self.deleted

    def count_plan(self, plan: Plan) -> None:
        """Count the objects of a plan, and the reasons of its decisions."""
        self.examined += len(plan.verdicts)
        self.reasons.update(verdict.reason for verdict in plan.verdicts)

    def count_deleted(self, path: str, size: int = 0) -> None:
        """Count one object of a plan that was deleted, or would be."""
        self.deleted += 1
        self.bytes += size
        self.paths.append(path)

    def count_unplanned(self, path: str, reason: str) -> None:
        """Count one object that is in no plan, and that was deleted, or would be."""
        self.examined += 1
        self.reasons[reason] += 1
        self.count_deleted(path)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, without the single paths."""
        return {
            "examined": self.examined,
            "kept": self.kept,
            "deleted": self.deleted,
            "bytes": self.bytes,
            "dry_run": self.dry_run,
            "reasons": dict(self.reasons),
            "errors": list(self.errors),
        }


@dataclass(slots=True)
class GarbageReport:
    """One round. `manifest_id` is the manifest it ended with.

    `gone` means that the database was destroyed and is now deleted. `waits_for` are the reasons why a destroyed
    database is not deleted yet: its grace period, or a checkpoint with its owner and its end.

    `revisit_in_ms` is when an object that only its age or a checkpoint keeps becomes garbage; None if that takes a new
    manifest.
    """

    database: str
    kinds: dict[Kind, KindReport] = field(default_factory=dict)
    manifest_id: int = 0
    seconds: float = 0.0
    revisit_in_ms: int | None = None
    gone: bool = False
    waits_for: list[str] = field(default_factory=list)

    def of(self, kind: Kind) -> KindReport:
        """The report of one kind, created if there is none."""
        return self.kinds.setdefault(kind, KindReport(kind))

    def __iter__(self) -> Iterator[KindReport]:
        return iter(self.kinds.values())

    @property
    def deleted(self) -> int:
        """How many objects were deleted; dry runs do not count."""
        return sum(entry.deleted for entry in self if not entry.dry_run)

    @property
    def errors(self) -> list[str]:
        """All errors, with their kinds."""
        return [f"{entry.kind}: {error}" for entry in self for error in entry.errors]

    @property
    def ok(self) -> bool:
        return not self.errors

    def revisit_within(self, ms: int) -> None:
        """An object becomes garbage in that many milliseconds; the smallest time counts."""
        self.revisit_in_ms = ms if self.revisit_in_ms is None else min(ms, self.revisit_in_ms)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "database": self.database,
            "manifest_id": self.manifest_id,
            "seconds": self.seconds,
            "gone": self.gone,
            "waits_for": list(self.waits_for),
            "kinds": {entry.kind: entry.to_dict() for entry in self},
        }
