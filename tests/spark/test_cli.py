"""`--spark` on the command line: the same results on Spark; and an error that says what to install without Spark."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import flagstone
from flagstone import Admin
from flagstone.cli.main import app
from golden.corpus import DATA
from kit.databases import QUIET
from kit.fixtures import Wheel
from kit.spark_loads import on_spark, shown


def cli(database: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--path", str(database), *arguments])


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    with flagstone.open(tmp_path / "shop", settings=QUIET) as db:
        for number in range(300):
            db.put(b"%03d" % (number % 200), b"%d" % number)
            if number % 100 == 99:
                db.flush()
    return tmp_path / "shop"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run-worker", "compact", "verify"])
def test_without_pyspark_the_error_says_how_to_install_it(
    shop: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    done = cli(shop, command, "--spark")
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert "pip install 'flagstone[spark]'" in line


def test_without_java_the_error_says_what_is_missing(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/no/such/java")
    done = cli(shop, "run-worker", "--spark")
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert "JAVA_HOME is /no/such/java" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compact", "--spark-conf", "spark.master=local"], "--spark-conf works only with --spark"),
        (["run-worker", "--spark", "--spark-conf", "spark.master"], "not NAME=VALUE"),
        (["verify", "--spark", "--spark-conf", "master=local"], "not NAME=VALUE"),
    ],
)
def test_invalid_spark_settings_are_refused_before_spark_starts(
    shop: Path, arguments: list[str], message: str
) -> None:
    done = cli(shop, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@on_spark
def test_compact_and_verify_run_on_spark(
    spark: Any, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def shared(conf: dict[str, str], *, command: str) -> Iterator[Any]:
        assert conf == {"spark.x": "1"}
        assert command in ("compact", "verify")
        yield spark

    monkeypatch.setattr("flagstone.cli.compaction.spark_session", shared)
    monkeypatch.setattr("flagstone.cli.databases.spark_session", shared)
    before, by_spark = shown(shop), ("--spark", "--spark-conf", "spark.x=1", "--json")

    done = cli(shop, "compact", "--full", *by_spark)
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert len(summary["jobs"]) == 1
    assert summary["bytes_written"] > 0
    tree = Admin(shop).manifest().value.tree
    assert (len(tree.l0), len(tree.runs)) == (0, 1)
    assert shown(shop) == before

    done = cli(shop, "verify", *by_spark)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == Admin(shop).verify().to_dict()
    shutil.copytree(DATA / "crash", tmp_path / "store")
    (tmp_path / "store/db/wal/00000000000000000004.sst").unlink()
    done = cli(tmp_path / "store/db", "verify", *by_spark)
    assert done.exit_code == 6
    assert json.loads(done.stdout) == Admin(tmp_path / "store/db").verify().to_dict()


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_worker_on_spark_runs_the_jobs_of_the_wheels_coordinator_until_it_gets_a_signal(
    wheel: Wheel, tmp_path: Path
) -> None:
    wheel.hold(str(tmp_path), "db", coordinator={})
    arguments = ["-p", str(tmp_path / "db"), "run-worker", "--spark", "--spark-conf", "spark.master=local[1]"]
    with subprocess.Popen(
        [sys.executable, "-c", "from flagstone.cli.main import main; main()", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            rows = {b"key%d" % number: b"value" for number in range(8)}
            for key, value in rows.items():
                wheel.held_apply("db", [("put", key, value), ("flush", "memtable")])
            deadline = time.monotonic() + 200
            while not Admin(tmp_path / "db").manifest().value.tree.runs:
                assert time.monotonic() < deadline
                assert worker.poll() is None
                time.sleep(0.5)
            assert wheel.held_scan("db") == rows
        finally:
            worker.send_signal(signal.SIGTERM)
            try:
                _, printed = worker.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                worker.kill()
                raise
            finally:
                wheel.release("db")
    assert worker.returncode == 0, printed
    assert "Traceback" not in printed
    assert "compacted database=db job=" in printed, "the job was Spark's"
    assert "stopped run-worker" in printed
    assert wheel.scan(str(tmp_path), "db") == rows
