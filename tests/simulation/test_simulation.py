"""The simulated world: the same seed gives the same run, worlds are sound, and planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flagstone.testing.simulation.mutants import MUTANTS, planted
from flagstone.testing.simulation.world import simulate

SEEDS = range(1, 9)
FOUND_BY = {"acknowledge_before_upload": 4, "skip_fence_check": 9}
"""A world that finds the planted bug."""


def traced(seed: int, hash_seed: int) -> bytes:
    command = [
        sys.executable,
        "-m",
        "flagstone.testing.simulate",
        "--seed",
        str(seed),
        "--hours",
        "0.3",
        "--trace",
    ]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    made = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=100)
    return made.stdout.rpartition(b"\nseed ")[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10, 1021])
def test_the_same_seed_gives_the_same_trace_in_another_process(seed: int) -> None:
    first, second = traced(seed, 1), traced(seed, 2)
    assert len(first.splitlines()) > 500
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_world_shows_a_violation(seed: int) -> None:
    assert simulate(seed, hours=0.5).problem is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND_BY)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name):
        assert simulate(FOUND_BY[name], hours=0.5).problem is not None, MUTANTS[name].mistake
