"""What the two-phase protocol leaves behind: half-done writes, temporaries and records of deleted objects.

Stores with conditional writes of their own have none of this. A record that says "deleted" is what makes a stalled
creator lose on such a store; forgetting it gives the path free, and then the boundary (for metadata) or the
writer's look at the manifest (for the log) refuses the late create, as on any other store.
"""

from __future__ import annotations

from typing import Final

from flagstone.maintenance.gc.report import KindReport
from flagstone.store.port import ObjectStore, find_inside
from flagstone.store.two_phase import TwoPhaseStore

DEFAULT_MIN_AGE_MS: Final = 24 * 60 * 60 * 1000
"""A temporary is dead, and a deletion forgotten, after a day: no request is under way for that long."""


def find_two_phase(store: ObjectStore) -> TwoPhaseStore | None:
    """The two-phase store inside the wrappers of `store`, if there is one."""
    return find_inside(store, TwoPhaseStore)


def collect_leftovers(
    store: TwoPhaseStore, folder: str, report: KindReport, *, min_age_ms: int, dry_run: bool
) -> None:
    """Complete what was interrupted below `folder`, then remove what nobody needs. May run beside writers.

    A crash half-way loses nothing: each step is one that any process may repeat.
    """
    if not dry_run:
        recovered = store.recover(folder)
        for path in recovered.cleaned:
            report.act(path, "temporary of a finished write")
        report.errors += [
            f"{path}: a decided write cannot be carried out, its temporary is gone"
            for path in recovered.broken
        ]
    removed = store.collect_garbage(prefix=folder, min_age_ms=min_age_ms, dry_run=dry_run)
    for path in removed.temporaries:
        report.act(path, "temporary without a decision")
    for path in removed.records:
        report.act(path, "record of a deleted object")
