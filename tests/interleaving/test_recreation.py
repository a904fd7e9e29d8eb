"""Destroying a database and creating another at its path, beside a stalled writer and a request that lands late.

A test run bounds how often a process is stopped in favour of another; `make interleavings` allows more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from flagstone.testing.interleaving_destroy import LeftOut, explore_destroy
from flagstone.testing.interleaving_threads import explore_threads
from interleaving.recreation import Recreation, without_the_fence, without_the_residue

pytestmark = pytest.mark.slow

FULL = bool(os.environ.get("INTERLEAVINGS_FULL"))
full_only = pytest.mark.skipif(not FULL, reason="part of `make interleavings`")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of rejected writes would each be logged."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# -- the model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence_collected", [False, True])
@pytest.mark.parametrize("files", [1, 2])
def test_no_order_has_two_owners_or_loses_an_acknowledged_row(files: int, fence_collected: bool) -> None:
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
def test_every_rule_of_the_residue_is_needed(left_out: LeftOut, fence_collected: bool) -> None:
    found = explore_destroy(left_out, fence_collected=fence_collected)
    print(left_out, found)
    assert found.violations > 0


# -- the real code ----------------------------------------------------------------------------------------


@pytest.mark.timeout(1500)
def test_the_real_destroyer_leaves_no_second_owner() -> None:
    found = explore_threads(Recreation, preemptions=2 if FULL else 1)
    print(found)
    assert found.finding is None, found.trace
    assert found.schedules > 30


@pytest.mark.timeout(1500)
def test_a_creator_that_comes_while_the_destroyer_is_at_work_loses_nothing() -> None:
    found = explore_threads(
        lambda stage: Recreation(stage, in_turn=False, late_request=False), preemptions=2 if FULL else 1
    )
    print(found)
    assert found.finding is None, found.trace


def test_without_the_residue_there_are_two_owners() -> None:
    with without_the_residue():
        found = explore_threads(Recreation, preemptions=1, stop_at_first=True)
    print(found)
    assert found.finding is not None


def test_without_the_end_of_the_wal_there_are_two_owners() -> None:
    with without_the_fence():
        found = explore_threads(
            lambda stage: Recreation(stage, in_turn=False, late_request=False),
            preemptions=1,
            stop_at_first=True,
        )
    print(found)
    assert found.finding is not None
    assert "two owners" in found.finding
