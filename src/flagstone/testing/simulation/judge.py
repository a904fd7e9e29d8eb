"""The quiet time: no more faults. Everything must work again within a bounded time, and nothing may be left over."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from flagstone.changes.reader import WalReader
from flagstone.testing.simulation.damage import require_reported
from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.feeds import require_complete, to_the_end
from flagstone.testing.simulation.history import Violation
from flagstone.testing.simulation.operators import require_no_damage
from flagstone.testing.simulation.readers import reread, rows_of
from flagstone.testing.simulation.restores import require_restored
from flagstone.testing.simulation.scheduler import Process
from flagstone.testing.simulation.session import Session

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World

QUIET_LIMIT_S: Final = 4 * 3600.0
"""How long the quiet time may take until everything works again."""


def judge(world: World, process: Process) -> None:
    """Raise `Violation` unless everything works again and nothing is left over."""
    machine, main, cast = process.machine, world.main, world.plan.cast
    while world.network.in_flight or any(each.paused for each in world.machines):
        machine.sleep(60)
    started_s = machine.monotonic()
    with world.open(process) as db:
        session = Session(world, main, process, db)
        for number in range(5):
            session.put_durably(b"judge %d" % number)
        session.scan()
        _require_changes(world, process, db.status()["last_seq"])
        db.flush()
        machine.sleep(600)  # compactions come to an end
    world.clones.require_sound(process)
    admin = world.admin(process)
    restored = next(iter(main.checkpoints), None) if "restore" in cast else None
    for checkpoint in main.checkpoints:
        reread(world, process, main, checkpoint)
        if checkpoint != restored:
            admin.delete_checkpoint(checkpoint, force=True)
    require_no_damage(world, admin)
    if machine.monotonic() - started_s > QUIET_LIMIT_S:
        raise Violation(f"recovery took {machine.monotonic() - started_s:.0f} s")
    _require_clean_store(world, process)
    if world.is_damaging:
        require_reported(world, process)
    if restored is not None:
        require_restored(world, process, restored, main.checkpoints[restored])
    rows, _ = rows_of(world, process, MAIN_PATH)
    world.outcome.rows = {row.key: row.value for row in rows if row.expires_ms is None}


def _require_changes(world: World, process: Process, last_seq: int) -> None:
    """Every consumer gets to the end, has received everything, and leaves."""
    for subscription in world.subscriptions.values():
        to_the_end(world, process, subscription)
        require_complete(subscription, world.main.oracle, last_seq)
        WalReader(
            MAIN_PATH,
            pin=subscription.name,
            **world.stores(process),
            clock=process.machine,
            ids=world.ids(process),
        ).release()


def _require_clean_store(world: World, process: Process) -> None:
    """After some rounds of garbage collection nothing is left that no manifest refers to."""
    machine, admin = process.machine, world.admin(process)
    # Past the checkpoints that crashed processes left behind, and past every clock that ran ahead.
    # The record of a bulk load whose driver crashed stays for a day.
    machine.sleep(150_000 if "loader" in world.plan.cast else 50_000)
    world.clones.require_gone(process)
    with world.open(process, compactor=False) as db:
        session = Session(world, world.main, process, db)
        # SSTs that are not older than the newest of L0 may belong to a flush under way.
        session.put_durably(b"judge")
        db.flush()
        session.scan()
    for _ in range(2):
        machine.sleep(4_000)
        report = admin.collect_garbage(min_age=timedelta())
        if report.errors:
            raise Violation(f"garbage collection in the quiet time: {report.errors[0]}")
    found = admin.verify()
    if found.findings:
        raise Violation(f"left over after garbage collection: {found.findings[0]}")
