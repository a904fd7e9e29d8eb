"""Fixtures that folders share: WAL files, a pool, the official wheel of SlateDB, and one Spark session per process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flagstone.runtime.pool import IoPool
from kit.wal import WalFiles


@pytest.fixture
def wal() -> WalFiles:
    return WalFiles()


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(max_workers=4, name="test")
    yield pool
    pool.close()


class Wheel:
    """Calls functions of `interop/wheel_process.py` by name: `wheel.scan(folder, path)`."""

    def __init__(self) -> None:
        script = Path(__file__).parent.parent / "interop" / "wheel_process.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # pytest and pickle probe such names

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


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    pytest.importorskip("pyspark")
    from flagstone.spark import session
    from flagstone.spark.sessions import wrapped_runtime

    # The Java that pip installed, as on a machine without Java; it is also the one with the most traps.
    os.environ.setdefault("JAVA_HOME", str(wrapped_runtime()))

    started = session(
        master="local[2]",
        app_name="flagstone tests",
        spark_log_level="OFF",
        spark_sql_shuffle_partitions=2,
        **{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
    )
    yield started
    started.stop()
