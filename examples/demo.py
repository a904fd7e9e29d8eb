"""The main job on embedded defaults: a local folder as object store, nothing left behind.

Builds a SlateDB database from Arrow data with the compiled kernels, commits it with one manifest, reads it back,
checks every byte, and shows what happens when one byte goes bad. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from flagstone import Admin
from flagstone.format import columns
from flagstone.format.codec import Codec
from flagstone.format.sst import decode_sst
from flagstone.kernels import COMPILED
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.table.builder import TableBuilder, TableOptions
from flagstone.types import RunId, Seq

TABLE_BYTES = 16 << 20
BATCH_ROWS = 20_000


def orders(rows: int) -> list[pa.RecordBatch]:
    """Sorted keys and small JSON-like values, as a data pipeline would deliver them."""
    batches = []
    for start in range(0, rows, BATCH_ROWS):
        numbers = range(start, min(start + BATCH_ROWS, rows))
        batches.append(
            pa.RecordBatch.from_pydict(
                {
                    "key": [b"order/%012d" % number for number in numbers],
                    "value": [
                        b'{"customer":%d,"cents":%d,"state":"paid"}' % (number % 9973, number * 37 % 99_991)
                        for number in numbers
                    ],
                }
            )
        )
    return batches


def write_database(store: LocalStore, paths: DbPaths, batches: list[pa.RecordBatch]) -> None:
    """One sorted run of tables, made visible by one manifest: all of it or nothing."""
    tables: list[SsTable] = []
    builder = TableBuilder(TableOptions(codec=Codec.LZ4))

    def upload() -> None:
        built = builder.finish()
        tables.append(SsTable(SYSTEM_IDS.ulid(), built.info))
        store.put(paths.table(tables[-1].id), built.data)

    now_ms = SYSTEM_CLOCK.now_ms()
    for batch in batches:
        if builder.finished_bytes >= TABLE_BYTES:
            upload()
            builder = TableBuilder(builder.options)
        builder.add_batch(batch, seq=1, created_ms=now_ms)
    upload()
    manifest = Manifest(
        ssts={table.id: table for table in sorted(tables, key=lambda table: table.id)},
        tree=Tree(runs=(SortedRun(RunId(0), tuple(SstView.whole(table.id) for table in tables)),)),
        last_l0_clock_tick=now_ms,
        last_l0_seq=Seq(1),
        recent_snapshot_min_seq=Seq(1),
    )
    ManifestStore(store, paths).create_next(manifest, None)


def count_rows(store: LocalStore, paths: DbPaths) -> int:
    """Every row of every table through Arrow columns."""
    manifest = ManifestStore(store, paths).require_latest().value
    total = 0
    for view in manifest.views:
        path = paths.table(view.sst_id)
        image = decode_sst(store.get(path).data, path)
        total += columns.decode_columns([image.block(number) for number in range(len(image.index))]).num_rows
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    rows = parser.parse_args().rows
    console = Console(highlight=False)
    console.print(f"kernels: {'compiled' if COMPILED else 'interpreted (no C compiler was found)'}")
    summary = Table("step", "seconds", "rows/s", title=f"{rows:,} orders")

    def step(name: str, started: float) -> float:
        now = SYSTEM_CLOCK.monotonic()
        summary.add_row(name, f"{now - started:.2f}", f"{rows / (now - started):,.0f}")
        return SYSTEM_CLOCK.monotonic()

    with tempfile.TemporaryDirectory(prefix="flagstone-demo-") as folder:
        store, paths = LocalStore(Path(folder)), DbPaths("shop")
        batches = orders(rows)
        clock = SYSTEM_CLOCK.monotonic()
        write_database(store, paths, batches)
        clock = step("write a SlateDB database (LZ4, bloom filters, fsync)", clock)
        assert count_rows(store, paths) == rows
        clock = step("read it back as Arrow", clock)
        report = Admin(Path(folder) / "shop").verify()
        step("verify every checksum, filter and reference", clock)
        assert report.ok
        console.print(summary)
        console.print(f"{report.bytes:,} bytes in {sum(report.objects.values())} objects, all sound")

        victim = max((Path(folder) / "shop" / "compacted").iterdir())
        damaged = bytearray(victim.read_bytes())
        damaged[1000] ^= 1
        victim.write_bytes(damaged)
        console.print("one flipped bit later, verify says:")
        for finding in Admin(Path(folder) / "shop").verify().damage:
            console.print(f"  {finding}", soft_wrap=True)


if __name__ == "__main__":
    main()
