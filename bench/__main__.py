"""`python -m bench [NAME …] [--quick]` runs the named comparisons, or all of them, and writes the summary.

`python -m bench compare OLD NEW` runs nothing: it compares the results of two commits or folders, see `bench.compare`.

Each comparison has a process of its own, one after the other, so that none inherits another's threads or heap; within it
the contenders take turns. A failed comparison is reported at the end and does not stop the others. `--quick` runs everything
at tiny sizes and writes into a temporary folder: it only checks that all of it works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.compare import compare
from bench.harness import QUICK_VARIABLE, RESULTS_VARIABLE, results_folder
from bench.machine import BUSY_VARIABLE, busy_percent
from bench.summary import write_summary

COMPARISONS: Final = {
    "kernels": "bench.kernels",
    "engine": "bench.engine",
    "requests": "bench.requests",
    "compaction": "bench.compaction",
    "amplification": "bench.amplification",
    "stalls": "bench.stalls",
    "scaling": "bench.scaling",
    "metadata": "bench.metadata",
    "memory": "bench.memory",
    "latency": "bench.latency",
    "threads": "bench.threads",
    "wal-uploads": "bench.wal_uploads",
    "range-delete": "bench.range_delete",
    "remote": "bench.remote",
    "spark": "bench.spark",
    "spark-compaction": "bench.spark_compaction",
    "spark-lookup": "bench.spark_lookup",
    "spark-reads": "bench.spark_reads",
    "spark-stream": "bench.spark_stream",
}
"""Name -> module with `run() -> str`, which keeps its results and returns them as text."""

TIMEOUT_S: Final = 1800


def run_all(names: list[str]) -> list[str]:
    """Run the comparisons one after the other and make the summary; returns the names of those that failed."""
    failed = []
    for name in names:
        print(f"--- {name}", flush=True)
        started = time.perf_counter()
        program = f"from {COMPARISONS[name]} import run; print(run())"
        try:
            subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            failed.append(name)
        print(f"--- {name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    print(f"summary: {write_summary()}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(COMPARISONS)}, or summary; or compare OLD NEW"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, results into a temporary folder")
    arguments = parser.parse_args()
    if arguments.names[:1] == ["compare"]:
        if len(arguments.names) != 3:
            parser.error("compare takes two commits or folders: python -m bench compare OLD NEW")
        print(compare(*arguments.names[1:]))
        return
    unknown = [name for name in arguments.names if name not in {*COMPARISONS, "summary"}]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(COMPARISONS)}, and summary")
    names = arguments.names or list(COMPARISONS)
    if arguments.quick:
        os.environ[QUICK_VARIABLE] = "1"
        os.environ.setdefault(RESULTS_VARIABLE, tempfile.mkdtemp(prefix="flagstone-bench-quick-"))
    # The comparisons and their child processes import this package from here.
    root = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    busy = busy_percent()
    if busy is not None:
        os.environ[BUSY_VARIABLE] = f"{busy:.1f}"
    failed = run_all([name for name in names if name != "summary"])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; what the others found is in {results_folder()}")


if __name__ == "__main__":
    main()
