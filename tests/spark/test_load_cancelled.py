"""Loads and streams that end half-way: failing tasks, cancelled jobs, stopped queries, speculative attempts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

import flagstone
from flagstone import Admin, Closed, FlagstoneError
from flagstone.runtime.ids import ulid_text
from flagstone.spark import bulk_load
from flagstone.spark.job_control import cancel_tagged, tag_thread
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import abort_load, begin_load
from kit.databases import QUIET
from kit.spark_loads import (
    address_of,
    assert_sound,
    load,
    on_spark,
    pairs,
    run_task,
    shown,
    ssts_of,
    write_options,
)
from spark.speculation_session import ROWS as ROWS_OF_SPECULATION

pytestmark = pytest.mark.slow

ROWS = 40_000
PARTS = 4
WAIT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "db"
    load(folder, [pairs({b"before": b"1"})])
    return folder


def rows_with(spark: Any, step: Callable[[int], None]) -> Any:
    """A frame of keys and values in key order. Tasks call `step` with the first number of each batch."""

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers = batch.column(0).to_pylist()
            step(numbers[0])
            keys = [b"k%08d" % number for number in numbers]
            yield pa.RecordBatch.from_pydict({"key": keys, "value": keys})

    return spark.range(0, ROWS, 1, PARTS).mapInArrow(make, "key binary, value binary")


def waiting(tmp_path: Path) -> Callable[[int], None]:
    """A step that creates a file, and then waits until a second one exists; without it, a minute."""
    begun, go = str(tmp_path / "begun"), str(tmp_path / "go")

    def step(first: int) -> None:
        Path(begun).touch()
        end = time.monotonic() + 60
        while not Path(go).exists() and time.monotonic() < end:
            time.sleep(0.02)

    return step


def await_file(path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.02)


def open_loads(folder: Path) -> list[str]:
    return [each.state for each in Admin(folder).loads() if each.state not in ("done", "refused")]


def assert_untouched(folder: Path) -> None:
    """The rows of before are there and no others, no load is open, and what was uploaded is garbage."""
    assert shown(folder) == {b"before": b"1"}
    assert open_loads(folder) == []
    with flagstone.open(
        folder, settings=QUIET
    ) as db:  # garbage collection keeps SSTs newer than the newest flush
        db.put(b"after", b"2")
    Admin(folder).collect_garbage(min_age=timedelta())
    assert len(ssts_of(folder)) == len(Admin(folder).manifest().value.ssts)
    assert_sound(folder)


@on_spark
@pytest.mark.parametrize("first", [0, ROWS // PARTS], ids=["first task", "second task"])
def test_a_task_that_raises_half_way_leaves_the_database_as_it_was(
    spark: Any, folder: Path, first: int
) -> None:
    def step(number: int) -> None:
        if number > first and number < first + ROWS // PARTS:
            raise ValueError("this row is wrong")

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 1000)
    try:
        with pytest.raises(PySparkException, match="this row is wrong"):
            bulk_load(rows_with(spark, step), folder, presorted=True)
        with pytest.raises(PySparkException, match="this row is wrong"):
            rows_with(spark, step).write.format("flagstone").mode("overwrite").save(str(folder))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")

    assert_untouched(folder)


@on_spark
@pytest.mark.parametrize("how", ["group", "tag"])
def test_a_cancelled_job_leaves_the_database_as_it_was(
    spark: Any, folder: Path, tmp_path: Path, how: str
) -> None:
    failed: list[BaseException] = []
    name = f"load to cancel {how}"

    def run() -> None:
        if how == "group":
            spark.sparkContext.setJobGroup(name, "a load", interruptOnCancel=True)
        else:
            tag_thread(spark, name)
        try:
            bulk_load(rows_with(spark, waiting(tmp_path)), folder, presorted=True)
        except (PySparkException, Py4JJavaError, FlagstoneError) as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    await_file(tmp_path / "begun")
    assert open_loads(folder) == ["loading"]
    if how == "group":
        spark.sparkContext.cancelJobGroup(name)
    else:
        cancel_tagged(spark, name)
    thread.join(WAIT_S)
    (tmp_path / "go").touch()

    assert not thread.is_alive()
    assert failed, "the load ended without an error"
    assert_untouched(folder)


@on_spark
def test_a_query_that_is_stopped_in_mid_load_shows_nothing_and_continues_with_every_row_once(
    spark: Any, folder: Path, tmp_path: Path
) -> None:
    step = waiting(tmp_path)
    source = tmp_path / "source"
    spark.range(0, 1000, 1, 2).write.parquet(str(source))

    def start() -> Any:
        def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                step(0)
                keys = [b"k%08d" % number for number in batch.column(0).to_pylist()]
                yield pa.RecordBatch.from_pydict({"key": keys, "value": keys})

        frame = (
            spark.readStream.schema("id bigint")
            .parquet(str(source))
            .mapInArrow(make, "key binary, value binary")
        )
        sink = frame.writeStream.format("flagstone").option("query", "copy").trigger(availableNow=True)
        return sink.option("checkpointLocation", str(tmp_path / "state")).start(str(folder))

    query = start()
    await_file(tmp_path / "begun")
    query.stop()

    assert shown(folder) == {b"before": b"1"}
    listed = [each for each in Admin(folder).loads() if each.state == "loading"]
    assert all((each.query, each.alive) == ("copy", True) for each in listed), listed
    (tmp_path / "go").touch()
    query = start()
    query.awaitTermination(120)
    assert query.exception() is None
    found = shown(folder)
    assert sum(key.startswith(b"k") for key in found) == 1000
    assert open_loads(folder) == []
    changes = [
        change
        for batch in flagstone.WalReader(folder).follow(timeout_s=0)
        for change in batch.changes
        if change.key.startswith(b"k")
    ]
    assert len(changes) == 1000
    assert_sound(folder)


def test_of_two_attempts_of_a_task_one_counts_and_the_other_is_garbage(folder: Path) -> None:
    """Speculation: Spark runs a slow task twice, and passes the message of the first attempt that ends."""
    plan = begin_load(address_of(folder))
    one = run_task(plan, folder, [pairs({b"a": b"1", b"b": b"1"})])
    two = run_task(plan, folder, [pairs({b"c": b"1"})])
    again = run_task(plan, folder, [pairs({b"a": b"1", b"b": b"1"})])

    report = commit_load(plan, write_options(folder), [*again, *two])
    late = run_task(plan, folder, [pairs({b"c": b"late"})])  # it is not interrupted at once

    assert report.rows == 3
    assert shown(folder) == {b"a": b"1", b"b": b"1", b"before": b"1", b"c": b"1"}
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"after", b"2")
    Admin(folder).collect_garbage(min_age=timedelta())
    assert not ssts_of(folder) & {f"{ulid_text(each.sst.id)}.sst" for each in (*one, *late)}
    assert_sound(folder)


def test_an_attempt_that_ends_after_the_load_was_given_up_is_garbage(folder: Path) -> None:
    plan = begin_load(address_of(folder))
    run_task(plan, folder, [pairs({b"a": b"1"})])
    abort_load(plan)

    late = run_task(plan, folder, [pairs({b"c": b"late"})])

    with pytest.raises(Closed, match="None of it is visible"):
        commit_load(plan, write_options(folder), late)
    assert_untouched(folder)


@on_spark
@pytest.mark.skipif(
    not os.environ.get("SPARK_KILLS"),
    reason="starts three Java processes: set SPARK_KILLS, or `make spark-long`",
)
def test_speculative_attempts_on_executors_load_every_row_once(tmp_path: Path) -> None:
    script = Path(__file__).with_name("speculation_session.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for job in ("load", "stream"):
        assert len(list((tmp_path / job / "attempts").iterdir())) >= 2, f"no second attempt in the {job}"
        folder = tmp_path / job / "db"
        found = [key for key in shown(folder) if key.startswith(b"k")]
        assert len(found) == ROWS_OF_SPECULATION
        changes = [
            change.key
            for batch in flagstone.WalReader(folder).follow(timeout_s=0)
            for change in batch.changes
            if change.key.startswith(b"k")
        ]
        assert sorted(changes) == found
        assert open_loads(folder) == []
        assert_sound(folder)
