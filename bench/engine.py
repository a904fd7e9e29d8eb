"""The engine against the official wheel and rocksdict: point operations, scans, flush, durable puts, reopening.

All three live in this process and take turns, on local folders; 16-byte keys, 100-byte values. The wheel is called as
its users call it, through asyncio; rocksdict and Flagstone directly.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import interleave, write_markdown

KEYS = 50_000
FLUSH_ROWS = 480_000
"""About 64 MB of keys and values with what a memtable adds to them."""

VALUE = os.urandom(100)


def key(number: int) -> bytes:
    return b"%016d" % number


class Flagstone:
    name = "flagstone"

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

    def flush(self) -> None:
        self.db.flush("memtable")

    def put_durably(self, numbers: range) -> None:
        for number in numbers:
            self.db.put(key(number), VALUE, await_durable=True)

    def close(self) -> None:
        self.db.close()


class Wheel:
    name = "slatedb 0.17"

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
    name = "rocksdict"

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
        lines = [
            *_point_operations(root),
            _flush(root),
            *_durable(root),
            _reopen(root),
            _memory(root),
        ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return write_markdown(
        "engine",
        "Engine: Flagstone against the official wheel and rocksdict",
        ["what", "flagstone", "slatedb 0.17", "rocksdict", "× wheel", "× rocksdict"],
        lines,
        [
            "Local folders, no compaction. The wheel goes through its asyncio binding, as its users do: most of its time",
            "on point operations is the binding, not the engine.",
        ],
    )


def _folder(root: Path, name: str) -> Path:
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    return folder


def _line(what: str, rates: dict[str, float], unit: str, *, higher: bool) -> list[str]:
    ours, wheel, rocks = (rates.get(peer.name) for peer in PEERS)
    assert ours is not None

    def show(rate: float | None) -> str:
        return "" if rate is None else f"{rate:,.2f} {unit}" if rate < 100 else f"{rate:,.0f} {unit}"

    def ratio(other: float | None) -> str:
        if other is None:
            return ""
        return f"{ours / other if higher else other / ours:.2f}×"

    return [what, show(ours), show(wheel), show(rocks), ratio(wheel), ratio(rocks)]


def _per_call(
    what: str, works: dict[str, Callable[[], object]], sizes: dict[str, int], rounds: int = 5
) -> list[str]:
    timings = interleave(works, rounds=rounds)
    return _line(what, {name: timings[name].median / sizes[name] * 1e6 for name in works}, "µs", higher=False)


def _point_operations(root: Path) -> list[list[str]]:
    peers = [peer(_folder(root, f"points-{peer.name}")) for peer in PEERS]
    chooser = random.Random(5)
    sample = [key(chooser.randrange(KEYS)) for _ in range(10_000)]
    absent = [b"absent%010d" % number for number in range(10_000)]
    few = {peer.name: 1_000 if peer.name == Wheel.name else 10_000 for peer in peers}
    lines = [
        _per_call(
            "put, no durability wait",
            {peer.name: (lambda peer=peer: peer.put_all(range(few[peer.name]))) for peer in peers},
            few,
        )
    ]
    for peer in peers:
        peer.load(list(range(KEYS)))

    def gets(what: str, keys: list[bytes]) -> list[str]:
        return _per_call(
            what, {peer.name: (lambda peer=peer: peer.get_all(keys[: few[peer.name]])) for peer in peers}, few
        )

    lines.append(gets("get, in the memtable", sample))
    for peer in peers:
        peer.flush()
        assert peer.get_all(sample[:10]) == 10
    lines.append(gets("get, in a table, warm", sample))
    lines.append(gets("get, absent", absent))
    timings = interleave({peer.name: peer.scan_all for peer in peers}, rounds=5)
    lines.append(
        _line("full scan", {n: KEYS / t.median / 1e3 for n, t in timings.items()}, "krows/s", higher=True)
    )
    for peer in peers:
        peer.close()
    return lines


def _flush(root: Path) -> list[str]:
    """Median of five flushes of a full memtable each; keys arrive in random order."""
    order = list(range(FLUSH_ROWS))
    random.Random(3).shuffle(order)
    seconds: dict[str, list[float]] = {peer.name: [] for peer in PEERS}
    for turn in range(5):
        for kind in random.sample(PEERS, len(PEERS)):
            peer = kind(_folder(root, f"flush-{kind.__name__}-{turn}"), **_no_early_flush(kind))
            peer.load(order)
            started = time.perf_counter()
            peer.flush()
            seconds[kind.name].append(time.perf_counter() - started)
            peer.close()
            shutil.rmtree(root / f"flush-{kind.__name__}-{turn}", ignore_errors=True)
    size = FLUSH_ROWS * 116 / 1e6
    rates = {name: size / sorted(taken)[2] for name, taken in seconds.items()}
    return _line(f"flush of {size:.0f} MB", rates, "MB/s", higher=True)


def _no_early_flush(kind: type[Any]) -> dict[str, Any]:
    return {} if kind is Rocks else {"l0_sst_size_bytes": 1 << 30, "max_unflushed_bytes": 2 << 30}


def _durable(root: Path) -> list[list[str]]:
    lines = []
    for fsync in (False, True):
        peers = [
            Flagstone(_folder(root, f"durable-{fsync}-f"), fsync=fsync),
            Wheel(_folder(root, f"durable-{fsync}-w")),
        ]
        if fsync:
            peers.append(Rocks(_folder(root, f"durable-{fsync}-r")))
        sizes = {peer.name: 10 if peer.name == Wheel.name else 300 for peer in peers}
        works = {
            peer.name: (lambda peer=peer, count=sizes[peer.name]: peer.put_durably(range(count)))
            for peer in peers
        }
        timings = interleave(works, rounds=5)
        what = f"durable put, one caller, {'fsync' if fsync else 'no fsync'}"
        lines.append(_line(what, {n: sizes[n] / t.median for n, t in timings.items()}, "/s", higher=True))
        for peer in peers:
            peer.close()
    return lines


def _reopen(root: Path) -> list[str]:
    """Opening a database whose log has 500 files of 100 rows, written by Flagstone and copied for each try."""
    source = _folder(root, "reopen-source")
    writer = Flagstone(source, flush_interval=None)
    for file in range(500):
        writer.put_all(range(file * 100, file * 100 + 100))
        writer.db.flush("wal")
    shutil.copytree(source, root / "reopen-copy")
    writer.close()
    seconds: dict[str, list[float]] = {Flagstone.name: [], Wheel.name: []}
    for turn in range(5):
        for kind in random.sample([Flagstone, Wheel], 2):
            folder = root / f"reopen-{kind.__name__}-{turn}"
            shutil.copytree(root / "reopen-copy", folder)
            started = time.perf_counter()
            peer = kind(folder)
            seconds[kind.name].append(time.perf_counter() - started)
            assert peer.get_all([key(49_999)]) == 1
            peer.close()
            shutil.rmtree(folder)
    return _line(
        "reopen, 500 WAL files", {n: sorted(t)[2] * 1e3 for n, t in seconds.items()}, "ms", higher=False
    )


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


def _memory(root: Path) -> list[str]:
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
    return _line("memory after loading 64 MB", sizes, "MB", higher=False)
