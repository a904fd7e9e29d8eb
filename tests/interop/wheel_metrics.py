"""Prints the names of the metrics that the official wheel registers, one per line. Run as a script in its own
process, because the wheel starts threads that outlive the database."""

from __future__ import annotations

import asyncio
import json
import sys

from slatedb.uniffi import (
    DbBuilder,
    DefaultMetricsRecorder,
    FlushOptions,
    FlushType,
    MergeOperator,
    ObjectStore,
    Settings,
)


class Concatenation(MergeOperator):
    def merge(self, key: bytes, existing_value: bytes | None, operand: bytes) -> bytes:
        return (existing_value or b"") + operand


def quick_settings(cache_folder: str) -> Settings:
    settings = json.loads(Settings.default().to_json_string())
    compactor = settings["compactor_options"]
    compactor["poll_interval"] = "20ms"
    compactor["worker"]["compactions_poll_interval"] = "20ms"
    compactor["worker"]["heartbeat_interval"] = "20ms"
    # The wheel registers some metrics only at this level, and others only with a cache on disk.
    for section in (settings, compactor, compactor["worker"]):
        section["metric_level"] = "Debug"
    settings["object_store_cache_options"]["root_folder"] = cache_folder
    return Settings.from_json_string(json.dumps(settings))


async def main(cache_folder: str) -> None:
    recorder = DefaultMetricsRecorder()
    builder = DbBuilder("db", ObjectStore.resolve("memory:///"))
    builder.with_settings(quick_settings(cache_folder))
    builder.with_metrics_recorder(recorder)
    builder.with_merge_operator(Concatenation())
    db = await builder.build()
    for _ in range(5):
        await db.put(b"key", b"value")
        await db.merge(b"merged", b"operand")
        await db.flush_with_options(FlushOptions(flush_type=FlushType.MEM_TABLE))
    await db.get(b"key")
    await db.get(b"missing")
    await asyncio.sleep(0.3)
    await db.shutdown()
    print("\n".join(sorted({metric.name for metric in recorder.snapshot()})))


asyncio.run(main(sys.argv[1]))
