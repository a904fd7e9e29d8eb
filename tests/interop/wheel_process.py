"""Serves calls to the official wheel over standard input and output, in its own process.

The wheel starts threads that outlive its databases and could crash our test process. One call
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
    CheckpointOptions,
    CloneSourceSpec,
    CompactionSpec,
    DbBuilder,
    DbReaderBuilder,
    Error,
    FlushOptions,
    FlushType,
    GarbageCollectorDirectoryOptions,
    GarbageCollectorOptions,
    IsolationLevel,
    KeyRange,
    MergeOperator,
    MergeOptions,
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
from wheel_records import read_metadata

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


def waiting_compactor() -> dict[str, Any]:
    """Compactor options of `settings()` whose scheduler picks no job: only submitted jobs run."""
    options: dict[str, Any] = json.loads(settings().to_json_string())["compactor_options"]
    options["scheduler_options"] = {"min_compaction_sources": "1000", "max_compaction_sources": "1000"}
    return options


async def collect(iterator: Any) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while rows := await iterator.next_batch(1000):
        found.update((row.key, row.value) for row in rows)
    return found


async def scan(
    folder: str, path: str, *, checkpoint: str | None = None, wal_folder: str | None = None
) -> Any:
    """All rows as a reader without a checkpoint sees them."""
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


async def compact(
    folder: str,
    path: str,
    *,
    l0: bool = True,
    runs: list[int] | None = None,
    destination: int | None = None,
    worker: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[bytes, bytes]:
    """Open for writing, merge all of L0 (or none) and some runs (None: all) into one, and scan the result.

    `worker` are options of the worker, `changes` top-level settings.
    """
    compactor = waiting_compactor()
    compactor["worker"].update(worker or {})
    builder = DbBuilder(path, store(folder))
    builder.with_merge_operator(Concatenation())
    builder.with_sst_block_size(SstBlockSize.BLOCK4_KIB)
    builder.with_settings(settings(compactor_options=compactor, **changes))
    db = await builder.build()
    try:
        admin = AdminBuilder(path, store(folder)).build()
        manifest = await admin.read_manifest(None)
        taken = [run.id for run in manifest.compacted] if runs is None else runs
        sources = [SourceId.SST_VIEW(view.id) for view in manifest.l0] if l0 else []
        sources += [SourceId.SORTED_RUN(run) for run in taken]
        submitted = await admin.submit_compaction(
            CompactionSpec.TIERED(
                segment=b"",
                sources=sources,
                destination=min(taken, default=0) if destination is None else destination,
            )
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


async def compact_everything(folder: str, path: str, *, codec: str | None = None) -> dict[bytes, bytes]:
    """`compact` all SSTs and sorted runs."""
    return await compact(folder, path, compression_codec=codec)


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
    """Open, perform all operations, scan, close; returns the rows of the scan."""
    db = await build(folder, path, segments=segments, **changes)
    try:
        for operation in operations:
            await perform(db, operation)
        return await collect(await db.scan(EVERYTHING))
    finally:
        await db.shutdown()


held: dict[str, Any] = {}


async def hold(
    folder: str,
    path: str,
    *,
    coordinator: dict[str, Any] | None = None,
    segments: bool = False,
    **changes: Any,
) -> None:
    """Open for writing and stay open; with `coordinator` options it coordinates compactions without a worker."""
    if coordinator is not None:
        changes["compactor_options"] = coordinator_only(**coordinator)
    held[path] = await build(folder, path, segments=segments, **changes)


async def held_apply(path: str, operations: list[tuple[Any, ...]]) -> None:
    """Let the held writer perform operations."""
    for operation in operations:
        await perform(held[path], operation)


async def held_scan(path: str) -> dict[bytes, bytes]:
    """All rows as the held writer sees them."""
    return await collect(await held[path].scan(EVERYTHING))


async def held_put(path: str, key: bytes, value: bytes) -> str:
    """A durable put by the held writer: "durable", or the text of the error."""
    try:
        handle = await held[path].put(key, value)
        await held[path].flush()
        await handle.await_durable()
    except Error as error:
        return str(error)
    return "durable"


async def release(path: str) -> None:
    """Close the held writer in any state."""
    with contextlib.suppress(Error):
        await held.pop(path).shutdown()


async def schedule(
    folder: str, path: str, *, segments: bool = False, seconds: float = 0.1, **compactor: Any
) -> None:
    """Open for writing with a coordinator and no worker, so that jobs are scheduled but not executed."""
    db = await build(folder, path, segments=segments, compactor_options=coordinator_only(**compactor))
    await asyncio.sleep(seconds)
    await db.shutdown()


def coordinator_only(**changes: Any) -> dict[str, Any]:
    """Quick compactor options without a worker."""
    quick = {"poll_interval": "10ms", "commit_compacted_interval": "10ms", "worker": None}
    defaults = json.loads(Settings.default().to_json_string())["compactor_options"]
    return {**defaults, **quick, **changes}


async def clone(
    folder: str,
    to: str,
    sources: list[tuple[str, str | None, tuple[bytes | None, bytes | None] | None]],
    *,
    wal_folder: str | None = None,
) -> None:
    """A clone of one source, or a union of several; each is a path, a checkpoint or None, and a range or None."""
    specs = [
        CloneSourceSpec(
            path=path,
            checkpoint=checkpoint,
            projection_range=keys
            and KeyRange(start=keys[0], start_inclusive=True, end=keys[1], end_inclusive=False),
        )
        for path, checkpoint, keys in sources
    ]
    admin = AdminBuilder(sources[0][0], store(folder))
    if wal_folder is not None:
        admin.with_wal_object_store(store(wal_folder))
    builder = admin.build().create_clone_builder_from_source(specs[0])
    builder.with_clone_path(to)
    builder.with_object_store(store(folder))
    if wal_folder is not None:
        builder.with_wal_object_store(store(wal_folder))
    for spec in specs[1:]:
        builder.with_source(spec)
    await builder.build()


async def create_checkpoint(
    folder: str,
    path: str,
    *,
    name: str | None = None,
    source: str | None = None,
    lifetime_ms: int | None = None,
) -> tuple[str, int]:
    options = CheckpointOptions(lifetime_ms=lifetime_ms, source=source, name=name)
    created = await AdminBuilder(path, store(folder)).build().create_detached_checkpoint(options)
    return created.id, created.manifest_id


async def list_checkpoints(folder: str, path: str) -> list[tuple[str, int, str | None]]:
    found = await AdminBuilder(path, store(folder)).build().list_checkpoints(None)
    return [(entry.id, entry.manifest_id, entry.name) for entry in found]


async def edit_checkpoint(folder: str, path: str, checkpoint: str, lifetime_ms: int | None) -> None:
    """Refresh the checkpoint, or delete it with a lifetime of 0."""
    admin = AdminBuilder(path, store(folder)).build()
    if lifetime_ms == 0:
        await admin.delete_checkpoint(checkpoint)
    else:
        await admin.refresh_checkpoint(checkpoint, lifetime_ms)


async def refused(call: Any) -> str:
    """The text of the error; fails if there is none."""
    try:
        await call
    except Error as error:
        return str(error)
    raise AssertionError("it was not refused")


async def refusal_of_merge(folder: str, how: str) -> str:
    """The error of a merge in a database without a merge operator."""
    builder = DbBuilder(f"merge-{how}", store(folder))
    builder.with_settings(settings(compactor_options=None))
    db = await builder.build()
    try:
        if how == "db":
            return await refused(db.merge(b"k", b"v"))
        if how == "transaction":
            return await refused((await db.begin(IsolationLevel.SNAPSHOT)).merge(b"k", b"v"))
        batch = WriteBatch()
        batch.merge(b"k", b"v")
        return await refused(db.write(batch))
    finally:
        await db.shutdown()


async def refusal_of_wal_flush(folder: str) -> str:
    """The error of a WAL flush in a database without a WAL."""
    db = await build(folder, "no-wal", wal_enabled=False, compactor_options=None)
    try:
        await db.put_with_options(b"k", b"v", PutOptions(ttl=Ttl.DEFAULT()), WriteOptions(seqnum=0))
        return await refused(db.flush_with_options(FlushOptions(flush_type=FlushType.WAL)))
    finally:
        await db.shutdown()


async def refusal_of_reader(folder: str, path: str) -> str:
    """The error of a reader without merge operator and extractor."""
    return await refused(DbReaderBuilder(path, store(folder)).build())


async def refuses_ttls(folder: str, ttls_ms: list[int]) -> bool:
    """Whether one batch may merge into one key with these times to live."""
    db = await build(folder, "ttls", compactor_options=None)
    batch = WriteBatch()
    for ttl_ms in ttls_ms:
        batch.merge_with_options(b"k", b"v", MergeOptions(ttl=Ttl.EXPIRE_AFTER_MILLIS(ttl_ms)))
    try:
        await db.write(batch)
    except Error:
        return True
    finally:
        await db.shutdown()
    return False


async def named_checkpoints(folder: str, path: str, name: str | None) -> list[str | None]:
    """The names of the checkpoints that match the filter."""
    return [held.name for held in await AdminBuilder(path, store(folder)).build().list_checkpoints(name)]


async def put_expiring(folder: str, path: str, key: bytes, moment: int) -> None:
    """Put a row that expires at a given time."""
    db = await build(folder, path, compactor_options=None)
    options = PutOptions(ttl=Ttl.EXPIRE_AT_MILLIS(moment))
    await db.put_with_options(key, b"v", options, WriteOptions(seqnum=0))
    await db.shutdown()


async def expiry_of(folder: str, path: str, key: bytes) -> int | None:
    """The time at which a reader sees the row expire."""
    builder = DbReaderBuilder(path, store(folder))
    builder.with_reader_mode(ReaderMode.FOLLOW_LATEST())
    reader = await builder.build()
    try:
        row = await reader.get_key_value(key)
        return None if row is None else row.expire_ts
    finally:
        await reader.shutdown()


async def run_gc_once(folder: str, path: str) -> None:
    """Delete everything that the wheel considers garbage, also fences, of any age."""
    now = GarbageCollectorDirectoryOptions(interval_ms=None, min_age_ms=0, dry_run=False)
    options = GarbageCollectorOptions(
        manifest_options=now,
        wal_options=now,
        wal_fence_options=now,
        compacted_options=now,
        compactions_options=now,
        detach_options=None,
        disable_boundary_files=False,
        object_store_max_retries=None,
    )
    await AdminBuilder(path, store(folder)).build().run_gc_once(options)


async def sequence_at(folder: str, path: str, second: int, *, up: bool) -> int | None:
    return await AdminBuilder(path, store(folder)).build().get_sequence_for_timestamp(second, up)


async def time_of(folder: str, path: str, sequence: int, *, up: bool) -> int | None:
    return await AdminBuilder(path, store(folder)).build().get_timestamp_for_sequence(sequence, up)


CALLS = {
    function.__name__: function
    for function in (
        scan,
        get_many,
        compact,
        compact_everything,
        apply,
        hold,
        held_apply,
        held_put,
        held_scan,
        release,
        schedule,
        clone,
        create_checkpoint,
        list_checkpoints,
        edit_checkpoint,
        expiry_of,
        named_checkpoints,
        put_expiring,
        refusal_of_merge,
        refusal_of_reader,
        refusal_of_wal_flush,
        refuses_ttls,
        run_gc_once,
        sequence_at,
        time_of,
        read_metadata,
    )
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
