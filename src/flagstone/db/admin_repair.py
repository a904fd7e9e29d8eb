"""The part of `Admin` that mends a database which does not open, or refers to what is gone."""

from __future__ import annotations

from flagstone.errors import InvalidRequest
from flagstone.lsm.segments import SegmentExtractor
from flagstone.maintenance.repair.plan import RepairReport, report_of
from flagstone.maintenance.repair.repairer import Repairer, finished
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.views.clone import Cloner
from flagstone.views.marks import load_origin


class AdminRepair:
    """Repair. Made by `Admin`, which opens the stores."""

    _store: ObjectStore
    _wal_store: ObjectStore
    _paths: DbPaths
    _clock: Clock
    _ids: Ids

    def repair(
        self, *, plan_only: bool = True, segment_extractor: SegmentExtractor | None = None
    ) -> RepairReport:
        """Say what is wrong with the database and what repairing it gives up; with `plan_only=False`, do it.

        A sound database is not touched. Planning reads only. Repairing first ends the WAL with a fence: a writer that
        is at work is replaced, so stop it before. Objects that are removed are copied below `flagstone/repair/` of
        the database and stay there until you delete them. A crash in the middle leaves the database as it was, or
        sound; repeat the call. `segment_extractor` is needed only where the WAL holds the first rows of a segment.

        Raises:
            InvalidRequest: there is nothing at that path, or rows of the WAL belong to a segment that only the
                segment extractor knows.
            TransactionConflict: another process writes manifests at the same time.
            Unavailable: the store did not answer.

        """
        repairer = Repairer(
            self._store,
            self._paths,
            wal_store=self._wal_store,
            clock=self._clock,
            ids=self._ids,
            has_origin=lambda: load_origin(self._store, self._paths) is not None,
            segment_extractor=segment_extractor,
        )
        plan = repairer.plan()
        if plan.sound and plan.manifest_id is None:
            raise InvalidRequest(
                f"no database at {self._paths.root!r} in {self._store.url}, and nothing to make one of; check the path"
            )
        if plan_only or not plan.repairable:
            return report_of(plan)
        if plan.finish_clone:
            return finished(report_of(plan), self._finish_clone())
        return repairer.apply(plan)

    def _finish_clone(self) -> int:
        """Repeat the call that made the clone, from its own record of what it is made of."""
        origin = load_origin(self._store, self._paths)
        assert origin is not None, "the plan says that it has one"
        cloner = Cloner(self._store, wal_store=self._wal_store, clock=self._clock, ids=self._ids)
        return cloner.clone(self._paths.root, list(origin.sources)).id
