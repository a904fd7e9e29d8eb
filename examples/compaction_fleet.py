"""A compaction fleet: SlateDB writes and schedules compactions, and Spark's executors merge.

    pip install slatedb==0.17.0
    python examples/compaction_fleet.py

The writer here is the official Python package of SlateDB, which contains its Rust engine; a service in Rust, Go or Java
works the same way. Its compactor only coordinates (`worker` is null): it writes jobs into the compactions file, waits
until a worker has done them, and commits. Spark claims the jobs and runs one task per key range, which reads and writes
the object store directly. For a permanent fleet, use `flagstone run-worker --spark`, or the two lines of
`serve_with_spark` in a job of your own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import flagstone
import flagstone.spark as fs
from flagstone.config import CompactionWorkerOptions
from flagstone.runtime.sync import Event

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS, ROUNDS = 2000, 6
PATIENCE_S = 120
WITHOUT_SLATEDB = "the writer of this example is SlateDB's own: `pip install slatedb==0.17.0` first"


async def write_with_slatedb(folder: Path) -> None:
    """The service: a SlateDB that writes, and schedules compactions but runs none."""
    from slatedb.uniffi import (  # noqa: PLC0415 - an optional dependency
        DbBuilder,
        FlushOptions,
        FlushType,
        ObjectStoreBuilder,
        Settings,
        WriteBatch,
    )

    settings = json.loads(Settings.default().to_json_string())
    settings["compactor_options"]["worker"] = None
    settings["compactor_options"]["poll_interval"] = "200ms"
    settings["compactor_options"]["commit_compacted_interval"] = "200ms"
    builder = DbBuilder("shop", ObjectStoreBuilder.from_url(f"file://{folder}").build())
    builder.with_settings(Settings.from_json_string(json.dumps(settings)))
    db = await builder.build()
    for turn in range(ROUNDS):
        batch = WriteBatch()
        for number in range(ROWS):
            batch.put(b"order/%08d" % (number * (turn + 1) % ROWS), b"round %d" % turn)
        await db.write(batch)
        await db.flush_with_options(FlushOptions(flush_type=FlushType.MEM_TABLE))
    print("written", flush=True)
    sys.stdin.readline()  # coordinates until the parent process ends it
    await db.shutdown()


def serve_with_spark(spark: SparkSession, url: Path, stop: Event) -> None:
    """Runs on the cluster until it is stopped: claims jobs and runs them."""
    options = CompactionWorkerOptions(compactions_poll_interval=timedelta(milliseconds=200))
    fs.run_worker(spark, url, options=options, stop=stop)


def main(spark: SparkSession, folder: Path) -> None:
    if find_spec("slatedb") is None:
        print(WITHOUT_SLATEDB)
        return
    url, stop, admin = folder / "shop", Event(), flagstone.Admin(folder / "shop")
    with (
        subprocess.Popen(
            [sys.executable, __file__, "--writer", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n", "SlateDB failed; see its output above"
        print(f"SlateDB has written {ROUNDS} SSTs of {ROWS:,} rows, and waits for a worker")
        fleet = pool.submit(serve_with_spark, spark, url, stop)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not admin.manifest().value.tree.runs:
                if fleet.done() or time.monotonic() > deadline:
                    raise TimeoutError("no compaction was committed")
                time.sleep(0.2)
        finally:
            stop.set()
            fleet.result(timeout=PATIENCE_S)
            writer.communicate("end\n", timeout=PATIENCE_S)
    tree = admin.manifest().value.tree
    print(
        f"Spark has merged, SlateDB has committed: {len(tree.l0)} SSTs in L0, {len(tree.runs)} sorted run(s) now"
    )
    with flagstone.open_reader(url) as reader:
        found = dict(reader.scan())
    expected = {
        b"order/%08d" % (number * (turn + 1) % ROWS): b"round %d" % turn
        for turn in range(ROUNDS)
        for number in range(ROWS)
    }
    assert found == expected
    assert admin.verify().ok
    print(f"{len(found):,} rows, all as they were written")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--writer"]:
        import asyncio

        asyncio.run(write_with_slatedb(Path(sys.argv[2])))
    elif find_spec("slatedb") is None:
        sys.exit(WITHOUT_SLATEDB)
    else:
        session = fs.session(app_name="compaction fleet", spark_log_level="ERROR")
        with tempfile.TemporaryDirectory() as made:
            main(session, Path(made))
        session.stop()
