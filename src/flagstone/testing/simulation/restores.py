"""Restore: at the end of a world, a checkpoint from its troubled time becomes the current state again."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.operators import require_no_damage
from flagstone.testing.simulation.readers import require_same, rows_of, values_of
from flagstone.testing.simulation.scheduler import Process

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World


def require_restored(world: World, process: Process, checkpoint: UUID, rows: dict[bytes, bytes]) -> None:
    """The database shows the rows of the checkpoint, takes new writes, and is sound."""
    admin = world.admin(process)
    before = admin.manifest().value.last_l0_seq
    admin.restore(checkpoint, segment_extractor=world.extractor)
    restored, _ = rows_of(world, process, MAIN_PATH)
    require_same("the restored database", values_of(restored), rows)
    value = world.new_value()
    # With a compactor: the restored L0 may be full.
    with world.open(process) as db:
        handle = db.put(b"judge restored", value)
        handle.wait()
    found, seq = rows_of(world, process, MAIN_PATH)
    shown = values_of(found)
    # A compaction drops rows that have expired.
    lasting = {row.key: row.value for row in restored if row.key in shown or row.expires_ms is None}
    require_same("the restored database", shown, {**lasting, b"judge restored": value})
    assert seq == handle.seq > before, "sequence numbers go on"
    found, _ = rows_of(world, process, MAIN_PATH, checkpoint)
    require_same(f"checkpoint {checkpoint}", values_of(found), rows)
    require_no_damage(admin)
    world.done["restore"] += 1
