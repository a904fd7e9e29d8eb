"""Garbage collection on real services, whose object times have whole seconds."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest

from flagstone.gc.collector import Collector
from flagstone.gc.plan import TOO_YOUNG, Kind, KindOptions
from flagstone.gc.round import StoreClock
from flagstone.runtime.clock import VirtualClock
from flagstone.store.port import ObjectStore
from flagstone.store.resolve import resolve
from kit.garbage import GarbageWorld
from servers.azure import AzureServer
from servers.gcs import GcsServer
from servers.s3 import S3Server


@pytest.fixture(params=["ministack", pytest.param("azurite", marks=pytest.mark.long), "gcs"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    server: S3Server | AzureServer | GcsServer = request.getfixturevalue(request.param)
    return resolve(server.url, **server.options())


@pytest.mark.slow
def test_the_clock_of_a_service_is_read_and_no_object_is_left(store: ObjectStore) -> None:
    path = f"{uuid4()}/gc/clock"
    before_s = int(time.time())
    now_ms = StoreClock(store, path).now_ms()
    # These services run on this machine, and their times have whole seconds.
    assert 1000 * before_s <= now_ms <= 1000 * (time.time() + 1)
    assert [*store.list(path.partition("/")[0])] == []


@pytest.mark.slow
def test_ages_come_from_the_service_and_the_boundary_advances_in_every_round(store: ObjectStore) -> None:
    # The clock of this process stands still at 1970: ages can come only from the clock of the service.
    world = GarbageWorld(store, root=str(uuid4()), clock=VirtualClock(1_000_000))
    options: dict[Kind, KindOptions] = {"manifest": KindOptions(3_600_000)}
    for round_number in (1, 2):
        world.claim(2)
        old = Collector(store, world.paths, options, clock=world.clock).collect()
        assert old.deleted == 0
        assert old.of("manifest").reasons[TOO_YOUNG] > 0
        new = Collector(store, world.paths, {"manifest": KindOptions(0)}, clock=world.clock).collect()
        assert new.ok, new.errors
        assert world.manifest_ids() == [1 + 2 * round_number]
        assert world.manifests.read_boundary() == 2 * round_number
