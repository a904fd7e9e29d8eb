"""Garbage collection in the background: inside an open database, or on a schedule of its own.

Nothing here may hurt the database it works for: whatever goes wrong is logged, counted and shown in `status`, and
tried again at the next turn. A process that is killed in between leaves garbage for the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flagstone.errors import Closed, FlagstoneError
from flagstone.maintenance.gc.collector import Collector
from flagstone.maintenance.gc.options import KindOptions
from flagstone.maintenance.gc.plan import Kind
from flagstone.maintenance.gc.report import GarbageReport
from flagstone.runtime.clock import Clock
from flagstone.runtime.sync import Event

_log = logging.getLogger("flagstone.gc")

_FIRST_AFTER_S: Final = 60.0
"""A process that lives shorter than an interval should still collect something."""

_LOOK_AT_LEAST_EVERY_S: Final = 24 * 60 * 60.0
"""Somebody may have left tables behind without ever having changed the manifest."""

_IDLE_S: Final = 3600.0


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
        self._current_manifest = current_manifest
        self._collected = collected
        self._rounds = 0
        self._skipped = 0
        self._halted = False
        self._failure: str | None = None
        self._report: GarbageReport | None = None
        started = clock.monotonic()
        self._turns = {
            kind: _Turn(interval_s, started + min(interval_s, _FIRST_AFTER_S))
            for kind, entry in options.items()
            if entry.interval is not None and (interval_s := entry.interval.total_seconds()) > 0
        }

    def run_once(self) -> float | None:
        """Collect what is due, unless nothing can have changed; says when the next kind is due."""
        if self._halted:
            return None
        if not self._turns:
            return _IDLE_S
        now = self._clock.monotonic()
        due = [kind for kind, turn in self._turns.items() if turn.due_at <= now]
        manifest_id = None if self._current_manifest is None else self._current_manifest()
        useful = [kind for kind in due if not self._turns[kind].pointless(now, manifest_id)]
        for kind in due:
            turn = self._turns[kind]
            turn.due_at = now + turn.interval_s
        if useful:
            self._collect(useful, now)
        else:
            self._skipped += bool(due)
        return max(0.0, min(turn.due_at for turn in self._turns.values()) - self._clock.monotonic())

    def halt(self) -> None:
        """Begin no further round, and let one that is under way end early; does not wait."""
        self._halted = True
        self._collector.halt()

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
        self._failure = "; ".join(report.errors) or None
        revisit_at = None if report.revisit_in_ms is None else now + report.revisit_in_ms / 1000
        for kind in kinds:
            turn = self._turns[kind]
            turn.looked_at, turn.revisit_at = now, revisit_at
            # After an error the round must be repeated, whether or not the manifest changes.
            turn.settled_manifest = None if report.of(kind).errors else report.manifest_id


def run_until(service: GarbageCollection, stop: Event) -> None:
    """Run the service in this thread until `stop` is set: the schedule of a process that does nothing else."""
    while not stop.is_set() and (delay := service.run_once()) is not None:
        stop.wait(delay)
