"""What one seed simulates: sizes, settings, and the rates of faults."""

from __future__ import annotations

from dataclasses import dataclass
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
from flagstone.testing.simulation.network import Fault

GARBAGE_AGE: Final = timedelta(seconds=300)


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
    latency_s: float
    crash_every_s: float
    pause_every_s: float
    jump_every_s: float
    outage_every_s: float
    busy_s: float
    idle_s: float
    cast: frozenset[Role] = frozenset()


def plan_world(seed: int, *, hours: float | None = None) -> Plan:
    """The world of a seed: sizes, settings and rates."""
    draw = Ids(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(draw.uniform(0, len(choices)))]

    trouble = pick(0.0, 0.3, 1.0, 3.0)
    rates: dict[Fault, float] = {
        "refused": 0.02 * trouble,
        "lost_reply": 0.02 * trouble,
        "late": pick(0.0, 0.005, 0.02) * trouble,
        "repeated": 0.01 * trouble,
        "slow": 0.02 * trouble,
        "full": pick(0.0, 0.002) * trouble,
    }
    compactor = CompactorOptions(
        scheduler_options=SchedulerOptions(min_compaction_sources=pick(2, 3, 4), max_compaction_sources=8),
        worker=CompactionWorkerOptions(max_sst_size=pick(2_000, 8_000), max_subcompactions=pick(1, 4)),
    )
    garbage = GcDirectoryOptions(interval=timedelta(seconds=pick(60, 600)), min_age=GARBAGE_AGE)
    fences = GcFenceOptions(interval=timedelta(seconds=600), min_age=GARBAGE_AGE, dry_run=pick(True, False))
    settings = Settings(
        l0_sst_size_bytes=pick(600, 2_000, 6_000),
        l0_max_ssts=pick(4, 8),
        l0_flush_parallelism=pick(1, 4),
        max_unflushed_bytes=pick(6_000, 1 << 20),
        flush_interval=pick(None, timedelta(milliseconds=100), timedelta(seconds=5)),
        wal_enabled=pick(True, True, True, False),
        synchronous_commit=pick(False, False, True),
        manifest_poll_interval=timedelta(seconds=pick(1, 10)),
        sst_block_size=1024,
        compactor_options=pick(compactor, compactor, None),
        on_clock_regression="hold",
        garbage_collector_options=pick(
            None,
            GarbageCollectorOptions(
                manifest_options=garbage,
                wal_options=garbage,
                wal_fence_options=fences,
                compacted_options=garbage,
                compactions_options=garbage,
            ),
        ),
    )
    return Plan(
        seed=seed,
        hours=hours if hours is not None else pick(0.2, 1.0, 6.0, 48.0),
        writers=pick(1, 2, 3),
        readers=pick(0, 1, 2),
        clients=pick(1, 2, 4),
        keys=pick(3, 12, 60),
        switch_rate=pick(0.02, 0.2, 0.6),
        settings=settings,
        rates=rates,
        latency_s=pick(0.001, 0.02, 0.3),
        crash_every_s=pick(60.0, 900.0, 20_000.0),
        pause_every_s=pick(120.0, 3_000.0, 50_000.0),
        jump_every_s=pick(600.0, 10_000.0, 1e9),
        outage_every_s=pick(600.0, 5_000.0, 1e9),
        busy_s=pick(5.0, 60.0),
        idle_s=pick(1.0, 60.0, 3_000.0),
        cast=draw_cast(seed),
    )
