"""A stalled writer beside the real metadata, WAL and collector, in all orders of their requests.

A test run bounds the preemptions; `make interleavings` does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from flagstone.gc.plan import Kind
from flagstone.store.port import ObjectChanged, ObjectStore
from interleaving.conftest import full_only
from interleaving.scenarios import Claims, Duel, RepeatingStore, without_the_boundary
from interleaving.thread_explorer import Runs, Stage, explore_threads

pytestmark = pytest.mark.slow


def duel(*, checks_epoch: bool, fences_too: bool = True, preemptions: int | None = 2, files: int = 2) -> Runs:
    def make(stage: Stage) -> Duel:
        return Duel(stage, checks_epoch=checks_epoch, fences_too=fences_too, files=files)

    found = explore_threads(make, preemptions=preemptions)
    print(f"checks_epoch={checks_epoch} fences_too={fences_too} preemptions={preemptions}", found)
    return found


class Counting:
    """Two actors that each add one to a counter in the store, with compare-and-swap or without."""

    def __init__(self, stage: Stage, *, swap: bool) -> None:
        self._store = RepeatingStore()
        self._store.put("n", b"0")
        self._swap = swap
        self.actors = {name: partial(self._add, stage.wrap(self._store, name)) for name in "ab"}

    def state(self) -> Hashable:
        return self._store.contents()

    def judge(self, outcomes: Mapping[str, Any]) -> str | None:
        count = int(self._store.get("n").data)
        return None if count == len(outcomes) else f"counted to {count}"

    def _add(self, store: ObjectStore) -> None:
        while True:
            found = store.get("n")
            data = b"%d" % (int(found.data) + 1)
            if not self._swap:
                store.put("n", data)
                return
            with suppress(ObjectChanged):
                store.put_if_match("n", data, found.meta.version)
                return


@pytest.mark.parametrize("preemptions", [None, 1])
def test_the_explorer_finds_a_lost_update_without_a_swap_and_none_with_it(preemptions: int | None) -> None:
    careless = explore_threads(lambda stage: Counting(stage, swap=False), preemptions=preemptions)
    careful = explore_threads(lambda stage: Counting(stage, swap=True), preemptions=preemptions)
    assert careless.finding == "counted to 1"
    assert sorted(careless.trace) == ["a: get", "a: put", "b: get", "b: put"]
    assert careful.finding is None
    assert careful.schedules >= 2


def test_with_no_preemption_two_actors_have_two_schedules() -> None:
    found = explore_threads(lambda stage: Counting(stage, swap=False), preemptions=0)
    assert found.finding is None
    assert found.schedules == 2


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["manifest", "compactions"])
def test_a_stalled_writer_never_reports_a_lost_epoch(kind: Kind) -> None:
    found = explore_threads(lambda stage: Claims(stage, kind, claims=(1, 2)), preemptions=2)
    print(kind, found)
    assert found.finding is None, found.trace
    assert found.schedules > 100


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["manifest", "compactions"])
def test_a_stalled_writer_on_the_two_phase_store_never_reports_a_lost_epoch(kind: Kind) -> None:
    found = explore_threads(lambda stage: Claims(stage, kind, claims=(1, 2), two_phase=True), preemptions=1)
    print(kind, found)
    assert found.finding is None, found.trace
    assert found.schedules > 100


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("kind", ["manifest", "compactions"])
def test_without_the_boundary_two_writers_get_the_same_epoch(kind: Kind, two_phase: bool) -> None:
    with without_the_boundary():
        found = explore_threads(
            lambda stage: Claims(stage, kind, claims=(1, 2), two_phase=two_phase),
            preemptions=1 if two_phase else 2,
            stop_at_first=True,
        )
    print(kind, found)
    assert found.finding == "two writers were given the same epoch: [1, 1, 2]"


@pytest.mark.slow
def test_no_durable_row_is_lost_when_fences_are_collected_and_writers_check_their_epoch() -> None:
    found = duel(checks_epoch=True, preemptions=1)
    assert found.finding is None, found.trace


@pytest.mark.slow
def test_no_durable_row_is_lost_when_fences_stay() -> None:
    found = duel(checks_epoch=False, fences_too=False, preemptions=1)
    assert found.finding is None, found.trace


def test_collected_fences_lose_the_rows_of_a_writer_that_does_not_check_its_epoch() -> None:
    found = explore_threads(lambda stage: Duel(stage, checks_epoch=False), preemptions=1, stop_at_first=True)
    print(found)
    assert found.finding == "rows [2] were reported as durable and are lost"


@full_only
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["manifest", "compactions"])
def test_no_order_of_two_writers_and_a_collector_loses_an_epoch(kind: Kind) -> None:
    found = explore_threads(lambda stage: Claims(stage, kind, claims=(1, 2)))
    print(kind, found)
    assert found.finding is None, found.trace


@full_only
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_order_with_two_preemptions_on_the_two_phase_store_loses_an_epoch() -> None:
    found = explore_threads(
        lambda stage: Claims(stage, "manifest", claims=(1, 2), two_phase=True), preemptions=2
    )
    print(found)
    assert found.finding is None, found.trace


@full_only
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_order_with_three_preemptions_loses_a_durable_row() -> None:
    found = duel(checks_epoch=True, preemptions=3)
    assert found.finding is None, found.trace
