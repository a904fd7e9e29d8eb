"""All orders of the modelled protocols: none has a violation, and a model without one precaution has some.

`make interleavings` runs larger models than a test run does.
"""

from __future__ import annotations

import pytest

from interleaving.conftest import full_only
from interleaving.explorer import Process, explore
from interleaving.manifest_model import explore_manifests
from interleaving.sst_model import explore_ssts
from interleaving.wal_model import explore_wal

pytestmark = pytest.mark.slow

# -- the explorer itself ----------------------------------------------------------------------------------


def counting(times: int) -> Process:
    done = 0
    while done < times:
        seen = yield lambda now: (now, now)
        yield lambda now, seen=seen: (seen + 1, None)
        done += 1


def test_the_explorer_finds_the_lost_update_of_two_counters() -> None:
    found = explore(0, {"a": lambda: counting(1), "b": lambda: counting(1)}, lambda now: None)
    assert (found.schedules, found.states) == (6, 12)
    ended: set[int] = set()

    def last(now: int) -> str | None:
        ended.add(now)
        return "both counted" if now == 2 else None

    found = explore(0, {"a": lambda: counting(1), "b": lambda: counting(1)}, last)
    assert found.violations > 0
    assert found.trace[-1].startswith("b: ")
    assert ended == {0, 1, 2}


def test_the_number_of_schedules_of_independent_processes_is_the_multinomial() -> None:
    def steps(count: int) -> Process:
        done = 0
        while done < count:
            yield lambda now: (now, None)
            done += 1

    found = explore(0, {"a": lambda: steps(3), "b": lambda: steps(4), "c": lambda: steps(2)}, lambda _: None)
    assert found.schedules == 1260  # 9! / (3! 4! 2!)
    assert found.states == 4 * 5 * 3


def test_a_model_that_never_ends_is_refused() -> None:
    def circle() -> Process:
        while True:
            yield lambda now: (now, None)

    with pytest.raises(AssertionError, match="in circles"):
        explore(0, {"a": circle}, lambda _: None)


# -- manifests -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [
        {"updates": (1, 2)},
        pytest.param({"updates": (2, 2), "rounds": 1}, marks=full_only),
        {"updates": (1, 2), "checkpoints": frozenset({2})},
        {"updates": (1, 2), "remember": True},
        pytest.param({"updates": (1, 2), "rounds": 1, "two_phase": True}, marks=full_only),
        pytest.param({"updates": (2, 2)}, marks=full_only),
        pytest.param({"updates": (2, 2), "checkpoints": frozenset({2})}, marks=full_only),
        pytest.param({"updates": (1, 3)}, marks=full_only),
        pytest.param({"updates": (2, 2), "remember": True}, marks=full_only),
        pytest.param({"updates": (1, 1, 1)}, marks=full_only),
        pytest.param({"updates": (1, 2), "two_phase": True}, marks=full_only),
    ],
    ids=str,
)
def test_no_order_loses_a_committed_manifest(world: dict[str, object]) -> None:
    found = explore_manifests(**world)  # type: ignore[arg-type]
    print(world, found)
    assert found.finding is None, found.trace
    assert found.schedules > 10**6


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("flaw", ["boundary not read", "boundary after the deletes"])
def test_without_the_boundary_a_stalled_writer_loses_a_reported_change(flaw: str, two_phase: bool) -> None:
    found = explore_manifests(updates=(1, 2), rounds=1, flaw=flaw, two_phase=two_phase)  # type: ignore[arg-type]
    print(flaw, found)
    assert found.violations > 0
    assert found.finding == "A0 was reported as committed and is lost"


# -- the WAL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precaution", ["fences stay", "read the manifest"])
def test_no_order_of_two_writers_loses_a_durable_row(precaution: str) -> None:
    found = explore_wal(precaution)  # type: ignore[arg-type]
    print(precaution, found)
    assert found.finding is None, found.trace
    assert found.schedules > 10**6


@full_only
@pytest.mark.parametrize("precaution", ["fences stay", "read the manifest"])
def test_no_order_of_two_simultaneous_openers_loses_a_durable_row(precaution: str) -> None:
    found = explore_wal(precaution, openers=2, files=1, rounds=1)  # type: ignore[arg-type]
    print(precaution, found)
    assert found.finding is None, found.trace


def test_collected_fences_lose_the_rows_of_a_stalled_writer_that_does_not_read_the_manifest() -> None:
    found = explore_wal("none")
    print(found)
    assert found.violations > 0
    assert found.finding == "A1 was reported as durable and is lost"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("min_age", "trusted", "ticks", "lost"),
    [
        (1, 1, 2, False),
        (1, 2, 2, True),
        pytest.param(2, 2, 4, False, marks=full_only),
        pytest.param(2, 3, 4, True, marks=full_only),
    ],
)
def test_a_manifest_read_may_be_trusted_for_less_than_the_minimum_age_of_collected_fences(
    min_age: int, trusted: int, ticks: int, lost: bool
) -> None:
    found = explore_wal(
        "read the manifest after a while", rounds=1, min_age=min_age, trusted=trusted, ticks=ticks
    )
    print(min_age, trusted, found)
    assert (found.violations > 0) == lost


# -- SSTs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 5], ids=lambda lag: f"lag {lag}")
@pytest.mark.parametrize("world", [{"rounds": 2}, {"jobs": 2}, {"failed_flushes": 2}], ids=str)
def test_no_order_deletes_an_sst_of_the_manifest(world: dict[str, int], lag: int) -> None:
    found = explore_ssts(**world, lag=lag)
    print(world, lag, found)
    assert found.finding is None, found.trace
    assert found.schedules > 10**6


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize(
    "flaw", ["manifest before jobs", "SSTs listed last", "flushes ignored", "jobs ignored"]
)
def test_the_model_without_one_rule_deletes_an_sst_of_the_manifest(flaw: str, lag: int) -> None:
    found = explore_ssts(flaw=flaw, lag=lag)  # type: ignore[arg-type]
    print(flaw, found)
    assert found.violations > 0
