"""How old garbage must be, and whether it is deleted or only reported: the settings, kind by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from flagstone.config.durations import as_duration
from flagstone.config.settings import GarbageCollectorOptions, GcDirectoryOptions, GcFenceOptions
from flagstone.errors import InvalidRequest
from flagstone.maintenance.gc.plan import Kind
from flagstone.maintenance.gc.two_phase import DEFAULT_MIN_AGE_MS
from flagstone.maintenance.gc.wal import MIN_FENCE_AGE_MS

_MS: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class KindOptions:
    """How one kind is collected. Without an `interval` only when somebody asks for it."""

    min_age_ms: int = 0
    dry_run: bool = False
    interval: timedelta | None = None

    def aged(self, kind: Kind, min_age: timedelta) -> KindOptions:
        """The same with another minimum age."""
        return replace(self, min_age_ms=max(min_age // _MS, MIN_FENCE_AGE_MS if kind == "wal_fence" else 0))


def kind_options(options: GarbageCollectorOptions) -> Mapping[Kind, KindOptions]:
    """The options of every kind that the settings do not switch off.

    Settings know nothing of the leftovers of the two-phase protocol; those follow the tables.
    """
    chosen: dict[Kind, KindOptions] = {}
    given: tuple[tuple[Kind, GcDirectoryOptions | GcFenceOptions | None], ...] = (
        ("manifest", options.manifest_options),
        ("compactions", options.compactions_options),
        ("wal", options.wal_options),
        ("wal_fence", options.wal_fence_options),
        ("compacted", options.compacted_options),
    )
    for kind, entry in given:
        if entry is not None:
            chosen[kind] = KindOptions(0, entry.dry_run, entry.interval).aged(kind, entry.min_age)
    if options.detach_options is not None:
        chosen["detach"] = KindOptions(interval=options.detach_options.interval)
    if options.compacted_options is not None:
        tables = options.compacted_options
        chosen["two_phase"] = KindOptions(DEFAULT_MIN_AGE_MS, tables.dry_run, tables.interval)
    return chosen


def requested_options(
    options: GarbageCollectorOptions, kinds: Iterable[Kind] | None, min_age: timedelta | str | None
) -> Mapping[Kind, KindOptions]:
    """The options of a round that somebody asks for: `kinds` of them (None: all), perhaps with another age.

    Fences that are asked for by name are deleted, whatever the settings say about them.

    Raises:
        InvalidRequest: a kind that does not exist or is switched off, or a negative age.

    """
    chosen = dict(kind_options(options))
    if min_age is not None:
        age = as_duration(min_age, "min_age", minimum=timedelta())
        chosen = {kind: entry.aged(kind, age) for kind, entry in chosen.items()}
    if kinds is None:
        return chosen
    wanted = list(kinds)
    unknown = [kind for kind in wanted if kind not in chosen]
    if unknown:
        raise InvalidRequest(f"cannot collect {', '.join(unknown)}; choose from {', '.join(chosen)}")
    return {
        kind: replace(chosen[kind], dry_run=False) if kind == "wal_fence" else chosen[kind] for kind in wanted
    }
