"""The garbage collector of one database: runs rounds, counts what they did, and tells."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flagstone.errors import InvalidRequest
from flagstone.maintenance.gc.options import KindOptions
from flagstone.maintenance.gc.plan import KINDS, Kind
from flagstone.maintenance.gc.reach import PinnedManifests
from flagstone.maintenance.gc.report import GarbageReport
from flagstone.maintenance.gc.round import Round, Subject
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.metrics import Metrics
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore, find_inside

_log = logging.getLogger("flagstone.gc")


@dataclass(frozen=True, slots=True)
class Remains:
    """What became of a database that was destroyed: the objects deleted, or why it is still there."""

    deleted: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()


class Bury(Protocol):
    """Deletes a destroyed database as a whole if its time has come; None when it was not destroyed."""

    def __call__(self, *, dry_run: bool) -> Remains | None: ...


class Collector:
    """Collects the garbage of one database. Any number may work at once, beside writers and compactors.

    `bury` is asked first; where it deletes the database there is nothing left to collect.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        options: Mapping[Kind, KindOptions],
        *,
        wal_store: ObjectStore | None = None,
        boundary_files: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
        bury: Bury | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._halted = False
        self._subject = Subject(
            store=store,
            wal_store=store if wal_store is None else wal_store,
            paths=paths,
            pinned=PinnedManifests(),
            options=options,
            boundary_files=boundary_files,
            clock=clock,
            metrics=self._metrics,
            halted=lambda: self._halted,
        )
        self._bury = bury
        self._rounds = self._metrics.counter("slatedb.gc.count")

    def collect(self, kinds: Iterable[Kind] | None = None, *, dry_run: bool = False) -> GarbageReport:
        """One round over `kinds` (None: all that the options name). Dry, it only says what it would delete.

        Raises:
            InvalidRequest: there is no database, or a kind that the options switch off.
            Unavailable: the store did not answer when asked for the manifest. Anything later is in the report.

        """
        subject = self._subject
        wanted = _in_order(subject.options if kinds is None else kinds, subject.options)
        started = subject.clock.monotonic()
        report = GarbageReport(f"{subject.store.url} {subject.paths.root}")
        if not self._buried(report, dry_run=dry_run):
            Round(subject, report, wanted, dry_run=dry_run).run()
        report.seconds = subject.clock.monotonic() - started
        self._count(report)
        return report

    @property
    def folders(self) -> tuple[LocalStore, ...]:
        """The folders it collects in, which can run out of room; none for a database on a service."""
        stores = dict.fromkeys((self._subject.store, self._subject.wal_store))
        found = [find_inside(store, LocalStore) for store in stores]
        return tuple(folder for folder in found if folder is not None)

    def halt(self) -> None:
        """Let the round under way end early, and later ones delete nothing; does not wait."""
        self._halted = True

    def _buried(self, report: GarbageReport, *, dry_run: bool) -> bool:
        remains = None if self._bury is None else self._bury(dry_run=dry_run)
        if remains is None:
            return False
        report.waits_for = list(remains.waits_for)
        if remains.waits_for:
            return False
        entry = report.of("destroyed")
        entry.dry_run = dry_run
        for path in remains.deleted:
            entry.act(path, "its database was destroyed")
        report.gone = not dry_run
        return True

    def _count(self, report: GarbageReport) -> None:
        self._rounds.add()
        for reason in report.waits_for:
            _log.info("a destroyed database is still there database=%s reason=%s", report.database, reason)
        for entry in report:
            if not entry.dry_run:
                self._metrics.counter("slatedb.gc.deleted_count", resource=entry.kind).add(entry.deleted)
                self._metrics.counter("flagstone.gc.deleted_bytes", resource=entry.kind).add(entry.bytes)
            self._metrics.counter("flagstone.gc.error_count", resource=entry.kind).add(len(entry.errors))
            if entry.kind in ("manifest", "compactions"):
                self._metrics.gauge("slatedb.gc.version_count", resource=entry.kind).set(entry.examined)
            for error in entry.errors:
                _log.warning("cannot collect kind=%s error=%s", entry.kind, error)
            if entry.deleted:
                verb = "would delete" if entry.dry_run else "deleted"
                _log.info(
                    "%s garbage kind=%s count=%d bytes=%d", verb, entry.kind, entry.deleted, entry.bytes
                )


def _in_order(kinds: Iterable[Kind], known: Collection[Kind]) -> Sequence[Kind]:
    wanted = set(kinds)
    if unknown := wanted - set(known):
        raise InvalidRequest(f"cannot collect {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return [kind for kind in KINDS if kind in wanted]
