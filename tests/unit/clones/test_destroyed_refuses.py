"""A softly destroyed database accepts no claim, checkpoint or edit, so it can always be deleted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from flagstone import Closed, InvalidRequest, Settings
from flagstone.clones.checkpoint import create_checkpoint, refresh_checkpoint
from flagstone.clones.destroy import Verdict, collect_destroyed
from flagstone.config import CompactorOptions, GarbageCollectorOptions, ReaderSettings
from flagstone.db.admin.garbage import open_collector
from flagstone.db.open import open_database
from flagstone.db.reader.feed import open_feed
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import FlagstoneError
from flagstone.gc.collector import GarbageCollection, run_all_until
from flagstone.gc.plan import kind_options
from flagstone.metadata.compactions import TieredSpec
from flagstone.metadata.fencing import claim_compactor, claim_writer
from flagstone.metadata.manifest import Checkpoint, add_checkpoint
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.sync import Event
from flagstone.store.paths import DbPaths
from flagstone.types import ManifestId
from kit.databases import World, numbered

HOUR = timedelta(hours=1)
PATHS = DbPaths("p")


def destroyed(world: World) -> World:
    world.write("p", numbered(0, 5))
    world.write("p", numbered(5, 9))
    world.admin("p").compact(full=True)
    world.admin("p").destroy(soft=True, grace=HOUR)
    return world


def verdict(world: World) -> Verdict:
    return collect_destroyed(
        world.store, PATHS, wal_store=world.store, clock=world.clock, ids=world.ids
    ).verdict


def manifests(world: World) -> ManifestStore:
    return ManifestStore(world.store, PATHS, clock=world.clock, ids=world.ids)


def any_checkpoint(world: World) -> Checkpoint:
    return Checkpoint(world.ids.uuid(), ManifestId(1), 0)


CALLS: dict[str, Callable[[World], Any]] = {
    "open": lambda world: world.open("p"),
    "reader": lambda world: world.scan("p"),
    "feed": lambda world: open_feed("p", "c", store=world.store, clock=world.clock, ids=world.ids),
    "compact": lambda world: world.admin("p").compact(full=True),
    "run_compactor": lambda world: world.admin("p").run_compactor(stop=Event()),
    "run_worker": lambda world: world.admin("p").run_worker(stop=Event()),
    "submit": lambda world: world.admin("p").submit_compaction(TieredSpec((), (), 0)),  # type: ignore[arg-type]
    "create_checkpoint": lambda world: world.admin("p").create_checkpoint(),
    "restore": lambda world: world.admin("p").restore(world.ids.uuid()),
    "clone": lambda world: world.admin("p").clone("c"),
    "claim_writer": lambda world: claim_writer(manifests(world)),
    "claim_compactor": lambda world: claim_compactor(manifests(world)),
    "checkpoint edit": lambda world: create_checkpoint(manifests(world), clock=world.clock, ids=world.ids),
    "any edit": lambda world: manifests(world).update(
        lambda now: add_checkpoint(now.value, any_checkpoint(world))
    ),
    "epoch edit": lambda world: manifests(world).update(lambda now: replace(now.value, compactor_epoch=99)),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_claim_and_edit_of_a_destroyed_database_is_refused(
    world: World, call: Callable[[World], Any]
) -> None:
    destroyed(world)
    before = world.objects()
    with pytest.raises((InvalidRequest, Closed), match="destroyed"):
        call(world)
    assert {path: data for path, data in world.objects().items() if path.startswith("p/manifest")} == {
        path: data for path, data in before.items() if path.startswith("p/manifest")
    }
    world.clock.advance(2 * 3_600_000)
    assert verdict(world) is Verdict.DUE


def test_a_checkpoint_of_a_destroyed_database_may_be_deleted_but_not_refreshed(world: World) -> None:
    world.write("p", numbered(0, 5))
    held = world.admin("p").create_checkpoint(lifetime=2 * HOUR, name="nightly backup")
    world.admin("p").destroy(soft=True, grace=HOUR)
    for call in (
        lambda: world.admin("p").refresh_checkpoint(held.id, 9 * HOUR),
        lambda: world.admin("p").refresh_checkpoint(held.id),
        lambda: refresh_checkpoint(manifests(world), held.id, clock=world.clock, lifetime=9 * HOUR),
    ):
        with pytest.raises((InvalidRequest, Closed), match="destroyed"):
            call()
    world.clock.advance(3_700_000)
    assert verdict(world) is Verdict.PINNED
    world.admin("p").delete_checkpoint(held.id)
    assert verdict(world) is Verdict.DUE


def open_writer(world: World) -> Db:
    db = world.open("p")
    for key, value in numbered(0, 5).items():
        db.put(key, value, await_durable=True)
    return db


@pytest.mark.parametrize("scope", ["durable", "all"])
@pytest.mark.parametrize("replaced_by", ["a destroyer", "a writer"])
def test_a_fenced_writer_creates_no_checkpoint(world: World, scope: Any, replaced_by: str) -> None:
    db = open_writer(world)
    if replaced_by == "a destroyer":
        world.admin("p").destroy(soft=True, grace=HOUR)
    else:
        world.open("p").close()
    before = world.admin("p").manifest().value.checkpoints
    with pytest.raises(Closed):
        db.checkpoint(scope=scope)
    assert world.admin("p").manifest().value.checkpoints == before
    with suppress(FlagstoneError):
        db.close()


def follow(world: World, reader: DbReader, *, rounds: int) -> None:
    for _ in range(rounds):
        world.clock.advance(240_000)
        reader.refresh()


def test_an_open_reader_does_not_keep_a_destroyed_database(world: World) -> None:
    world.write("p", numbered(0, 5))
    settings = ReaderSettings(manifest_poll_interval=timedelta(minutes=5))
    with open_reader("p", store=world.store, clock=world.clock, ids=world.ids, settings=settings) as reader:
        world.admin("p").destroy(soft=True, grace=HOUR)
        assert dict(reader.scan()) == numbered(0, 5)
        with pytest.raises(Closed, match="destroyed"):
            follow(world, reader, rounds=20)
    world.clock.advance(3_600_000)
    assert verdict(world) is Verdict.DUE


def test_a_restarted_compactor_does_not_keep_a_destroyed_database(world: World) -> None:
    settings = Settings(garbage_collector_options=None)
    with open_database("p", store=world.store, settings=settings) as db:
        db.put(b"k", b"v")
        world.admin("p").destroy(soft=True, grace=timedelta())
        with pytest.raises(Closed):
            db.put(b"k", b"w", await_durable=True)
    for _ in range(2):
        with pytest.raises(FlagstoneError, match="destroyed"):
            world.admin("p").run_compactor(options=CompactorOptions(), stop=Event())
    world.clock.advance(24 * 3_600_000)
    assert verdict(world) is Verdict.DUE


# -- garbage collection -----------------------------------------------------------------------------------


def test_the_report_of_a_collection_names_what_keeps_a_destroyed_database(world: World) -> None:
    world.write("p", numbered(0, 5))
    named = world.admin("p").create_checkpoint(lifetime=3 * HOUR, name="nightly backup")
    with open_feed("p", "mirror", store=world.store, clock=world.clock, ids=world.ids, lifetime=2 * HOUR):
        pass
    world.admin("p").destroy(soft=True, grace=HOUR)

    waiting = world.admin("p").collect_garbage(min_age=timedelta())
    assert not waiting.gone
    assert any("grace period ends at 2023-11-14T23:" in reason for reason in waiting.waits_for)
    assert any(f"{named.id} named 'nightly backup' holds it until" in reason for reason in waiting.waits_for)
    assert any("of the consumer 'mirror' holds it until" in reason for reason in waiting.waits_for)
    assert waiting.to_dict()["waits_for"] == waiting.waits_for

    world.clock.advance(2 * 3_600_000 + 60_000)
    [reason] = world.admin("p").collect_garbage(min_age=timedelta()).waits_for
    assert str(named.id) in reason
    world.clock.advance(3_600_000)
    report = world.admin("p").collect_garbage(min_age=timedelta())
    assert report.gone
    assert report.waits_for == []


def service(world: World, path: str) -> GarbageCollection:
    kinds = kind_options(GarbageCollectorOptions())
    collector = open_collector(world.store, DbPaths(path), kinds, clock=world.clock, ids=world.ids)
    return GarbageCollection(collector, kinds, clock=world.clock)


def test_a_schedule_ends_when_its_databases_are_gone(world: World) -> None:
    for path in ("a", "b"):
        world.write(path, numbered(0, 5))
        world.admin(path).destroy(soft=True, grace=timedelta())
    services = [service(world, path) for path in ("a", "b", "never")]
    world.clock.advance(600_000)

    run_all_until(services, Event(), clock=world.clock)

    assert all(each.gone for each in services)
    assert [each.run_once() for each in services] == [None] * 3
    for path in ("a", "b"):
        with pytest.raises(InvalidRequest, match="no database"):
            world.scan(path)


def test_a_schedule_serves_databases_that_are_discovered_later(world: World) -> None:
    world.write("a", numbered(0, 5))
    world.admin("a").destroy(soft=True, grace=timedelta())
    stop, found = Event(), [service(world, "a")]
    served = list(found)
    world.clock.advance(600_000)

    def discover() -> list[GarbageCollection]:
        if len(served) == 2:
            stop.set()
            return []
        world.write("b", numbered(0, 5))
        served.append(service(world, "b"))
        return served[1:]

    run_all_until(found, stop, discover=discover, discover_every_s=0.0, clock=world.clock)
    assert [each.gone for each in served] == [True, False]
