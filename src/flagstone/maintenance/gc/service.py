"""Garbage collection in the background: inside an open database, or on a schedule of its own.

Nothing here may hurt the database it works for: whatever goes wrong is logged, counted and shown in `status`, and
tried again at the next turn. A process that is killed in between leaves garbage for the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flagstone.errors import Closed, FlagstoneError
from flagstone.maintenance.gc.collector import Collector
from flagstone.maintenance.gc.options import KindOptions
from flagstone.maintenance.gc.plan import Kind
from flagstone.maintenance.gc.report import GarbageReport
from flagstone.metadata.stores import NoDatabase
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.sync import Event

_log = logging.getLogger("flagstone.gc")

_FIRST_AFTER_S: Final = 60.0
"""A process that lives shorter than an interval should still collect something."""

_LOOK_AT_LEAST_EVERY_S: Final = 24 * 60 * 60.0
"""Somebody may have left tables behind without ever having changed the manifest."""

_IDLE_S: Final = 3600.0
_DISCOVER_EVERY_S: Final = 600.0
"""How often databases that are new are looked for."""

_CROWDED_BYTES: Final = 64 * 1024 * 1024
"""With less room than this on a disk, the next WAL file or SST may not fit."""

_CROWDED_EVERY_S: Final = 10.0
"""How often the room on a disk is looked at, and how often garbage is collected while there is too little."""


@dataclass(slots=True)
class _Turn:
    """When a kind is due, and what is known since its last round."""

    interval_s: float
    due_at: float
    looked_at: float = 0.0
    settled_manifest: int | None = None
    revisit_at: float | None = None

    def pointless(self, now: float, manifest_id: int | None) -> bool:
        """Whether nothing can have become garbage since the last round."""
        return (
            manifest_id is not None
            and manifest_id == self.settled_manifest
            and now - self.looked_at < _LOOK_AT_LEAST_EVERY_S
            and (self.revisit_at is None or now < self.revisit_at)
        )


class GarbageCollection:
    """A background service. `current_manifest` is what the process knows for free; with it, idle turns ask nothing.

    `collected` hears of every round that deleted something, so that its owner can look at the manifest again.
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
        self._turns = {
            kind: _Turn(interval_s, started + min(interval_s, _FIRST_AFTER_S))
            for kind, entry in options.items()
            if entry.interval is not None and (interval_s := entry.interval.total_seconds()) > 0
        }

    def run_once(self) -> float | None:
        """Collect what is due, unless nothing can have changed; says when the next kind is due.

        None is the end: it was halted, or its database is gone.
        """
        if self._halted or self._gone:
            return None
        if not self._turns:
            return _IDLE_S
        now = self._clock.monotonic()
        # A full disk stops the writer until room is made: garbage does not wait for its interval then.
        crowded = any(folder.free_bytes() < _CROWDED_BYTES for folder in self._folders)
        due = [kind for kind, turn in self._turns.items() if crowded or turn.due_at <= now]
        manifest_id = None if self._current_manifest is None else self._current_manifest()
        useful = [kind for kind in due if not self._turns[kind].pointless(now, manifest_id)]
        for kind in due:
            turn = self._turns[kind]
            turn.due_at = now + turn.interval_s
        if useful:
            self._collect(useful, now)
        else:
            self._skipped += bool(due)
        if self._gone:
            return None
        wait_s = max(0.0, min(turn.due_at for turn in self._turns.values()) - self._clock.monotonic())
        return min(wait_s, _CROWDED_EVERY_S) if self._folders else wait_s

    def halt(self) -> None:
        """Begin no further round, and let one that is under way end early; does not wait."""
        self._halted = True
        self._collector.halt()

    @property
    def gone(self) -> bool:
        """Whether it has ended because there is no database any more."""
        return self._gone

    def status(self) -> dict[str, Any]:
        """How it goes, as plain values."""
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
            # The database is being closed, or somebody else owns it now; its own services say so.
            return
        except FlagstoneError as error:
            self._failure = f"{type(error).__name__}: {error}"
            _log.warning("cannot collect garbage error=%s", self._failure)
            return
        except Exception as error:  # noqa: BLE001
            # A bug of ours must cost disk space, not the database.
            self._failure = f"{type(error).__name__}: {error}"
            _log.exception("cannot collect garbage")
            return
        self._rounds += 1
        self._report = report
        self._gone = report.gone
        self._failure = "; ".join(report.errors) or None
        revisit_at = None if report.revisit_in_ms is None else now + report.revisit_in_ms / 1000
        for kind in kinds if not report.gone else ():
            turn = self._turns[kind]
            turn.looked_at, turn.revisit_at = now, revisit_at
            # After an error the round must be repeated, whether or not the manifest changes.
            turn.settled_manifest = None if report.of(kind).errors else report.manifest_id


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

    `discover` is asked again and again for services of databases that are new; with it, only `stop` ends this.
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
