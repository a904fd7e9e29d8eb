"""`serve-metrics` as a process: what Prometheus gets, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flagstone
from flagstone.cli.main import app

parser = pytest.importorskip("prometheus_client.parser", reason="the parser of Prometheus is the judge here")
pytestmark = pytest.mark.slow

MAIN = [sys.executable, "-c", "from flagstone.cli.main import main; main()"]


@contextmanager
def serving(*words: str | Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [*MAIN, *map(str, words), "serve-metrics", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"], process
        finally:
            process.kill()


def scrape(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = parser.text_string_to_metric_families(answer.read().decode())
        return {family.name: family for family in families}


def objects(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


def test_several_databases_are_served_and_none_is_written(tmp_path: Path) -> None:
    for name, flushes in (("a", 2), ("b", 1)):
        with flagstone.open(tmp_path / name, settings={"compactor_options": None}) as db:
            for number in range(flushes):
                db.put(b"%d" % number, b"v")
                db.flush()
    before = objects(tmp_path)
    with serving("-p", tmp_path / "a", "-p", tmp_path / "b") as (address, process):
        assert address.startswith("http://127.0.0.1:")
        found = scrape(address)
        l0 = {each.labels["database"]: each.value for each in found["slatedb_db_l0_sst_count"].samples}
        assert l0 == {"a": 2, "b": 1}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address.removesuffix("/metrics"), timeout=10)
        rebound = urllib.request.Request(address, headers={"Host": "evil.example:80"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(rebound, timeout=10)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert objects(tmp_path) == before


def test_a_port_in_use_is_refused_with_one_line(tmp_path: Path) -> None:
    flagstone.open(tmp_path / "a").close()
    with serving("-p", tmp_path / "a") as (address, _):
        port = address.split(":")[2].partition("/")[0]
        done = CliRunner().invoke(app, ["-p", str(tmp_path / "a"), "serve-metrics", "--port", port])
    assert done.exit_code == 2
    assert f"cannot listen on port {port}" in done.stderr


def test_a_missing_database_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["-p", str(tmp_path / "none"), "serve-metrics", "--port", "0"])
    assert done.exit_code == 2
    assert "no database at" in done.stderr
