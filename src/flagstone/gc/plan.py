"""Kinds of garbage, the options of each kind, and plans: what is deleted, what is kept, and why.

A plan is made in two steps. The rules of a kind decide which objects no process can need any more. Then the minimum age
keeps objects that are too young, because a reader of an older manifest may still be about to read them. Only the
second step needs a clock, so a round that finds no garbage reads none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Literal, NamedTuple, get_args

from flagstone.config.durations import as_duration
from flagstone.config.settings import GarbageCollectorOptions, GcDirectoryOptions, GcFenceOptions
from flagstone.errors import InvalidRequest
from flagstone.store.port import ObjectMeta

Kind = Literal[
    "checkpoint",
    "manifest",
    "compactions",
    "wal",
    "wal_fence",
    "compacted",
    "detach",
    "two_phase",
    "destroyed",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""Every kind of garbage, in the order of a round. SlateDB's names where SlateDB has the kind."""

TOO_YOUNG: Final = "younger than the minimum age"
_SECOND_MS: Final = 1000


class Verdict(NamedTuple):
    """The decision about one object. `born_ms` is the latest time at which it can have been created."""

    meta: ObjectMeta
    id: int
    delete: bool
    reason: str
    born_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The verdicts on all objects of one kind, in the order they were listed."""

    kind: Kind
    verdicts: tuple[Verdict, ...] = ()

    @property
    def deletions(self) -> Sequence[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.delete]

    @property
    def youngest_due_ms(self) -> int | None:
        """The creation time of the oldest object that only its age keeps."""
        return min(
            (verdict.born_ms for verdict in self.verdicts if verdict.reason == TOO_YOUNG), default=None
        )


def keep(meta: ObjectMeta, object_id: int, reason: str) -> Verdict:
    """A process may need the object."""
    return Verdict(meta, object_id, False, reason, _latest_birth_ms(meta))


def drop(meta: ObjectMeta, object_id: int, reason: str, *, stamped_ms: int = 0) -> Verdict:
    """No process needs the object. `stamped_ms` is the time in its name, which may be later than the store's."""
    return Verdict(meta, object_id, True, reason, max(stamped_ms, _latest_birth_ms(meta)))


def apply_age(plan: Plan, *, now_ms: int, min_age_ms: int) -> Plan:
    """The plan without deletions of objects younger than `min_age_ms` (above 0) at `now_ms` of the store's clock."""
    horizon_ms = now_ms - min_age_ms
    return replace(
        plan,
        verdicts=tuple(
            verdict._replace(delete=False, reason=TOO_YOUNG)
            if verdict.delete and verdict.born_ms > horizon_ms
            else verdict
            for verdict in plan.verdicts
        ),
    )


def _latest_birth_ms(meta: ObjectMeta) -> int:
    # A store may truncate times to whole seconds: the object may be up to a second younger.
    modified_ms = meta.last_modified_ms
    return modified_ms + _SECOND_MS - 1 if modified_ms % _SECOND_MS == 0 else modified_ms


MIN_FENCE_AGE_MS: Final = 60_000
"""Several times the longest interval at which a writer reads the manifest to check that it owns the database."""

TWO_PHASE_MIN_AGE_MS: Final = 24 * 60 * 60 * 1000
"""Temporaries and records of deletions are garbage after a day: no request is under way for that long."""

_MS: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class KindOptions:
    """How one kind is collected. Without an `interval` it is collected only on request."""

    min_age_ms: int = 0
    dry_run: bool = False
    interval: timedelta | None = None

    def aged(self, kind: Kind, min_age: timedelta) -> KindOptions:
        """The same options with another minimum age."""
        return replace(self, min_age_ms=max(min_age // _MS, MIN_FENCE_AGE_MS if kind == "wal_fence" else 0))


def kind_options(options: GarbageCollectorOptions) -> Mapping[Kind, KindOptions]:
    """The options of every kind that the settings do not switch off.

    The settings have no entry for the leftovers of the two-phase protocol; they follow the options of SSTs.
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
        ssts = options.compacted_options
        chosen["two_phase"] = KindOptions(TWO_PHASE_MIN_AGE_MS, ssts.dry_run, ssts.interval)
    return chosen


def requested_options(
    options: GarbageCollectorOptions, kinds: Iterable[Kind] | None, min_age: timedelta | str | None
) -> Mapping[Kind, KindOptions]:
    """The options of a requested round over `kinds` (None: all), with `min_age` if it is given.

    Fences that are requested by name are deleted, also if the settings have `dry_run` for them.

    Raises:
        InvalidRequest: a kind does not exist or is switched off, or the age is negative.

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
