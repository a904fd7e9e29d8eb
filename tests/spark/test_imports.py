"""What the Python processes of Spark import: many of them live for one call."""

from __future__ import annotations

import subprocess
import sys


def test_a_read_does_not_import_what_loads_streams_and_writers_need() -> None:
    program = "import sys, flagstone.spark.datasource, flagstone.spark.scan; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    unneeded = {
        "asyncio",
        "pandas",
        "flagstone.db.admin.admin",
        "flagstone.db.writer.engine",
        "flagstone.spark.load.commit",
        "flagstone.spark.load.task",
        "flagstone.spark.stream.source",
    }
    assert not unneeded & imported
