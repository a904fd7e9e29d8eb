"""One Spark session for all tests of a process, and loads without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from interop.conftest import wheel  # noqa: F401 - a fixture

pytest.importorskip("pyspark")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from flagstone.spark import session
    from flagstone.spark.java import wrapped_runtime

    # The Java that pip installed: the way that a machine without Java goes, and the one with the most traps.
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
