"""Processes beside the writers of a simulated world: each role does its work, and its checks find mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from flagstone.changes.change import ChangeBatch
from flagstone.changes.reader import Follower
from flagstone.testing.simulation.cast import ROLES, Role, draw_cast
from flagstone.testing.simulation.plan import plan_world
from flagstone.testing.simulation.wheel import find_difference
from flagstone.testing.simulation.world import Outcome, World


def live(seed: int, *cast: Role, hours: float = 0.3, **changes: Any) -> Outcome:
    plan = replace(plan_world(seed, hours=hours), cast=frozenset(cast), idle_s=1.0, **changes)
    plan = replace(plan, settings=replace(plan.settings, wal_enabled=True))
    return World(plan).run()


def done_in(seeds: Iterable[int], *cast: Role, hours: float = 0.3) -> Counter[str]:
    """What was done in these worlds together, all of them sound. A seed may draw a world in which little happens."""
    operations: Counter[str] = Counter()
    for seed in seeds:
        outcome = live(seed, *cast, hours=hours)
        assert outcome.problem is None
        operations += outcome.operations
    return operations


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
    assert outcome.faults["damage"] > 0
    assert outcome.operations["damage"] > 0
    assert outcome.operations["noisy read"] > 0


@pytest.mark.slow
def test_checkpoints_are_restored_beside_running_writers() -> None:
    operations = done_in([1, 3], "restore", "consumer", "feed", hours=0.5)
    assert operations["restore"] > 2


@pytest.mark.slow
def test_the_asyncio_interface_keeps_the_database_sound() -> None:
    operations = done_in([1, 3, 4, 5], "aio")
    assert operations["aio_put"] > 0
    assert operations["aio reader scan"] > 0
    assert operations["aio changes"] > 0


@pytest.mark.slow
def test_an_event_loop_gives_the_same_run_twice() -> None:
    first, second = live(1, "aio"), live(1, "aio")
    assert first.digest == second.digest


@pytest.mark.slow
def test_projections_are_written_within_their_range_only() -> None:
    operations = done_in(range(5, 11), "cloner", "clone_writer")
    assert operations["projection write"] > 0
    assert operations["refusal"] > 0


@pytest.mark.slow
def test_transactions_read_ranges() -> None:
    assert done_in([4, 5], "range_reads")["range read"] > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "cast"),
    [(1, ()), (2, ("segments",)), (3, ("wal_store",)), (4, ("restore", "aio")), (5, ("two_phase", "loader"))],
)
def test_the_official_wheel_shows_the_same_rows_in_the_end(seed: int, cast: tuple[Role, ...]) -> None:
    pytest.importorskip("slatedb")
    outcome = live(seed, *cast)
    assert outcome.problem is None
    assert outcome.rows
    assert find_difference(outcome) is None
    some = next(iter(outcome.rows))
    outcome.rows[some] += b"!"
    assert repr(some) in (find_difference(outcome) or "")


@pytest.mark.slow
def test_a_restored_checkpoint_is_the_current_state_again() -> None:
    assert done_in([1, 2, 3], "restore", "segments")["restore"] > 1


def test_only_worlds_above_a_million_draw_the_compaction_policy() -> None:
    def policies(seeds: range, **chosen: object) -> set[object]:
        return {plan_world(seed, chosen=chosen).drawn["compaction_policy"] for seed in seeds}

    assert policies(range(1, 200)) == {"size-tiered"}
    assert policies(range(1_000_001, 1_000_020)) == {"size-tiered", "lazy-leveling"}
    assert policies(range(1, 5), compaction_policy="lazy-leveling") == {"lazy-leveling"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 8])
def test_worlds_with_lazy_leveling_are_sound_and_repeat(seed: int) -> None:
    chosen = {"compaction_policy": "lazy-leveling", "compactor": True}
    first, second = (World(plan_world(seed, hours=0.3, chosen=chosen)).run() for _ in range(2))
    assert first.problem is None
    assert first.digest == second.digest
    assert first.requests > 1000
