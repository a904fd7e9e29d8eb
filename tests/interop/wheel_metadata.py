"""Lets the official wheel read and rewrite our metadata, and prints what it read as JSON.

    wheel_metadata.py open FOLDER      read by Admin and DbReader, then open for writing and write one row
    wheel_metadata.py rewrite FOLDER   add a checkpoint and a compaction job, which rewrites both files

A script in its own process, because the wheel starts threads that outlive the database.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from slatedb.uniffi import (
    AdminBuilder,
    CheckpointOptions,
    CompactionSpec,
    DbBuilder,
    DbReaderBuilder,
    FlushOptions,
    FlushType,
    KeyRange,
    ObjectStore,
    ReaderMode,
    SourceId,
)


async def rows_of(reader: Any) -> list[list[str]]:
    whole = KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)
    iterator = await reader.scan(whole)
    rows = []
    while (row := await iterator.next()) is not None:
        rows.append([row.key.hex(), row.value.hex()])
    return rows


async def open_database(path: str, store: ObjectStore) -> dict[str, Any]:
    admin = AdminBuilder(path, store).build()
    manifest = await admin.read_manifest(None)
    checkpoints = await admin.list_checkpoints(None)
    seen: dict[str, Any] = {
        "id": manifest.id,
        "writer_epoch": manifest.writer_epoch,
        "compactor_epoch": manifest.compactor_epoch,
        "last_l0_seq": manifest.last_l0_seq,
        "next_wal_sst_id": manifest.next_wal_sst_id,
        "checkpoints": [[entry.id, entry.name, entry.manifest_id] for entry in checkpoints],
        "time_of_150_down": await admin.get_timestamp_for_sequence(150, False),
        "time_of_150_up": await admin.get_timestamp_for_sequence(150, True),
    }
    for mode in (ReaderMode.CHECKPOINT(checkpoints[0].id), ReaderMode.FOLLOW_LATEST()):
        builder = DbReaderBuilder(path, store)
        builder.with_reader_mode(mode)
        reader = await builder.build()
        seen.setdefault("rows", []).append(await rows_of(reader))
        await reader.shutdown()
    db = await DbBuilder(path, store).build()
    await db.put(b"key", b"value")
    await db.flush_with_options(FlushOptions(flush_type=FlushType.MEM_TABLE))
    seen["written"] = await rows_of(db)
    await db.shutdown()
    return seen


async def rewrite(path: str, store: ObjectStore) -> dict[str, Any]:
    admin = AdminBuilder(path, store).build()
    held = await admin.read_compactions(None)
    await admin.create_detached_checkpoint(CheckpointOptions(lifetime_ms=None, source=None, name="näme"))
    await admin.submit_compaction(
        CompactionSpec.TIERED(
            segment=b"", sources=[SourceId.SORTED_RUN(3), SourceId.SORTED_RUN(1)], destination=1
        )
    )
    return {"jobs": [str(job.status) for job in held.recent_compactions]}


async def main(action: str, folder: str) -> None:
    store = ObjectStore.resolve("file:///")
    path = f"{folder}/db".lstrip("/")
    print(json.dumps(await {"open": open_database, "rewrite": rewrite}[action](path, store)))


asyncio.run(main(*sys.argv[1:]))
