"""The director: crashes and pauses machines, sets clocks, cuts machines off from the store, and damages objects."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.scheduler import Machine, Process, Task
from flagstone.testing.simulation.stores import damaged

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World

_DAMAGE_EVERY_S: Final = 150.0
_DAMAGE_S: Final = (0.5, 20.0, 400.0)
"""How long objects stay damaged: for one read, for some, and for longer than the age of garbage."""


class Director:
    """Disturbs a world until it is quiet. `network.faults` counts what it did."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random
        self._scheduler = world.scheduler
        # A generator of its own, so that worlds without damage draw the same as before.
        self._damage_random = Random(f"damage {world.plan.seed}")

    def start(self) -> None:
        plan, faults = self._world.plan, self._world.network.faults

        def counted(kind: str, strike: Callable[[], None]) -> Callable[[], None]:
            def counting() -> None:
                faults[kind] += 1
                strike()

            return counting

        self._disturb(plan.crash_every_s, self._crash_one, self._random)
        self._disturb(plan.pause_every_s, counted("pause", self._pause_one), self._random)
        self._disturb(plan.jump_every_s, counted("clock", self._shift_one), self._random)
        self._disturb(plan.outage_every_s, counted("outage", self._begin_outage), self._random)
        if self._world.is_damaging:
            self._disturb(_DAMAGE_EVERY_S, self._damage_some, self._damage_random)

    def _disturb(self, every_s: float, strike: Callable[[], None], random: Random) -> None:
        def again() -> None:
            if not self._world.quiet:
                strike()
                self._scheduler.after(random.expovariate(1 / every_s), again)

        self._scheduler.after(random.expovariate(1 / every_s), again)

    # -- machines -----------------------------------------------------------------------------------------

    def _crash_one(self) -> None:
        world = self._world
        machine = self._random.choice(world.machines)
        process = world.processes[machine.name]
        main = process.objects.get("main")
        if main is None or process.dead:
            return
        # At a scheduling point of one of its tasks, some turns from now.
        countdown = self._random.randrange(1, 40)

        def strike(task: Task) -> None:
            nonlocal countdown
            if task.process is process:
                countdown -= 1
                if countdown <= 0:
                    self._scheduler.on_switch = None
                    self._crash(process, main)

        self._scheduler.on_switch = strike

    def _crash(self, process: Process, main: Callable[[Process], None]) -> None:
        self._world.network.faults["crash"] += 1
        self._scheduler.crash(process)
        delay_s = self._random.choice((0.1, 5.0, 120.0, 4_000.0))
        self._scheduler.after(delay_s, lambda: self._world.boot(process.machine, main))

    def _pause_one(self) -> None:
        machine = self._random.choice(self._world.machines)
        seconds = self._random.choice(self._world.plan.pauses_s)
        self._scheduler.note(f"pause {machine.name} for {seconds} s")
        machine.pause(seconds)

    def _shift_one(self) -> None:
        machine = self._random.choice(self._world.machines)
        self._world.window(0, machine)
        machine.offset_ms += self._random.choice((-3_600_000, -20_000, -1_500, 1_500, 20_000, 3_600_000))
        self._scheduler.note(f"clock of {machine.name} is off by {machine.offset_ms} ms")

    def _begin_outage(self) -> None:
        network = self._world.network
        machine: Machine | None = self._random.choice((None, *self._world.machines))
        seconds = self._random.choice((1.0, 30.0, 600.0))
        self._scheduler.note(f"outage of {machine.name if machine else 'the store'} for {seconds} s")
        if machine is None:
            network.conditions.outage = True
        else:
            network.cut_off.add(machine.name)

        def end() -> None:
            if machine is None:
                network.conditions.outage = False
            else:
                network.cut_off.discard(machine.name)

        self._scheduler.after(seconds, end)

    # -- objects ------------------------------------------------------------------------------------------

    def _damage_some(self) -> None:
        """Damage some objects of the database, for a while. One episode ends before the next begins."""
        random, world = self._damage_random, self._world
        stores = (world.store, world.wal_store)
        if any(store.is_damaged for store in stores):
            return
        for _ in range(random.randrange(1, 4)):
            store = random.choice(stores)
            paths = [meta.path for meta in store.list(MAIN_PATH) if meta.size]
            if paths:
                # Not by chance alone: reads concern the newest objects more than old ones.
                path = paths[-1] if random.random() < 0.2 else random.choice(paths)
                store.damage(path, damaged(random, store.get(path).data))
                world.network.faults["damage"] += 1
                self._scheduler.note(f"damage {path}")
        self._scheduler.after(random.choice(_DAMAGE_S), world.mend)
