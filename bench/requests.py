"""Requests to the object store: Flagstone and the official wheel, with the same work for both.

Ours are counted by `CountingStore`, the wheel's by its own metric; both count calls of the store's interface. The
wheel's metric counts every put twice, as its stored objects show, and is corrected for that. Local folders serve
as the store, because a count does not depend on where the objects are. The idle minute is a real minute, with all
databases open at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol, Self

from bench.harness import FLAGSTONE, WHEEL, Measurement, sized, write_markdown
from bench.prices import S3_STANDARD

ROWS: Final = sized(100_000, quickly=4_000)
SSTS: Final = 4
PUTS: Final = sized(1000, quickly=20)
GETS: Final = sized(1000, quickly=20)
SETTLING_S: Final = sized(75, quickly=1)
"""Start-up work of a database is not idling, and the first round of a collector comes within a minute."""
IDLE_S: Final = sized(60, quickly=2)
IDLE_BY_DEFAULT: Final = "idle minute, default settings"
WINDOW_S: Final = sized(10, quickly=1)
MINUTES_A_MONTH: Final = 30 * 24 * 60

QUIET: Final = {"compactor_options": None, "garbage_collector_options": None}
MANY_SSTS: Final = {"l0_max_ssts": 1000, "l0_max_ssts_per_key": 1000}

Count = Counter[str]
"""Requests by kind: get (with head), put, list, delete, copy."""


def key(number: int) -> bytes:
    return b"%016d" % number


class Contender(Protocol):
    """One engine, with one database that is opened, used and closed."""

    def open(self, **settings: Any) -> None: ...

    def count(self) -> Count:
        """All requests since the database was opened."""
        ...

    def load(self, numbers: list[int], value: bytes) -> None: ...

    def flush(self) -> None: ...

    def put_durably(self, count: int, value: bytes) -> None: ...

    def get_all(self, keys: list[bytes]) -> int: ...

    def scan_all(self) -> int: ...

    def close(self) -> None: ...


class Flagstone:
    """Flagstone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, **settings: Any) -> None:
        import flagstone
        from flagstone.store.counting import CountingStore
        from flagstone.store.local import LocalStore

        self._store = CountingStore(LocalStore(self._folder), component="bench")
        self._db = flagstone.open("db", store=self._store, settings=flagstone.Settings(**settings))

    def count(self) -> Count:
        from flagstone.store.counting import OPERATIONS

        counted = Count()
        for api, requests in self._store.totals()["requests"].items():
            counted[_kind(OPERATIONS[api])] += requests
        return counted

    def load(self, numbers: list[int], value: bytes) -> None:
        for number in numbers:
            self._db.put(key(number), value)

    def flush(self) -> None:
        self._db.flush("memtable")

    def put_durably(self, count: int, value: bytes) -> None:
        for number in range(count):
            self._db.put(key(number), value, await_durable=True)

    def get_all(self, keys: list[bytes]) -> int:
        return sum(self._db.get(one) is not None for one in keys)

    def scan_all(self) -> int:
        return sum(1 for _ in self._db.scan())

    def close(self) -> None:
        self._db.close()


class Wheel:
    """The official wheel, through asyncio as its users call it."""

    def __init__(self, folder: Path) -> None:
        from slatedb import uniffi

        self._uniffi = uniffi
        self._folder = folder
        self._loop = asyncio.new_event_loop()

    def open(self, **settings: Any) -> None:
        uniffi = self._uniffi
        values = json.loads(uniffi.Settings.default().to_json_string())
        values.update(settings)
        self._recorder = uniffi.DefaultMetricsRecorder()
        builder = uniffi.DbBuilder("db", uniffi.ObjectStoreBuilder.from_url(f"file://{self._folder}").build())
        builder.with_settings(uniffi.Settings.from_json_string(json.dumps(values)))
        builder.with_metrics_recorder(self._recorder)
        objects = self._objects()
        self._times_counted = 1
        self._db = self._run(builder.build())
        self._times_counted = max(self.count()["put"] // max(self._objects() - objects, 1), 1)

    def _objects(self) -> int:
        return sum(1 for found in self._folder.rglob("*") if found.is_file())

    def count(self) -> Count:
        counted = Count()
        for metric in self._recorder.snapshot():
            if metric.name == "slatedb.object_store.request_count":
                api = next(label.value for label in metric.labels if label.key == "api")
                counted[_kind(api)] += metric.value[0]
        counted["put"] //= self._times_counted
        return counted

    def load(self, numbers: list[int], value: bytes) -> None:
        async def work() -> None:
            for start in range(0, len(numbers), 1000):
                batch = self._uniffi.WriteBatch()
                for number in numbers[start : start + 1000]:
                    batch.put(key(number), value)
                await self._db.write(batch)

        self._run(work())

    def flush(self) -> None:
        options = self._uniffi.FlushOptions(flush_type=self._uniffi.FlushType.MEM_TABLE)
        self._run(self._db.flush_with_options(options))

    def put_durably(self, count: int, value: bytes) -> None:
        async def work() -> None:
            for number in range(count):
                handle = await self._db.put(key(number), value)
                await handle.await_durable()

        self._run(work())

    def get_all(self, keys: list[bytes]) -> int:
        async def work() -> int:
            return sum([await self._db.get(one) is not None for one in keys])

        return int(self._run(work()))

    def scan_all(self) -> int:
        everything = self._uniffi.KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)

        async def work() -> int:
            rows = await self._db.scan(everything)
            found = 0
            while batch := await rows.next_batch(1000):
                found += len(batch)
            return found

        return int(self._run(work()))

    def close(self) -> None:
        self._run(self._db.shutdown())

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


