"""Spark Connect: everything that needs no open database in the driver's process works through a remote session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagstone.spark.load.request import begin_load
from flagstone.spark.sessions import wrapped_runtime
from kit.spark_loads import batch_of, pairs, shown, write_options

CLIENT = Path(__file__).with_name("connect_client.py")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    "SPARK_CONNECT" not in os.environ, reason="takes a minute: set SPARK_CONNECT=1, or `make spark-long`"
)
def test_load_read_stream_and_compaction_work_through_a_remote_session(tmp_path: Path) -> None:
    # In a new process: a process is either a client of Spark Connect or has its own Spark.
    # With SPARK_TESTING the server chooses a free port and the client finds it.
    environment = {
        **os.environ,
        "SPARK_TESTING": "1",
        "PYTHONWARNINGS": "error::UserWarning:pyspark.sql.connect.conf",
    }
    environment.setdefault("JAVA_HOME", str(wrapped_runtime()))
    run = subprocess.run(
        [sys.executable, str(CLIENT), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )

    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "session": "pyspark.sql.connect.session",
        "loaded": 1000,
        "read": 1000,
        "pushed": 10,
        "held": [1, 20],
        "released": 0,
        "counted": 1000,
        "looked_up": ["0", "1", "2"],
        "viewed": 5,
        "compacted": 1,
        "ordinary": 10 + 90 * 2 + 900 * 3,
        "streamed": 10,
        "refused": "column 'value' has 1000 nulls; every row needs one",
        "after": 1000,
    }
    assert len(shown(tmp_path / "shop")) == 1000


def test_a_client_on_another_machine_gets_no_load_report_and_the_load_is_committed(tmp_path: Path) -> None:
    from flagstone.spark.load.writer import FlagstoneWriter

    folder = tmp_path / "db"
    options = write_options(folder, receipt="/of/another/machine/receipt.json")
    writer = FlagstoneWriter(begin_load(options.address), options, overwrite=False)

    writer.commit([writer.write(iter([batch_of(pairs({b"k": b"v"}))]))])

    assert shown(folder) == {b"k": b"v"}
