"""A session with real executors, which are killed during loads, reads, compactions and streams. For `test_kills.py`.

    python kill_session.py FOLDER ROUNDS SEED

Every round kills, in each kind of job, an executor or all its Python processes. The results of the jobs go to
FOLDER/report.json; the test that started this program checks the databases.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyspark

import flagstone
import flagstone.spark as fs
from flagstone.config import CompactionWorkerOptions, CompactorOptions, Settings
from flagstone.spark.sessions import wrapped_runtime

ROWS: Final = 60_000
CHANGES: Final = 3_000
SST_BYTES: Final = 200_000
QUIET: Final = Settings(compactor_options=None, garbage_collector_options=None)
PATIENCE_S: Final = 240
NOTICED_S: Final = 1.5
"""How long Spark may take to notice that a process is gone."""


@dataclass
class Kill:
    """The killed process, and the number of tasks that failed with it."""

    job: str
    victim: str
    tasks_lost: int = 0
    seconds: float = 0.0


def descendants(pid: int) -> dict[int, str]:
    """All descendants of the process `pid`, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, front = dict[int, str](), [pid]
    while front:
        parent = front.pop()
        for child in [each for each, its in parents.items() if its == parent]:
            front.append(child)
            try:
                line = (
                    Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            found[child] = line
    return found


def victims(kind: str) -> list[list[int]]:
    """The processes to kill for each executor of this session: the executor, or all its Python processes."""
    executors = [
        pid for pid, line in descendants(os.getpid()).items() if "CoarseGrainedExecutorBackend" in line
    ]
    if kind == "executor":
        return [[pid] for pid in executors]
    below = [
        [pid for pid, line in descendants(executor).items() if "pyspark" in line and not descendants(pid)]
        for executor in executors
    ]
    return [pids for pids in below if pids]


def failed_tasks(spark: Any) -> int:
    """How many task attempts of this session have failed so far."""
    jobs = spark._jsc.sc().statusStore().jobsList(None)
    return sum(jobs.apply(at).numFailedTasks() for at in range(jobs.size()))


@contextmanager
def killing(
    spark: Any, job: str, kind: str, when: Callable[[], bool], chance: random.Random
) -> Iterator[list[Kill]]:
    """Kill a process of that kind as soon as `when` is true, in the middle of the job.

    The processes of an executor may be idle, or between two tasks. Then those of another one are killed.
    """
    kills: list[Kill] = []
    over, before = threading.Event(), failed_tasks(spark)

    def work() -> None:
        while not over.is_set():
            if not when():
                time.sleep(0.01)
                continue
            found = victims(kind)
            if not found:
                time.sleep(0.01)
                continue
            for pid in chance.choice(found):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not kills:
                kills.append(Kill(job, kind))
            if struck():
                return

    def struck() -> bool:
        """Whether a task has failed, a moment after a kill."""
        noticed_by = time.monotonic() + NOTICED_S
        while not over.is_set() and time.monotonic() < noticed_by:
            if failed_tasks(spark) > before:
                return True
            time.sleep(0.05)
        return False

    thread, began = threading.Thread(target=work), time.monotonic()
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()
        for kill in kills:
            kill.seconds = time.monotonic() - began
            kill.tasks_lost = failed_tasks(spark) - before


def ssts_of(folder: Path) -> set[str]:
    return {path.name for path in (folder / "compacted").glob("*.sst")} if folder.exists() else set()


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches with pauses, so that a kill hits a running task."""
    for batch in batches:
        time.sleep(0.05)
        yield batch


def numbered(spark: Any, text: str) -> Any:
    """All rows, sorted by key, with values that contain their origin."""
    return spark.range(0, ROWS, 1, 4).selectExpr(
        "cast(concat('k', lpad(cast(id as string), 8, '0')) as binary) as key",
        f"cast(concat('{text} ', id, repeat('.', 80)) as binary) as value",
    )


def load(spark: Any, folder: Path, kind: str, chance: random.Random) -> tuple[list[Kill], Any]:
    rows = numbered(spark, "loaded")
    with killing(spark, "load", kind, lambda: bool(ssts_of(folder)), chance) as kills:
        report = fs.bulk_load(
            rows.mapInArrow(slowly, rows.schema), folder, presorted=True, max_sst_size=SST_BYTES
        )
    assert report is not None
    return kills, report.rows


def read(spark: Any, folder: Path, kind: str, chance: random.Random) -> tuple[list[Kill], Any]:
    seen = folder.parent / "seen"

    def touching(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in slowly(batches):
            seen.touch()
            yield batch

    frame = spark.read.format("flagstone").options(partitions=6, batch_rows=1000).load(str(folder))
    with killing(spark, "read", kind, seen.exists, chance) as kills:
        shown = frame.mapInArrow(touching, frame.schema).selectExpr(
            "count(*) as rows", "count(distinct key) as keys", "sum(crc32(concat(key, value))) as checksum"
        )
        [row] = shown.collect()
    seen.unlink()
    return kills, row.asDict()


def compact(spark: Any, folder: Path, kind: str, chance: random.Random) -> tuple[list[Kill], Any]:
    for turn in range(2):
        fs.bulk_load(
            numbered(spark, f"turn {turn}").where(f"crc32(key) % 3 = {turn}"), folder, presorted=True
        )
    before = ssts_of(folder)
    options = CompactorOptions(worker=CompactionWorkerOptions(max_sst_size=SST_BYTES))
    with killing(spark, "compaction", kind, lambda: bool(ssts_of(folder) - before), chance) as kills:
        jobs = fs.compact(spark, folder, full=True, tasks=4, options=options)
    return kills, len(jobs)


def stream(spark: Any, folder: Path, kind: str, chance: random.Random) -> tuple[list[Kill], Any]:
    """A stream of changes into another database. Each change is an operand for a separate counter."""
    source, target = folder.parent / "source", folder.parent / "target"
    with flagstone.open(source, settings=QUIET) as db:
        for number in range(CHANGES):
            db.put(b"c%06d" % number, b"x")
            if number % 100 == 99:
                db.flush("wal")
    changes = (
        spark.readStream.format("flagstone")
        .options(consumer="kills", starting="earliest", max_files_per_trigger="10", partitions="4")
        .load(str(source))
        .selectExpr("key", "X'0100000000000000' as value", "'merge' as op")
    )
    with killing(spark, "stream", kind, lambda: bool(ssts_of(target)), chance) as kills:
        query = (
            changes.mapInArrow(slowly, changes.schema)
            .writeStream.format("flagstone")
            .options(checkpointLocation=str(folder.parent / "state"), max_sst_size="4096")
            .trigger(availableNow=True)
            .start(str(target))
        )
        assert query.awaitTermination(PATIENCE_S), "the query does not end"
    return kills, query.exception() and str(query.exception())


JOBS: Final = {"load": load, "read": read, "compaction": compact, "stream": stream}


def main(base: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    os.environ.setdefault("JAVA_HOME", str(wrapped_runtime()))
    spark = fs.session(
        master="local-cluster[2,1,1024]",
        app_name="flagstone kills",
        spark_log_level="OFF",
        spark_sql_shuffle_partitions=2,
        spark_executor_memory="512m",
        **{
            "spark.sql.execution.arrow.maxRecordsPerBatch": 1000,
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
    )
    application = spark.sparkContext.applicationId
    reports: list[dict[str, Any]] = []
    try:
        for number in range(rounds):
            folder = base / f"round {number}" / "db"
            folder.parent.mkdir()
            answers: dict[str, Any] = {"folder": str(folder.parent), "kills": [], "answers": {}}
            for job, run in JOBS.items():
                # The first round kills executors, the hardest case; later rounds choose.
                kind = "executor" if number == 0 else chance.choice(["executor", "python"])
                kills, answer = run(spark, folder, kind, chance)
                answers["kills"] += [asdict(kill) for kill in kills]
                answers["answers"][job] = answer
                print(job, answer, kills, flush=True)
            reports.append(answers)
            (base / "report.json").write_text(json.dumps(reports))
    finally:
        spark.stop()
        # Spark's workers write the logs of executors into the folder of PySpark.
        shutil.rmtree(Path(pyspark.__file__).parent / "work" / application, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
