"""Which versions of manifest and compactions file nobody can need any more.

The highest version is the database and always stays. Of the manifests, those stay that a checkpoint of the
latest one names. What such a set leaves out can never come back into it: a later checkpoint names its own
version, or the version of a checkpoint that exists. So a plan stays right however long acting on it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flagstone.maintenance.gc.plan import Kind, Plan, Verdict, drop, keep
from flagstone.metadata.sequenced import Listed
from flagstone.wal.pins import PIN_MANIFEST_ID


def plan_versions(kind: Kind, listed: Iterable[Listed], *, latest: int, pinned: Collection[int] = ()) -> Plan:
    """Judge all listed versions: older than `latest` and not `pinned` by a checkpoint means unneeded."""

    def judge(version: Listed) -> Verdict:
        if version.id == latest:
            return keep(version.meta, version.id, "the latest")
        if version.id > latest:
            return keep(version.meta, version.id, "newer than what this round knows")
        if version.id in pinned:
            return keep(version.meta, version.id, "named by a checkpoint")
        if kind == "manifest" and version.id == PIN_MANIFEST_ID:
            # A store may refuse the same name a second time, and then no consumer could pin the log again.
            return keep(version.meta, version.id, "where consumers pin the log")
        return drop(version.meta, version.id, "superseded")

    return Plan(kind, tuple(judge(version) for version in listed))


def plan_boundary(plan: Plan) -> int | None:
    """Up to which number the boundary must have been advanced before the plan may be carried out."""
    return max((verdict.id for verdict in plan.deletions), default=None)
