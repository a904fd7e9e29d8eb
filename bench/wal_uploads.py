"""How long 64 callers wait for durable puts on simulated S3 Standard, with several WAL files under way and second requests.

The same store as in `bench.latency`. Waits are also given as multiples of those of a single PUT request.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Final

import flagstone
from bench.harness import sized, write_markdown
from bench.latency import VALUE, Seen, key, observed, together
from bench.latency_store import STANDARD, LatencyStore, Profile
from bench.prices import SECONDS_A_MONTH
from flagstone.store.memory import MemoryStore

WRITERS: Final = 64
SECONDS: Final = sized(6.0, quickly=0.1)
CASES: Final = (
    (1, None),
    (1, 100),
    (1, 60),
    (1, 35),
    (2, 60),
    (4, None),
    (4, 100),
    (4, 60),
    (4, 35),
    (8, 50),
)
"""`max_parallel_wal_writes` and the milliseconds of `wal_hedge_after`."""


def durable_puts(profile: Profile, parallel: int, hedge_ms: int | None) -> Seen:
    """Callers that each wait for their put before the next."""
    store = LatencyStore(MemoryStore(), profile)
    hedge = None if hedge_ms is None else timedelta(milliseconds=hedge_ms / profile.nearer)
    settings = flagstone.Settings(max_parallel_wal_writes=parallel, wal_hedge_after=hedge)
    with flagstone.open("db", store=store, settings=settings) as db, observed(store) as seen:
        end = time.perf_counter() + SECONDS

        def write(writer: int) -> None:
            number = writer
            while (started := time.perf_counter()) < end:
                db.put(key(number), VALUE, await_durable=True)
                seen.calls.append(time.perf_counter() - started)
                number += WRITERS

        together(write, WRITERS)
    return seen


def run() -> str:
    """Measure every case, write `results/wal-uploads.md`."""
    profile = replace(STANDARD, nearer=sized(1.0, quickly=10.0))
    rows = []
    for parallel, hedge_ms in CASES:
        seen = durable_puts(profile, parallel, hedge_ms)
        half, most = (seen.percentile_ms(share) for share in (0.5, 0.99))
        millions = len(seen.calls) / 1e6
        rows.append(
            [
                str(parallel),
                "never" if hedge_ms is None else f"{hedge_ms} ms",
                f"{half:.0f} ms, {half / profile.put.median / 1e3 * profile.nearer:.2f}×",
                f"{most:.0f} ms, {most / profile.put.p99 / 1e3 * profile.nearer:.2f}×",
                f"{len(seen.calls) / seen.seconds:,.0f} /s",
                f"{seen.requests['put'] / seen.seconds:,.1f} /s",
                f"${seen.month(profile, 1).dollars / millions:,.2f}",
                f"${seen.month(profile, SECONDS_A_MONTH / seen.seconds).dollars:,.0f}",
            ]
        )
    return write_markdown(
        "wal-uploads",
        "WAL files under way and second requests: 64 callers on simulated S3 Standard",
        ["files", "second request", "p50, of one PUT", "p99, of one PUT", "durable puts", "PUT", "per million puts", "a month"],
        rows,
        [
            "`max_parallel_wal_writes` and `wal_hedge_after`. A month is these callers around the clock; requests only.",
            "With either setting the next file waits up to a tenth of an upload for the callers of the file that was just finished, so",
            "that all of them share it. The first line has neither.",
        ],
        basis=f"Simulated waiting, counted requests; {SECONDS:g} s for each line.",
    )  # fmt: skip


if __name__ == "__main__":
    print(run())
