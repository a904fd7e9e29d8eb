"""Amplification of the compaction policies: bytes written and stored, and sources and blocks read, on three workloads.

Deterministic and without threads: SSTs of L0 are built from seeded rows and added to a manifest in memory, and after each
one all jobs that the policy proposes are executed, one at a time. Replaced SSTs are deleted at once.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bench.harness import Bars, formatted, sized, write_markdown
from flagstone.compaction.commit import Result, apply_result
from flagstone.compaction.executor import LocalExecutor, Merging
from flagstone.compaction.extensions import CompactionTask
from flagstone.compaction.policy import new_scheduler, new_survey
from flagstone.config import CompactionWorkerOptions, CompactorOptions, SchedulerOptions
from flagstone.db.reader.reader import open_reader
from flagstone.lsm.tree import SstView
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Flush, Manifest, SsTable, apply_flush, new_manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.runtime.pool import IoPool
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import VALUE, EntryTuple, Seq, WalId

FLUSHES: Final = sized(300, quickly=24)
ROWS: Final = 2_000
"""Rows that are written between two flushes."""
VALUE_BYTES: Final = 100
KEYS: Final = sized(100_000, quickly=10_000)
SENSORS: Final = 200
TTL_FLUSHES: Final = FLUSHES // 4
MINUTE_MS: Final = 60_000
SAMPLES: Final = sized(8, quickly=2)
GETS: Final = sized(200, quickly=20)
OPTIONS: Final = SstOptions()

POLICIES: Final = {
    "size-tiered": SchedulerOptions(),
    "size-tiered, space-driven": SchedulerOptions(space_driven=True),
    "lazy leveling": SchedulerOptions(compaction_policy="lazy-leveling"),
}

Written = Iterator[tuple[bytes, int | None]]
"""Keys, and after how many milliseconds each row expires."""


def overwrites(_flush: int, chance: random.Random) -> Written:
    """Keys drawn uniformly from a set that does not grow."""
    for _ in range(ROWS):
        yield b"user/%011d" % chance.randrange(KEYS), None


def readings(flush: int, _chance: random.Random) -> Written:
    """Each sensor adds readings at the end of its series; each is kept for a quarter of the run."""
    for number in range(ROWS):
        sensor, at = number % SENSORS, flush * (ROWS // SENSORS) + number // SENSORS
        yield b"s%04d/%010d" % (sensor, at), TTL_FLUSHES * MINUTE_MS


def appends(flush: int, _chance: random.Random) -> Written:
    """Keys that grow with time and stay."""
    for number in range(flush * ROWS, (flush + 1) * ROWS):
        yield b"log/%012d" % number, None


WORKLOADS: Final[dict[str, Callable[[int, random.Random], Written]]] = {
    "uniform overwrites": overwrites,
    "time series with TTL": readings,
    "append": appends,
}


@dataclass
class Sample:
    """One moment: stored bytes for each live byte, and what a get of a live key must consult."""

    space: float
    sources: float
    blocks: float


@dataclass
class Trial:
    """One workload under one policy."""

    limits: SchedulerOptions
    clock: VirtualClock = field(default_factory=VirtualClock)
    manifest: Manifest = field(default_factory=new_manifest)
    seq: int = 0
    flushed_bytes: int = 0
    flushed_raw_bytes: int = 0
    jobs: int = 0

    def __post_init__(self) -> None:
        pool, self.paths = IoPool(max_workers=0), DbPaths("db")
        self.ids = Ids(1, clock=self.clock)
        self.store = MemoryStore(clock=self.clock)
        self.compaction = CountingStore(self.store, component="compaction", clock=self.clock)
        options = CompactorOptions(scheduler_options=self.limits)
        self.survey = new_survey(options, self.compaction, self.paths, pool=pool)
        self.scheduler = new_scheduler(options, self.survey)
        work = CompactionWorkerOptions(max_sst_size=1 << 20, max_subcompactions=1)
        merging = Merging(work=work, sst=OPTIONS)
        self.executor = LocalExecutor(self.compaction, self.paths, merging, pool=pool, ids=self.ids)

    def flush(self, rows: Written, chance: random.Random) -> None:
        """One SST of L0 with the newest version of each row."""
        now_ms = self.clock.now_ms()
        newest: dict[bytes, EntryTuple] = {}
        for key, ttl_ms in rows:
            self.seq += 1
            expires = None if ttl_ms is None else now_ms + ttl_ms
            newest[key] = (key, self.seq, VALUE, chance.randbytes(VALUE_BYTES), now_ms, expires)
        built = encode_sst([newest[key] for key in sorted(newest)], OPTIONS)
        sst = SsTable(self.ids.ulid(), built.info, built.format_version)
        self.store.put(self.paths.sst(sst.id), built.data)
        self.flushed_bytes += len(built.data)
        self.flushed_raw_bytes += sum(len(key) + VALUE_BYTES for key in newest)
        seq = Seq(self.seq)
        self.manifest = apply_flush(
            self.manifest, Flush(((b"", sst),), WalId(0), WalId(0), now_ms, seq, snapshot_min_seq=seq)
        )
        self.clock.advance(MINUTE_MS)

    def compact(self) -> None:
        """Execute what the policy proposes, until that is nothing."""
        while True:
            while self.survey is not None and self.survey.read(self.manifest):
                pass
            specs = self.scheduler.plan(self.manifest, Compactions())
            if not specs:
                return
            task = CompactionTask(job_id=self.ids.ulid(), spec=specs[0], manifest=self.manifest)  # type: ignore[arg-type]
            output = self.executor.run(task, record=lambda _: None, cancelled=lambda: False)
            views = tuple(SstView.whole(sst.id) for sst in output)
            before = self.manifest
            self.manifest = apply_result(before, Result(specs[0], views, output))
            for sst_id in before.ssts.keys() - self.manifest.ssts.keys():
                self.store.delete(self.paths.sst(sst_id))
            self.jobs += 1

    @property
    def stored_bytes(self) -> int:
        """The bytes of all SSTs on the store."""
        return sum(meta.size for meta in self.store.list("db/compacted"))

    def sample(self, chance: random.Random) -> Sample:
        """Scan everything, and ask for some of the keys."""
        manifests = ManifestStore(self.store, self.paths, clock=self.clock)
        if manifests.latest() is None:
            manifests.create_next(self.manifest, None)
        else:
            manifests.update(lambda now: replace(self.manifest, writer_epoch=now.value.writer_epoch))
        with open_reader("db", store=self.store, mode="latest", clock=self.clock) as reader:
            live = {key: len(key) + len(value) for key, value in reader.scan()}
            asked = chance.sample(sorted(live), min(GETS, len(live)))
            searched = [step for key in asked for step in reader.explain(key).steps if step.block is not None]
        stored_share = self.flushed_bytes / self.flushed_raw_bytes
        return Sample(
            self.stored_bytes / (sum(live.values()) * stored_share),
            statistics.mean(self._sources(key) for key in asked),
            len(searched) / len(asked),
        )

    def _sources(self, key: bytes) -> int:
        """The SSTs of L0 and the runs whose key range has the key."""
        tree = self.manifest.tree
        layers = [*((view,) for view in tree.l0), *(run.views for run in tree.runs)]
        return sum(
            any(key in view.effective_range(self.manifest.sst(view).info) for view in views)
            for views in layers
        )


@dataclass
class Figures:
    """What one workload costs under one policy."""

    write: float
    read_by_compaction: float
    space: float
    most_space: float
    sources: float
    blocks: float
    jobs: int
    after_ttl: float | None


def measure(workload: Callable[[int, random.Random], Written], limits: SchedulerOptions) -> Figures:
    """Run one workload under one policy; samples are from its second half."""
    trial, chance = Trial(limits), random.Random(1)
    every = FLUSHES // 2 // SAMPLES
    samples = []
    for number in range(FLUSHES):
        trial.flush(workload(number, chance), chance)
        trial.compact()
        if number >= FLUSHES // 2 and number % every == 0:
            samples.append(trial.sample(random.Random(number)))
    counted = trial.compaction.totals()
    most, after_ttl = trial.stored_bytes, None
    if workload is readings:
        trial.clock.advance(2 * TTL_FLUSHES * MINUTE_MS)
        trial.flush(iter([(b"later", None)]), chance)
        trial.compact()
        after_ttl = trial.stored_bytes / most
    return Figures(
        write=1 + counted["bytes_written"] / trial.flushed_bytes,
        read_by_compaction=counted["bytes_read"] / trial.flushed_bytes,
        space=statistics.mean(sample.space for sample in samples),
        most_space=max(sample.space for sample in samples),
        sources=statistics.mean(sample.sources for sample in samples),
        blocks=statistics.mean(sample.blocks for sample in samples),
        jobs=trial.jobs,
        after_ttl=after_ttl,
    )


def run() -> str:
    """Measure every workload under every policy, write `results/amplification.md`."""
    found = {
        workload: {policy: measure(written, limits) for policy, limits in POLICIES.items()}
        for workload, written in WORKLOADS.items()
    }
    lines = [
        [
            workload,
            policy,
            *(
                formatted(figure, "×")
                for figure in (one.write, one.read_by_compaction, one.space, one.most_space)
            ),
            formatted(one.sources, ""),
            formatted(one.blocks, ""),
            str(one.jobs),
            "" if one.after_ttl is None else f"{one.after_ttl:.0%}",
        ]
        for workload, by_policy in found.items()
        for policy, one in by_policy.items()
    ]

    def bars(name: str, title: str, unit: str, figure: Callable[[Figures], float]) -> Bars:
        rows: dict[str, Any] = {
            workload: {policy: figure(one) for policy, one in by_policy.items()}
            for workload, by_policy in found.items()
        }
        return Bars(name, title, unit, rows)

    return write_markdown(
        "amplification",
        "Write, read and space amplification of the compaction policies",
        [
            "workload",
            "policy",
            "bytes written",
            "read by compaction",
            "space",
            "most space",
            "sources of a get",
            "blocks of a get",
            "jobs",
            "space after the TTL",
        ],
        lines,
        [
            f"{FLUSHES} flushes of {ROWS:,} rows with values of {VALUE_BYTES} bytes. Overwrites draw from {KEYS:,} keys; a time series",
            f"has {SENSORS} sensors, and its rows live as long as {TTL_FLUSHES} flushes take.",
            "Bytes written and read are multiples of the bytes that were flushed; the flush itself counts as 1.",
            "Space is the bytes of all SSTs as a multiple of the live rows, which a full scan counts, stored as in L0; mean and largest",
            "of the samples. Sources are the L0 SSTs and runs whose range has the key; blocks are those that a get with nothing in",
            "memory fetches, behind the bloom filters.",
            "The last column: after all rows have expired and one more row was flushed, the bytes that are left of those before.",
        ],
        basis=f"Counted, not timed; {SAMPLES} samples in the second half of each run.",
        bars=[
            bars("written", "Bytes written for each flushed byte", "×", lambda one: one.write),
            bars("space", "Bytes stored for each live byte", "×", lambda one: one.space),
            bars("sources", "Sources whose range has the key of a get", "", lambda one: one.sources),
        ],
    )


if __name__ == "__main__":
    print(run())
