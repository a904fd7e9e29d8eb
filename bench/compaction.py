"""Compaction against the official wheel and rocksdict: eight overlapping SSTs into one sorted run.

Flagstone writes the database once; it and the wheel compact copies of the same files, rocksdict the same rows in its
own. No compression, bloom filters of ten bits, folders in memory, default parallelism. Every measurement has a process
of its own, so that its processor time, over all threads, is that of the compaction.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import FLAGSTONE, ROCKS, WHEEL, Measurement, sized, write_markdown
from bench.machine import scratch_place

SSTS = 8
VALUE_BYTES = sized({100: 120_000, 1000: 16_000}, quickly={100: 1_000})
"""Rows per SST by size of the values: 111 and 130 MB of keys and values."""
ROUNDS = sized(3, quickly=1)


def rows(value_bytes: int, sst: int) -> list[tuple[bytes, bytes]]:
    source = random.Random(1000 * value_bytes + sst)
    numbers = sorted(source.sample(range(10_000_000), VALUE_BYTES[value_bytes]))
    noise = source.randbytes(4096 + value_bytes)
    return [(b"%016d" % number, noise[number & 4095 :][:value_bytes]) for number in numbers]


def prepare_flagstone(folder: Path, value_bytes: int) -> None:
    import flagstone

    settings = flagstone.Settings(
        compactor_options=None,
        garbage_collector_options=None,
        l0_max_ssts=100,
        l0_max_ssts_per_key=100,
        l0_sst_size_bytes=1 << 28,
        max_unflushed_bytes=1 << 30,
    )
    with flagstone.open("db", store=str(folder), store_options={"fsync": False}, settings=settings) as db:
        for sst in range(SSTS):
            for key, value in rows(value_bytes, sst):
                db.put(key, value)
            db.flush("memtable")


def prepare_rocksdict(folder: Path, value_bytes: int) -> None:
    db = _open_rocksdict(folder)
    for sst in range(SSTS):
        for key, value in rows(value_bytes, sst):
            db[key] = value
        db.flush()
    db.close()


def _open_rocksdict(folder: Path) -> Any:
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_disable_auto_compactions(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_write_buffer_size(1 << 28)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_bloom_filter(10, False)
    options.set_block_based_table_factory(blocks)
    return rocksdict.Rdict(str(folder / "rocks"), options)


def compact_flagstone(folder: Path, **changes: int) -> Callable[[], None]:
    from flagstone.compaction.executor import LocalExecutor, Merging
    from flagstone.compaction.extensions import CompactionTask
    from flagstone.config import CompactionWorkerOptions
    from flagstone.metadata.compactions import TieredSpec
    from flagstone.metadata.stores import ManifestStore
    from flagstone.runtime.ids import SYSTEM_IDS
    from flagstone.sst.builder import SstOptions
    from flagstone.store.local import LocalStore
    from flagstone.store.paths import DbPaths
    from flagstone.types import RunId

    store, paths = LocalStore(folder, fsync=False), DbPaths("db")
    manifest = ManifestStore(store, paths).require_latest().value
    work = CompactionWorkerOptions().replace(**changes)
    executor = LocalExecutor(store, paths, Merging(work=work, sst=SstOptions()))
    task = CompactionTask(
        job_id=SYSTEM_IDS.ulid(),
        spec=TieredSpec(tuple(view.id for view in manifest.tree.l0), (), RunId(0)),
        manifest=manifest,
    )
    assert len(task.spec.l0_view_ids) == SSTS
    return lambda: _used(executor.run(task, record=lambda _: None, cancelled=lambda: False))


def _used(ssts: tuple[Any, ...]) -> None:
    assert ssts


def compact_flagstone_alone(folder: Path) -> Callable[[], None]:
    return compact_flagstone(folder, max_subcompactions=1)


def compact_wheel(folder: Path) -> Callable[[], None]:
    from slatedb.uniffi import (
        AdminBuilder,
        CompactionSpec,
        DbBuilder,
        ObjectStoreBuilder,
        Settings,
        SourceId,
    )

    values = json.loads(Settings.default().to_json_string())
    compactor = values["compactor_options"]
    compactor["poll_interval"] = compactor["commit_compacted_interval"] = "10ms"
    compactor["worker"]["compactions_poll_interval"] = "10ms"
    # Only the submitted job may run.
    compactor["scheduler_options"] = {"min_compaction_sources": "100", "max_compaction_sources": "100"}
    values.update(garbage_collector_options=None, l0_max_ssts=100, l0_max_ssts_per_key=100)
    loop = asyncio.new_event_loop()
    store = ObjectStoreBuilder.from_url(f"file://{folder}").build()

    async def begin() -> Any:
        builder = DbBuilder("db", store)
        builder.with_settings(Settings.from_json_string(json.dumps(values)))
        return await builder.build(), AdminBuilder("db", store).build()

    db, admin = loop.run_until_complete(begin())

    async def work() -> None:
        manifest = await admin.read_manifest(None)
        sources = [SourceId.SST_VIEW(view.id) for view in manifest.l0]
        assert len(sources) == SSTS
        job = await admin.submit_compaction(
            CompactionSpec.TIERED(segment=b"", sources=sources, destination=0)
        )
        while True:
            now = await admin.read_compaction(job.id, None)
            if now is None or now.status.name in ("COMPLETED", "FAILED"):
                break
            await asyncio.sleep(0.01)
        assert now is None or now.status.name == "COMPLETED", now

    assert db is not None
    return lambda: loop.run_until_complete(work())


def compact_rocksdict(folder: Path) -> Callable[[], None]:
    db = _open_rocksdict(folder)
    return lambda: db.compact_range(None, None)


CONTENDERS: dict[str, Callable[[Path], Callable[[], None]]] = {
    FLAGSTONE: compact_flagstone,
    "flagstone, one thread": compact_flagstone_alone,
    WHEEL: compact_wheel,
    ROCKS: compact_rocksdict,
}


class Taken(NamedTuple):
    """What one compaction took."""

    cpu_seconds: float
    wall_seconds: float
    peak_mb: float


def measure(name: str, warm_up: Path, folder: Path) -> None:
    """In a process of its own: prints processor seconds, wall seconds and peak memory of the second of two runs."""
    work = CONTENDERS[name](folder)
    # Our executor can run the job twice on one database; the others warm up on a second database.
    warm = work if name.startswith("flagstone") else CONTENDERS[name](warm_up)
    warm()
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    taken = (time.process_time() - cpu, time.perf_counter() - wall)
    # Not `ru_maxrss`, which includes the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps([*taken, peak]), flush=True)
    os._exit(0)  # the wheel's threads would keep the process alive


def timed(
    scratch: Path, value_bytes: int, names: Sequence[str] = tuple(CONTENDERS), *, rounds: int = ROUNDS
) -> dict[str, Taken]:
    """Processor seconds, wall seconds and peak memory of these contenders, medians over the rounds."""
    prepared = scratch / f"prepared-{value_bytes}"
    prepared.mkdir()
    prepare_flagstone(prepared, value_bytes)
    if ROCKS in names:
        prepare_rocksdict(prepared, value_bytes)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            copies = [scratch / "first", scratch / "second"]
            for copy in copies:
                shutil.copytree(prepared, copy)
            command = [sys.executable, "-m", "bench.compaction", name, *map(str, copies)]
            output = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
                cwd=Path(__file__).parent.parent,
            )
            found[name].append(json.loads(output.stdout.splitlines()[-1]))
            for copy in copies:
                shutil.rmtree(copy)
    shutil.rmtree(prepared)
    return {
        name: Taken(*(statistics.median(column) for column in zip(*taken, strict=True)))
        for name, taken in found.items()
    }


def megabytes(value_bytes: int) -> float:
    """Keys and values that go in."""
    return SSTS * VALUE_BYTES[value_bytes] * (16 + value_bytes) / 1e6


def throughput(value_bytes: int, taken: Mapping[str, Taken]) -> Measurement:
    """Megabytes that go in, by seconds."""
    rates = {name: megabytes(value_bytes) / one.wall_seconds for name, one in taken.items()}
    return Measurement(f"compaction, {value_bytes} B values", "MB/s", rates, "higher")


def run() -> str:
    table: list[list[str]] = []
    measurements = []
    with tempfile.TemporaryDirectory(dir=scratch_place(1 << 30)) as scratch:
        for value_bytes in VALUE_BYTES:
            taken = timed(Path(scratch), value_bytes)
            whole = throughput(value_bytes, taken)
            size = megabytes(value_bytes)
            per_core = {name: size / one.cpu_seconds for name, one in taken.items()}
            table += [
                [
                    f"{value_bytes} B",
                    name,
                    f"{per_core[name]:.0f}",
                    f"{whole.values[name]:.0f}",
                    f"{one.cpu_seconds:.2f} s",
                    f"{one.peak_mb:.0f} MB",
                ]
                for name, one in taken.items()
            ]
            measurements += [
                Measurement(f"compaction per core, {value_bytes} B values", "MB/s", per_core, "higher"),
                whole,
            ]
    return write_markdown(
        "compaction",
        "Compaction: eight overlapping SSTs into one sorted run",
        ["values", "engine", "MB/s per core", "MB/s", "processor time", "peak memory"],
        table,
        [
            "16-byte keys, random and overlapping; MB are of keys and values that go in. Processor time is of the whole",
            "process while it compacts; memory is that of the whole process. Uncompressed, 4 KiB blocks, bloom",
            "filters of 10 bits per key, folders in memory without fsync, default settings of each engine otherwise.",
        ],
        basis=f"Medians of {ROUNDS} rounds; each is the second compaction of a fresh process.",
        measurements=measurements,
    )


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
