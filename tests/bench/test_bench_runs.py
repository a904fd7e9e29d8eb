"""`python -m bench --quick` runs what it is asked to, keeps its results where it should and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.__main__ import COMPARISONS
from bench.harness import FLAGSTONE, RESULTS, RESULTS_VARIABLE

ROOT = Path(__file__).parents[2]
TRIED = os.environ.get("BENCH_TRIED", "kernels requests amplification").split()
"""What runs here; all of it takes a minute, and twice that with Spark: `BENCH_TRIED="engine scaling …"`."""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, RESULTS_VARIABLE: str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_every_comparison_runs_at_tiny_sizes(tmp_path: Path) -> None:
    kept = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    assert set(TRIED) <= set(COMPARISONS)

    done = run(tmp_path, "--quick", *TRIED)

    assert done.returncode == 0, done.stderr
    for name in TRIED:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["quick"]
        assert result["rows"]
        assert (tmp_path / f"{name}.md").read_text().startswith(f"# {result['title']}")
        for one in result["measurements"]:
            assert one["values"][FLAGSTONE] > 0
    assert "mean nothing" in (tmp_path / "README.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == kept


def test_an_unknown_comparison_raises_with_the_known_names(tmp_path: Path) -> None:
    done = run(tmp_path, "--quick", "engin")

    assert done.returncode == 2
    assert "engine" in done.stderr
    assert not list(tmp_path.iterdir())
