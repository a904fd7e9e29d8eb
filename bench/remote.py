"""Flagstone and the official wheel on the same simulated S3: HTTP, simulated latency, counted requests.

The service is `bench.s3_server`, in a process of its own. Both engines have their default settings and reach it through
their own clients; the wheel is called through asyncio, with a task for each writer, Flagstone with a thread for each. Both read
the same database in turn, which Flagstone loaded and compacted.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Self

from bench.harness import FLAGSTONE, WHEEL, Measurement, formatted, markdown_table, sized, write_markdown
from bench.s3_server import COUNTS, PROFILES

ROWS: Final = sized(20_000, quickly=1_000)
"""Few, because the wheel fetches one block after the other."""
KEY_BYTES: Final = 20
VALUE: Final = random.Random(6).randbytes(100)
WRITERS: Final = (1, 8, 64)
SECONDS: Final = sized(3.0, quickly=0.2)
ROUNDS: Final = sized(3, quickly=1)
GETS: Final = sized(40, quickly=4)
OPENINGS: Final = sized(5, quickly=1)


def key(number: int) -> bytes:
    return b"%020d" % number


class Service:
    """The server of one profile, running during the block."""

    def __init__(self, profile: str) -> None:
        self._command = [sys.executable, "-m", "bench.s3_server", profile]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._process.communicate("", timeout=30)

    def counts(self) -> Counter[str]:
        """Requests by kind since the start."""
        with urllib.request.urlopen(self.endpoint + COUNTS) as answer:
            counted = Counter(json.loads(answer.read()))
        return Counter({kind: count for kind, count in counted.items() if kind not in ("sent", "received")})


class Flagstone:
    name = FLAGSTONE

    def __init__(self, service: Service, path: str) -> None:
        self._path = path
        self._options: dict[str, Any] = {
            "endpoint": service.endpoint,
            "region": "us-east-1",
            "access_key_id": "bench",
            "secret_access_key": "bench",
            "virtual_hosted_style_request": False,
            "allow_http": True,
        }

    def open(self) -> None:
        import flagstone

        self._db = flagstone.open(self._path, store="s3://bench", store_options=self._options)

    def load(self) -> None:
        """Make the database that both read: one sorted run, no WAL."""
        import flagstone

        self.open()
        for _ in range(2):  # the second time, so that no WAL is left that the next open would replay
            for number in range(ROWS):
                self._db.put(key(number), VALUE)
            self._db.flush("memtable")
        self._db.close()
        admin = flagstone.Admin(self._path, store="s3://bench", store_options=self._options)
        admin.compact(full=True, patience=timedelta(seconds=0.1))

    def put_durably(self, writers: int, end: float) -> list[float]:
        taken: list[float] = []

        def write(writer: int) -> None:
            number = writer
            while (started := time.perf_counter()) < end:
                self._db.put(key(number), VALUE, await_durable=True)
                taken.append(time.perf_counter() - started)
                number += writers

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return taken

    def get(self, one: bytes) -> object:
        return self._db.get(one)

    def scan(self) -> int:
        return sum(1 for _ in self._db.scan())

    def close(self) -> None:
        self._db.close()


class Wheel:
    name = WHEEL

    def __init__(self, service: Service, path: str) -> None:
        from slatedb import uniffi

        self._uniffi, self._path = uniffi, path
        self._loop = asyncio.new_event_loop()
        builder = uniffi.ObjectStoreBuilder.from_url("s3://bench")
        for name, text in {
            "aws_endpoint": service.endpoint,
            "aws_region": "us-east-1",
            "aws_access_key_id": "bench",
            "aws_secret_access_key": "bench",
            "aws_virtual_hosted_style_request": "false",
            "aws_allow_http": "true",
        }.items():
            builder.with_config(name, text)
        self._store = builder.build()

    def open(self) -> None:
        self._db = self._run(self._uniffi.DbBuilder(self._path, self._store).build())

    def put_durably(self, writers: int, end: float) -> list[float]:
        taken: list[float] = []

        async def write(writer: int) -> None:
            number = writer
            while (started := time.perf_counter()) < end:
                handle = await self._db.put(key(number), VALUE)
                await handle.await_durable()
                taken.append(time.perf_counter() - started)
                number += writers

        async def work() -> None:
            await asyncio.gather(*(write(writer) for writer in range(writers)))

        self._run(work())
        return taken

    def get(self, one: bytes) -> object:
        return self._run(self._db.get(one))

    def scan(self) -> int:
        async def work() -> int:
            everything = self._uniffi.KeyRange(
                start=None, start_inclusive=True, end=None, end_inclusive=False
            )
            rows, found = await self._db.scan(everything), 0
            while batch := await rows.next_batch(1000):
                found += len(batch)
            return found

        return int(self._run(work()))

    def close(self) -> None:
        self._run(self._db.shutdown())

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


ENGINES: Final[tuple[type[Any], ...]] = (Flagstone, Wheel)
Figures = dict[str, dict[str, list[float]]]
"""Measurement -> engine -> its rounds."""


class Comparison:
    """Both engines on one service: times, and requests per operation."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.times: Figures = {}
        self.requests: Figures = {}

    def measure(self) -> None:
        """Measure everything; the engines take turns in each round."""
        Flagstone(self._service, "read").load()
        for writers in WRITERS:
            self._take_turns(ROUNDS, lambda engine, writers=writers: self._puts(engine, writers))
        self._take_turns(OPENINGS, self._opening)
        self._take_turns(ROUNDS, self._gets)
        self._take_turns(ROUNDS, self._scan)

    def _take_turns(self, rounds: int, work: Callable[[type[Any]], None]) -> None:
        for _ in range(rounds):
            for engine in random.sample(ENGINES, len(ENGINES)):
                work(engine)

    def _puts(self, kind: type[Any], writers: int) -> None:
        engine = kind(self._service, f"puts-{kind.__name__}")
        engine.open()
        before, started = self._service.counts(), time.perf_counter()
        taken = engine.put_durably(writers, started + SECONDS)
        seconds = time.perf_counter() - started
        requests = (self._service.counts() - before).total()
        engine.close()
        what = f"durable put, {'1 writer' if writers == 1 else f'{writers} writers'}"
        self._keep(what, engine.name, len(taken) / seconds, requests / len(taken))

    def _opening(self, kind: type[Any]) -> None:
        engine = kind(self._service, "read")
        before, started = self._service.counts(), time.perf_counter()
        engine.open()
        seconds, requests = time.perf_counter() - started, self._service.counts() - before
        engine.close()
        self._keep("open", engine.name, seconds * 1e3, requests.total())

    def _gets(self, kind: type[Any]) -> None:
        engine = kind(self._service, "read")
        engine.open()
        before, started = self._service.counts(), time.perf_counter()
        for number in random.sample(range(ROWS), GETS):
            assert engine.get(key(number)) is not None
        seconds, requests = time.perf_counter() - started, self._service.counts() - before
        engine.close()
        self._keep("cold get", engine.name, seconds / GETS * 1e3, requests.total() / GETS)

    def _scan(self, kind: type[Any]) -> None:
        engine = kind(self._service, "read")
        engine.open()
        before, started = self._service.counts(), time.perf_counter()
        assert engine.scan() == ROWS
        seconds, requests = time.perf_counter() - started, self._service.counts() - before
        engine.close()
        self._keep("cold full scan", engine.name, ROWS / seconds / 1e3, requests.total())

    def _keep(self, what: str, engine: str, figure: float, requests: float) -> None:
        self.times.setdefault(what, {}).setdefault(engine, []).append(figure)
        self.requests.setdefault(what, {}).setdefault(engine, []).append(requests)