def _kind(api: str) -> str:
    """The kind of request, by which it is billed, for a method of the store's interface."""
    for prefix, kind in (("list", "list"), ("put", "put"), ("multipart", "put"), ("delete", "delete")):
        if api.startswith(prefix):
            return kind
    return "copy" if api == "copy" else "get"


def _measure_work(contender: Contender) -> dict[str, Count]:
    """Requests by step of the work, each step counted separately."""
    value = random.Random(7).randbytes(100)
    numbers = random.Random(8).sample(range(ROWS), ROWS)
    found: dict[str, Count] = {}
    contender.open(**QUIET, **MANY_SSTS)
    found["open, new database"] = contender.count()
    for part in range(SSTS):
        contender.load(numbers[part::SSTS], value)
        contender.flush()
    contender.close()
    contender.open(**QUIET, **MANY_SSTS)
    found["open, existing database"] = contender.count()
    chosen = [key(number) for number in random.Random(9).sample(range(ROWS), GETS)]
    before = contender.count()
    assert contender.get_all(chosen) == GETS
    found[f"{GETS:,} cold gets"] = contender.count() - before
    contender.close()
    contender.open(**QUIET, **MANY_SSTS)
    before = contender.count()
    assert contender.scan_all() == ROWS
    found["cold full scan"] = contender.count() - before
    contender.close()
    # With the wheel's default of 100 ms this would take minutes, in which it would also poll more.
    contender.open(**QUIET, **MANY_SSTS, flush_interval="2ms")
    before = contender.count()
    contender.put_durably(PUTS, value)
    found[f"{PUTS:,} durable puts, one caller"] = contender.count() - before
    contender.close()
    return found


def _measure_idle(folder: Path) -> dict[str, list[Count]]:
    """A minute without reads and writes: both engines, without and with their compactor and collector."""
    rows: dict[str, dict[str, Any]] = {
        "idle minute, no compactor or collector": QUIET,
        IDLE_BY_DEFAULT: {},
    }
    contenders = []
    for place, (name, settings) in enumerate(rows.items()):
        for engine in (Flagstone, Wheel):
            at = folder / f"{engine.__name__}-{place}"
            at.mkdir()
            contenders.append((name, _left_alone(engine(at), settings)))
    time.sleep(SETTLING_S)
    before = [contender.count() for _, contender in contenders]
    time.sleep(IDLE_S)
    found: dict[str, list[Count]] = {name: [] for name in rows}
    for (name, contender), earlier in zip(contenders, before, strict=True):
        found[name].append(contender.count() - earlier)
    for _, contender in contenders:
        contender.close()
    return found


def _left_alone(contender: Contender, settings: Mapping[str, Any]) -> Contender:
    contender.open(**settings)
    contender.load(list(range(100)), os.urandom(100))
    contender.flush()
    return contender


class IdleDatabase:
    """Our database with default settings, left alone while the block runs: its requests, from short windows.

    For programs that have less time than `run`. A round of the garbage collector falls into one window of several, so
    the median is that of a minute without one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._counts: list[int] = []

    def __enter__(self) -> Self:
        self._contender = _left_alone(Flagstone(self._folder), {})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._contender.close()

    def _count(self) -> None:
        while not self._end.wait(WINDOW_S):
            self._counts.append(self._contender.count().total())

    def minute(self) -> Measurement | None:
        """The requests of a minute; None before the second window has ended. The first is that of start-up."""
        windows = [after - before for before, after in pairwise(self._counts)]
        if not windows:
            return None
        return _requests(IDLE_BY_DEFAULT, {FLAGSTONE: statistics.median(windows) * 60 / WINDOW_S})


def _requests(name: str, totals: dict[str, float]) -> Measurement:
    return Measurement(f"requests, {name}", "", totals)


def run() -> str:
    """Count everything, and keep the table."""
    with tempfile.TemporaryDirectory() as folder:
        idle = _measure_idle(Path(folder))
        counted = []
        for engine in (Flagstone, Wheel):
            at = Path(folder) / engine.__name__
            at.mkdir()
            counted.append(_measure_work(engine(at)))
    ours, theirs = counted
    steps = {name: [ours[name], theirs[name]] for name in ours} | idle
    rows, measurements = [], []
    for name, (mine, wheels) in steps.items():
        ratio = mine.total() / max(wheels.total(), 1)
        rows.append(
            [name, _counted(mine), _counted(wheels), f"{ratio:.2f}", _cost(name, mine), _cost(name, wheels)]
        )
        totals = {FLAGSTONE: float(mine.total()), WHEEL: float(wheels.total())}
        measurements.append(_requests(name, totals))
    return write_markdown(
        "requests",
        "Requests to the object store: Flagstone beside slatedb 0.17.0",
        ["work", "flagstone", "slatedb 0.17", "ratio", "flagstone, dollars", "slatedb, dollars"],
        rows,
        [
            (
                f"{ROWS:,} rows of 16 + 100 bytes in {SSTS} SSTs; one process, local folders. Each figure is the "
                "sum, then what it consists of; get includes head. The wheel's metric counts each put twice, as the "
                "objects it leaves behind show; its puts are halved here."
            ),
            "",
            (
                "Dollars at S3's prices (put and list $0.005, get $0.0004 per thousand): for an idle minute the cost of "
                "a month of such minutes, for other work the cost of doing it a million times."
            ),
        ],
        basis="Counts, not times: they repeat.",
        measurements=measurements,
    )


def _counted(counted: Count) -> str:
    parts = ", ".join(f"{requests:,} {kind}" for kind, requests in sorted(counted.items()) if requests)
    return f"{counted.total():,} ({parts})" if parts else "0"


def _cost(name: str, counted: Count) -> str:
    times = MINUTES_A_MONTH if name.startswith("idle") else 1_000_000
    return f"{S3_STANDARD.requests(counted) * times:,.2f}"
