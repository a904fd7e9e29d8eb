"""How often a writer looks for manifests of others, and what that costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from flagstone.config import Settings
from flagstone.db.manifest_follower import ManifestFollower, plan_delay
from flagstone.db.open import open_database
from flagstone.errors import Closed, Unavailable
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.write.durability import DurabilityTracker
from unit.db.upkeep import Upkeep


class Engine:
    """What a follower needs, as the test wants it."""

    news = False
    waiting = False
    down = False
    expired = 0

    def __init__(self) -> None:
        self.durability = DurabilityTracker(0, request_flush=lambda _: None)

    def poll(self) -> bool:
        if self.down:
            raise Unavailable("no answer")
        return self.news

    def awaits_news(self) -> bool:
        return self.waiting

    def expire_read_points(self) -> None:
        self.expired += 1


class Loads:
    """Loads that wait for the writer; there are none."""

    announced = 0
    looked = 0

    def announce(self) -> None:
        self.announced += 1

    def run(self) -> None:
        self.looked += 1


def test_it_slows_down_while_nothing_happens_and_hurries_when_something_does() -> None:
    engine, loads = Engine(), Loads()
    follower = ManifestFollower(engine, loads, interval_s=1.0)
    assert follower.run_once() == 1, "opening has just looked"
    assert [follower.run_once() for _ in range(6)] == [2, 4, 8, 10, 10, 10]
    engine.news = True
    assert follower.run_once() == 1
    engine.news = False
    assert [follower.run_once() for _ in range(2)] == [2, 4]
    engine.waiting = True
    assert [follower.run_once() for _ in range(3)] == [1, 1, 1]
    engine.waiting = False
    assert follower.run_once() == 2
    engine.durability.record(1)
    assert [follower.run_once() for _ in range(2)] == [1, 2]
    assert loads.looked == 15
    engine.down = True
    assert [follower.run_once() for _ in range(2)] == [1, 1]
    assert (engine.expired, loads.announced, loads.looked) == (17, 18, 15)


@pytest.mark.parametrize(("interval_s", "slowest_s"), [(0.05, 0.5), (1.0, 10.0), (3.0, 10.0), (30.0, 30.0)])
def test_it_never_slows_down_too_much(interval_s: float, slowest_s: float) -> None:
    delays = [plan_delay(interval_s, quiet) for quiet in range(100)]
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (interval_s, pytest.approx(slowest_s))


QUIET = Settings(flush_interval=None, compactor_options=None, garbage_collector_options=None)


def test_opening_and_looking_around_cost_few_requests() -> None:
    store = CountingStore(MemoryStore(), component="test")
    with open_database("db", store=store, settings=QUIET) as db:
        requests = store.totals()["requests"]
        assert requests["put_if_absent"] == 3, "two manifests, one fence"
        assert requests["list"] == 1
        assert requests["get"] + requests["head"] <= 8, "the wheel needs thirteen"
        store.reset()
        assert not db._engine.poll()
        assert store.totals()["requests"] == {"get": 1}
        store.reset()
        db.put(b"key", b"value", await_durable=True)
        assert store.totals()["requests"]["put_if_absent"] == 1


def test_a_writer_that_was_replaced_learns_it_at_its_next_look() -> None:
    store = MemoryStore()
    first = open_database("db", store=store, settings=QUIET)
    with open_database("db", store=store, settings=QUIET), pytest.raises(Closed, match="newer writer"):
        first._engine.poll()
    first.close()


def test_a_writer_that_waits_for_room_in_l0_looks_at_once_and_goes_on_when_another_process_made_it() -> None:
    store = MemoryStore()
    settings = replace(QUIET, l0_max_ssts=2, manifest_poll_interval=timedelta(seconds=0.2))
    with open_database("db", store=store, settings=settings) as db:
        for number in range(2):
            db.put(b"%d" % number, b"value")
            db.flush()
        assert not db._engine.awaits_news()
        db.put(b"2", b"value")
        held_up = threading.Thread(target=db.flush)
        held_up.start()
        wait_for(db._engine.awaits_news)
        Upkeep(store, SYSTEM_CLOCK).compact()
        held_up.join(5)
        assert not held_up.is_alive()
        wait_for(lambda: not db._engine.awaits_news())
        assert [key for key, _ in db.scan()] == [b"0", b"1", b"2"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
