"""Both engines compact the same inputs into the same rows, and nearly always into the same bytes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from flagstone import Admin
from flagstone.compaction.executor import LocalExecutor, Merging
from flagstone.compaction.extensions import CompactionTask
from flagstone.config import CompactionWorkerOptions
from flagstone.format.codec import Codec
from flagstone.format.sst import decode_sst
from flagstone.lsm.retention import visible_value
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import JobContext, TieredSpec
from flagstone.metadata.manifest import Manifest, SsTable, apply_compaction
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, RunId, Seq
from kit.databases import Append

pytestmark = pytest.mark.slow

PATHS = DbPaths("db")


class Inputs:
    """Three SSTs in L0 and the sorted runs 5 and 2, all with values, tombstones, operands and times of expiry."""

    def __init__(self, folder: Path, seed: int, *, rows: int, keys: int, options: SstOptions) -> None:
        self.folder = folder
        self.store = LocalStore(folder, fsync=False)
        self.options = options
        self.random = random.Random(seed)
        self.now_ms = SYSTEM_CLOCK.now_ms() - 3_600_000
        self.clock_ms = self.now_ms + rows
        ids = Ids(seed)
        parts: list[list[EntryTuple]] = [[] for _ in range(5)]
        for seq in range(1, rows + 1):
            parts[(seq - 1) * 5 // rows].append(self._row(seq, keys))
        self.rows = [row for part in parts for row in part]
        ssts = []
        for part in parts:
            built = encode_sst(sorted(part, key=lambda row: (row[0], -row[1])), options)
            # A little in the past, because the wheel creates its own ids from the current time on.
            sst = SsTable(ids.ulid(), built.info)
            self.store.put(PATHS.sst(sst.id), built.data)
            ssts.append(sst)
        views = [SstView.whole(sst.id) for sst in ssts]
        self.manifest = Manifest(
            writer_epoch=1,
            ssts={sst.id: sst for sst in sorted(ssts, key=lambda sst: sst.id)},
            tree=Tree(
                l0=(views[4], views[3], views[2]),
                runs=(SortedRun(RunId(5), (views[1],)), SortedRun(RunId(2), (views[0],))),
            ),
            last_l0_clock_tick=self.clock_ms,
            last_l0_seq=Seq(rows),
            # A snapshot is open at a sequence number in the middle.
            recent_snapshot_min_seq=Seq(self.random.choice([0, rows // 2, rows * 9 // 10, rows])),
        )
        ManifestStore(self.store, PATHS).create_next(self.manifest, None)

    def _row(self, seq: int, keys: int) -> EntryTuple:
        key = b"%s/%06d" % (self.random.choice([b"a", b"long-prefix"]), self.random.randrange(keys))
        kind = self.random.choice([VALUE, VALUE, VALUE, TOMBSTONE, MERGE])
        value = b"" if kind == TOMBSTONE else b"%d," % seq * self.random.choice([1, 3, 20])
        expires_ms = None
        if kind != TOMBSTONE and self.random.random() < 0.4:
            expires_ms = self.clock_ms + self.random.choice([-100, -1, 0, 1, 10**9])
        return (key, seq, kind, value, self.now_ms + seq, expires_ms)


def run_rows(folder: Path, run: int) -> tuple[list[bytes], list[EntryTuple]]:
    """The SSTs of one sorted run, and the rows in them."""
    store = LocalStore(folder, fsync=False)
    manifest = ManifestStore(store, PATHS).require_latest().value
    views = next((found.views for found in manifest.tree.runs if found.id == run), ())
    ssts = [store.get(PATHS.sst(view.sst_id)).data for view in views]
    rows = [row for data in ssts for block in decode_sst(data, "sst").rows() for row in block]
    return ssts, rows


def compact_ours(inputs: Inputs, folder: Path, spec: TieredSpec, **limits: int) -> JobContext:
    """Compact with our executor and commit the result; returns the last record."""
    return _compact(LocalStore(folder, fsync=False), inputs.manifest, inputs.options, spec, **limits)


def _compact(
    store: LocalStore, manifest: Manifest, options: SstOptions, spec: TieredSpec, **limits: int
) -> JobContext:
    work = CompactionWorkerOptions().replace(**limits)
    executor = LocalExecutor(store, PATHS, Merging(work=work, sst=options, merge_operator=Append()))
    records: list[JobContext] = []
    newest = max(manifest.ssts)
    task = CompactionTask(job_id=Ids().ulid(ulid_ms(newest)), spec=spec, manifest=manifest)
    ssts = executor.run(task, record=records.append, cancelled=lambda: False)
    ManifestStore(store, PATHS).update(
        lambda latest: apply_compaction(
            latest.value,
            segment=b"",
            l0=spec.l0_view_ids,
            runs=spec.sorted_runs,
            destination=spec.destination,
            output=ssts,
        )
    )
    return records[-1]


CHOICES = {
    "everything into the last run": (True, [5, 2], 2),
    "L0 into a new run": (True, [], 6),
    "L0 and a run above the last": (True, [5], 5),
    "two runs": (False, [5, 2], 2),
}


@pytest.mark.parametrize("choice", list(CHOICES))
@pytest.mark.parametrize(
    ("seed", "codec"), [(1, Codec.NONE), (2, Codec.LZ4), (3, Codec.NONE), (4, Codec.ZSTD)]
)
def test_wheel_and_flagstone_compact_the_same_ssts_to_the_same_rows(
    choice: str, seed: int, codec: Codec, tmp_path: Path, wheel: Any
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    inputs = Inputs(ours, seed, rows=4000, keys=700, options=SstOptions(codec=codec, min_filter_keys=100))
    shutil.copytree(ours, theirs)
    l0, runs, destination = CHOICES[choice]
    view_ids = tuple(view.id for view in inputs.manifest.tree.l0) if l0 else ()
    spec = TieredSpec(view_ids, tuple(RunId(run) for run in runs), RunId(destination))

    compact_ours(inputs, ours, spec, max_sst_size=40_000)
    wheel.compact(
        str(theirs),
        "db",
        l0=l0,
        runs=runs,
        destination=destination,
        worker={"max_sst_size": 40_000},
        min_filter_keys=100,
        compression_codec=None if codec is Codec.NONE else codec.title,
    )

    our_tables, our_rows = run_rows(ours, destination)
    their_tables, their_rows = run_rows(theirs, destination)
    assert our_rows == their_rows
    assert len(our_tables) > 1 or len(our_rows) < 1000
    if codec is Codec.NONE:
        # If both split the output at the same keys, separators, statistics and filter bits are equal as well.
        assert our_tables == their_tables
    seen = wheel.scan(str(theirs), "db")
    assert wheel.scan(str(ours), "db") == seen
    keys = sorted({row[0] for row in inputs.rows})[::7]
    assert wheel.get_many(str(ours), "db", keys) == [seen.get(key) for key in keys]
    assert_same_views(inputs, our_rows, choice)


def assert_same_views(inputs: Inputs, compacted: list[EntryTuple], choice: str) -> None:
    """Assert that a reader at any retained sequence number sees the same before and after."""
    if choice != "everything into the last run":
        return
    oldest = inputs.manifest.recent_snapshot_min_seq
    last = inputs.manifest.last_l0_seq
    for max_seq in {oldest, (oldest + last) // 2, last}:
        for key in sorted({row[0] for row in inputs.rows})[::20]:
            seen = [
                visible_value(
                    sorted((row for row in rows if row[0] == key), key=lambda row: -row[1]),
                    max_seq=max_seq,
                    now_ms=inputs.clock_ms,
                    merge_operator=Append(),
                )
                for rows in (inputs.rows, compacted)
            ]
            before, after = (None if row is None else row.value for row in seen)
            assert before == after, (key, max_seq)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.SNAPPY, Codec.ZSTD])
def test_the_wheel_reads_and_compacts_an_output_with_blocks_taken_over_as_they_are(
    codec: Codec, tmp_path: Path, wheel: Any
) -> None:
    options = SstOptions(codec=codec, min_filter_keys=100)
    store, ids = LocalStore(tmp_path, fsync=False), Ids(1)
    expected, views, ssts = {}, [], {}
    for source in range(4):
        # Each series begins a little before the end of the one before.
        rows = [
            (b"event/%06d" % number, 10_000 * source + number + 1, VALUE, b"%d," % source * 30, 1, None)
            for number in range(max(2000 * source - 50, 0), 2000 * source + 2000, 1 + (source == 2))
        ]
        expected |= {row[0]: row[3] for row in rows}
        built = encode_sst(rows, options)
        sst = SsTable(ids.ulid(), built.info)
        store.put(PATHS.sst(sst.id), built.data)
        ssts[sst.id] = sst
        views.insert(0, SstView.whole(sst.id))
    manifest = Manifest(
        writer_epoch=1,
        ssts=ssts,
        tree=Tree(l0=tuple(views)),
        last_l0_seq=Seq(50_000),
        recent_snapshot_min_seq=Seq(50_000),
    )
    ManifestStore(store, PATHS).create_next(manifest, None)
    sealed = {sst.id: _stored_blocks(store.get(PATHS.sst(sst.id)).data) for sst in ssts.values()}
    spec = TieredSpec(tuple(view.id for view in views), (), RunId(0))
    _compact(store, manifest, options, spec, max_sst_size=150_000 if codec is Codec.NONE else 20_000)

    outputs, rows = run_rows(tmp_path, 0)
    assert len(outputs) > 1
    blocks = [block for data in outputs for block in _stored_blocks(data)]
    assert sum(block in of_sst for of_sst in sealed.values() for block in blocks) > 0.7 * len(blocks)
    assert {row[0]: row[3] for row in rows} == expected
    assert wheel.scan(str(tmp_path), "db") == expected
    keys = [*sorted(expected)[::3], b"event/absent"]
    assert wheel.get_many(str(tmp_path), "db", keys) == [expected.get(key) for key in keys]
    report = Admin("db", store=store).verify()
    assert report.ok, report
    assert wheel.compact_everything(str(tmp_path), "db") == expected


def _stored_blocks(data: bytes) -> list[bytes]:
    index = decode_sst(data, "sst").index
    return [data[start:stop] for start, stop in zip(index.offsets, index.stops, strict=True)]


@pytest.mark.long
@pytest.mark.slow
def test_wheel_and_flagstone_split_a_job_into_the_same_subcompactions(tmp_path: Path, wheel: Any) -> None:
    """Both split a job at the same keys."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    inputs = Inputs(ours, 9, rows=60_000, keys=30_000, options=SstOptions())
    shutil.copytree(ours, theirs)
    tree = inputs.manifest.tree
    spec = TieredSpec(tuple(view.id for view in tree.l0), (RunId(5), RunId(2)), RunId(2))
    recorded = compact_ours(inputs, ours, spec, max_subcompactions=4, max_sst_size=60_000)
    wheel.compact(
        str(theirs),
        "db",
        worker={"max_sst_size": 60_000, "max_subcompactions": 4, "heartbeat_interval": "1ms"},
    )
    compactions = CompactionsStore(LocalStore(theirs, fsync=False), PATHS)
    planned = [
        job.context
        for listed in compactions.list()
        for job in compactions.load(listed.id).jobs
        if job.context is not None
    ]
    assert planned
    ranges = [part.range for part in recorded.subcompactions]
    assert len(ranges) == 4
    assert [part.range for part in planned[-1].subcompactions] == ranges
    assert run_rows(ours, 2) == run_rows(theirs, 2)
