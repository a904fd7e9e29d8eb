"""The last line of a test run names the servers it ran against, and those it skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.plugin import TITLES
from servers.postgres import SYSTEM_FOLDERS, system_path
from servers.shared import note_used, summarize


def test_a_run_without_servers_prints_no_summary_line(tmp_path: Path) -> None:
    (tmp_path / "helper.json").write_text(json.dumps({"pid": 1, "facts": {}}))
    assert summarize(tmp_path, TITLES) is None


def test_the_summary_line_names_used_skipped_and_unused_servers(tmp_path: Path) -> None:
    note_used(tmp_path, "gcs")
    (tmp_path / "seaweedfs.json").write_text(json.dumps({"pid": 1, "facts": {"port": 1}}))
    (tmp_path / "postgres.json").write_text(json.dumps({"missing": "postgres ended at once:\nno useradd"}))

    line = summarize(tmp_path, TITLES)

    assert line == (
        "servers: ran against SeaweedFS (S3), GCS stand-in; skipped PostgreSQL (postgres ended at once: no "
        "useradd); not asked for: MiniStack (S3, DynamoDB), Azurite (Azure Blob)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.long)])
def test_the_summary_line_is_the_last_one_of_a_run(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_it.py").write_text("def test_one(gcs): pass\ndef test_two(gcs): pass\n")
    here = Path(__file__).parents[1]

    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "servers.plugin",
            *workers,
            "-p",
            "no:cacheprovider",
            ".",
        ],
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(here), "HOME": str(tmp_path), "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == (
        "servers: ran against GCS stand-in; skipped none; not asked for: "
        "SeaweedFS (S3), MiniStack (S3, DynamoDB), Azurite (Azure Blob), PostgreSQL"
    )


def test_postgres_finds_the_system_programs_in_an_empty_environment() -> None:
    assert system_path(None).split(os.pathsep) == list(SYSTEM_FOLDERS)
    assert system_path("/opt/bin:/usr/sbin").split(os.pathsep)[:2] == ["/opt/bin", "/usr/sbin"]
    assert system_path("/opt/bin:/usr/sbin").count("/usr/sbin") == 1
