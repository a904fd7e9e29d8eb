"""What the parts of a plan share: findings in the making, and how they name things. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from flagstone.maintenance.repair.plan import Defect, Losses, Removal

CLOCK_TOLERANCE_MS: Final = 10_000
"""A writer waits this long for a clock that is behind; what is further ahead stops it."""

_NAMED: Final = 5


@dataclass(slots=True)
class Findings:
    """What was found so far."""

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


def some(names: list[str]) -> str:
    """The first few of the names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
