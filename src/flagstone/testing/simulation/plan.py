"""What one seed simulates: sizes, settings, and the rates of faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

from flagstone.config import (
    CompactionWorkerOptions,
    CompactorOptions,
    GarbageCollectorOptions,
    GcDirectoryOptions,
    GcFenceOptions,
    SchedulerOptions,
    Settings,
)
from flagstone.runtime.ids import Ids
from flagstone.testing.simulation.cast import Role, draw_cast
from flagstone.testing.simulation.network import Aim, Fault

GARBAGE_AGE: Final = timedelta(seconds=300)
PAUSES_S: Final = (0.5, 15.0, 45.0, 400.0, 4_000.0, 90_000.0)
"""How long a machine may be paused: below and above every timeout, trust window and age."""
NEVER_S: Final = 1e9
"""The interval of disturbances that do not happen."""
_LATER: Final = 0x57414C
"""Separates the generator of values that came later from that of the first ones."""
_NEW_WORLDS: Final = 0x4C415A59
"""Separates the generators of values that only worlds above `_RECORDED` draw."""
_RECORDED: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed simulates. All of it is drawn from the seed."""

    seed: int
    hours: float
    writers: int
    readers: int
    clients: int
    keys: int
    switch_rate: float
    settings: Settings
    rates: dict[Fault, float]
    aims: tuple[Aim, ...]
    latency_s: float
    crash_every_s: float
    pause_every_s: float
    pauses_s: tuple[float, ...]
    jump_every_s: float
    outage_every_s: float
    busy_s: float
    idle_s: float
    cast: frozenset[Role] = frozenset()
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Values that were given instead of drawn."""
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """Every value by its name, for a reader."""


def plan_world(seed: int, *, hours: float | None = None, chosen: Mapping[str, Any] | None = None) -> Plan:
    """The world of a seed: sizes, settings and rates. Values in `chosen` replace the drawn ones of the same name."""
    draw = Ids(seed)
    given = {**(chosen or {}), **({} if hours is None else {"hours": hours})}
    drawn: dict[str, Any] = {}

    def pick(name: str, *choices: Any) -> Any:
        # The draw is made in any case, so that a chosen value changes no other value.
        value = choices[int(draw.uniform(0, len(choices)))]
        drawn[name] = value = given.get(name, value)
        return value

    later = Ids(seed ^ _LATER)

    def pick_later(name: str, default: Any, *choices: Any) -> Any:
        # Of another generator, so that older values of a seed stay; a world with chosen values has the default.
        value = choices[int(later.uniform(0, len(choices)))]
        drawn[name] = value = given.get(name, default if chosen else value)
        return value

    def pick_in_new_worlds(name: str, default: Any, *choices: Any) -> Any:
        # Worlds of lower seeds are recorded, and stay as they are.
        draws = Ids(seed ^ _NEW_WORLDS)
        value = choices[int(draws.uniform(0, len(choices)))] if seed > _RECORDED else default
        drawn[name] = value = given.get(name, default if chosen else value)
        return value

    trouble = pick("trouble", 0.0, 0.3, 1.0, 3.0)
    rates: dict[Fault, float] = {
        "refused": pick("refused", 0.02) * trouble,
        "lost_reply": pick("lost_reply", 0.02) * trouble,
        "late": pick("late", 0.0, 0.005, 0.02) * trouble,
        "repeated": pick("repeated", 0.01) * trouble,
        "slow": pick("slow", 0.02) * trouble,
        "full": pick("full", 0.0, 0.002) * trouble,
    }
    compactor = CompactorOptions(
        scheduler_options=SchedulerOptions(
            min_compaction_sources=pick("min_compaction_sources", 2, 3, 4),
            max_compaction_sources=8,
            compaction_policy=pick_in_new_worlds(
                "compaction_policy", "size-tiered", "size-tiered", "lazy-leveling"
            ),
        ),
        worker=CompactionWorkerOptions(
            max_sst_size=pick("max_sst_size", 2_000, 8_000),
            max_subcompactions=pick("max_subcompactions", 1, 4),
        ),
        checkpoint_lifetime=timedelta(seconds=pick("checkpoint_lifetime_s", 900, 5)),
    )
    interval = timedelta(seconds=pick("garbage_every_s", 60, 600))
    garbage = GcDirectoryOptions(interval=interval, min_age=GARBAGE_AGE)
    fences = GcFenceOptions(interval=interval, min_age=GARBAGE_AGE, dry_run=pick("keep_fences", True, False))
    collector = GarbageCollectorOptions(
        manifest_options=garbage,
        wal_options=garbage,
        wal_fence_options=fences,
        compacted_options=garbage,
        compactions_options=garbage,
    )
    flush_interval_s = pick("flush_interval_s", None, 0.1, 5)
    hedge_s = pick_later("wal_hedge_s", None, None, None, 0.03, 0.5)
    settings = Settings(
        l0_sst_size_bytes=pick("l0_sst_size_bytes", 600, 2_000, 6_000),
        l0_max_ssts=pick("l0_max_ssts", 4, 8),
        l0_flush_parallelism=pick("l0_flush_parallelism", 1, 4),
        max_unflushed_bytes=pick("max_unflushed_bytes", 6_000, 1 << 20),
        flush_interval=None if flush_interval_s is None else timedelta(seconds=flush_interval_s),
        wal_enabled=pick("wal_enabled", True, True, True, False),
        synchronous_commit=pick("synchronous_commit", False, False, True),
        manifest_poll_interval=timedelta(seconds=pick("manifest_poll_s", 1, 10)),
        sst_block_size=1024,
        compactor_options=compactor if pick("compactor", True, True, False) else None,
        on_clock_regression="hold",
        max_parallel_wal_writes=pick_later("max_parallel_wal_writes", 1, 1, 1, 2, 4),
        wal_hedge_after=None if hedge_s is None else timedelta(seconds=hedge_s),
        garbage_collector_options=collector if pick("collector", False, True) else None,
    )
    plan = Plan(
        seed=seed,
        hours=pick("hours", 0.2, 1.0, 6.0, 48.0),
        writers=pick("writers", 1, 2, 3),
        readers=pick("readers", 0, 1, 2),
        clients=pick("clients", 1, 2, 4),
        keys=pick("keys", 3, 12, 60),
        switch_rate=pick("switch_rate", 0.02, 0.2, 0.6),
        settings=settings,
        rates=rates,
        aims=tuple(Aim(*each) for each in given.get("aims", ())),
        latency_s=pick("latency_s", 0.001, 0.02, 0.3),
        crash_every_s=pick("crash_every_s", 60.0, 900.0, 20_000.0),
        pause_every_s=pick("pause_every_s", 120.0, 3_000.0, 50_000.0),
        pauses_s=tuple(given.get("pauses_s", PAUSES_S)),
        jump_every_s=pick("jump_every_s", 600.0, 10_000.0, NEVER_S),
        outage_every_s=pick("outage_every_s", 600.0, 5_000.0, NEVER_S),
        busy_s=pick("busy_s", 5.0, 60.0),
        idle_s=pick("idle_s", 1.0, 60.0, 3_000.0),
        cast=frozenset(given["cast"]) if "cast" in given else draw_cast(seed),
        chosen=given,
        drawn=drawn,
    )
    if "hours" in given:
        return plan
    # Two days of machines that work every second cost minutes and show no more than six hours of them.
    return replace(plan, hours=min(plan.hours, 6 * plan.idle_s))
