"""A stream of changes into another database, stopped and broken at random points: every change arrives exactly once.

Each change is an operand for a separate counter, so the counters show missing and repeated changes. A thread writes to
the source meanwhile. `STREAM_RESTARTS` is the number of restarts, and `STREAM_SEED` selects the faults: `make
spark-long`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSourceStreamArrowWriter

import flagstone
from flagstone import Admin, values
from flagstone.lsm.operators import Counter
from flagstone.spark import foreach_batch
from flagstone.spark.datasource import FlagstoneDataSource
from flagstone.spark.stream.sink import StreamSink, parse_sink_options
from kit.databases import QUIET
from kit.spark_loads import shown

RESTARTS = int(os.environ.get("STREAM_RESTARTS", "3"))
SEED = int(os.environ.get("STREAM_SEED", "5"))

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(300 + 60 * RESTARTS),
]
PATIENCE_S = 240
FILES_PER_RUN = 24
ATTEMPTS = 5

# Spark's processes do not find test modules by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Broken(Exception):
    """The error of an injected fault."""


def fault_file(folder: str | Path) -> Path:
    return Path(f"{folder}.fault")


def meet_fault(folder: str, point: str) -> None:
    """Raise, or kill this process, if the fault file names this point. Happens once."""
    wanted = fault_file(folder)
    try:
        fault = json.loads(wanted.read_text())
        if fault["point"] != point:
            return
        wanted.rename(f"{wanted}.met")
    except FileNotFoundError:
        return
    if fault["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)
    raise Broken(point)


class FailingWriter(DataSourceStreamArrowWriter):
    """The sink with faults before and after each of its steps."""

    def __init__(self, sink: StreamSink, folder: str) -> None:
        self._sink = sink
        self._folder = folder

    def write(self, iterator: Iterator[Any]) -> Any:
        meet_fault(self._folder, "before a task")
        made = self._sink.write(iterator)
        meet_fault(self._folder, "after a task")
        return made

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        meet_fault(self._folder, "before the commit")
        self._sink.commit(messages, batchId)
        meet_fault(self._folder, "after the commit")

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        self._sink.abort(messages, batchId)


class FailingSource(FlagstoneDataSource):
    @classmethod
    def name(cls) -> str:
        return "failing"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        folder = self.options["path"]
        if Path(sys._getframe(1).f_code.co_filename).stem == "python_streaming_sink_runner":
            return FailingWriter(StreamSink(None, parse_sink_options(self.options)), folder)
        meet_fault(folder, "before the claim")
        sink = super().streamWriter(schema, overwrite)
        meet_fault(folder, "after the claim")
        return FailingWriter(sink, folder)


SINK_POINTS = [
    "before the claim",
    "after the claim",
    "before a task",
    "after a task",
    "before the commit",
    "after the commit",
]


class Source:
    """A database to which a thread writes, and the written changes: one name per change."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.changes: list[bytes] = []
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self._wanted = threading.Semaphore(0)
        self._db = flagstone.open(folder, settings=QUIET)
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        while not self._over.wait(self._chance.choice((0.05, 0.2, 0.6))):
            if not self._wanted.acquire(timeout=0.1):
                continue
            for _ in range(self._chance.randrange(1, 12)):
                with self._db.batch() as batch:
                    keys = {b"k%d" % self._chance.randrange(40) for _ in range(3)}
                    for key in keys:
                        if self._chance.random() < 0.2:
                            batch.delete(self.stored_key(key))
                        else:
                            batch.put(self.stored_key(key), self.stored_value(key))
                seq = self._db.status()["committed_seq"]
                self.changes += [b"%08d/%s" % (seq, key) for key in keys]
            self._db.flush("wal")

    @contextmanager
    def written(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
            self._db.close()

    def stored_key(self, name: bytes) -> bytes:
        return name

    def stored_value(self, name: bytes) -> bytes:
        return b"v"

    def stream(self, spark: Any, files: int = 8) -> Any:
        """The stream of changes. Each call lets the thread write as many files as a query reads until it fails."""
        self._wanted.release(FILES_PER_RUN)
        return self.read(spark, files)

    def read(self, spark: Any, files: int) -> Any:
        changes = (
            spark.readStream.format("flagstone")
            .options(consumer="model", starting="earliest", max_files_per_trigger=str(files), partitions="2")
            .load(str(self.folder))
        )
        return changes.selectExpr(
            "concat(lpad(cast(seq as string), 8, '0'), '/', cast(key as string)) as key",
            "X'0100000000000000' as value",
            "'merge' as op",
        )


class TypedSource(Source):
    """Rows of ordinary columns, read as such by a query that has no name but the one in Spark's checkpoint."""

    _VALUES = values.codec("row", pa.schema([("size", pa.int64())]))

    def stored_key(self, name: bytes) -> bytes:
        return flagstone.keys.encode(name.decode())

    def stored_value(self, name: bytes) -> bytes:
        return self._VALUES.encode({"size": len(name)})

    def read(self, spark: Any, files: int) -> Any:
        changes = (
            spark.readStream.format("flagstone")
            .schema("op string, name string, size long, seq long")
            .options(
                changes="true", starting="earliest", max_rows_per_trigger=str(30 * files), partitions="2"
            )
            .option("key.columns", "name")
            .load(str(self.folder))
        )
        # A wrong value, or one in a delete, makes a key that no change has.
        size = "case op when 'put' then size = length(name) else size is null end"
        return changes.selectExpr(
            f"cast(concat(lpad(cast(seq as string), 8, '0'), '/', name, if({size}, '', '!')) as binary) as key",
            "X'0100000000000000' as value",
            "'merge' as op",
        )


def end(query: Any) -> Exception | None:
    """Wait until the query has ended; returns its error, if any."""
    try:
        assert query.awaitTermination(PATIENCE_S), "the query does not end"
    except Exception as error:  # noqa: BLE001 - Spark's, judged by the caller
        return error
    return None


def run_until_stopped(query: Any, chance: random.Random) -> None:
    """Stop a query somewhere in the middle of a micro-batch."""
    until = time.monotonic() + PATIENCE_S
    while query.lastProgress is None and query.isActive and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(chance.random() * 1.5)
    query.stop()


def assert_every_change_came_once(source: Source, target: Path) -> None:
    counts = {
        key: Counter.decode(value)
        for key, value in shown(target, merge_operator=Counter()).items()
        if not key.startswith(b"\0")
    }
    missing = [change for change in source.changes if change not in counts]
    assert not missing, f"{len(missing)} of {len(source.changes)} never came, the first is {missing[0]!r}"
    assert counts == dict.fromkeys(source.changes, 1)


def assert_no_orphans(target: Path) -> None:
    with flagstone.open(target, settings=QUIET, merge_operator=Counter()) as db:
        db.put(b"after", b"here")
    Admin(target).collect_garbage(min_age=timedelta())
    assert len(list((target / "compacted").iterdir())) == len(Admin(target).manifest().value.ssts)
    report = Admin(target).verify()
    assert not report.findings, report.findings


def restart_at_random(
    begin: Callable[..., Any], folder: Path, points: list[str], chance: random.Random, *, kills: bool
) -> list[str]:
    """Start a query repeatedly, and let it fail or stop it each time; returns the points of the stops."""
    history: list[str] = []
    # Every point at least once, in random order, and stops at random times among them.
    wanted = chance.sample(points, len(points))
    wanted += [chance.choice([*points, "stopped"]) for _ in range(RESTARTS - len(points))]
    for point in chance.sample(wanted[:RESTARTS], min(RESTARTS, len(wanted))):
        if point == "stopped":
            run_until_stopped(begin(), chance)
        else:
            fault = {"point": point, "kills": kills and chance.random() < 0.5}
            fault_file(folder).write_text(json.dumps(fault))
            for _ in range(ATTEMPTS):
                error = end(begin())
                assert error is not None, f"nothing failed {point}"
                if not fault_file(folder).exists():
                    break
                print(f"failed, but not {point}: {error}")  # Spark fails on a busy machine; start once more
            assert not fault_file(folder).exists(), f"never failed {point}"
        history.append(point)
    return history


def finish(begin: Callable[..., Any]) -> None:
    """Let the query read everything that is left."""
    for _ in range(ATTEMPTS):
        error = end(begin(availableNow=True))
        if error is None:
            return
        print(f"once more: {error}")
    pytest.fail("the query failed in every attempt")


@pytest.mark.parametrize("kind", [Source, TypedSource])
def test_the_sink_writes_every_change_once_through_restarts(
    spark: Any, tmp_path: Path, kind: type[Source]
) -> None:
    spark.dataSource.register(FailingSource)
    chance, target = random.Random(SEED), tmp_path / "target"
    source = kind(tmp_path / "source", SEED)

    def begin(**trigger: Any) -> Any:
        writing = source.stream(spark, files=1000 if trigger else 8).writeStream.format("failing")
        writing = writing.option("checkpointLocation", str(tmp_path / "state"))
        return writing.trigger(**(trigger or {"processingTime": "0 seconds"})).start(str(target))

    with source.written():
        history = restart_at_random(begin, target, SINK_POINTS, chance, kills=True)
    finish(begin)

    print(f"seed {SEED}: {len(source.changes)} changes through {history}")
    assert_every_change_came_once(source, target)
    assert_no_orphans(target)


def test_foreach_batch_writes_every_change_once_through_restarts(spark: Any, tmp_path: Path) -> None:
    chance, target = random.Random(SEED + 1), tmp_path / "target"
    source = Source(tmp_path / "source", SEED + 1)
    opened: list[Any] = []

    def begin(**trigger: Any) -> Any:
        # The database of the run before is not closed: rows without acknowledgement are lost, as in a crash.
        opened.append(flagstone.open(target, settings=QUIET, merge_operator=Counter()))
        write = foreach_batch(opened[-1], "model")

        def failing(frame: Any, batch_id: int) -> None:
            meet_fault(str(target), "before a batch")
            write(frame, batch_id)
            meet_fault(str(target), "after a batch")

        writing = source.stream(spark, files=1000 if trigger else 8).writeStream.foreachBatch(failing)
        writing = writing.option("checkpointLocation", str(tmp_path / "state"))
        return writing.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    with source.written():
        history = restart_at_random(begin, target, ["before a batch", "after a batch"], chance, kills=False)
    finish(begin)
    for db in reversed(opened):
        db.close()

    print(f"seed {SEED + 1}: {len(source.changes)} changes through {history}")
    assert_every_change_came_once(source, target)
    assert_no_orphans(target)
