"""A database is destroyed and another created at its path, beside a stalled writer and a late request.

A test run allows one preemption; `make interleavings` allows two.
"""

from __future__ import annotations

import pytest

from interleaving.conftest import FULL
from interleaving.destroy_model import LeftOut, explore_destroy
from interleaving.recreation import Recreation, without_the_fence, without_the_residue
from interleaving.thread_explorer import explore_threads

pytestmark = pytest.mark.slow

# -- the model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence_collected", [False, True])
@pytest.mark.parametrize("files", [1, 2])
def test_no_order_of_the_model_has_two_owners_or_loses_an_acknowledged_row(
    files: int, fence_collected: bool
) -> None:
    found = explore_destroy(files=files, fence_collected=fence_collected)
    print(found)
    assert found.finding is None, found.trace
    assert found.schedules > 10**7


@pytest.mark.parametrize(
    ("left_out", "fence_collected"),
    [
        ("the residue", False),
        ("the fence stays", False),
        ("the last WAL file is emptied", False),
        ("the boundary is advanced", False),
        ("manifest ids go on", False),
        ("WAL ids go on", False),
        ("epochs go on", True),
    ],
)
def test_the_model_without_one_rule_of_the_residue_has_a_violation(
    left_out: LeftOut, fence_collected: bool
) -> None:
    found = explore_destroy(left_out, fence_collected=fence_collected)
    print(left_out, found)
    assert found.violations > 0


# -- the real code ----------------------------------------------------------------------------------------


@pytest.mark.timeout(1500)
def test_no_order_of_the_real_destroyer_has_two_owners() -> None:
    found = explore_threads(Recreation, preemptions=2 if FULL else 1)
    print(found)
    assert found.finding is None, found.trace
    assert found.schedules > 30


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_database_created_during_the_destruction_loses_no_row() -> None:
    found = explore_threads(
        lambda stage: Recreation(stage, in_turn=False, late_request=False), preemptions=2 if FULL else 1
    )
    print(found)
    assert found.finding is None, found.trace


def test_a_destroyer_without_the_residue_allows_two_owners() -> None:
    with without_the_residue():
        found = explore_threads(Recreation, preemptions=1, stop_at_first=True)
    print(found)
    assert found.finding is not None


def test_a_residue_without_the_end_of_the_wal_allows_two_owners() -> None:
    with without_the_fence():
        found = explore_threads(
            lambda stage: Recreation(stage, in_turn=False, late_request=False),
            preemptions=1,
            stop_at_first=True,
        )
    print(found)
    assert found.finding is not None
    assert "two owners" in found.finding
