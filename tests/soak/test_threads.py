"""Threads on one database, with compiled and with interpreted kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("THREADS_SECONDS", "4"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 2 * SECONDS)
@pytest.mark.parametrize("form", ["compiled", "interpreted"])
def test_concurrent_threads_read_every_row_they_must_and_no_other(form: str) -> None:
    program = Path(__file__).with_name("threads.py")
    run = subprocess.run(
        [sys.executable, str(program), str(SECONDS)],
        env={**os.environ, "FLAGSTONE_KERNELS": form},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-3000:]
