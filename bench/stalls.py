"""The latency of puts while a compaction runs in the same process, compared with the same puts alone.

A thread merges eight overlapping SSTs (the files of `bench.compaction`) while the main thread puts rows one by one
into another database and times each put. Every measurement has a process of its own, and the engines take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench import compaction
from bench.harness import FLAGSTONE, ROCKS, WHEEL, Measurement, compared, sized, write_markdown
from bench.machine import scratch_place

VALUE_BYTES: Final = 100
VALUE: Final = os.urandom(VALUE_BYTES)
ALONE_S: Final = sized(1.0, quickly=0.05)
ROUNDS: Final = sized(3, quickly=1)
ENGINES: Final = (FLAGSTONE, WHEEL, ROCKS)
FIGURES: Final = ("p50", "p99", "p99.9", "longest")

Put = Callable[[bytes, bytes], object]


def flagstone_put(folder: Path) -> Put:
    import flagstone

    settings = flagstone.Settings(
        compactor_options=None,
        garbage_collector_options=None,
        l0_sst_size_bytes=1 << 30,
        max_unflushed_bytes=2 << 30,
    )
    options = {"fsync": False}
    return flagstone.open("puts", store=str(folder), store_options=options, settings=settings).put


def wheel_put(folder: Path) -> Put:
    from slatedb import uniffi

    loop = asyncio.new_event_loop()
    values = json.loads(uniffi.Settings.default().to_json_string())
    values.update(compactor_options=None, garbage_collector_options=None)
    values.update(l0_sst_size_bytes=1 << 30, max_unflushed_bytes=2 << 30)
    builder = uniffi.DbBuilder("puts", uniffi.ObjectStoreBuilder.from_url(f"file://{folder}").build())
    builder.with_settings(uniffi.Settings.from_json_string(json.dumps(values)))
    db = loop.run_until_complete(_built(builder))
    return lambda key, value: loop.run_until_complete(db.put(key, value))


async def _built(builder: Any) -> Any:
    return await builder.build()


def rocksdict_put(folder: Path) -> Put:
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(1 << 30)
    return rocksdict.Rdict(str(folder / "puts"), options).put


PUTS: Final[dict[str, Callable[[Path], Put]]] = {
    FLAGSTONE: flagstone_put,
    WHEEL: wheel_put,
    ROCKS: rocksdict_put,
}


def timed_puts(put: Put, more: Callable[[], bool], first: int) -> list[float]:
    """Put rows while `more()` is true; returns the seconds of each put."""
    taken, number = [], first
    while more():
        for _ in range(50):
            key = b"%016d" % (number * 7_368_787 % 10_000_000)
            started = time.perf_counter()
            put(key, VALUE)
            taken.append(time.perf_counter() - started)
            number += 1
    return taken


def percentiles(taken: list[float]) -> list[float]:
    """Microseconds, in the order of `FIGURES`."""
    ordered = sorted(taken)
    return [
        ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e6 for share in (0.5, 0.99, 0.999, 1)
    ]


def measure(engine: str, folder: Path) -> None:
    """In a process of its own: prints the percentiles alone, beside a compaction, and how many puts those were."""
    put = PUTS[engine](folder)
    work = compaction.CONTENDERS[engine](folder)
    timed_puts(put, _for_seconds(ALONE_S / 4), 0)
    alone = timed_puts(put, _for_seconds(ALONE_S), 1_000_000)
    compacting = threading.Thread(target=work)
    compacting.start()
    beside = timed_puts(put, compacting.is_alive, 3_000_000)
    compacting.join()
    print(json.dumps([percentiles(alone), percentiles(beside), len(beside)]), flush=True)
    os._exit(0)  # the wheel's threads would keep the process alive


def _for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def run() -> str:
    """Measure all engines, write `results/stalls.md`."""
    found: dict[str, list[Any]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory(dir=scratch_place(1 << 30)) as scratch:
        prepared, copy = Path(scratch, "prepared"), Path(scratch, "copy")
        prepared.mkdir()
        compaction.prepare_flagstone(prepared, VALUE_BYTES)
        compaction.prepare_rocksdict(prepared, VALUE_BYTES)
        for _ in range(ROUNDS):
            for engine in random.sample(ENGINES, len(ENGINES)):
                shutil.copytree(prepared, copy)
                command = [sys.executable, "-m", "bench.stalls", engine, str(copy)]
                done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                found[engine].append(json.loads(done.stdout.splitlines()[-1]))
                shutil.rmtree(copy)
    measurements = [
        Measurement(
            f"put {figure}, {when}",
            "µs",
            {
                engine: statistics.median(one[turn][place] for one in rounds)
                for engine, rounds in found.items()
            },
        )
        for place, figure in enumerate(FIGURES)
        for turn, when in enumerate(("alone", "beside a compaction"))
    ]
    puts = {engine: round(statistics.median(one[2] for one in rounds)) for engine, rounds in found.items()}
    counted = ", ".join(f"{engine} {count:,}" for engine, count in puts.items())
    return write_markdown(
        "stalls",
        "Stalls: puts beside a compaction in the same process",
        *compared(measurements),
        [
            f"{compaction.VALUE_BYTES[VALUE_BYTES] * compaction.SSTS * 116 / 1e6:.0f} MB in eight overlapping SSTs are merged by",
            f"threads while another puts rows one by one. Puts while it lasted: {counted}.",
            "A put waits for two things: a turn on the processor, and the interpreter's lock, which the kernels release.",
        ],
        basis=f"Medians of {ROUNDS} rounds of interleaved processes.",
        measurements=[one for one in measurements if "p99," in one.what],
    )


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]))
