"""Worlds of chosen values, in which planted bugs show soon. All of them are sound without a bug."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flagstone.testing.simulation.plan import NEVER_S

BUSY: Final[Mapping[str, Any]] = {
    "cast": (),
    "writers": 2,
    "clients": 4,
    "busy_s": 60.0,
    "idle_s": 1.0,
    "latency_s": 0.02,
    "wal_enabled": True,
    "max_parallel_wal_writes": 1,
}
"""A world in which the clients of two writers have much to do, without further roles."""
RIVALS: Final[Mapping[str, Any]] = {
    **BUSY,
    "writers": 3,
    "busy_s": 5.0,
    "latency_s": 0.3,
    "flush_interval_s": 0.1,
}
"""A world in which three writers take the database away from each other all the time."""
PARALLEL: Final[Mapping[str, Any]] = {
    **RIVALS,
    "max_parallel_wal_writes": 4,
    "crash_every_s": 60.0,
}
"""As `RIVALS`, with several WAL files under way and more crashes."""
TREE: Final[Mapping[str, Any]] = {
    **BUSY,
    "l0_sst_size_bytes": 600,
    "compactor": True,
    "min_compaction_sources": 2,
    "max_sst_size": 2_000,
    "crash_every_s": 20_000.0,
    "pause_every_s": NEVER_S,
    "trouble": 0.3,
}
"""A world of many small flushes and compactions, and of few disturbances."""
GARBAGE: Final[Mapping[str, Any]] = {
    **TREE,
    "collector": True,
    "garbage_every_s": 60,
    "keep_fences": False,
    "pause_every_s": 120.0,
}
"""A world in which garbage is collected often, and machines are paused for longer than its minimum age."""

LONG_READS: Final[Mapping[str, Any]] = {
    **TREE,
    "busy_s": 3_000.0,
    "keys": 12,
    "collector": True,
    "garbage_every_s": 60,
    "checkpoint_lifetime_s": 5,
}
"""A world in which garbage collection deletes SSTs that a snapshot has seen: it goes on with newer ones."""
DOUBT: Final = (("put_if_absent", "/manifest/", "lost_reply", 0.2), ("head", "/manifest/", "refused", 0.98))
"""A writer of a manifest often does not learn whether it was written."""

ASLEEP: Final[Mapping[str, Any]] = {
    **BUSY,
    "readers": 0,
    "latency_s": 0.05,
    "flush_interval_s": 0.1,
    "manifest_poll_s": 10,
    "trouble": 0.0,
    "aims": (
        ("get", "/manifest/", "slow", 0.6),
        ("list", "/manifest", "slow", 0.6),
        ("get_if_changed", "boundary", "slow", 0.6),
    ),
    "collector": True,
    "garbage_every_s": 60,
    "keep_fences": False,
    "crash_every_s": NEVER_S,
    "outage_every_s": NEVER_S,
    "pause_every_s": 300.0,
    "pauses_s": (400.0, 700.0),
}
"""A world in which a writer wakes up after its successor has made and collected a fence."""
STALLED: Final[Mapping[str, Any]] = {
    **BUSY,
    "readers": 0,
    "wal_enabled": False,
    "compactor": False,
    "collector": True,
    "garbage_every_s": 60,
    "manifest_poll_s": 3_000,
    "latency_s": 1.5,
    "trouble": 0.0,
    "aims": (("put_if_absent", "/manifest/", "slow", 0.5),),
    "crash_every_s": NEVER_S,
    "outage_every_s": NEVER_S,
    "pause_every_s": NEVER_S,
}
"""A world in which a manifest may reach the store when its id is already collected, and its writer waits for it."""
