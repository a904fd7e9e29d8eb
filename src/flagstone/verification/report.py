"""The report of a verification: counts, and findings by object and offset."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flagstone.errors import CorruptData

Severity = Literal["damage", "warning", "note"]
"""Damage loses or changes data. A warning may become damage later. A note is information."""

SEVERITIES: Final[tuple[Severity, ...]] = ("damage", "warning", "note")
"""Worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem, with its object and, if known, the byte offset."""

    severity: Severity
    object: str
    problem: str
    offset: int | None = None

    def __str__(self) -> str:
        place = self.object if self.offset is None else f"{self.object} at byte {self.offset}"
        return f"{self.severity}: {place}: {self.problem}"


@dataclass(slots=True)
class Report:
    """The result of one verification. `ok` means that no data is lost, and none would be read wrongly.

    `objects` counts what was read by kind: manifest, compactions, boundary, wal, wal fence and sst.
    Two reports are equal if they have the same findings and counts; the duration does not matter.
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
        """Add the error of a decoder as a finding about `path`."""
        self.add(severity, error.object or path, error.problem, error.offset)

    def count(self, kind: str, size: int) -> None:
        """Count one object of that kind that was read."""
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
