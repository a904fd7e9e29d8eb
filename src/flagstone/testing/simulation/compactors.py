"""Compactors and workers in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flagstone.config import CompactionWorkerOptions, CompactorOptions
from flagstone.errors import Closed, CorruptData, InvalidRequest, Unavailable
from flagstone.runtime import sync
from flagstone.testing.simulation.databases import Concatenation
from flagstone.testing.simulation.scheduler import Process, describe

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World


def coordinate(world: World, process: Process) -> None:
    """The life of a compactor. Sometimes it only coordinates, and workers execute its jobs."""
    random = world.random
    while True:
        options = world.plan.settings.compactor_options or CompactorOptions()
        if "worker" in world.plan.cast and random.random() < 0.5:
            options = options.replace(worker=None)
        try:
            world.admin(process).run_compactor(
                options=options, merge_operator=Concatenation(), stop=_stop_later(world, process)
            )
            world.done["compactor"] += 1
        except (Closed, Unavailable, InvalidRequest, CorruptData) as error:
            if world.is_unexpected(error):
                raise
            world.scheduler.note(f"compactor: {describe(error)}")
        process.machine.sleep(random.expovariate(1 / 30))


def work(world: World, process: Process) -> None:
    """The life of a worker."""
    while True:
        options = world.plan.settings.compactor_options or CompactorOptions()
        try:
            world.admin(process).run_worker(
                options=options.worker or CompactionWorkerOptions(),
                merge_operator=Concatenation(),
                stop=_stop_later(world, process),
            )
            world.done["worker"] += 1
        except (Closed, Unavailable, InvalidRequest, CorruptData) as error:
            if world.is_unexpected(error):
                raise
            world.scheduler.note(f"worker: {describe(error)}")
        process.machine.sleep(world.random.expovariate(1 / 30))


def _stop_later(world: World, process: Process) -> sync.Event:
    stop = sync.Event()
    after_s = world.random.choice((30.0, 600.0, 20_000.0))

    def wait() -> None:
        process.machine.sleep(after_s)
        stop.set()

    sync.start_thread(wait, name="stop")
    return stop
