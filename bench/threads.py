"""What the interpreter lock costs: the same work by one thread, by several, by tasks of an event loop, by two processes.

A process has a lock of its own, so two processes show what two cores can do. Every measurement has processes of its own;
the ways of working take turns. Gets are warm, except for those from a store with the latency of S3 Standard.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from bench.harness import formatted, sized, write_markdown

ROWS: Final = sized(200_000, quickly=4_000)
L0_SSTS: Final = 8
SECONDS: Final = sized(1.5, quickly=0.05)
COLD_SECONDS: Final = sized(3.0, quickly=0.1)
ROUNDS: Final = sized(5, quickly=1)
TASKS: Final = 64
VALUE: Final = random.Random(9).randbytes(100)
BATCH: Final = 100
"""Calls between two looks at the clock."""


def key(number: int) -> bytes:
    return b"%020d" % number


def _filled(layers: int, store: Any) -> Any:
    """A database with all rows in that many overlapping SSTs."""
    import flagstone

    settings = flagstone.Settings(
        compactor_options=None,
        garbage_collector_options=None,
        l0_max_ssts=1000,
        l0_max_ssts_per_key=1000,
    )
    db = flagstone.open("db", store=store, settings=settings)
    for layer in range(layers):
        for number in range(layer, ROWS, layers):
            db.put(key(number), VALUE)
        db.flush("memtable")
    return db


def _keys(worker: int, count: int) -> list[bytes]:
    return [key(number) for number in random.Random(worker).choices(range(ROWS), k=count)]


Go = Callable[[], float]
"""Does the prepared work, and returns calls a second of all workers together."""


def _by_threads(work: Callable[[int, float], int], workers: int, seconds: float) -> Go:
    """`work` takes the number of a worker and the time at which to stop, and returns how many calls it made."""

    def go() -> float:
        counts = [0] * workers
        started = time.perf_counter()

        def run(worker: int) -> None:
            counts[worker] = work(worker, started + seconds)

        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - started)

    return go


def _thread_gets(get: Callable[[bytes], object], threads: int, seconds: float, batch: int) -> Go:
    keys = [_keys(worker, 5_000) for worker in range(threads)]

    def work(worker: int, end: float) -> int:
        mine, done = keys[worker], 0
        while time.perf_counter() < end:
            for _ in range(batch):
                assert get(mine[done % len(mine)]) is not None
                done += 1
        return done

    return _by_threads(work, threads, seconds)


def _task_gets(get: Callable[[bytes], Awaitable[object]], seconds: float, batch: int) -> Go:
    keys = [_keys(worker, 500) for worker in range(TASKS)]

    async def every_task() -> float:
        done, started = 0, time.perf_counter()

        async def work(mine: list[bytes]) -> None:
            nonlocal done
            at = 0
            while time.perf_counter() < started + seconds:
                for _ in range(batch):
                    assert await get(mine[at % len(mine)]) is not None
                    at += 1
                done += batch
                await asyncio.sleep(0)

        await asyncio.gather(*map(work, keys))
        return done / (time.perf_counter() - started)

    return lambda: asyncio.run(every_task())


def gets(layers: int, threads: int) -> Go:
    """Gets by threads, with everything in memory."""
    from flagstone.store.memory import MemoryStore

    db = _filled(layers, MemoryStore())
    for number in range(ROWS):
        db.get(key(number))
    return _thread_gets(db.get, threads, SECONDS, BATCH)


def task_gets(layers: int) -> Go:
    """Gets by tasks of one event loop, with everything in memory."""
    from flagstone.db.aio.database import AsyncDb
    from flagstone.store.memory import MemoryStore

    db = _filled(layers, MemoryStore())
    for number in range(ROWS):
        db.get(key(number))
    return _task_gets(AsyncDb(db).get, SECONDS, BATCH)


def puts(threads: int) -> Go:
    """Puts by threads, into memory; the WAL is written in the background."""
    import flagstone
    from flagstone.store.memory import MemoryStore

    settings = flagstone.Settings(
        compactor_options=None,
        garbage_collector_options=None,
        l0_sst_size_bytes=1 << 30,
        max_unflushed_bytes=2 << 30,
    )
    db = flagstone.open("db", store=MemoryStore(), settings=settings)

    def work(worker: int, end: float) -> int:
        number = worker * 10_000_000
        while time.perf_counter() < end:
            for _ in range(BATCH):
                db.put(key(number), VALUE)
                number += 1
        return number - worker * 10_000_000

    return _by_threads(work, threads, SECONDS)


def _cold_reader() -> Any:
    import flagstone
    from bench.latency_store import STANDARD, LatencyStore
    from flagstone.store.memory import MemoryStore

    inner = MemoryStore()
    _filled(1, inner).close()
    # Room for the index and the filter, but for few blocks.
    settings = flagstone.ReaderSettings(block_cache_bytes=0, meta_cache_bytes=1 << 20)
    reader = flagstone.open_reader("db", store=LatencyStore(inner, STANDARD), settings=settings)
    reader.get(key(0))
    return reader


def cold_gets(threads: int) -> Go:
    """Gets by threads; nearly each makes a request."""
    return _thread_gets(_cold_reader().get, threads, COLD_SECONDS, 1)


def cold_task_gets() -> Go:
    """The same by tasks of one event loop."""
    from flagstone.db.aio.reader import AsyncDbReader

    return _task_gets(AsyncDbReader(_cold_reader()).get, COLD_SECONDS, 1)


Way = tuple[str, Callable[[], Go], int]
"""What works, how a process prepares it, and how many such processes run at once."""


def _warm(layers: int) -> list[Way]:
    return [
        ("1 thread", lambda: gets(layers, 1), 1),
        ("2 threads", lambda: gets(layers, 2), 1),
        ("4 threads", lambda: gets(layers, 4), 1),
        (f"{TASKS} tasks", lambda: task_gets(layers), 1),
        ("2 processes", lambda: gets(layers, 1), 2),
    ]


WORK: Final[dict[str, list[Way]]] = {
    "get, one SST": _warm(1),
    f"get, {L0_SSTS} SSTs": _warm(L0_SSTS),
    "put": [
        ("1 thread", lambda: puts(1), 1),
        ("8 threads", lambda: puts(8), 1),
        ("2 processes", lambda: puts(1), 2),
    ],
    "get, not in memory, S3 Standard": [
        ("1 thread", lambda: cold_gets(1), 1),
        ("2 threads", lambda: cold_gets(2), 1),
        ("4 threads", lambda: cold_gets(4), 1),
        (f"{TASKS} tasks", cold_task_gets, 1),
    ],
}


def measure(what: str, at: int) -> None:
    """In a process of its own: prepare, wait for a line of input, print calls a second and cores in use."""
    go = WORK[what][at][1]()
    print("ready", flush=True)
    sys.stdin.readline()
    used, started = time.process_time(), time.perf_counter()
    rate = go()
    print(json.dumps([rate, (time.process_time() - used) / (time.perf_counter() - started)]), flush=True)
    os._exit(0)  # databases are still open


def _measured(what: str, at: int) -> tuple[float, float]:
    """Calls a second and cores in use, of all processes together."""
    command = [sys.executable, "-c", f"from bench.threads import measure; measure({what!r}, {at})"]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(WORK[what][at][2])
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate(timeout=300)[0]) for process in running]
    return sum(rate for rate, _ in results), sum(cores for _, cores in results)


def run() -> str:
    """Measure everything, write `results/threads.md`."""
    rows = []
    for what, ways in WORK.items():
        measured: dict[int, list[tuple[float, float]]] = {at: [] for at in range(len(ways))}
        for _ in range(ROUNDS):
            for at in random.sample(range(len(ways)), len(ways)):
                measured[at].append(_measured(what, at))
        alone = statistics.median(rate for rate, _ in measured[0])
        for at, (way, _, _) in enumerate(ways):
            rate = statistics.median(rate for rate, _ in measured[at])
            cores = statistics.median(cores for _, cores in measured[at])
            rows.append([what, way, formatted(rate, "/s"), f"{rate / alone:.2f}×", f"{cores:.2f}"])
    return write_markdown(
        "threads",
        "Threads: what the interpreter lock costs",
        ["what", "by", "calls, all together", "of one thread", "cores in use"],
        rows,
        [
            f"{ROWS:,} rows of 20 + 100 bytes, store in memory. A warm get or put holds the interpreter lock from its first to its last",
            "instruction, so threads share one core and add switches between them. Two processes have two locks and show what the cores can",
            "do. A get that makes a request waits without the lock, so threads and tasks overlap.",
        ],
        basis=f"Medians of {ROUNDS} interleaved rounds, each in processes of its own.",
    )
