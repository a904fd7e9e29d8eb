"""The operator's handle on a database: looks at it and maintains it without opening it for writing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from uuid import UUID

from flagstone.config import GarbageCollectorOptions
from flagstone.db.admin_compaction import AdminCompaction
from flagstone.db.admin_repair import AdminRepair
from flagstone.db.admin_views import AdminViews
from flagstone.db.differences import Diff, open_diff
from flagstone.db.garbage import open_collector
from flagstone.db.reading import check_range
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.sequence import Rounding
from flagstone.maintenance.gc.options import requested_options
from flagstone.maintenance.gc.plan import Kind
from flagstone.maintenance.gc.report import GarbageReport
from flagstone.maintenance.verification.report import Report
from flagstone.maintenance.verification.subjects import Checker
from flagstone.maintenance.verification.verifier import Verifier
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.paths import DbPaths
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.store.retrying import patient
from flagstone.views import history


class Admin(AdminViews, AdminCompaction, AdminRepair):
    """Works on the database at `path`; nothing is contacted before the first call.

    Addresses are those of `flagstone.open`: a folder, `file://`, `memory://NAME/path`, `s3://bucket/path` and so
    on, or a path inside `store`. `wal_store` is where the log lives when it has a store of its own.

    An `Admin` pickles, and works where it arrives; credentials stay behind unless the store was told otherwise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        store: StoreLike | None = None,
        store_options: Mapping[str, OptionValue] | None = None,
        wal_store: StoreLike | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        found, root = resolve_database(path, store, store_options)
        self._clock = clock
        self._ids = ids
        self._paths = DbPaths(root)
        self._by_folder = store is None and found.url.startswith("file:")
        self._store = patient(found, clock=clock, ids=ids)
        self._wal_store = (
            self._store
            if wal_store is None
            else patient(resolve_wal_store(wal_store, found, store_options), clock=clock, ids=ids)
        )

    def __repr__(self) -> str:
        return f"Admin({self._paths.root!r}, store={self._store.url!r})"

    def verify(self, *, checker: Checker | None = None) -> Report:
        """Read every object, check every checksum, filter, order and reference, and report what is wrong.

        Reads only, and may run beside a writer. A `checker` reads the tables and the log in place of this process.

        Raises:
            InvalidRequest: there is no database at that path.
            Unavailable: the store did not answer.

        """
        verifier = Verifier(self._store, self._paths, wal_store=self._wal_store, checker=checker)
        return verifier.verify()

    def collect_garbage(
        self,
        *,
        kinds: Iterable[Kind] | None = None,
        min_age: timedelta | str | None = None,
        dry_run: bool = False,
        options: GarbageCollectorOptions | None = None,
    ) -> GarbageReport:
        """Delete, once and now, what nobody can need any more. May run beside writers, compactors and collectors.

        `kinds` are some of manifest, compactions, wal, wal_fence, compacted, detach and two_phase; all by default,
        with fences only reported. `min_age` replaces the ages in `options`. What could not be deleted is in the report.
        A database that was destroyed softly is deleted as a whole when its grace period is over.

        Raises:
            InvalidRequest: there is no database at that path, or an argument is wrong.
            Unavailable: the store did not answer.

        """
        options = options or GarbageCollectorOptions()
        collector = open_collector(
            self._store,
            self._paths,
            requested_options(options, kinds, min_age),
            wal_store=self._wal_store,
            boundary_files=options.boundary_files_enabled,
            clock=self._clock,
            ids=self._ids,
        )
        return collector.collect(dry_run=dry_run)

    def sequence_at(self, time: datetime, *, rounding: Rounding = "down") -> int | None:
        """The last sequence number known to have been current at `time` (`up`: the first known after it), or None.

        The manifest remembers one number a minute at most. `time` needs a time zone.

        Raises:
            InvalidRequest: there is no database, or `time` has no time zone.

        """
        return history.sequence_at(self._latest_manifest(), time, rounding)

    def time_of(self, sequence: int, *, rounding: Rounding = "down") -> datetime | None:
        """When the last known sequence number up to `sequence` was current (`up`: the first from it on), or None."""
        return history.time_of(self._latest_manifest(), sequence, rounding)

    def diff(
        self,
        before: UUID | str,
        after: UUID | str,
        *,
        start: bytes | None = None,
        stop: bytes | None = None,
        prefix: bytes | None = None,
        merge_operator: MergeOperator | None = None,
    ) -> Diff:
        """The keys whose rows differ between two checkpoints, in [start, stop) or with `prefix`, ordered by key.

        Iterate it for `(key, before, after)`, or `.arrow()` for record batches. Reads what only one of the two has,
        and of the rest what that asks for. Expiry is judged at the later checkpoint for both: what had expired by
        then is in neither, so a key that only expired is no difference. The checkpoints must outlive the iteration.

        Raises:
            InvalidRequest: there is no database or no such checkpoint, or merge operands without a `merge_operator`.

        """
        return open_diff(
            self._store,
            self._wal_store,
            self._paths,
            before,
            after,
            keys=check_range(start, stop, prefix),
            merge_operator=merge_operator,
        )

    def _latest_manifest(self) -> Manifest:
        return ManifestStore(self._store, self._paths).require_latest().value
