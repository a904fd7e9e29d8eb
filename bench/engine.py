"""The engine against the official wheel and rocksdict: point operations, scans, flush, durable puts, reopening.

All three run in this process and take turns, on local folders; 16-byte keys, 100-byte values. The wheel is called as
its users call it, through asyncio; rocksdict and Flagstone directly.
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import FLAGSTONE, ROCKS, WHEEL, Measurement, compared, interleave, sized, write_markdown

KEYS = sized(50_000, quickly=5_000)
FLUSH_ROWS = sized(480_000, quickly=5_000)
"""About 64 MB of keys and values, including the overhead of a memtable."""

FLUSH_MB = FLUSH_ROWS * 116 / 1e6
CALLS = sized(10_000, quickly=500)
WHEEL_CALLS = CALLS // 10
ROUNDS = sized(5, quickly=1)
WAL_FILES = sized(500, quickly=20)

VALUE = os.urandom(100)


def key(number: int) -> bytes:
    return b"%016d" % number


class Flagstone:
    name = FLAGSTONE

    def __init__(self, folder: Path, **settings: Any) -> None:
        import flagstone

        quiet = {"compactor_options": None, "garbage_collector_options": None, "l0_max_ssts": 1000}
        self._open = lambda: flagstone.open(
            "db",
            store=str(folder),
            store_options={"fsync": bool(settings.pop("fsync", False))},
            settings=flagstone.Settings(**{**quiet, "l0_max_ssts_per_key": 1000, **settings}),
        )
        self.db = self._open()

    def load(self, numbers: list[int]) -> None:
        self.put_all(numbers)

    def put_all(self, numbers: Sequence[int]) -> None:
        put = self.db.put
        for number in numbers:
            put(key(number), VALUE)

    def get_all(self, keys: list[bytes]) -> int:
        get = self.db.get
        return sum(get(one) is not None for one in keys)

    def scan_all(self) -> int:
        return sum(1 for _ in self.db.scan())

    def write_table(self, table: Any) -> None:
        self.db.write_arrow(table, await_durable=False)

    def flush(self) -> None:
        self.db.flush("memtable")

    def put_durably(self, numbers: range) -> None:
        for number in numbers:
            self.db.put(key(number), VALUE, await_durable=True)

    def close(self) -> None:
        self.db.close()


class Wheel:
    name = WHEEL

    def __init__(self, folder: Path, **settings: Any) -> None:
        from slatedb import uniffi

        self._uniffi = uniffi
        self._loop = asyncio.new_event_loop()
        values = json.loads(uniffi.Settings.default().to_json_string())
        values.update({"compactor_options": None, "garbage_collector_options": None, "l0_max_ssts": 1000})
        values.update({"l0_max_ssts_per_key": 1000, **settings})
        store = uniffi.ObjectStoreBuilder.from_url(f"file://{folder}").build()
        builder = uniffi.DbBuilder("db", store)
        builder.with_settings(uniffi.Settings.from_json_string(json.dumps(values)))
        self.db = self._run(builder.build())
        self._everything = uniffi.KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def put_all(self, numbers: Sequence[int]) -> None:
        async def work() -> None:
            for number in numbers:
                await self.db.put(key(number), VALUE)

        self._run(work())

    def load(self, numbers: list[int]) -> None:
        async def work() -> None:
            for start in range(0, len(numbers), 1000):
                batch = self._uniffi.WriteBatch()
                for number in numbers[start : start + 1000]:
                    batch.put(key(number), VALUE)
                await self.db.write(batch)

        self._run(work())

    def write_table(self, table: Any) -> None:
        async def work() -> None:
            for rows in table.to_batches(1000):
                batch = self._uniffi.WriteBatch()
                for one, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
                    batch.put(one, value)
                await self.db.write(batch)

        self._run(work())

    def get_all(self, keys: list[bytes]) -> int:
        async def work() -> int:
            return sum([await self.db.get(one) is not None for one in keys])

        return int(self._run(work()))

    def scan_all(self) -> int:
        async def work() -> int:
            iterator = await self.db.scan(self._everything)
            total = 0
            while rows := await iterator.next_batch(1000):
                total += len(rows)
            return total

        return int(self._run(work()))

    def flush(self) -> None:
        kind = self._uniffi.FlushType.MEM_TABLE
        self._run(self.db.flush_with_options(self._uniffi.FlushOptions(flush_type=kind)))

    def put_durably(self, numbers: range) -> None:
        async def work() -> None:
            for number in numbers:
                handle = await self.db.put(key(number), VALUE)
                await handle.await_durable()

        self._run(work())

    def close(self) -> None:
        self._run(self.db.shutdown())
        self._loop.close()


class Rocks:
    name = ROCKS

    def __init__(self, folder: Path, **_: Any) -> None:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(256 << 20)
        self._rocksdict = rocksdict
        self.db = rocksdict.Rdict(str(folder / "db"), options)

    def load(self, numbers: list[int]) -> None:
        self.put_all(numbers)

    def put_all(self, numbers: Sequence[int]) -> None:
        db = self.db
        for number in numbers:
            db[key(number)] = VALUE

    def get_all(self, keys: list[bytes]) -> int:
        get = self.db.get
        return sum(get(one) is not None for one in keys)

    def write_table(self, table: Any) -> None:
        for rows in table.to_batches(1000):
            batch = self._rocksdict.WriteBatch(raw_mode=True)
            for one, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
                batch.put(one, value)
            self.db.write(batch)

    def scan_all(self) -> int:
        return sum(1 for _ in self.db.items())

    def flush(self) -> None:
        self.db.flush(True)

    def put_durably(self, numbers: range) -> None:
        options = self._rocksdict.WriteOptions()
        options.sync = True
        for number in numbers:
            self.db.put(key(number), VALUE, options)

    def close(self) -> None:
        self.db.close()


PEERS: list[type[Any]] = [Flagstone, Wheel, Rocks]


def run() -> str:
    """Measure everything and write `results/engine.md`."""
    root = Path(tempfile.mkdtemp(prefix="flagstone-bench-"))
    try:
        measurements = [
            *point_operations(root),
            _arrow(root),
            flush(root),
            *(durable_puts(root, fsync=fsync) for fsync in (False, True)),
            _reopen(root),
            _memory(root),
        ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return write_markdown(
        "engine",
        "Engine: Flagstone against the official wheel and rocksdict",
        *compared(measurements),
        [
            "Local folders, no compaction. The wheel goes through its asyncio binding, as its users do: most of its time",
            "on point operations is the binding, not the engine.",
        ],
        measurements=measurements,
    )


def _folder(root: Path, name: str) -> Path:
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    return folder


def _per_call(what: str, works: dict[str, Callable[[], object]], sizes: dict[str, int]) -> Measurement:
    timings = interleave(works, rounds=ROUNDS)
    return Measurement(what, "µs", {name: timings[name].median / sizes[name] * 1e6 for name in works})


def point_operations(root: Path, kinds: Sequence[type[Any]] = PEERS) -> list[Measurement]:
    """Puts, gets and scans of these engines."""
    peers = [peer(_folder(root, f"points-{peer.name}")) for peer in kinds]
    chooser = random.Random(5)
    sample = [key(chooser.randrange(KEYS)) for _ in range(CALLS)]
    absent = [b"absent%010d" % number for number in range(CALLS)]
    few = {peer.name: WHEEL_CALLS if peer.name == Wheel.name else CALLS for peer in peers}
    found = [
        _per_call(
            "put, no durability wait",
            {peer.name: (lambda peer=peer: peer.put_all(range(few[peer.name]))) for peer in peers},
            few,
        )
    ]
    for peer in peers:
        peer.load(list(range(KEYS)))

    def gets(what: str, keys: list[bytes]) -> Measurement:
        return _per_call(
            what, {peer.name: (lambda peer=peer: peer.get_all(keys[: few[peer.name]])) for peer in peers}, few
        )

    found.append(gets("get, in the memtable", sample))
    for peer in peers:
        peer.flush()
        assert peer.get_all(sample[:10]) == 10
    found.append(gets("get, in an SST, warm", sample))
    found.append(gets("get, absent", absent))
    timings = interleave({peer.name: peer.scan_all for peer in peers}, rounds=ROUNDS)
    rates = {name: KEYS / timing.median / 1e3 for name, timing in timings.items()}
    found.append(Measurement("full scan", "krows/s", rates, "higher"))
    for peer in peers:
        peer.close()
    return found


def _arrow(root: Path) -> Measurement:
    """Rows of an Arrow table, written to memory and the WAL without waiting; keys arrive in random order."""
    import pyarrow as pa

    order = list(range(FLUSH_ROWS))
    random.Random(4).shuffle(order)
    table = pa.table({"key": [key(number) for number in order], "value": [VALUE] * len(order)})
    seconds: dict[str, list[float]] = {peer.name: [] for peer in PEERS}
    for turn in range(ROUNDS):
        for kind in random.sample(PEERS, len(PEERS)):
            # The binding of the wheel needs half a minute for all rows.
            rows = table.slice(0, len(order) // 10) if kind is Wheel else table
            peer = kind(_folder(root, f"arrow-{kind.__name__}-{turn}"), **_no_early_flush(kind))
            started = time.perf_counter()
            peer.write_table(rows)
            seconds[kind.name].append((time.perf_counter() - started) / rows.num_rows)
            peer.close()
            shutil.rmtree(root / f"arrow-{kind.__name__}-{turn}", ignore_errors=True)
    rates = {name: 1 / statistics.median(taken) / 1e3 for name, taken in seconds.items()}
    return Measurement("write of an Arrow table", "krows/s", rates, "higher")


def flush(root: Path, kinds: Sequence[type[Any]] = PEERS, *, rounds: int = ROUNDS) -> Measurement:
    """Median flush of a full memtable; keys arrive in random order."""
    order = list(range(FLUSH_ROWS))
    random.Random(3).shuffle(order)
    seconds: dict[str, list[float]] = {peer.name: [] for peer in kinds}
    for turn in range(rounds):
        for kind in random.sample(kinds, len(kinds)):
            peer = kind(_folder(root, f"flush-{kind.__name__}-{turn}"), **_no_early_flush(kind))
            peer.load(order)
            started = time.perf_counter()
            peer.flush()
            seconds[kind.name].append(time.perf_counter() - started)
            peer.close()
            shutil.rmtree(root / f"flush-{kind.__name__}-{turn}", ignore_errors=True)
    rates = {name: FLUSH_MB / statistics.median(taken) for name, taken in seconds.items()}
    return Measurement(f"flush of {FLUSH_MB:.0f} MB", "MB/s", rates, "higher")


def _no_early_flush(kind: type[Any]) -> dict[str, Any]:
    return {} if kind is Rocks else {"l0_sst_size_bytes": 1 << 30, "max_unflushed_bytes": 2 << 30}


def durable_puts(root: Path, kinds: Sequence[type[Any]] = PEERS, *, fsync: bool) -> Measurement:
    """Durable puts of one caller, one after the other. RocksDB takes part only with fsync."""
    chosen = [kind for kind in kinds if fsync or kind is not Rocks]
    peers = [
        kind(_folder(root, f"durable-{fsync}-{kind.__name__}"), **_with_fsync(kind, fsync)) for kind in chosen
    ]
    sizes = {
        peer.name: sized(10, quickly=2) if peer.name == Wheel.name else sized(300, quickly=20)
        for peer in peers
    }
    works = {
        peer.name: (lambda peer=peer, count=sizes[peer.name]: peer.put_durably(range(count)))
        for peer in peers
    }
    timings = interleave(works, rounds=ROUNDS)
    rates = {name: sizes[name] / timing.median for name, timing in timings.items()}
    for peer in peers:
        peer.close()
    return Measurement(f"durable put, one caller, {'fsync' if fsync else 'no fsync'}", "/s", rates, "higher")


def _with_fsync(kind: type[Any], fsync: bool) -> dict[str, Any]:
    """SlateDB's folders never call fsync; RocksDB's writes ask for it themselves."""
    return {"fsync": fsync} if kind is Flagstone else {}


def _reopen(root: Path) -> Measurement:
    """Open a database with many WAL files of 100 rows, written by Flagstone and copied for each attempt."""
    source = _folder(root, "reopen-source")
    writer = Flagstone(source, flush_interval=None)
    for file in range(WAL_FILES):
        writer.put_all(range(file * 100, file * 100 + 100))
        writer.db.flush("wal")
    shutil.copytree(source, root / "reopen-copy")
    writer.close()
    seconds: dict[str, list[float]] = {Flagstone.name: [], Wheel.name: []}
    for turn in range(ROUNDS):
        for kind in random.sample([Flagstone, Wheel], 2):
            folder = root / f"reopen-{kind.__name__}-{turn}"
            shutil.copytree(root / "reopen-copy", folder)
            started = time.perf_counter()
            peer = kind(folder)
            seconds[kind.name].append(time.perf_counter() - started)
            assert peer.get_all([key(WAL_FILES * 100 - 1)]) == 1
            peer.close()
            shutil.rmtree(folder)
    taken = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    return Measurement(f"reopen, {WAL_FILES} WAL files", "ms", taken)


_MEMORY_PROGRAM = """
import sys
from pathlib import Path
from bench import engine
kind = {peer.__name__: peer for peer in engine.PEERS}[sys.argv[1]]
peer = kind(Path(sys.argv[2]), **engine._no_early_flush(kind))
peer.load(list(range(engine.FLUSH_ROWS)))
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6)
peer.close()
"""


def _memory(root: Path) -> Measurement:
    """Resident memory of a fresh process after loading the rows of a full memtable."""
    sizes = {}
    for kind in PEERS:
        folder = _folder(root, f"memory-{kind.name}")
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY_PROGRAM, kind.__name__, str(folder)],
            capture_output=True,
            text=True,
            check=True,
        )
        sizes[kind.name] = float(done.stdout.split()[0])
    return Measurement("memory after loading 64 MB", "MB", sizes)
