"""The kernels, compiled against interpreted: the gain by a C compiler, and whether the minimum rates are met."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO
from types import ModuleType

import pyarrow as pa

from bench.harness import interleave, sized, write_markdown
from flagstone.format import columns
from flagstone.format.sst import decode_sst
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.spark.load.task import row_columns
from flagstone.sst.builder import SstBuilder
from flagstone.types import MAX_SEQ

ROWS = sized(200_000, quickly=20_000)
SLOW_ROWS = sized(5_000, quickly=500)
"""The interpreted form gets fewer rows; rates are compared, not times."""

_rows = [
    (b"%016d" % number, number + 1, 0, os.urandom(100), 1_700_000_000_000, None) for number in range(ROWS)
]


def encode(kernel: ModuleType, count: int) -> list[bytes]:
    writer = kernel.BlockWriter(4096, want_hashes=False)
    writer.add_rows(_rows[:count])
    blocks: list[bytes] = writer.finish_blocks()
    return blocks


def run() -> str:
    """Measure, write `results/kernels.md`, return its text."""
    compiled = {name: load_compiled(name) for name in ("block_reader", "block_writer", "bloom", "index")}
    if None in compiled.values():
        return "kernels are not compiled here: nothing to compare\n"
    slow = {name: load_interpreted(name) for name in compiled}
    raws, few = encode(compiled["block_writer"], ROWS), encode(compiled["block_writer"], SLOW_ROWS)
    megabytes, few_megabytes = sum(map(len, raws)) / 1e6, sum(map(len, few)) / 1e6
    keys = [row[0] for row in _rows]
    block = raws[7]
    held = [row[0] for row in compiled["block_reader"].decode_rows(block)]
    batch = columns.decode_columns(raws)
    offsets = list(range(0, 4100 * 5000, 4100))
    separators = keys[:5000]

    def lookups(kernel: ModuleType, times: int) -> Callable[[], None]:
        def work() -> None:
            find = kernel.lookup
            for _ in range(times):
                for key in held:
                    find(block, key, MAX_SEQ)

        return work

    def blooms(kernel: ModuleType, count: int) -> Callable[[], None]:
        def work() -> None:
            kernel.build(kernel.hash_keys(keys[:count]), count * 10 // 8, 6)

        return work

    def sst() -> bytes:
        data = BytesIO()
        builder = SstBuilder(open_sink=lambda: data)
        builder.write_columns(row_columns(batch), 0, seq=1, created_ms=1)
        builder.finish()
        return data.getvalue()

    reader, writer, index = "block_reader", "block_writer", "index"
    data = sst()

    def read_sst() -> pa.RecordBatch:
        image = decode_sst(data, "bench")
        return columns.decode_columns([image.block(number) for number in range(len(image.index))])

    # name -> (compiled work, its size, interpreted work, its size, unit); sizes in MB give MB/s, else µs each
    cases: dict[str, tuple[Callable[[], object], float, Callable[[], object] | None, float, str]] = {
        "block encode, rows": (
            lambda: encode(compiled[writer], ROWS), megabytes, lambda: encode(slow[writer], SLOW_ROWS), few_megabytes, "MB/s",
        ),
        "block decode, rows": (
            lambda: [compiled[reader].decode_rows(raw) for raw in raws], megabytes,
            lambda: [slow[reader].decode_rows(raw) for raw in few], few_megabytes, "MB/s",
        ),
        "block lookup, hit": (
            lookups(compiled[reader], 600), 600 * len(held), lookups(slow[reader], 20), 20 * len(held), "µs",
        ),
        "bloom build, per key": (blooms(compiled["bloom"], ROWS), ROWS, blooms(slow["bloom"], SLOW_ROWS), SLOW_ROWS, "µs"),
        "index encode, per block": (
            lambda: compiled[index].encode_index(offsets, separators), 5000,
            lambda: slow[index].encode_index(offsets, separators), 5000, "µs",
        ),
        "blocks to Arrow": (lambda: columns.decode_columns(raws), megabytes, None, 0, "MB/s"),
        "Arrow to a whole SST (blocks, CRC, bloom, index, stats)": (sst, megabytes, None, 0, "MB/s"),
        "whole SST to Arrow (CRC checked)": (read_sst, megabytes, None, 0, "MB/s"),
    }  # fmt: skip
    contenders: dict[str, Callable[[], object]] = {}
    for name, (fast, _, slowly, _, _) in cases.items():
        contenders[f"{name}/compiled"] = fast
        if slowly is not None:
            contenders[f"{name}/interpreted"] = slowly
    timings = interleave(contenders)

    def rate(seconds: float, size: float, unit: str) -> float:
        return size / seconds if unit == "MB/s" else seconds / size * 1e6

    lines = []
    for name, (_, size, slowly, slow_size, unit) in cases.items():
        quick = rate(timings[f"{name}/compiled"].median, size, unit)
        if slowly is None:
            lines.append([name, f"{quick:,.2f} {unit}", "", ""])
            continue
        lazy = rate(timings[f"{name}/interpreted"].median, slow_size, unit)
        ratio = quick / lazy if unit == "MB/s" else lazy / quick
        lines.append([name, f"{quick:,.2f} {unit}", f"{lazy:,.2f} {unit}", f"{ratio:.0f}×"])
    lines.append(["import flagstone", f"{import_ms():.0f} ms", "", ""])
    return write_markdown(
        "kernels",
        "Kernels: compiled against interpreted",
        ["what", "compiled", "interpreted", "ratio"],
        lines,
        [
            f"{ROWS:,} rows of 16-byte keys and 100-byte values in 4 KiB blocks; the interpreted form gets {SLOW_ROWS:,}."
        ],
    )


def import_ms() -> float:
    """Median time of `import flagstone` in fresh interpreters, beyond the interpreter's own start."""
    program = "import time; t = time.perf_counter(); import flagstone; print(time.perf_counter() - t)"
    taken = sorted(
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(sized(7, quickly=1))
    )
    return taken[len(taken) // 2] * 1e3


if __name__ == "__main__":
    started = time.perf_counter()
    print(run(), f"\n({time.perf_counter() - started:.0f} s)")
