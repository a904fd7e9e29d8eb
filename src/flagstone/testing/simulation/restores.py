"""Restore: a checkpoint becomes the current state again, beside running writers and at the end of a world.

A restore takes effect when its manifest is created, which may be long after its caller gave up. So the link of the
restoring process reports that moment to the oracle. Everything that was written since the checkpoint is gone then, also
what was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import UUID

from flagstone.errors import Closed, CorruptData, InvalidRequest, Unavailable
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import load_manifest
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectVersion
from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.history import Violation
from flagstone.testing.simulation.network import Link
from flagstone.testing.simulation.operators import require_no_damage
from flagstone.testing.simulation.readers import require_same, rows_of, values_of
from flagstone.testing.simulation.scheduler import Process, describe

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World


def restore(world: World, process: Process) -> None:
    """The life of a process that restores checkpoints."""
    while True:
        process.machine.sleep(world.random.expovariate(1 / (60 * world.plan.idle_s)))
        checkpoints = world.main.checkpoints
        if not checkpoints:
            continue
        checkpoint = world.random.choice(list(checkpoints))
        try:
            _restore_once(world, process, checkpoint)
        except (Closed, Unavailable, CorruptData) as error:
            if world.is_unexpected(error):
                raise
            world.scheduler.note(f"restore: {describe(error)}")
        except InvalidRequest:
            if checkpoint in checkpoints:
                raise


def _restore_once(world: World, process: Process, checkpoint: UUID) -> None:
    oracle, known = world.main.oracle, world.main.checkpoints[checkpoint]
    rows, _ = rows_of(world, process, MAIN_PATH, checkpoint)
    require_same(f"checkpoint {checkpoint}", values_of(rows), known)

    def landed(manifest: Manifest) -> None:
        world.scheduler.note(f"restored {checkpoint} at {manifest.last_l0_seq}")
        world.done["restore"] += 1
        oracle.restored(manifest.writer_epoch, manifest.last_l0_seq, rows)

    link = _ReportingLink(world, process, landed)
    made = world.admin(process, store=link).restore(checkpoint, segment_extractor=world.extractor)
    if made.value.last_l0_seq not in [each.seq for each in oracle.restores]:
        raise Violation(f"a restore returned, but manifest {made.id} was not created")


class _ReportingLink(Link):
    """A link that calls `landed` when a manifest with a new state of the database becomes the newest one."""

    def __init__(self, world: World, process: Process, landed: Callable[[Manifest], None]) -> None:
        super().__init__(world.network, process)
        self._objects = world.store
        self._landed = landed
        self._paths = DbPaths(MAIN_PATH)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        data = bytes(data)
        if self._paths.parse_manifest(path) is None:
            return super().put_if_absent(path, data, token=token)

        def effect() -> ObjectVersion:
            newest = [meta.path for meta in self._objects.list(self._paths.manifest_folder)][-1]
            version = self._objects.put_if_absent(path, data, token=token)
            before = load_manifest(self._objects.whole(newest), newest)
            made = load_manifest(data, path)
            # The claims before it leave the sequence number as it is. A late manifest that is not the newest has no
            # effect.
            if path > newest and made.last_l0_seq > before.last_l0_seq:
                self._landed(made)
            return version

        return self._call("put_if_absent", path, effect)


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
    require_no_damage(world, admin)
    world.done["restore"] += 1
