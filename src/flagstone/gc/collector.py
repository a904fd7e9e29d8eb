"""The garbage collector of one database, and the background service that runs it on a schedule.

The service never harms the database it works for: an error is logged, counted and shown in `status`, and the round is
repeated at the next interval. A process that is killed in between leaves garbage for the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from flagstone.errors import Closed, FlagstoneError, InvalidRequest
from flagstone.gc.metadata import CheckpointedManifests
from flagstone.gc.plan import KINDS, Kind, KindOptions
from flagstone.gc.report import GarbageReport
from flagstone.gc.round import Round, Target
from flagstone.metadata.stores import NoDatabase
from flagstone.runtime import metric_names as names
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Event
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore, find_inside

_log = logging.getLogger("flagstone.gc")

_FIRST_AFTER_S: Final = 60.0
"""A process that lives shorter than an interval should still collect something."""

_COLLECT_AT_LEAST_EVERY_S: Final = 24 * 60 * 60.0
"""A process may have left SSTs behind without ever having changed the manifest."""

_IDLE_S: Final = 3600.0
_DISCOVER_EVERY_S: Final = 600.0
"""How often new databases are searched for."""

_CROWDED_BYTES: Final = 64 * 1024 * 1024
"""With less room than this on a disk, the next WAL file or SST may not fit."""

_CROWDED_EVERY_S: Final = 10.0
"""How often the free space of a disk is checked, and how often garbage is collected while there is too little."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a destroyed database: the objects that were deleted, or why it is not deleted yet."""

    deleted: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()


class DeleteDestroyed(Protocol):
    """Deletes a destroyed database as a whole once it is due; returns None if it was not destroyed."""

    def __call__(self, *, dry_run: bool) -> Remains | None: ...


