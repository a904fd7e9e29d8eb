"""Range deletes: what deleting a part of a database costs, and what a full scan costs afterwards.

`python -m bench.range_delete --rows 10000000` measures another size. Every range is deleted in a clone of one compacted
database, so each begins with the same SSTs. The scan is compared with that of a database that never had the rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import flagstone
from bench.harness import formatted, sized, write_markdown
from bench.machine import scratch_place
from flagstone.store.local import LocalStore

ROWS: Final = sized(10_000_000, quickly=20_000)
ROUNDS: Final = sized(3, quickly=1)
VALUE_BYTES: Final = 100
GROUP: Final = 100_000
SHARES: Final = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9)
"""The parts of the rows that are deleted; 0 is a single row."""

SETTINGS: Final = flagstone.Settings(compactor_options=None, garbage_collector_options=None)


def key(number: int) -> bytes:
    """The key of a row."""
    return b"key/%012d" % number


def fill(store: LocalStore, path: str, rows: int, gap: range) -> None:
    """A database of one sorted run, without the rows of the gap."""
    value = b"v" * VALUE_BYTES
    with flagstone.open(path, store=store, settings=SETTINGS.replace(l0_max_ssts=10_000)) as db:
        for first in range(0, rows, GROUP):
            names = [key(number) for number in range(first, min(first + GROUP, rows)) if number not in gap]
            if names:
                db.write_arrow(
                    pa.RecordBatch.from_pydict({"key": names, "value": [value] * len(names)}),
                    await_durable=False,
                )
        db.flush()
    flagstone.Admin(path, store=store).compact(full=True)


def scan_cpu_s(store: LocalStore, path: str) -> tuple[float, int]:
    """The CPU time of a full scan to Arrow, the fastest of several, and its rows."""
    taken, rows = [], 0
    with flagstone.open_reader(path, store=store, mode="latest") as reader:
        for _ in range(ROUNDS):
            started = time.process_time()
            rows = sum(batch.num_rows for batch in reader.scan_arrow(batch_rows=None))
            taken.append(time.process_time() - started)
    return min(taken), rows


def requests_of(db: flagstone.Db) -> int:
    """The requests that the database has made so far."""
    found: dict[str, Any] = db.metrics()
    return sum(
        int(count) for name, count in found.items() if name.startswith("slatedb.object_store.request_count")
    )


def measure(store: LocalStore, rows: int, share: float) -> list[str]:
    """Delete one range in a clone, and scan."""
    count = max(1, int(rows * share))
    first = (rows - count) // 2
    gap, name = range(first, first + count), f"clone-{share}"
    flagstone.Admin("db", store=store).clone(name)
    with flagstone.open(name, store=store, settings=SETTINGS) as db:
        before = {meta.path: meta.size for meta in store.list(name)}
        asked, started = requests_of(db), time.perf_counter()
        db.delete_range(key(gap.start), key(gap.stop))
        taken_s, made = time.perf_counter() - started, requests_of(db) - asked
        after = {meta.path: meta.size for meta in store.list(name)}
    written = sum(size for path, size in after.items() if path not in before)
    fill(store, f"never-{share}", rows, gap)
    scan_s, left = scan_cpu_s(store, name)
    never_s, same = scan_cpu_s(store, f"never-{share}")
    assert left == same == rows - count, (left, same)
    return [
        f"{count:,}",
        "one row" if share == 0 else f"{share:.1%}",
        formatted(taken_s * 1000, "ms"),
        str(made),
        f"{written:,}",
        formatted(scan_s, "s"),
        f"{scan_s / never_s:.2f}×",
    ]


def run(rows: int = ROWS) -> str:
    """Measure every range, write `results/range-delete.md`."""
    with tempfile.TemporaryDirectory(dir=scratch_place(10 * rows * VALUE_BYTES)) as folder:
        store = LocalStore(Path(folder), fsync=False)
        fill(store, "db", rows, range(0))
        lines = [measure(store, rows, share) for share in SHARES]
    return write_markdown(
        "range-delete",
        f"Deleting a range of {rows:,} rows of {VALUE_BYTES} bytes",
        [
            "rows deleted",
            "share",
            "time",
            "requests",
            "bytes written",
            "full scan, CPU",
            "against never written",
        ],
        lines,
        [
            "Each range is deleted in a clone of one compacted database, so each begins with the same SSTs.",
            "The last column is the full scan as a multiple of that of a database that never had the rows.",
        ],
        basis=f"CPU times are the fastest of {ROUNDS}; a delete is timed once.",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    print(run(parser.parse_args().rows))
