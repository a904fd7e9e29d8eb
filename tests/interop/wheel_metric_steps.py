"""Performs the steps of `test_metric_counts.py` with the official wheel and prints its metrics after each as JSON.

Run as a script in its own process, because the wheel starts threads that outlive the database.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from slatedb.uniffi import (
    DbBuilder,
    DefaultMetricsRecorder,
    FlushOptions,
    FlushType,
    IsolationLevel,
    MergeOptions,
    ObjectStore,
    PutOptions,
    Settings,
    Ttl,
    WriteBatch,
    WriteOptions,
)
from wheel_process import EVERYTHING, Concatenation, collect

QUICKLY = WriteOptions(seqnum=0)


async def perform(db: Any, step: list[Any]) -> None:
    verb, *arguments = step
    given = [each.encode() if isinstance(each, str) else each for each in arguments]
    match verb:
        case "put":
            await db.put_with_options(*given, PutOptions(ttl=Ttl.DEFAULT()), QUICKLY)
        case "delete":
            await db.delete_with_options(*given, QUICKLY)
        case "merge":
            await db.merge_with_options(*given, MergeOptions(ttl=Ttl.DEFAULT()), QUICKLY)
        case "batch":
            batch = WriteBatch()
            for key in arguments[0]:
                batch.put(key.encode(), b"value")
            await db.write_with_options(batch, QUICKLY)
        case "transaction":
            transaction = await db.begin(IsolationLevel.SNAPSHOT)
            await transaction.get(given[0])
            await transaction.put(given[0], b"value")
            await transaction.commit()
        case "snapshot":
            snapshot = await db.snapshot()
            await snapshot.get(given[0])
            await collect(await snapshot.scan(EVERYTHING))
        case "get":
            await db.get(given[0])
        case "row":
            await db.get_key_value(given[0])
        case "scan":
            await collect(await db.scan(EVERYTHING))
        case "flush":
            kind = {"wal": FlushType.WAL, "memtable": FlushType.MEM_TABLE}[arguments[0]]
            await db.flush_with_options(FlushOptions(flush_type=kind))


async def main(steps: list[list[Any]]) -> None:
    settings = json.loads(Settings.default().to_json_string())
    settings |= {"compactor_options": None, "garbage_collector_options": None, "flush_interval": "1000s"}
    settings |= {"manifest_poll_interval": "1000s", "min_filter_keys": 1, "metric_level": "Debug"}
    recorder = DefaultMetricsRecorder()
    builder = DbBuilder("db", ObjectStore.resolve("memory:///"))
    builder.with_settings(Settings.from_json_string(json.dumps(settings)))
    builder.with_metrics_recorder(recorder)
    builder.with_merge_operator(Concatenation())
    db = await builder.build()

    def taken() -> dict[str, float]:
        found = {}
        for metric in recorder.snapshot():
            labels = sorted((label.key, label.value) for label in metric.labels)
            shown = f"{{{','.join(f'{key}={value}' for key, value in labels)}}}" if labels else ""
            if not metric.value.is_histogram():
                found[metric.name + shown] = metric.value[0]
        return found

    await asyncio.sleep(0.1)  # the first tick of the flush timer is before the first write
    answers = [taken()]
    for step in steps:
        await perform(db, step)
        answers.append(taken())
    await db.shutdown()
    answers.append(taken())
    print(json.dumps(answers))


asyncio.run(main(json.loads(sys.argv[1])))
