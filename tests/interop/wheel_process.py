"""Serves calls to the official wheel, in a process of its own, over standard input and output.

The wheel starts threads that outlive its databases and could take our test process down with them. One call
is one pickled tuple (name, arguments); the answer is (True, result) or (False, text of the error).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import sys
from typing import Any

from slatedb.uniffi import (
    AdminBuilder,
    CompactionSpec,
    DbBuilder,
    DbReaderBuilder,
    Error,
    FlushOptions,
    FlushType,
    KeyRange,
    MergeOperator,
    ObjectStore,
    ObjectStoreBuilder,
    PrefixExtractor,
    PrefixTarget,
    PutOptions,
    ReaderMode,
    Settings,
    SourceId,
    SstBlockSize,
    Ttl,
    WriteBatch,
    WriteOptions,
)

EVERYTHING = KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)


class Concatenation(MergeOperator):
    def merge(self, key: bytes, existing_value: bytes | None, operand: bytes) -> bytes:
        return (existing_value or b"") + operand


class FirstThree(PrefixExtractor):
    def name(self) -> str:
        return "first3"

    def prefix_len(self, target: PrefixTarget) -> int | None:
        return 3


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


async def build(folder: str, path: str, *, segments: bool = False, **changes: Any) -> Any:
    """A database open for writing, merging by concatenation; with `segments` split by the first three bytes."""
    builder = DbBuilder(path, store(folder))
    builder.with_merge_operator(Concatenation())
    builder.with_settings(settings(**changes))
    if segments:
        builder.with_segment_extractor(FirstThree())
    return await builder.build()


async def perform(db: Any, operation: tuple[Any, ...]) -> None:
    """One operation: ("put", key, value[, ttl_ms]), ("delete", key), ("merge", key, operand), ("batch", …), …"""
    match operation:
        case ("put", key, value):
            await db.put(key, value)
        case ("put", key, value, ttl_ms):
            options = PutOptions(ttl=Ttl.EXPIRE_AFTER_MILLIS(ttl_ms))
            await db.put_with_options(key, value, options, WriteOptions(seqnum=0))
        case ("delete", key):
            await db.delete(key)
        case ("merge", key, operand):
            await db.merge(key, operand)
        case ("batch", operations):
            batch = WriteBatch()
            for verb, *arguments in operations:
                getattr(batch, verb)(*arguments)
            await db.write(batch)
        case ("flush", "wal"):
            await db.flush()
        case ("flush", "memtable"):
            await db.flush_with_options(FlushOptions(flush_type=FlushType.MEM_TABLE))


async def apply(
    folder: str, path: str, operations: list[tuple[Any, ...]], *, segments: bool = False, **changes: Any
) -> dict[bytes, bytes]:
    """Open, perform everything, scan, close; returns what the scan saw."""
    db = await build(folder, path, segments=segments, **changes)
    try:
        for operation in operations:
            await perform(db, operation)
        return await collect(await db.scan(EVERYTHING))
    finally:
        await db.shutdown()


held: dict[str, Any] = {}


async def hold(folder: str, path: str) -> None:
    """Open for writing and stay open, for duels."""
    held[path] = await build(folder, path)


async def held_put(path: str, key: bytes, value: bytes) -> str:
    """A durable put by the held writer: "durable", or the text of the refusal."""
    try:
        handle = await held[path].put(key, value)
        await held[path].flush()
        await handle.await_durable()
    except Error as error:
        return str(error)
    return "durable"


async def release(path: str) -> None:
    """Close the held writer, whatever state it is in."""
    with contextlib.suppress(Error):
        await held.pop(path).shutdown()


CALLS = {
    function.__name__: function
    for function in (scan, get_many, compact_everything, apply, hold, held_put, release)
}


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
