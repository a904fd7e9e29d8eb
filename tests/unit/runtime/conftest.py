from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest


@pytest.fixture
def run_script() -> Callable[[str], str]:
    """Runs code that forks or exits in a new interpreter, and returns its output, stripped."""

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
        return done.stdout.strip()

    return run
