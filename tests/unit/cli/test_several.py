"""One garbage collection for several databases: given by paths, or found below a prefix."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flagstone import Admin, Settings
from flagstone.cli.main import app
from flagstone.db.open import open_database

QUIET = Settings(compactor_options=None, garbage_collector_options=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "deep/c"):
        with open_database(tmp_path / name, settings=QUIET) as db:
            db.put(b"k", b"v")
            db.flush()
    return tmp_path


def flagstone(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def roots(done: Result) -> list[str]:
    assert done.exit_code == 0, done.stderr
    return [entry["database"].rpartition(" ")[2] for entry in json.loads(done.stdout)["databases"]]


@pytest.mark.slow
def test_paths_may_be_given_before_and_after_the_command(folder: Path) -> None:
    a, b, c = folder / "a", folder / "b", folder / "deep" / "c"
    collect = ("run-garbage-collection", "--json")
    assert roots(flagstone("-p", a, "-p", b, *collect)) == ["a", "b"]
    assert roots(flagstone(*collect, "--path", a, "--path", c)) == ["a", "c"]
    assert roots(flagstone("-p", a, *collect, "-p", b, "-p", a)) == ["a", "b"]


@pytest.mark.slow
def test_a_prefix_collects_every_database_below_it(folder: Path) -> None:
    done = flagstone("run-garbage-collection", "--json", "--prefix", folder)
    assert [root.rpartition("/")[2] for root in roots(done)] == ["a", "b", "c"]
    Admin(folder / "a").destroy()
    done = flagstone("run-garbage-collection", "--json", "--prefix", folder)
    assert [root.rpartition("/")[2] for root in roots(done)] == ["b", "c"]
    (folder / "empty").mkdir()
    refused = flagstone("run-garbage-collection", "--prefix", folder / "empty")
    assert refused.exit_code == 2
    assert "no database below" in refused.stderr


def test_other_commands_accept_only_one_database(folder: Path) -> None:
    refused = flagstone("-p", folder / "a", "-p", folder / "b", "stats")
    assert refused.exit_code == 2
    assert "only garbage collection and serve-metrics take more than one" in refused.stderr


@pytest.mark.slow
def test_the_report_says_what_a_destroyed_database_waits_for(folder: Path) -> None:
    Admin(folder / "a").create_checkpoint(name="backup")
    Admin(folder / "a").destroy(soft=True)
    done = flagstone("-p", folder / "a", "run-garbage-collection")
    assert done.exit_code == 0
    assert "its grace period ends at" in done.stdout + done.stderr
    assert "named 'backup' holds it until it is deleted" in done.stdout + done.stderr


@pytest.mark.slow
def test_scheduled_collection_ends_when_its_databases_are_gone(folder: Path) -> None:
    for name in ("a", "b"):
        Admin(folder / name).destroy(soft=True, grace=timedelta())
    words = ["-p", folder / "a", "schedule-garbage-collection", "-p", folder / "b"]
    command = [sys.executable, "-c", "from flagstone.cli.main import main; main()", *map(str, words)]
    done = subprocess.run(
        [*command, "--wal", "min_age=0s,period=1s"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "every database is gone" in done.stderr
