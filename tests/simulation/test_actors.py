"""Processes beside the writers of a simulated world: each role does its work, and its checks find mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from flagstone.changes.change import ChangeBatch
from flagstone.changes.reader import Follower
from flagstone.testing.simulation.cast import ROLES, Role, draw_cast
from flagstone.testing.simulation.plan import plan_world
from flagstone.testing.simulation.world import Outcome, World


def live(seed: int, *cast: Role, hours: float = 0.3, **changes: Any) -> Outcome:
    plan = replace(plan_world(seed, hours=hours), cast=frozenset(cast), idle_s=1.0, **changes)
    plan = replace(plan, settings=replace(plan.settings, wal_enabled=True))
    return World(plan).run()


def test_every_role_has_worlds_and_some_worlds_have_none() -> None:
    casts = [draw_cast(seed) for seed in range(300)]
    assert set().union(*casts) == set(ROLES)
    assert frozenset() in casts


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 6, 8])
def test_compactors_and_workers_in_their_own_processes_keep_the_database_sound(seed: int) -> None:
    outcome = live(seed, "compactor", "only_compactor", "worker", crash_every_s=300.0)
    assert outcome.problem is None
    assert outcome.operations["compactor"] + outcome.operations["worker"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_consumers_receive_every_change_once(seed: int) -> None:
    outcome = live(seed, "consumer", "feed", crash_every_s=120.0)
    assert outcome.problem is None
    assert outcome.operations["changes"] > 20
    assert outcome.operations["copied"] >= 1


@pytest.mark.slow
def test_a_change_that_a_consumer_does_not_receive_is_found() -> None:
    right, taken = Follower.take, 0

    def take(self: Follower) -> tuple[ChangeBatch | None, float | None]:
        nonlocal taken
        batch, wait_s = right(self)
        taken += batch is not None
        return (None, 0.0) if batch is not None and taken == 20 else (batch, wait_s)

    with patch.object(Follower, "take", take):
        problem = live(2, "consumer").problem
    assert problem is not None
    assert "did not receive write" in problem


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 5, 16])
def test_clones_show_their_source_and_go_without_a_trace(seed: int) -> None:
    outcome = live(seed, "cloner", "clone_writer")
    assert outcome.problem is None
    assert outcome.operations["clone"] > 0
    assert outcome.operations["destroy"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 8, 24])
def test_bulk_loads_are_added_whole_and_reach_consumers(seed: int) -> None:
    outcome = live(seed, "loader", "consumer", hours=0.5)
    assert outcome.problem is None
    assert outcome.operations["load adopted"] + outcome.operations["load claimed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["segments", "two_phase", "wal_store"])
def test_segments_and_other_stores_keep_the_database_sound(choice: Role) -> None:
    assert live(1, choice, "consumer", "cloner").problem is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 6])
def test_damage_is_reported_and_never_returned(seed: int) -> None:
    outcome = live(seed, "damage")
    assert outcome.problem is None
    assert outcome.operations["damage"] > 0
    assert outcome.operations["noisy read"] > 0


@pytest.mark.slow
def test_a_restored_checkpoint_is_the_current_state_again() -> None:
    outcome = live(1, "restore", "segments")
    assert outcome.problem is None
    assert outcome.operations["restore"] == 1