class Collector:
    """Collects the garbage of one database. Any number may run at once, beside writers and compactors.

    `delete_destroyed` is called first; if it deletes the database there is nothing left to collect.
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
        ids: Ids = SYSTEM_IDS,
        metrics: Metrics | None = None,
        delete_destroyed: DeleteDestroyed | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._target = Target(
            store=store,
            wal_store=store if wal_store is None else wal_store,
            paths=paths,
            manifests=CheckpointedManifests(),
            options=options,
            boundary_files=boundary_files,
            clock=clock,
            ids=ids,
            metrics=self._metrics,
        )
        self._delete_destroyed = delete_destroyed
        self._rounds = self._metrics.counter(names.GC_COUNT)

    def collect(self, kinds: Iterable[Kind] | None = None, *, dry_run: bool = False) -> GarbageReport:
        """One round over `kinds` (None: all that the options name). A dry run only reports what it would delete.

        Raises:
            InvalidRequest: there is no database, or the options switch a kind off.
            Unavailable: the manifest could not be read. Later errors are in the report.

        """
        target = self._target
        wanted = _in_order(target.options if kinds is None else kinds, target.options)
        started = target.clock.monotonic()
        report = GarbageReport(f"{target.store.url} {target.paths.root}")
        if not self._delete_if_destroyed(report, dry_run=dry_run):
            Round(target, report, wanted, dry_run=dry_run).run()
        report.seconds = target.clock.monotonic() - started
        self._count(report)
        return report

    @property
    def folders(self) -> tuple[LocalStore, ...]:
        """The local folders it collects in, which can run out of room; none for a database on a service."""
        stores = dict.fromkeys((self._target.store, self._target.wal_store))
        found = [find_inside(store, LocalStore) for store in stores]
        return tuple(folder for folder in found if folder is not None)

    def halt(self) -> None:
        """End the round under way early, and delete nothing in later ones; does not wait."""
        self._target.halted = True

    def _delete_if_destroyed(self, report: GarbageReport, *, dry_run: bool) -> bool:
        remains = None if self._delete_destroyed is None else self._delete_destroyed(dry_run=dry_run)
        if remains is None:
            return False
        report.waits_for = list(remains.waits_for)
        if remains.waits_for:
            return False
        entry = report.of("destroyed")
        entry.dry_run = dry_run
        for path in remains.deleted:
            entry.count_unplanned(path, "its database was destroyed")
        report.gone = not dry_run
        return True

    def _count(self, report: GarbageReport) -> None:
        self._rounds.add()
        for reason in report.waits_for:
            _log.info(
                "a destroyed database is not deleted yet database=%s reason=%s", report.database, reason
            )
        for entry in report:
            if not entry.dry_run:
                self._metrics.counter(names.GC_DELETED_COUNT, resource=entry.kind).add(entry.deleted)
                self._metrics.counter(names.GC_DELETED_BYTES, resource=entry.kind).add(entry.bytes)
            self._metrics.counter(names.GC_ERROR_COUNT, resource=entry.kind).add(len(entry.errors))
            if entry.kind in ("manifest", "compactions"):
                self._metrics.gauge(names.GC_VERSION_COUNT, resource=entry.kind).set(entry.examined)
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


@dataclass(slots=True)
class _Schedule:
    """When a kind is due, and the outcome of its last round."""

    interval_s: float
    due_at: float
    collected_at: float = 0.0
    settled_manifest: int | None = None
    revisit_at: float | None = None

    def pointless(self, now: float, manifest_id: int | None) -> bool:
        """Whether nothing can have become garbage since the last round."""
        return (
            manifest_id is not None
            and manifest_id == self.settled_manifest
            and now - self.collected_at < _COLLECT_AT_LEAST_EVERY_S
            and (self.revisit_at is None or now < self.revisit_at)
        )


class GarbageCollection:
    """A background service. With `current_manifest`, which makes no request, an idle database costs no requests.

    `collected` is called with the report of every round that deleted something, so that the owner can read the
    manifest again.
    """

    name = "garbage-collector"

    def __init__(
        self,
        collector: Collector,
        options: Mapping[Kind, KindOptions],
        *,
        clock: Clock,
        current_manifest: Callable[[], int] | None = None,
        collected: Callable[[GarbageReport], None] = lambda _: None,
    ) -> None:
        self._collector = collector
        self._clock = clock
        self._folders = collector.folders
        self._current_manifest = current_manifest
        self._collected = collected
        self._rounds = 0
        self._skipped = 0
        self._halted = False
        self._gone = False
        self._failure: str | None = None
        self._report: GarbageReport | None = None
        started = clock.monotonic()
        self._schedules = {
            kind: _Schedule(interval_s, started + min(interval_s, _FIRST_AFTER_S))
            for kind, entry in options.items()
            if entry.interval is not None and (interval_s := entry.interval.total_seconds()) > 0
        }

    def run_once(self) -> float | None:
        """Collect the kinds that are due, unless nothing can have changed; returns the time until the next one is due.

        None ends the service: it was halted, or its database is gone.
        """
        if self._halted or self._gone:
            return None
        if not self._schedules:
            return _IDLE_S
        now = self._clock.monotonic()
        # A full disk stops the writer, so garbage is then collected at once.
        crowded = any(folder.free_bytes() < _CROWDED_BYTES for folder in self._folders)
        due = [kind for kind, schedule in self._schedules.items() if crowded or schedule.due_at <= now]
        manifest_id = None if self._current_manifest is None else self._current_manifest()
        useful = [kind for kind in due if not self._schedules[kind].pointless(now, manifest_id)]
        for kind in due:
            schedule = self._schedules[kind]
            schedule.due_at = now + schedule.interval_s
        if useful:
            self._collect(useful, now)
        else:
            self._skipped += bool(due)
        if self._gone:
            return None
        wait_s = max(
            0.0, min(schedule.due_at for schedule in self._schedules.values()) - self._clock.monotonic()
        )
        return min(wait_s, _CROWDED_EVERY_S) if self._folders else wait_s

    def halt(self) -> None:
        """Begin no further round, and end one that is under way early; does not wait."""
        self._halted = True
        self._collector.halt()

    @property
    def gone(self) -> bool:
        """Whether it has ended because there is no database any more."""
        return self._gone

    def status(self) -> dict[str, Any]:
        """The state of the service, as plain values."""
        return {
            "rounds": self._rounds,
            "skipped": self._skipped,
            "failure": self._failure,
            "last": None if self._report is None else self._report.to_dict(),
        }

    def _collect(self, kinds: list[Kind], now: float) -> None:
        try:
            report = self._collector.collect(kinds)
            if report.deleted:
                self._collected(report)
        except NoDatabase as error:
            self._gone = True
            self._failure = str(error)
            return
        except Closed:
            # The database is being closed, or a newer writer owns it; its own services report that.
            return
        except FlagstoneError as error:
            self._failure = f"{type(error).__name__}: {error}"
            _log.warning("cannot collect garbage error=%s", self._failure)
            return
        except Exception as error:  # noqa: BLE001
            # A bug here may cost disk space, but must not harm the database.
            self._failure = f"{type(error).__name__}: {error}"
            _log.exception("cannot collect garbage")
            return
        self._rounds += 1
        self._report = report
        self._gone = report.gone
        self._failure = "; ".join(report.errors) or None
        revisit_at = None if report.revisit_in_ms is None else now + report.revisit_in_ms / 1000
        for kind in kinds if not report.gone else ():
            schedule = self._schedules[kind]
            schedule.collected_at, schedule.revisit_at = now, revisit_at
            # After an error the round is repeated, whether or not the manifest changes.
            schedule.settled_manifest = None if report.of(kind).errors else report.manifest_id


def run_until(service: GarbageCollection, stop: Event) -> None:
    """Run the service in this thread until `stop` is set, or its database is gone."""
    run_all_until([service], stop)


def run_all_until(
    services: Iterable[GarbageCollection],
    stop: Event,
    *,
    discover: Callable[[], Iterable[GarbageCollection]] | None = None,
    discover_every_s: float = _DISCOVER_EVERY_S,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Run the services in this thread, one round at a time, until `stop` is set or all databases are gone.

    `discover` is called at intervals for the services of new databases; with it, only `stop` ends this function.
    """
    due = [(0.0, service) for service in services]
    discover_at = clock.monotonic() + discover_every_s
    while not stop.is_set() and (due or discover is not None):
        now = clock.monotonic()
        if discover is not None and now >= discover_at:
            due += [(now, service) for service in discover()]
            discover_at = now + discover_every_s
        waiting: list[tuple[float, GarbageCollection]] = []
        for at, service in due:
            if at > now or stop.is_set():
                waiting.append((at, service))
                continue
            delay_s = service.run_once()
            if delay_s is not None:
                waiting.append((clock.monotonic() + delay_s, service))
        due = waiting
        times = [at for at, _ in due] + ([] if discover is None else [discover_at])
        if times:
            stop.wait(max(0.0, min(times) - clock.monotonic()))
