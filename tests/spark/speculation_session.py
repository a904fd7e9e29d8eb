"""A session with real executors and speculation: one task of a load, then of a stream, hangs in its first attempt.

    python speculation_session.py FOLDER

The first attempt of the slow task sleeps, and Spark starts a second one. Spark never starts it on the host of the
first, so the two workers of this cluster have two names of the same machine. For `test_load_cancelled.py`, which checks
the databases FOLDER/load and FOLDER/stream.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyspark
from pyspark import TaskContext

import flagstone.spark as fs
from flagstone.spark.sessions import wrapped_runtime

ROWS: Final = 8_000
PARTS: Final = 8


def encoded(base: str) -> Any:
    """Keys and values of numbers. The first attempt at the last part leaves a file, and is slow."""

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers = batch.column(0).to_pylist()
            context = TaskContext.get()
            if numbers and numbers[-1] == ROWS - 1 and context is not None:
                (Path(base) / f"attempt {context.taskAttemptId()}").touch()
                if context.attemptNumber() == 0:
                    time.sleep(20)
            keys = [b"k%08d" % number for number in numbers]
            yield pa.RecordBatch.from_pydict({"key": keys, "value": keys})

    return make


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def daemon(base: Path, name: str, *arguments: str) -> Iterator[None]:
    """A master or worker of Spark as a process of its own."""
    home = Path(str(pyspark.__file__)).parent
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "128m"}
    with (base / f"{name} {arguments[1]}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def main(base: Path) -> None:
    os.environ.setdefault("JAVA_HOME", str(wrapped_runtime()))
    master = free_port()
    with ExitStack() as cluster:
        web = ("--webui-port", "0")
        cluster.enter_context(
            daemon(base, "master.Master", "--host", "127.0.0.1", "--port", str(master), *web)
        )
        time.sleep(3)
        for host in ("127.0.0.1", "localhost"):
            own = ("--host", host, *web, "--cores", "2", "--memory", "1g", "--work-dir", str(base / host))
            cluster.enter_context(daemon(base, "worker.Worker", *own, f"spark://127.0.0.1:{master}"))
        run(base, f"spark://127.0.0.1:{master}")


def run(base: Path, master: str) -> None:
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    spark = fs.session(
        master=master,
        app_name="flagstone speculation",
        spark_log_level="OFF",
        spark_executor_memory="512m",
        **{
            "spark.driver.host": "127.0.0.1",
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.multiplier": "1.1",
            "spark.driver.extraJavaOptions": quick,
            "spark.executor.extraJavaOptions": quick,
        },
    )
    try:
        for job in ("load", "stream"):
            (base / job / "attempts").mkdir(parents=True)
        rows = spark.range(0, ROWS, 1, PARTS)
        work = encoded(str(base / "load" / "attempts"))
        fs.bulk_load(rows.mapInArrow(work, "key binary, value binary"), base / "load" / "db", presorted=True)
        rows.write.parquet(str(base / "source"))
        numbers = spark.readStream.schema("id bigint").parquet(str(base / "source"))
        work = encoded(str(base / "stream" / "attempts"))
        frame = numbers.mapInArrow(work, "key binary, value binary")
        sink = frame.writeStream.format("flagstone").trigger(availableNow=True)
        query = sink.option("checkpointLocation", str(base / "state")).start(str(base / "stream" / "db"))
        query.awaitTermination(120)
        if query.exception() is not None:
            raise SystemExit(str(query.exception()))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
