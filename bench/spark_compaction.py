"""Distributed compaction: more than 2 GB of overlapping sorted runs merged into one, by this process and by Spark.

The database is made once: bulk loads that overwrite and delete rows of each other, and small SSTs in L0 on top. Every
contender compacts a clone of it, which shares its SSTs: this process, Spark with one executor of one core, and Spark with two.
Each result is compared with the local one row by row: keys, values, sequence numbers and times.

`python -m bench.spark_compaction 200 1` runs it with 200 MB, once.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import sized, write_markdown

MEGABYTES = sized(2_300, quickly=20)
ROUNDS = sized(3, quickly=1)
LOADS = 4
L0_SSTS = 3
KEY_BYTES, VALUE_BYTES = 16, 200
DELETED = 0.1
KEYS_PER_ROW = 1.5
"""Different keys per row of a load: about two of three rows overwrite an older one."""
BATCH_ROWS = 65_536
TASKS = 8
LOCAL = "this process"
EXECUTORS = sized({"Spark, 1 executor": 1, "Spark, 2 executors": 2}, quickly={"Spark, 2 executors": 2})
OPTIONS = {"fsync": False}


def batches(load: int, rows: int) -> Iterator[Any]:
    """One load in key order: keys as 16 digits, values that do not compress, every tenth row a deletion."""
    import numpy as np
    import pyarrow as pa

    chance = np.random.default_rng(load)
    step = KEYS_PER_ROW
    noise = np.frombuffer(chance.bytes(BATCH_ROWS + VALUE_BYTES), np.uint8)
    for start in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - start)
        low, high = int(start * step), int((start + count) * step)
        numbers = np.sort(chance.choice(high - low, count, replace=False)) + low
        digits = (numbers[:, None] // 10 ** np.arange(KEY_BYTES - 1, -1, -1) % 10 + ord("0")).astype(np.uint8)
        at = chance.integers(0, BATCH_ROWS, count)
        values = noise[at[:, None] + np.arange(VALUE_BYTES)]
        deleted = chance.random(count) < DELETED
        yield pa.RecordBatch.from_arrays(
            [
                _binary(digits, KEY_BYTES),
                _binary(values, VALUE_BYTES),
                pa.array(np.where(deleted, "delete", "put").astype(object), pa.string()),
            ],
            names=["key", "value", "op"],
        )


def _binary(cells: Any, width: int) -> Any:
    import pyarrow as pa

    rows = len(cells)
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), rows, [None, pa.py_buffer(cells.tobytes())]
    )
    return fixed.cast(pa.binary())


def prepare(store: Path, megabytes: int) -> int:
    """Make the database `base`; returns the bytes of its SSTs."""
    import flagstone
    from flagstone.spark.address import DatabaseAddress
    from flagstone.spark.load.commit import commit_load
    from flagstone.spark.load.request import begin_load
    from flagstone.spark.load.task import write_ssts
    from flagstone.spark.options import parse_write_options

    options = parse_write_options(
        {"path": "base", "store": str(store), "sorted": "true", "store.fsync": "false"}
    )
    rows = megabytes * 1_000_000 // LOADS // (KEY_BYTES + VALUE_BYTES)
    for load in range(LOADS):
        plan = begin_load(DatabaseAddress("base", str(store), None, OPTIONS))
        commit_load(plan, options, write_ssts(batches(load, rows), plan, options))
    settings = flagstone.Settings(compactor_options=None, garbage_collector_options=None)
    with flagstone.open("base", store=str(store), store_options=OPTIONS, settings=settings) as db:
        for sst in range(L0_SSTS):
            for number in range(sst, int(rows * KEYS_PER_ROW), max(1, rows // 5_000)):
                if number % 7:
                    db.put(b"%016d" % number, b"of L0 %d" % sst)
                else:
                    db.delete(b"%016d" % number)
            db.flush("memtable")
    manifest = flagstone.Admin("base", store=str(store)).manifest().value
    assert len(manifest.tree.runs) == LOADS
    assert len(manifest.tree.l0) == L0_SSTS
    return sum(sst.info.estimated_size for sst in manifest.ssts.values())


def measure(name: str, store: str, path: str) -> None:
    """In a process of its own: compacts a database, and prints how many seconds that took."""
    from datetime import timedelta

    import flagstone

    if name == LOCAL:
        admin = flagstone.Admin(path, store=store, store_options=OPTIONS)
        started = time.perf_counter()
        jobs = admin.compact(full=True, patience=timedelta(0))
        taken = time.perf_counter() - started
    else:
        import pyspark

        from flagstone.spark import compact

        spark = _cluster(EXECUTORS[name])
        started = time.perf_counter()
        jobs = compact(
            spark, path, store=store, store_options=OPTIONS, full=True, tasks=TASKS, patience=timedelta(0)
        )
        taken = time.perf_counter() - started
        application = spark.sparkContext.applicationId
        spark.stop()
        # Executors of a local cluster write their logs into PySpark's own folder.
        shutil.rmtree(Path(pyspark.__file__).parent / "work" / application, ignore_errors=True)
    assert len(jobs) == 1
    print(json.dumps(taken), flush=True)


def _cluster(executors: int) -> Any:
    """A session with real executor processes of one core each, all of them started and warm."""
    from flagstone.spark import session

    spark = session(master=f"local-cluster[{executors},1,1024]", spark_log_level="ERROR")

    def warm(given: Iterator[Any]) -> Iterator[Any]:
        import flagstone.spark.jobs.compaction

        assert flagstone.spark.jobs.compaction
        yield from given

    there = spark._jsc.sc().getExecutorMemoryStatus  # noqa: SLF001 - the driver counts as one of them
    while there().size() <= executors:
        time.sleep(0.2)
    spark.range(0, 4 * executors, 1, 4 * executors).mapInArrow(warm, "id long").collect()
    return spark


def compare(store: Path, one: str, other: str) -> int:
    """Compare two databases, which must be equal to the last byte; returns the number of rows."""
    import flagstone
    from flagstone.read.arrow import COLUMNS

    left, right = (flagstone.open_reader(path, store=str(store), mode="latest") for path in (one, other))
    with left, right:
        streams = [iter(each.scan_arrow(columns=COLUMNS)) for each in (left, right)]
        heads: list[Any] = [next(stream, None) for stream in streams]
        rows = 0
        while heads[0] is not None and heads[1] is not None:
            count = min(head.num_rows for head in heads)
            parts = [head.slice(0, count) for head in heads]
            assert parts[0].equals(parts[1]), (
                f"{one} and {other} differ between rows {rows} and {rows + count}"
            )
            rows += count
            for at, head in enumerate(heads):
                heads[at] = head.slice(count) if head.num_rows > count else next(streams[at], None)
        assert heads == [None, None], f"{one} and {other} differ in length, after {rows} rows"
    return rows


def run(megabytes: int = MEGABYTES, rounds: int = ROUNDS) -> str:
    import flagstone

    seconds: dict[str, list[float]] = {name: [] for name in (LOCAL, *EXECUTORS)}
    with tempfile.TemporaryDirectory(prefix="flagstone-bench-") as scratch:
        store = Path(scratch, "store")
        store.mkdir()
        size = prepare(store, megabytes)
        rows = 0
        for turn in range(rounds):
            for number, (name, taken) in enumerate(seconds.items()):
                copy = f"copy-{turn}-{number}"
                flagstone.Admin("base", store=str(store), store_options=OPTIONS).clone(copy)
                command = [sys.executable, "-m", "bench.spark_compaction", "measure", name, str(store), copy]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
                taken.append(json.loads(done.stdout.splitlines()[-1]))
                if name == LOCAL and turn == 0:
                    reference = copy
                    continue
                rows = compare(store, reference, copy)
                shutil.rmtree(store / copy)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    alone = medians.get("Spark, 1 executor")
    table = [
        [
            name,
            f"{taken:.1f} s",
            f"{size / 1e6 / taken:.0f}",
            "" if alone is None or name == LOCAL else f"{alone / taken:.2f}×",
        ]
        for name, taken in medians.items()
    ]
    return write_markdown(
        "spark-compaction",
        "Distributed compaction on Spark",
        ["merged by", "time", "MB/s", "against one executor"],
        table,
        [
            f"{size / 1e9:.2f} GB in {LOADS} overlapping runs and {L0_SSTS} SSTs in L0 become one sorted run of {rows:,} rows:",
            f"{KEY_BYTES}-byte keys, {VALUE_BYTES}-byte values, two of three rows overwritten, every tenth a deletion.",
            f"Executors are processes with one core (local-cluster), jobs are cut into {TASKS} ranges; sessions were warm.",
            "This process uses its default of four threads. Keys, values, sequence numbers and times of every row of every",
            "result are those of the first local one. A folder without fsync; MB are of the SSTs that go in.",
        ],
        basis=f"Medians of {rounds} rounds, each in a fresh process." if rounds > 1 else "One round.",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:5])
    else:
        print(run(*map(int, sys.argv[1:3])))
