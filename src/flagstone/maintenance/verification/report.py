"""What a verification found: counts for the operator, findings by object and offset."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flagstone.errors import CorruptData

Severity = Literal["damage", "warning", "note"]
"""Damage loses or falsifies data. A warning may do so later. A note is only worth knowing."""

SEVERITIES: Final[tuple[Severity, ...]] = ("damage", "warning", "note")
"""Worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, with the object and, where known, the byte it begins at."""

    severity: Severity
    object: str
    problem: str
    offset: int | None = None

    def __str__(self) -> str:
        place = self.object if self.offset is None else f"{self.object} at byte {self.offset}"
        return f"{self.severity}: {place}: {self.problem}"


@dataclass(slots=True)
class Report:
    """The outcome of one verification. `ok` means: nothing is lost, and nothing would be read wrongly.

    Two reports are equal when they found the same, however long it took.
    """

    database: str
    manifest_id: int | None = None
    objects: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    rows: int = 0
    findings: list[Finding] = field(default_factory=list)
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        return not self.damage

    @property
    def damage(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "damage"]

    def add(self, severity: Severity, path: str, problem: str, offset: int | None = None) -> None:
        self.findings.append(Finding(severity, path, problem, offset))

    def add_error(self, error: CorruptData, path: str, severity: Severity = "damage") -> None:
        """A decoder's complaint as a finding about `path`."""
        self.add(severity, error.object or path, error.problem, error.offset)

    def count(self, kind: str, size: int) -> None:
        """One more object of that kind was read."""
        self.objects[kind] += 1
        self.bytes += size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "database": self.database,
            "ok": self.ok,
            "manifest_id": self.manifest_id,
            "objects": dict(sorted(self.objects.items())),
            "bytes": self.bytes,
            "rows": self.rows,
            "findings": [
                {
                    "severity": finding.severity,
                    "object": finding.object,
                    "offset": finding.offset,
                    "problem": finding.problem,
                }
                for finding in self.findings
            ],
        }
