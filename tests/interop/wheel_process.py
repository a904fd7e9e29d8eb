"""Serves calls to the official wheel, in a process of its own, over standard input and output.

The wheel starts threads that outlive its databases and could take our test process down with them. One call
is one pickled tuple (name, arguments); the answer is (True, result) or (False, text of the error).
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from typing import Any

from slatedb.uniffi import (
    AdminBuilder,
    CompactionSpec,
    DbBuilder,
    DbReaderBuilder,
    KeyRange,
    MergeOperator,
    ObjectStore,
    ObjectStoreBuilder,
    ReaderMode,
    Settings,
    SourceId,
    SstBlockSize,
)

EVERYTHING = KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)


class Concatenation(MergeOperator):
    def merge(self, key: bytes, existing_value: bytes | None, operand: bytes) -> bytes:
        return (existing_value or b"") + operand


def store(folder: str) -> ObjectStore:
    return ObjectStoreBuilder.from_url(f"file://{folder}").build()


def settings(**changes: Any) -> Settings:
    """Defaults with quick polling, so that a compaction takes milliseconds; `changes` are top-level keys."""
    values = json.loads(Settings.default().to_json_string())
    compactor = values["compactor_options"]
    compactor["poll_interval"] = compactor["commit_compacted_interval"] = "10ms"
    compactor["worker"]["compactions_poll_interval"] = "10ms"
    values["manifest_poll_interval"] = "50ms"
    values["garbage_collector_options"] = None
    values.update(changes)
    return Settings.from_json_string(json.dumps(values))


async def collect(iterator: Any) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while rows := await iterator.next_batch(1000):
        found.update((row.key, row.value) for row in rows)
    return found


async def scan(
    folder: str, path: str, *, checkpoint: str | None = None, wal_folder: str | None = None
) -> Any:
    """All rows as a reader sees them that writes nothing."""
    builder = DbReaderBuilder(path, store(folder))
    builder.with_merge_operator(Concatenation())
    builder.with_reader_mode(
        ReaderMode.FOLLOW_LATEST() if checkpoint is None else ReaderMode.CHECKPOINT(checkpoint)
    )
    if wal_folder is not None:
        builder.with_wal_object_store(store(wal_folder))
    reader = await builder.build()
    try:
        return await collect(await reader.scan(EVERYTHING))
    finally:
        await reader.shutdown()


async def get_many(folder: str, path: str, keys: list[bytes]) -> list[bytes | None]:
    """Point reads, which go through the filters."""
    builder = DbReaderBuilder(path, store(folder))
    builder.with_merge_operator(Concatenation())
    builder.with_reader_mode(ReaderMode.FOLLOW_LATEST())
    reader = await builder.build()
    try:
        return [await reader.get(key) for key in keys]
    finally:
        await reader.shutdown()


async def compact_everything(folder: str, path: str, *, codec: str | None = None) -> dict[bytes, bytes]:
    """Open for writing, merge all of L0 and all runs into one run, and scan the result."""
    builder = DbBuilder(path, store(folder))
    builder.with_merge_operator(Concatenation())
    builder.with_sst_block_size(SstBlockSize.BLOCK4_KIB)
    builder.with_settings(settings(compression_codec=codec))
    db = await builder.build()
    try:
        admin = AdminBuilder(path, store(folder)).build()
        manifest = await admin.read_manifest(None)
        sources = [SourceId.SST_VIEW(view.id) for view in manifest.l0]
        sources += [SourceId.SORTED_RUN(run.id) for run in manifest.compacted]
        destination = min((run.id for run in manifest.compacted), default=0)
        submitted = await admin.submit_compaction(
            CompactionSpec.TIERED(segment=b"", sources=sources, destination=destination)
        )
        for _ in range(1000):
            current = await admin.read_compaction(submitted.id, None)
            if current is None or current.status.name in ("COMPLETED", "FAILED"):
                break
            await asyncio.sleep(0.01)
        assert current is None or current.status.name == "COMPLETED", current
        return await collect(await db.scan(EVERYTHING))
    finally:
        await db.shutdown()


CALLS = {function.__name__: function for function in (scan, get_many, compact_everything)}


async def serve() -> None:
    while True:
        try:
            name, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, await CALLS[name](*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - every failure is an answer
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(serve())
