"""A declarative pipeline (Spark 4.1 and newer) that reads a database, follows its changes, and writes to another one.

    pip install 'pyspark[pipelines]'
    python examples/pipeline/run.py

Spark runs pipelines with a program of its own, `spark-pipelines`, which starts its own session. `register` cannot be
called there and is not needed: Spark finds `format("flagstone")` in the installed package. This file
makes a small shop, runs the pipeline once, and checks the result. To run a pipeline repeatedly, give Spark a
persistent catalogue; the changes and the second database then continue where they stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import SparkSession

import flagstone
import flagstone.spark as fs

HERE = Path(__file__).parent
WITHOUT_PIPELINES = "declarative pipelines need more packages: `pip install 'pyspark[pipelines]'` first"


def place_orders(url: Path, numbers: range) -> None:
    with flagstone.open(url) as db:
        for number in numbers:
            order = {"customer": number % 7, "cents": 100 + number}
            db.put(b"order/%06d" % number, json.dumps(order).encode())


def run_pipeline(folder: Path) -> None:
    """`spark-pipelines run`, in the folder for its tables and checkpoints."""
    fs.configure(SparkSession.builder)  # finds Java and sets Spark's Python, also for child processes
    program = Path(sys.executable).with_name("spark-pipelines")
    subprocess.run(
        [str(program), "run", "--conf", "spark.ui.enabled=false"], cwd=folder, check=True, timeout=600
    )


def main(folder: Path) -> None:
    if find_spec("grpc") is None:
        print(WITHOUT_PIPELINES)
        return
    shutil.copytree(HERE / "transformations", folder / "transformations")
    spec = (HERE / "spark-pipeline.yml").read_text().replace("{folder}", str(folder))
    (folder / "spark-pipeline.yml").write_text(spec)
    orders = range(100)
    place_orders(folder / "shop", orders)
    run_pipeline(folder)
    changes = _table(folder, "changes").num_rows
    revenue = sum(_table(folder, "revenue").column("cents").to_pylist())
    with flagstone.open_reader(folder / "by-customer") as reader:
        indexed = [key for key, _ in reader.scan(b"0")]  # the stream's progress rows sort before it
    print(f"{len(orders)} orders: {changes} changes, {len(indexed)} rows by customer, {revenue} cents in all")
    assert changes == len(indexed) == len(orders)
    assert indexed[:2] == [b"0/order/000000", b"0/order/000007"]
    assert revenue == sum(100 + number for number in orders)


def _table(folder: Path, name: str) -> pa.Table:
    files = [str(path) for path in (folder / "spark-warehouse" / name).glob("*.parquet")]
    return ds.dataset(files, format="parquet").to_table()


if __name__ == "__main__":
    if find_spec("grpc") is None:
        sys.exit(WITHOUT_PIPELINES)
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
