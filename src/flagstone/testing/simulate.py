"""`python -m flagstone.testing.simulate`: live through simulated worlds, or replay one with its trace."""

from __future__ import annotations

import argparse
import sys
import time

from flagstone.testing.simulation.world import simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds")
    parser.add_argument(
        "--hours", type=float, help="simulated hours of trouble; drawn from the seed if not given"
    )
    parser.add_argument("--trace", action="store_true", help="print every event")
    chosen = parser.parse_args()
    bad = 0
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        started = time.perf_counter()
        outcome = simulate(seed, hours=chosen.hours, trace=print if chosen.trace else None)
        seconds = time.perf_counter() - started
        bad += outcome.problem is not None
        print(
            f"seed {seed}: {outcome.problem or 'sound'} | {outcome.simulated_s / 3600:.1f} h in {seconds:.1f} s, "
            f"{outcome.operations.total()} operations, {outcome.requests} requests, {outcome.faults.total()} faults, "
            f"{outcome.acknowledged} acknowledged, {outcome.reads} reads checked, digest {outcome.digest:08x}"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
