"""What an open database says about itself."""

from __future__ import annotations

from typing import Any

from flagstone.db.engine import Engine


def describe(engine: Engine) -> dict[str, Any]:
    """Where writes, flushes and tables stand, as plain values."""
    manifest, durability, memtables = engine.manifest, engine.durability, engine.committer.memtables
    pause = engine.upload_pause
    failure = durability.failure
    return {
        "path": engine.env.paths.root,
        "store": engine.env.store.url,
        "state": "closed" if engine.closed else "read-only" if failure else "open",
        "failure": None if failure is None else str(failure),
        "manifest_id": manifest.id,
        "writer_epoch": engine.fence.epoch,
        "last_seq": durability.last_seq,
        "committed_seq": durability.committed_seq,
        "durable_seq": durability.durable_seq,
        "last_l0_seq": manifest.value.last_l0_seq,
        "unflushed_bytes": memtables.unflushed_bytes,
        "frozen_memtables": len(memtables.frozen),
        "writers_paused": engine.committer.paused,
        "upload_paused": None if pause is None else pause.message,
        "l0_tables": sum(len(tree.l0) for tree in manifest.value.trees),
        "sorted_runs": sum(len(tree.runs) for tree in manifest.value.trees),
        "pinned_for_long_reads": engine.read_pins.count,
        "compactor": engine.maintenance.status(),
        "garbage_collector": engine.maintenance.garbage_status(),
    }
