"""`python -m bench compare` shows how Flagstone's figures changed between two folders or commits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench.compare import compare

MACHINE = {"processor": "P", "cores": 2, "python": "3.11", "kernels": "compiled"}


def result(put_us: float, rows_per_s: float, curve: float, **changed: Any) -> str:
    return json.dumps(
        {
            "name": "engine",
            "machine": {**MACHINE, **changed},
            "measurements": [
                {"what": "put", "unit": "µs", "values": {"flagstone": put_us}, "better": "lower"},
                {"what": "scan", "unit": "rows/s", "values": {"flagstone": rows_per_s}, "better": "higher"},
                {"what": "of others", "unit": "s", "values": {"rocksdict": 1.0}, "better": "lower"},
            ],
            "curves": [
                {"title": "open", "unit": "ms", "points": {"flagstone": [[1000, curve]]}, "better": "lower"}
            ],
        }
    )


def folder(path: Path, text: str) -> str:
    path.mkdir()
    (path / "engine.json").write_text(text)
    return str(path)


def test_two_folders_give_a_ratio_above_one_for_what_became_better(tmp_path: Path) -> None:
    old = folder(tmp_path / "old", result(4.0, 100.0, 10.0))
    new = folder(tmp_path / "new", result(2.0, 50.0, 10.0))

    lines = compare(old, new).splitlines()

    assert lines[2:] == [
        "| engine | put | 4.00 µs | 2.00 µs | 2.00× |",
        "| engine | scan | 100 rows/s | 50.0 rows/s | 0.50× |",
        "| engine | open, 1,000 | 10.0 ms | 10.0 ms | 1.00× |",
    ]


def test_results_of_different_machines_are_compared_with_a_warning(tmp_path: Path) -> None:
    old = folder(tmp_path / "old", result(4.0, 100.0, 10.0))
    new = folder(tmp_path / "new", result(4.0, 100.0, 10.0, cores=8))

    assert compare(old, new).endswith("different machines or Python versions.")


def test_two_commits_are_compared_by_the_results_they_contain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr("bench.compare.ROOT", tmp_path)
    monkeypatch.setattr("bench.compare.RESULTS", results)
    git = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "commit.gpgsign=false",
    ]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for tag, put_us in (("one", 4.0), ("two", 1.0)):
        (results / "engine.json").write_text(result(put_us, 1.0, 1.0))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", tag], check=True)
        subprocess.run([*git, "tag", tag], check=True)

    assert "| engine | put | 4.00 µs | 1.00 µs | 4.00× |" in compare("one", "two")


def test_an_unknown_commit_is_an_error_that_names_it() -> None:
    with pytest.raises(SystemExit, match="no-such-commit"):
        compare("no-such-commit", "HEAD")