UNITS: Final = {"open": "ms", "cold get": "ms", "cold full scan": "krows/s"}


def run() -> str:
    """Measure both profiles, write `results/remote.md`."""
    measurements, rows = [], []
    for short, profile in PROFILES.items():
        with Service(short) as service:
            comparison = Comparison(service)
            comparison.measure()
        for what, engines in comparison.times.items():
            unit = UNITS.get(what, "/s")
            one = Measurement(
                f"{what}, {profile.name}",
                unit,
                {engine: statistics.median(rounds) for engine, rounds in engines.items()},
                "lower" if unit == "ms" else "higher",
            )
            measurements.append(one)
            asked = {engine: statistics.median(found) for engine, found in comparison.requests[what].items()}
            ratio = one.ratio(WHEEL)
            rows.append(
                [
                    one.what,
                    *(formatted(one.values[engine], unit) for engine in (FLAGSTONE, WHEEL)),
                    "" if ratio is None else f"{ratio:.2f}×",
                    *(f"{asked[engine]:,.2f}".removesuffix(".00") for engine in (FLAGSTONE, WHEEL)),
                ]
            )
    assumed = [
        [
            profile.name,
            *(f"{wait.median * 1e3:.0f} / {wait.p99 * 1e3:.0f}" for wait in (profile.get, profile.put)),
            f"{profile.bytes_per_second / 1e6:.0f}",
        ]
        for profile in PROFILES.values()
    ]
    return write_markdown(
        "remote",
        "The same simulated S3: Flagstone beside slatedb 0.17.0",
        ["what", FLAGSTONE, WHEEL, "× wheel", "requests each, flagstone", "requests each, slatedb"],
        rows,
        [
            f"A server on this machine that waits as S3 does, default settings of both, {ROWS:,} rows of {KEY_BYTES} + {len(VALUE)} bytes in",
            "one sorted run for the reads, nothing cached. Requests are all that arrive during the work, background included,",
            "divided by the number of puts, gets, openings or scans. By default the wheel uploads its WAL every 100 ms and a writer",
            "waits for that; Flagstone uploads as soon as a caller waits. In a scan Flagstone reads ahead; by default the wheel reads",
            "one block after the other.",
            "",
            *markdown_table(["assumed", "get, ms", "put, ms", "MB/s per connection"], assumed),
            "",
            "Median / 99th percentile; see [latency.md](latency.md).",
        ],
        basis=f"Medians of {ROUNDS} interleaved rounds.",
        measurements=measurements,
    )


if __name__ == "__main__":
    print(run())
