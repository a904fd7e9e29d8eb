"""Large databases: what their metadata costs, from 1,000 to 100,000 SSTs, with 1,000 checkpoints.

The database is its metadata: the SSTs that the manifest lists do not exist, because none of these steps reads one. Requests
go to memory, those of opening and flushing to a folder.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID

import flagstone
from bench.harness import formatted, sized, write_markdown
from bench.machine import scratch_place
from flagstone import Admin, Settings
from flagstone.compaction.picker import plan_compactions
from flagstone.config.settings import CompactorOptions
from flagstone.format.sst_info import SsTableInfo
from flagstone.inspector.snapshot import take_snapshot
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import (
    Compactions,
    Job,
    JobStatus,
    TieredSpec,
    encode_compactions,
    load_compactions,
)
from flagstone.metadata.integrity import seal_metadata
from flagstone.metadata.manifest import Checkpoint, Flush, Manifest, SsTable, apply_flush
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest, load_manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ViewBuilder
from flagstone.sst.store import SstStore
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import ManifestId, RunId, Seq, Ulid, WalId

T = TypeVar("T")

SIZES: Final = sized((1_000, 10_000, 100_000), quickly=(200,))
ROUNDS: Final = sized(5, quickly=1)
CHECKPOINTS: Final = sized(1_000, quickly=5)
FIRST_ID_MS: Final = 1_760_000_000_000
PATHS: Final = DbPaths("db")
PATH: Final = PATHS.manifest(ManifestId(1))

STEPS: Final = {
    "decode a manifest": "A kernel checks every offset and makes three objects per SST; then the checksum, a dictionary of all SSTs.",
    "decode one of SlateDB": "The same without a checksum: every byte must belong to one object, and every record must be possible.",
    "encode a manifest": "The whole manifest, about 220 bytes per SST, and its checksum: the format has no smaller unit.",
    "decode a compactions file": "One job whose output are as many SSTs.",
    "encode a compactions file": "One job whose output are as many SSTs.",
    "edit for a flush": "A new dictionary of all SSTs, copied as a block; everything else depends on the flush only.",
    "publish a view": "The layers of L0, and of the runs that changed.",
    "plan compactions": "The size of each run is the sum over its SSTs.",
    "open": "Decode the manifest, write the next one, make an object per SST and a layer per run.",
    "flush": "One row: an SST, the rules between two manifests, a manifest, a view.",
    "statistics": "What `flagstone stats` shows.",
    "garbage collection": "A dry run: list the objects, read the manifests, decide.",
    "clone": "Two manifests of the clone, two of the database, which keeps the SSTs by a checkpoint.",
}
"""Step -> what it does, and what it costs."""


def made_manifest(count: int) -> Manifest:
    """A database after years: nearly all SSTs in three sorted runs, four in L0."""
    chance = random.Random(1)
    ids = [Ulid((FIRST_ID_MS + number) << 80 | chance.getrandbits(80)) for number in range(count)]
    ssts = {sst_id: SsTable(sst_id, _info(number)) for number, sst_id in enumerate(ids)}
    borders = [0, 8 * count // 10, 95 * count // 100, count - 4]
    runs = [
        SortedRun(RunId(number), tuple(map(SstView.whole, ids[borders[number] : borders[number + 1]])))
        for number in (2, 1, 0)
    ]
    return Manifest(
        ssts=ssts,
        tree=Tree(tuple(map(SstView.whole, reversed(ids[-4:]))), tuple(runs)),
        last_l0_seq=Seq(10**6),
        last_l0_clock_tick=FIRST_ID_MS,
        checkpoints=tuple(
            Checkpoint(UUID(int=number + 1), ManifestId(1), FIRST_ID_MS // 1000, 2**32 - 1)
            for number in range(CHECKPOINTS)
        ),
    )


def _info(number: int) -> SsTableInfo:
    blocks = 200_000_000 + 1000 * number
    return SsTableInfo(
        b"user/%016d" % (10 * number),
        b"user/%016d" % (10 * number + 9),
        index_offset=blocks + 40_000,
        index_len=12_000,
        filter_offset=blocks,
        filter_len=40_000,
        stats_offset=blocks + 52_000,
        stats_len=800,
    )


def made_database(store: ObjectStore, manifest: Manifest) -> None:
    """A database whose manifest lists SSTs that do not exist."""
    ManifestStore(store, PATHS).create_next(manifest, None)


def run() -> str:
    """Measure every step at every size, write `results/metadata.md`."""
    sizes = {count: _Steps(count) for count in SIZES}
    for steps in sizes.values():
        for _ in range(ROUNDS):
            steps.measure()
    return _report(sizes)


class _Steps:
    """One size: milliseconds per round and step, of the clock and of the processor."""

    def __init__(self, count: int) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)
        self.worked: dict[str, list[float]] = defaultdict(list)
        self._manifest = made_manifest(count)
        self._unsealed = encode_manifest(self._manifest)
        self._sealed = seal_metadata(self._unsealed, PATH)
        job = Job(
            Ulid(FIRST_ID_MS << 80),
            TieredSpec((), (RunId(0),), RunId(0)),
            JobStatus.COMPACTED,
            tuple(self._manifest.ssts.values()),
        )
        self._compactions = Compactions(1, (job,))
        self._sealed_compactions = seal_metadata(encode_compactions(self._compactions), PATH)
        self._flush = Flush(
            ssts=((b"", SsTable(Ulid((FIRST_ID_MS + count) << 80), _info(count))),),
            replay_after_wal_id=WalId(0),
            wal_id_last_seen=WalId(0),
            last_clock_tick=FIRST_ID_MS + 1,
            last_seq=Seq(10**6 + 1),
            snapshot_min_seq=Seq(10**6 + 1),
        )

    def measure(self) -> None:
        """One round of every step."""
        manifest = self._manifest
        self._time("decode a manifest", lambda: load_manifest(self._sealed, PATH))
        self._time("decode one of SlateDB", lambda: decode_manifest(self._unsealed, strict=True))
        self._time("encode a manifest", lambda: seal_metadata(encode_manifest(manifest), PATH))
        self._time("decode a compactions file", lambda: load_compactions(self._sealed_compactions, PATH))
        self._time("encode a compactions file", lambda: encode_compactions(self._compactions))
        views = ViewBuilder(SstStore(MemoryStore(), PATHS))
        view = views.build(manifest)
        flushed = self._time("edit for a flush", lambda: apply_flush(manifest, self._flush))
        newer = self._time("publish a view", lambda: views.build(flushed))
        assert len(newer.forest.layers) == len(view.forest.layers) + 1
        self._time("plan compactions", lambda: plan_compactions(flushed, Compactions(), CompactorOptions()))
        self._use_database()

    def _use_database(self) -> None:
        settings = Settings(compactor_options=None, garbage_collector_options=None)
        with tempfile.TemporaryDirectory(dir=scratch_place(10 * len(self._sealed))) as folder:
            store = LocalStore(Path(folder), fsync=False)
            made_database(store, self._manifest)
            with self._time("open", lambda: flagstone.open("db", store=store, settings=settings)) as db:
                db.put(b"user", b"value")
                self._time("flush", lambda: db.flush("memtable"))
        store = MemoryStore()
        made_database(store, self._manifest)
        self._time("statistics", lambda: take_snapshot(store, None, "db"))
        admin = Admin("db", store=store)
        self._time("garbage collection", lambda: admin.collect_garbage(dry_run=True))
        self._time("clone", lambda: admin.clone("copy"))

    def _time(self, name: str, step: Callable[[], T]) -> T:
        gc.collect()
        started, worked = time.perf_counter(), time.process_time()
        result = step()
        self.taken[name].append(1e3 * (time.perf_counter() - started))
        self.worked[name].append(1e3 * (time.process_time() - worked))
        return result


def _report(sizes: dict[int, _Steps]) -> str:
    largest = max(sizes)
    median = statistics.median
    rows = [
        [
            name,
            *(formatted(median(steps.taken[name]), "ms") for steps in sizes.values()),
            formatted(median(sizes[largest].worked[name]), "ms"),
        ]
        for name in STEPS
    ]
    return write_markdown(
        "metadata",
        "Metadata of large databases",
        ["what", *(f"{count:,} SSTs" for count in sizes), "of it CPU time"],
        rows,
        [
            f"{CHECKPOINTS:,} checkpoints. The SSTs do not exist: no step reads one. A manifest of 100,000 SSTs has 22 MiB.",
            "Requests go to memory, those of open and flush to a folder in memory without fsync.",
            "",
            *(f"- **{name}**: {limit}" for name, limit in STEPS.items()),
        ],
        basis=f"Medians of {ROUNDS} rounds.",
    )


if __name__ == "__main__":
    print(run())
