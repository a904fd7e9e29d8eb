"""The operator: garbage collection, compactions on demand, verification, and a second look at checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flagstone.db.admin.admin import Admin
from flagstone.errors import Closed, CorruptData, InvalidRequest, TransactionConflict, Unavailable
from flagstone.testing.simulation.databases import Concatenation
from flagstone.testing.simulation.history import Violation
from flagstone.testing.simulation.plan import GARBAGE_AGE
from flagstone.testing.simulation.readers import reread
from flagstone.testing.simulation.scheduler import Process, describe

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World


def operate(world: World, process: Process) -> None:
    """The life of an operator's process."""
    while True:
        process.machine.sleep(world.random.expovariate(1 / (10 * world.plan.idle_s)))
        try:
            _maintain(world, process)
        except (Closed, Unavailable, TransactionConflict, CorruptData, InvalidRequest) as error:
            if world.is_unexpected(error):
                raise
            world.scheduler.note(f"operator: {describe(error)}")


def _maintain(world: World, process: Process) -> None:
    admin, random, checkpoints = world.admin(process), world.random, world.main.checkpoints
    choice = random.randrange(4)
    if choice == 0:
        admin.collect_garbage(min_age=GARBAGE_AGE)
        world.done["collect"] += 1
    elif choice == 1:
        admin.compact(full=random.random() < 0.5, merge_operator=Concatenation())
        world.done["compact"] += 1
    elif choice == 2 and checkpoints:
        checkpoint = random.choice(list(checkpoints))
        reread(world, process, world.main, checkpoint)
        if random.random() < 0.3:
            rows = checkpoints.pop(checkpoint)
            try:
                admin.delete_checkpoint(checkpoint)
            except InvalidRequest as error:
                if "clone" not in str(error):
                    raise
                checkpoints[checkpoint] = rows
    else:
        require_no_damage(world, admin)
        world.done["verify"] += 1


def require_no_damage(world: World, admin: Admin) -> None:
    """`verify` finds no damage, except that of the director.

    Beside running processes it may find what garbage collection has not deleted yet.
    """
    damage = [finding for finding in admin.verify().findings if finding.severity == "damage"]
    if damage and (world.quiet or not any(world.was_damaged(finding.object) for finding in damage)):
        raise Violation(f"verify: {damage[0]}")
