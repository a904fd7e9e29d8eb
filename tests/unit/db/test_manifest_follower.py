"""How often a writer polls for new manifests, and what that costs."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.db.writer.manifest_follower import ManifestFollower, plan_delay
from flagstone.errors import Closed, Unavailable
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.service import Supervisor
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL, Upkeep, eventually


class Engine:
    """State, manifest and flusher in one, as the test wants them."""

    last_seq = 0
    news = False
    pause: str | None = None
    down = False
    expired = 0

    def poll(self) -> bool:
        if self.down:
            raise Unavailable("no answer")
        return self.news

    def expire_reads(self) -> None:
        self.expired += 1


class Loads:
    """Loads that wait for the writer; there are none."""

    announced = 0
    looked = 0
    expected = in_doubt = False

    def announce(self) -> None:
        self.announced += 1

    def run(self) -> None:
        self.looked += 1


class RangeDeletes:
    """Range deletes that callers wait for; there are none."""

    expected = in_doubt = False

    def run(self) -> None:
        pass


def test_the_poll_interval_grows_while_idle_and_shrinks_after_a_change() -> None:
    engine, loads = Engine(), Loads()
    one: Any = engine
    waiting: Any = loads
    deletes: Any = RangeDeletes()
    follower = ManifestFollower(one, one, one, waiting, deletes, interval_s=1.0, supervisor=Supervisor())
    assert follower.run_once() == 1, "opening has just looked"
    assert [follower.run_once() for _ in range(6)] == [2, 4, 8, 10, 10, 10]
    engine.news = True
    assert follower.run_once() == 1
    engine.news = False
    assert [follower.run_once() for _ in range(2)] == [2, 4]
    engine.pause = "L0 is full"
    assert [follower.run_once() for _ in range(3)] == [1, 1, 1]
    engine.pause = None
    assert follower.run_once() == 2
    engine.last_seq = 1
    assert [follower.run_once() for _ in range(2)] == [1, 2]
    assert loads.looked == 15
    engine.down = True
    assert [follower.run_once() for _ in range(2)] == [1, 1]
    assert (engine.expired, loads.announced, loads.looked) == (17, 18, 15)


@pytest.mark.parametrize(("interval_s", "slowest_s"), [(0.05, 0.5), (1.0, 10.0), (3.0, 10.0), (30.0, 30.0)])
def test_the_poll_interval_has_an_upper_limit(interval_s: float, slowest_s: float) -> None:
    delays = [plan_delay(interval_s, quiet) for quiet in range(100)]
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (interval_s, pytest.approx(slowest_s))


def test_opening_polling_and_writing_cost_few_requests() -> None:
    store = CountingStore(MemoryStore(), component="test")
    with open_database("db", store=store, settings=MANUAL) as db:
        requests = store.totals()["requests"]
        assert requests["put_if_absent"] == 3, "two manifests, one fence"
        assert requests["list"] == 1
        assert requests["get"] + requests["head"] <= 8, "the wheel needs thirteen"
        store.reset()
        assert not db._engine.manifest.poll()
        assert store.totals()["requests"] == {"get": 1}
        store.reset()
        db.put(b"key", b"value", await_durable=True)
        assert store.totals()["requests"]["put_if_absent"] == 1


def test_a_replaced_writer_is_fenced_at_its_next_poll() -> None:
    store = MemoryStore()
    first = open_database("db", store=store, settings=MANUAL)
    with open_database("db", store=store, settings=MANUAL), pytest.raises(Closed, match="newer writer"):
        first._engine.manifest.poll()
    first.close()


def test_a_writer_that_waits_for_room_in_l0_polls_at_once_and_continues_after_another_process_compacts() -> (
    None
):
    store = MemoryStore()
    settings = replace(MANUAL, l0_max_ssts=2, manifest_poll_interval=timedelta(seconds=0.2))
    with open_database("db", store=store, settings=settings) as db:
        for number in range(2):
            db.put(b"%d" % number, b"value")
            db.flush()
        assert not follower_hurries(db)
        db.put(b"2", b"value")
        held_up = threading.Thread(target=db.flush)
        held_up.start()
        eventually(lambda: follower_hurries(db))
        Upkeep(store, SYSTEM_CLOCK).compact()
        held_up.join(5)
        assert not held_up.is_alive()
        eventually(lambda: not follower_hurries(db))
        assert [key for key, _ in db.scan()] == [b"0", b"1", b"2"]


def follower_hurries(db: Db) -> bool:
    return db._engine.services.manifest_follower._hurries
