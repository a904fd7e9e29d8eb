"""Readers: they follow the database beside its writer, and everything that they show must have been true."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flagstone.config import ReaderSettings
from flagstone.errors import Closed, CorruptData, InvalidRequest, Unavailable
from flagstone.testing.simulation.databases import TrackedDatabase
from flagstone.testing.simulation.history import Violation
from flagstone.testing.simulation.scheduler import Process, describe
from flagstone.testing.simulation.stores import NoisyLink
from flagstone.types import Row

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World


def read(world: World, process: Process) -> None:
    """The life of a reader process."""
    while True:
        process.machine.sleep(world.random.expovariate(1 / world.plan.idle_s))
        try:
            _follow(world, process)
        except (Closed, Unavailable, InvalidRequest, CorruptData) as error:
            if world.is_unexpected(error):
                raise
            world.scheduler.note(f"reader: {describe(error)}")


def _follow(world: World, process: Process) -> None:
    machine, random, oracle = process.machine, world.random, world.main.oracle
    settings = ReaderSettings(
        manifest_poll_interval=timedelta(seconds=1), checkpoint_lifetime=timedelta(seconds=60)
    )
    options: dict[str, Any] = {"mode": random.choice(("managed", "latest")), "settings": settings}
    if world.is_damaging and random.random() < 0.3:
        options["store"] = NoisyLink(world.network, process, world.store)
    with world.open_reader(process, **options) as reader:
        shown = 0
        for _ in range(random.randrange(1, 8)):
            machine.sleep(random.expovariate(0.5))
            low, before_ms = reader.status()["last_seq"], machine.now_ms()
            rows = dict(reader.scan())
            high = reader.status()["last_seq"]
            if low < shown:
                raise Violation(f"a reader showed sequence number {shown}, and then {low}")
            shown = low
            branch = oracle.latest
            if branch is not None and low == high:
                oracle.expect_all(branch, rows, (low, low), world.window(before_ms, machine))
            world.done["reader scan"] += 1


def rows_of(
    world: World, process: Process, path: str, checkpoint: UUID | None = None
) -> tuple[list[Row], int]:
    """The rows of a checkpoint, or of the latest state, expired ones included; and its sequence number."""
    options: dict[str, Any] = {"mode": "latest"} if checkpoint is None else {"checkpoint": checkpoint}
    with world.open_reader(process, path, **options) as reader:
        while True:
            seq = reader.status()["last_seq"]
            with reader.scan(include_expired=True) as rows:
                found = list(rows.rows())
            if reader.status()["last_seq"] == seq:
                return found, seq


def reread(world: World, process: Process, database: TrackedDatabase, checkpoint: UUID) -> None:
    """A checkpoint shows what it showed when it was created."""
    rows = database.checkpoints[checkpoint]
    found, _ = rows_of(world, process, database.path, checkpoint)
    require_same(f"checkpoint {checkpoint}", values_of(found), rows)
    world.done["reread"] += 1


def values_of(rows: Iterable[Row]) -> dict[bytes, bytes]:
    return {row.key: row.value for row in rows}


def require_same(name: str, found: dict[bytes, bytes], rows: dict[bytes, bytes]) -> None:
    """Raise if `name` shows other rows than before."""
    if found != rows:
        changed = sorted(key for key in {*found, *rows} if found.get(key) != rows.get(key))
        key = changed[0]
        raise Violation(
            f"{name} shows other rows than before: {key!r} is {found.get(key)!r}, it was {rows.get(key)!r}; "
            f"{len(changed)} keys differ"
        )
