"""The official wheel as a fixture: the judge of compatibility."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Wheel:
    """Calls functions of `wheel_process.py` by name: `wheel.scan(folder, path)`."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "wheel_process.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # what others look for in any object is no function of the wheel's

        def call(*args: Any, **kwargs: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            pickle.dump((name, args, kwargs), self._process.stdin)
            self._process.stdin.flush()
            worked, result = pickle.load(self._process.stdout)
            if not worked:
                pytest.fail(f"the wheel's {name} failed: {result}")
            return result

        return call

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def wheel() -> Iterator[Wheel]:
    started = Wheel()
    yield started
    started.close()
