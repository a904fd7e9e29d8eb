"""Collection in the background: when it runs, what an idle database costs, and how failures are handled."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from flagstone.errors import Unavailable
from flagstone.gc.collector import Collector, GarbageCollection, run_until
from flagstone.gc.plan import Kind, KindOptions
from flagstone.runtime.sync import Event
from flagstone.store.counting import CountingStore
from flagstone.testing.faults import Fault, FaultyStore
from kit.garbage import GarbageWorld

MINUTES_10 = timedelta(minutes=10)
OPTIONS: dict[Kind, KindOptions] = {
    "manifest": KindOptions(300_000, interval=MINUTES_10),
    "wal": KindOptions(300_000, interval=MINUTES_10),
    "compacted": KindOptions(300_000, interval=MINUTES_10),
}


def embedded(
    world: GarbageWorld, store: CountingStore | FaultyStore, *, current: Callable[[], int] | None = None
) -> GarbageCollection:
    collector = Collector(store, world.paths, OPTIONS, clock=world.clock)
    return GarbageCollection(
        collector,
        OPTIONS,
        clock=world.clock,
        current_manifest=current or (lambda: world.manifests.require_latest().id),
    )


def test_an_idle_database_without_garbage_causes_no_requests() -> None:
    world = GarbageWorld()
    world.flush()
    world.flush()
    counting = CountingStore(world.store, component="gc")
    service = embedded(world, counting)
    spent = []
    for _ in range(60):
        delay = service.run_once()
        assert delay is not None
        world.advance(delay)
        spent.append(sum(counting.totals()["requests"].values()))
    assert service.status()["rounds"] == 2  # the second one when the young objects are old enough
    assert spent[-1] == spent[5]
    assert service.status()["skipped"] > 50


def test_a_round_runs_when_the_manifest_has_changed_and_once_a_day() -> None:
    world = GarbageWorld()
    service = embedded(world, CountingStore(world.store, component="gc"))

    def pass_time(seconds: float) -> int:
        until = world.clock.monotonic() + seconds
        while world.clock.monotonic() < until:
            world.advance(service.run_once() or 0)
        rounds = service.status()["rounds"]
        assert isinstance(rounds, int)
        return rounds

    assert pass_time(3600) == 1
    world.claim()
    assert pass_time(3600) == 2
    assert pass_time(3600) == 2
    assert pass_time(24 * 3600) == 3


def test_the_first_round_runs_a_minute_after_opening() -> None:
    world = GarbageWorld()
    service = embedded(world, CountingStore(world.store, component="gc"))
    assert service.run_once() == 60
    assert service.status()["rounds"] == 0


def test_without_a_known_manifest_id_every_interval_runs_a_round() -> None:
    world = GarbageWorld()
    collector = Collector(world.store, world.paths, OPTIONS, clock=world.clock)
    service = GarbageCollection(collector, OPTIONS, clock=world.clock)
    for _ in range(5):
        world.advance(service.run_once() or 0)
    assert service.status()["rounds"] == 4


def test_a_failed_round_is_in_the_status_and_is_repeated() -> None:
    world = GarbageWorld()
    faulty = FaultyStore(world.store, [Fault("error", nth=None, op="get*")])
    service = embedded(world, faulty, current=lambda: 1)
    world.advance(60)
    assert service.run_once() == 600
    assert "Unavailable" in service.status()["failure"]
    faulty.faults.clear()
    world.advance(600)
    service.run_once()
    assert service.status()["failure"] is None
    assert service.status()["rounds"] == 1


def test_an_unexpected_error_is_logged_and_does_not_stop_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = GarbageWorld()
    service = embedded(world, CountingStore(world.store, component="gc"), current=lambda: 1)
    service._collector = None  # type: ignore[assignment]
    world.advance(60)
    assert service.run_once() == 600
    assert "AttributeError" in service.status()["failure"]
    assert "cannot collect garbage" in caplog.text


def test_a_round_with_errors_in_its_report_is_repeated() -> None:
    world = GarbageWorld()
    world.flush()
    world.flush()
    world.advance(400)
    faulty = FaultyStore(world.store, [Fault("error", op="delete_many")])
    service = embedded(world, faulty)
    world.advance(60)
    service.run_once()
    assert "manifest" in service.status()["failure"]
    world.advance(600)
    service.run_once()
    assert service.status()["failure"] is None
    assert world.manifest_ids() == [3]


def test_a_service_without_intervals_runs_no_round() -> None:
    world = GarbageWorld()
    options: dict[Kind, KindOptions] = {"wal": KindOptions(0)}
    service = GarbageCollection(
        Collector(world.store, world.paths, options, clock=world.clock), options, clock=world.clock
    )
    assert service.run_once() == 3600


def test_a_schedule_ends_when_its_stop_event_is_set() -> None:
    world = GarbageWorld()
    stop = Event()

    def collected(_: object) -> None:
        stop.set()

    world.claim(2)
    world.advance(400)
    options: dict[Kind, KindOptions] = {"manifest": KindOptions(0, interval=timedelta(milliseconds=1))}
    service = GarbageCollection(
        Collector(world.store, world.paths, options, clock=world.clock),
        options,
        clock=world.clock,
        collected=collected,
    )
    world.advance(1)
    run_until(service, stop)
    assert service.status()["rounds"] == 1


def test_an_error_of_the_report_callback_does_not_stop_the_service() -> None:
    world = GarbageWorld()
    world.claim(2)
    world.advance(400)

    def complain(_: object) -> None:
        raise Unavailable("not now")

    service = GarbageCollection(
        Collector(world.store, world.paths, OPTIONS, clock=world.clock),
        OPTIONS,
        clock=world.clock,
        collected=complain,
    )
    world.advance(60)
    assert service.run_once() == 600
    assert service.status()["failure"] == "Unavailable: not now"
