"""A query as Spark runs it, in this process: one sink for the tasks, another for the commit, and repeated batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.request import begin_load
from flagstone.spark.stream.sink import SinkOptions, StreamSink, parse_sink_options
from flagstone.store.port import ObjectStore
from kit.spark_loads import Cells, batch_of

QUERY = "orders"
PROGRESS = b"\0flagstone/stream/orders"


def sink_options(folder: Path, **options: str) -> SinkOptions:
    """The options as Spark passes them, with its own options among them."""
    given: Mapping[str, str] = {
        "path": str(folder),
        "query": QUERY,
        "checkpointLocation": "/some/where",
        **options,
    }
    return parse_sink_options(given)


def on_store(store: ObjectStore) -> SinkOptions:
    """For the database `db` on a store object. A load does not wait for a crashed writer."""
    options, address = sink_options(Path("db")), DatabaseAddress("db", store=store)  # type: ignore[arg-type]
    return replace(options, write=replace(options.write, address=address, hand_over_timeout=timedelta(0)))


def run_tasks(options: SinkOptions, *tasks: Iterable[Cells]) -> list[Any]:
    """The messages of the tasks of one micro-batch."""
    sink = StreamSink(begin_load(options.write.address, owner=options.owner), options)
    return [sink.write(map(batch_of, task)) for task in tasks]


def commit(options: SinkOptions, batch_id: int, messages: Sequence[Any]) -> None:
    StreamSink(None, options).commit(list(messages), batch_id)


def run_batch(options: SinkOptions, batch_id: int, *tasks: Iterable[Cells]) -> list[Any]:
    """A whole micro-batch; if it fails, its SSTs are deleted, as Spark does."""
    messages = run_tasks(options, *tasks)
    try:
        commit(options, batch_id, messages)
    except Exception:
        StreamSink(None, options).abort(messages, batch_id)
        raise
    return messages
