"""One step of the scaling run, in a process of its own: `python -m bench.scaling_steps ENGINE STEP FOLDER ROWS BUDGET_S`.

Prints one line of JSON: figures by name, with the peak memory of each step. Default settings throughout: compaction
runs in the background of a load. The rows are keys of 20 bytes in random order, cut from a
file that the parent made, and values of 100 bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bench.harness import FLAGSTONE, ROCKS, WHEEL

KEY_BYTES: Final = 20
VALUE_BYTES: Final = 100
CHUNK: Final = 20_000
GETS: Final = 2_000
SCAN_BUDGET_S: Final = 10.0
OPENINGS: Final = 5
REST_S: Final = 60.0

Rows = list[tuple[bytes, bytes]]
Figures = dict[str, float]


def make_keys(path: Path, rows: int) -> None:
    """Write distinct keys in no order: the numbers below `rows`, scrambled, as 20 digits each."""
    with path.open("wb") as file:
        for start in range(0, rows, CHUNK):
            file.write(
                b"".join(b"%020d" % scrambled(number) for number in range(start, min(start + CHUNK, rows)))
            )


def scrambled(number: int) -> int:
    """A permutation of 64-bit numbers: invertible multiplications and shifts."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def read_rows(path: Path) -> Iterator[Rows]:
    """The rows, chunk by chunk."""
    noise = random.Random(1).randbytes(VALUE_BYTES + 1000)
    values = [noise[start : start + VALUE_BYTES] for start in range(1000)]
    with path.open("rb") as file:
        while chunk := file.read(KEY_BYTES * CHUNK):
            yield [
                (chunk[at : at + KEY_BYTES], values[at // KEY_BYTES % 1000])
                for at in range(0, len(chunk), KEY_BYTES)
            ]


def sample_keys(path: Path, rows: int) -> list[bytes]:
    """Some of the keys, at random."""
    with path.open("rb") as file:
        found = []
        for number in random.Random(2).sample(range(rows), min(GETS, rows)):
            file.seek(KEY_BYTES * number)
            found.append(file.read(KEY_BYTES))
    return found


class Flagstone:
    """Flagstone, as a service would use it."""

    def __init__(self, folder: Path) -> None:
        import flagstone

        self._folder = folder
        # The wheel and rocksdict do not sync by default, either.
        self._options = {"fsync": False}
        self._flagstone = flagstone

    def open(self) -> None:
        self._db = self._flagstone.open("db", store=str(self._folder), store_options=self._options)

    def put(self, rows: Rows) -> None:
        put = self._db.put
        for key, value in rows:
            put(key, value)

    def flush(self) -> None:
        self._db.flush("memtable")

    def get(self, keys: list[bytes]) -> int:
        get = self._db.get
        return sum(get(key) is not None for key in keys)

    def scan(self) -> Iterator[int]:
        rows = self._db.scan()
        while found := sum(1 for _ in islice(rows, CHUNK)):
            yield found

    def compact(self) -> Callable[[], object]:
        # There is no other coordinator to wait for.
        return lambda: self._admin().compact(full=True, patience=timedelta(seconds=0.1))

    def settle(self, row: Rows) -> None:
        """Put the row again until it is the only new row.

        A flush may leave WAL files that every open replays until the next flush. An interrupted compaction would disturb the
        next step, and a compaction of everything would leave it nothing to do.
        """
        for _ in range(4):
            self.put(row)
            self.flush()
            self._rest()
            if self._admin().manifest().value.tree.l0:
                break

    def _rest(self) -> None:
        """Wait until no compaction is running."""
        admin, idle, end = self._admin(), 0, time.perf_counter() + REST_S
        while idle < 5 and time.perf_counter() < end:
            busy = admin.manifest().value.compactor_epoch and any(
                not job.status.finished for job in admin.compactions().value.jobs
            )
            idle = 0 if busy else idle + 1
            time.sleep(0.1)

    def _admin(self) -> Any:
        return self._flagstone.Admin("db", store=str(self._folder), store_options=self._options)

    def close(self) -> None:
        self._db.close()


class Wheel:
    """The official wheel, through asyncio: batches of a thousand rows for reads and writes, its fastest way."""

    def __init__(self, folder: Path) -> None:
        from slatedb import uniffi

        self._uniffi = uniffi
        self._loop = asyncio.new_event_loop()
        self._store = uniffi.ObjectStoreBuilder.from_url(f"file://{folder}").build()

    def open(self, **settings: Any) -> None:
        values = json.loads(self._uniffi.Settings.default().to_json_string())
        for name, change in settings.items():
            values[name].update(change)
        builder = self._uniffi.DbBuilder("db", self._store)
        builder.with_settings(self._uniffi.Settings.from_json_string(json.dumps(values)))
        self._db = self._run(builder.build())

    def put(self, rows: Rows) -> None:
        async def work() -> None:
            for start in range(0, len(rows), 1000):
                batch = self._uniffi.WriteBatch()
                for key, value in rows[start : start + 1000]:
                    batch.put(key, value)
                await self._db.write(batch)

        self._run(work())

    def flush(self) -> None:
        kind = self._uniffi.FlushType.MEM_TABLE
        self._run(self._db.flush_with_options(self._uniffi.FlushOptions(flush_type=kind)))

    def get(self, keys: list[bytes]) -> int:
        async def work() -> int:
            return sum([await self._db.get(key) is not None for key in keys])

        return int(self._run(work()))

    def settle(self, row: Rows) -> None:
        """Nothing: the rows it loads are not read."""

    def scan(self) -> Iterator[int]:
        everything = self._uniffi.KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)
        rows = self._run(self._db.scan(everything))

        async def work() -> int:
            found = 0
            while found < CHUNK and (batch := await rows.next_batch(1000)):
                found += len(batch)
            return found

        while found := self._run(work()):
            yield found

    def compact(self) -> Callable[[], object]:
        # By default it polls for jobs every 5 s; and only the submitted job may run.
        self.open(
            compactor_options={
                "poll_interval": "10ms",
                "commit_compacted_interval": "10ms",
                "scheduler_options": {"min_compaction_sources": "100", "max_compaction_sources": "100"},
                "worker": {
                    **json.loads(self._uniffi.Settings.default().to_json_string())["compactor_options"][
                        "worker"
                    ],
                    "compactions_poll_interval": "10ms",
                },
            }
        )
        return lambda: self._run(self._compact())

    async def _compact(self) -> None:
        uniffi = self._uniffi
        admin = uniffi.AdminBuilder("db", self._store).build()
        manifest = await admin.read_manifest(None)
        runs = [run.id for run in manifest.compacted]
        sources = [uniffi.SourceId.SST_VIEW(view.id) for view in manifest.l0]
        sources += [uniffi.SourceId.SORTED_RUN(run) for run in runs]
        spec = uniffi.CompactionSpec.TIERED(segment=b"", sources=sources, destination=min(runs, default=0))
        job = await admin.submit_compaction(spec)
        while True:
            now = await admin.read_compaction(job.id, None)
            if now is None or now.status.name in ("COMPLETED", "FAILED"):
                break
            await asyncio.sleep(0.01)
        assert now is None or now.status.name == "COMPLETED", now

    def close(self) -> None:
        self._run(self._db.shutdown())

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


class Rocks:
    """RocksDB through rocksdict; uncompressed and with bloom filters of ten bits, as the others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        self._db = rocksdict.Rdict(str(self._folder / "rocks"), options)

    def put(self, rows: Rows) -> None:
        db = self._db
        for key, value in rows:
            db[key] = value

    def flush(self) -> None:
        self._db.flush(True)

    def get(self, keys: list[bytes]) -> int:
        get = self._db.get
        return sum(get(key) is not None for key in keys)

    def settle(self, row: Rows) -> None:
        """Put the row again: the next compaction then has something to do."""
        self.put(row)
        self.flush()

    def scan(self) -> Iterator[int]:
        rows = self._db.items()
        while found := sum(1 for _ in islice(rows, CHUNK)):
            yield found

    def compact(self) -> Callable[[], object]:
        import rocksdict

        self.open()
        options = rocksdict.CompactOptions()
        # Otherwise the lowest level would not be rewritten.
        options.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force())
        return lambda: self._db.compact_range(None, None, options)

    def close(self) -> None:
        self._db.close()


ENGINES: Final[dict[str, type[Any]]] = {FLAGSTONE: Flagstone, WHEEL: Wheel, ROCKS: Rocks}


def load(engine: Any, keys: Path, rows: int, budget_s: float) -> Figures:
    """Put all rows, until they are in SSTs. Returns nothing if that takes longer than the budget."""
    engine.open()
    started, cpu = time.perf_counter(), time.process_time()
    for chunk in read_rows(keys):
        engine.put(chunk)
        if time.perf_counter() - started > budget_s:
            return {}
    engine.flush()
    seconds = time.perf_counter() - started
    figures = {
        "put": rows / seconds,
        "put cores": (time.process_time() - cpu) / seconds,
        "put memory": peak_mb(),
    }
    engine.settle(chunk[-1:])
    engine.close()
    return figures


def compact(engine: Any, _keys: Path, rows: int, _budget_s: float) -> Figures:
    """Merge everything into one sorted run."""
    work = engine.compact()
    forget_peak()
    started, cpu = time.perf_counter(), time.process_time()
    done = work()
    assert done != [], "there was nothing to compact"
    seconds = time.perf_counter() - started
    megabytes = rows * (KEY_BYTES + VALUE_BYTES) / 1e6
    figures = {
        "compaction": megabytes / seconds,
        "compaction cores": (time.process_time() - cpu) / seconds,
        "compaction memory": peak_mb(),
    }
    if not isinstance(engine, Flagstone):
        engine.close()
    return figures


def use(engine: Any, keys: Path, rows: int, _budget_s: float) -> Figures:
    """Open, read some keys for the first time and again, read everything."""
    openings = []
    for turn in range(OPENINGS + 1):
        started = time.perf_counter()
        engine.open()
        if turn:
            openings.append(time.perf_counter() - started)
        engine.close()
    engine.open()
    figures = {"open": statistics.median(openings) * 1e3}
    forget_peak()
    sample, rounds = sample_keys(keys, rows), []
    for _ in range(6):
        started = time.perf_counter()
        assert engine.get(sample) == len(sample)
        rounds.append((time.perf_counter() - started) / len(sample) * 1e6)
    figures |= {"cold get": rounds[0], "warm get": statistics.median(rounds[1:]), "get memory": peak_mb()}
    forget_peak()
    started, found = time.perf_counter(), 0
    for part in engine.scan():
        found += part
        if time.perf_counter() - started > SCAN_BUDGET_S:
            break
    else:
        assert found == rows, f"{found} rows of {rows}"
    figures |= {"scan": found / (time.perf_counter() - started), "scan memory": peak_mb()}
    engine.close()
    return figures


STEPS: Final[dict[str, Callable[[Any, Path, int, float], Figures]]] = {
    "load": load,
    "compact": compact,
    "use": use,
}


def forget_peak() -> None:
    """Reset the peak of resident memory, if the system allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """Peak of resident memory. Not `ru_maxrss`, which includes the process that started this one."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    name, step, folder, keys, rows, budget = sys.argv[1:]
    found = STEPS[step](ENGINES[name](Path(folder)), Path(keys), int(rows), float(budget))
    print(json.dumps(found), flush=True)
    os._exit(0)  # the wheel's threads would keep the process alive
