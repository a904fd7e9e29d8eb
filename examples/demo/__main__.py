"""The demo: every feature, from end to end, with a local folder as object store and a local Spark.

    make demo                                a million orders
    make demo ROWS=10000000                  more of them
    make demo KEEP=1                         the database stays
    python examples/demo --rows 20000 --keep fewer, and the folder stays

Spark loads a shop. A service opens it, reads, writes and runs transactions. A clone is changed independently. Spark
streams the changes out and compacts. Every byte is verified. Each step checks its own result and raises if it is wrong.
In the end the rows of the README's table are measured, beside the README's figures. The files beside this one are the
acts, in order: load, serve, branch, follow, maintain, rates, summary.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import flagstone
import flagstone.spark as fs
from branch import branch
from flagstone.kernels import COMPILED
from follow import follow
from load import load
from maintain import analyse, compact, verify
from rates import IdleDatabase, measure_engine, measure_spark, note_load, show_rates
from serve import serve
from shop import Shop
from stage import Stage, java_output_in
from summary import count_requests, summarize

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEXT = """[bold]What next[/]
  examples/README.md    short programs: sessions, features, change data, nightly loads, compaction fleets, pipelines
  docs/                 what it promises, how it works, and how to run it; docs/spark.md for the cluster
  flagstone --help      inspect any database, also one that SlateDB writes: flagstone --path /data/shop stats"""


def play(stage: Stage, spark: SparkSession, shop: Shop, folder: Path) -> None:
    """Run all acts. `folder` holds the object store and the lake; it is empty at first."""
    bucket, lake = folder / "bucket", folder / "lake"
    url = bucket / "shop"
    load(stage, spark, shop, url)
    # This process leaves compaction to Spark; by default it would compact itself.
    with flagstone.open(url, settings=flagstone.Settings(compactor_options=None)) as db:
        serve(stage, db, shop)
        requests = branch(stage, db, shop, url)
        follow(stage, spark, db, shop, url=url, lake=lake)
        compact(stage, spark, db, url)
        analyse(stage, spark, shop, url)
    requests += count_requests(db)
    verify(stage, url)
    summarize(stage, bucket, requests)


def start_spark(stage: Stage, log: Path) -> SparkSession:
    stage.act("0 Start", "a local Spark; without a Java on the path, the one that pip installed")
    try:
        with stage.step("start Spark"), java_output_in(log):
            return fs.session(
                app_name="flagstone demo",
                spark_driver_memory="2g",
                # The collector that starts quickest.
                **{"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"},
            )
    except Exception:
        stage.console.print(log.read_text(errors="replace")[-2000:], markup=False)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="orders to load (1,000,000; at least 1,000)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder, to look around in it")
    arguments = parser.parse_args()
    if arguments.rows < 1000:
        parser.error("--rows: a shop with fewer than 1,000 orders is no demo")
    note_load()
    stage, started = Stage(), time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="flagstone-demo-"))
    stage.console.print(
        f"{arguments.rows:,} orders, kernels {'compiled' if COMPILED else 'interpreted (no C compiler was found)'}, "
        f"{os.cpu_count()} cores, in {folder}",
        soft_wrap=True,
    )
    try:
        with IdleDatabase(new_folder(folder / "idle")) as idle:
            spark = start_spark(stage, folder / "spark.log")
            try:
                play(stage, spark, Shop(arguments.rows), folder)
                measured = measure_spark(stage, spark)
            finally:
                spark.stop()
            measured += measure_engine(stage, new_folder(folder / "rates"))
            of_a_minute = idle.minute()
        show_rates(stage, [*measured, of_a_minute] if of_a_minute else measured)
        stage.console.print(
            f"\n[bold green]{stage.checks} checks passed[/] in {time.perf_counter() - started:.0f} s.",
            soft_wrap=True,
        )
        stage.console.print(NEXT, soft_wrap=True)
        explore(stage, folder, keep=arguments.keep)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def explore(stage: Stage, folder: Path, *, keep: bool) -> None:
    """On a terminal: the page of `flagstone inspect` on the shop, until Ctrl-C. Elsewhere only how to open it."""
    command = [
        str(Path(sys.executable).with_name("flagstone")),
        "--path",
        str(folder / "bucket" / "shop"),
        "inspect",
    ]
    kept = f"{folder} is kept" if keep else f"{folder} is removed"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        stage.console.print(
            f"\n{kept}." + (f" Look at the database: {' '.join(command)}" if keep else ""), soft_wrap=True
        )
        return
    stage.console.print(
        f"\n[bold]Look at the database[/] in a browser. Ctrl-C ends this; then {kept}.", soft_wrap=True
    )
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as inspector:
        try:
            inspector.wait()
        except KeyboardInterrupt:
            inspector.wait()  # Ctrl-C reached it, too
    if keep:
        stage.console.print(f"Open it again: {' '.join(command)}", soft_wrap=True)


if __name__ == "__main__":
    main()
