"""The official wheel reads a database that only our encoders wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin
from flagstone.config import Settings
from flagstone.format.codec import Codec
from flagstone.format.filter import BloomPolicy
from flagstone.format.sst_info import SstType
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import Ids
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, RunId, Seq, WalId

ROWS = 3000


class HandMade:
    """A database built file by file: a sorted run of three SSTs, two SSTs in L0, a WAL with a fence and rows."""

    def __init__(self, folder: Path, options: SstOptions) -> None:
        self.store = LocalStore(folder, fsync=False)
        self.paths = DbPaths("db")
        self.options = options
        self.ids = Ids(seed=7)
        self.now_ms = SYSTEM_CLOCK.now_ms() - 10_000
        self.seq = 0
        self.expected: dict[bytes, bytes] = {}

    def rows(self, numbers: Any, kind: int, value: bytes) -> list[EntryTuple]:
        """One row per number, each its own commit; also adds the rows to the model."""
        made = []
        for number in numbers:
            self.seq += 1
            key = b"order/%08d" % number
            content = b"" if kind == TOMBSTONE else value + b"-%d" % number
            made.append((key, self.seq, kind, content, self.now_ms + self.seq, None))
            if kind == VALUE:
                self.expected[key] = content
            elif kind == TOMBSTONE:
                self.expected.pop(key, None)
            else:
                self.expected[key] = self.expected.get(key, b"") + content
        return made

    def write_sst(self, rows: list[EntryTuple]) -> SsTable:
        built = encode_sst(sorted(rows, key=lambda row: (row[0], -row[1])), self.options)
        sst = SsTable(self.ids.ulid(), built.info)
        self.store.put(self.paths.sst(sst.id), built.data)
        return sst

    def wal(self, wal_id: int, rows: list[EntryTuple]) -> None:
        data = b""
        if rows:
            data = encode_sst(rows, self.options, sst_type=SstType.WAL).data
        self.store.put_if_absent(self.paths.wal(WalId(wal_id)), data)

    def write(self) -> None:
        old = self.rows(range(ROWS), VALUE, b"old" * 20)
        third = ROWS // 3
        run = [self.write_sst(old[start : start + third]) for start in range(0, ROWS, third)]
        first_l0 = self.write_sst(
            self.rows(range(0, ROWS, 5), VALUE, b"new" * 10) + self.rows(range(0, ROWS, 7), TOMBSTONE, b"")
        )
        second_l0 = self.write_sst(
            self.rows(range(0, ROWS, 9), MERGE, b"+m") + self.rows([ROWS, ROWS + 1], VALUE, b"")
        )
        in_tables = self.seq
        self.wal(1, [])
        self.wal(2, self.rows(range(1, 40), VALUE, b"tail"))
        self.wal(3, self.rows(range(20, 60, 2), TOMBSTONE, b""))
        ssts = [*run, first_l0, second_l0]
        manifest = Manifest(
            writer_epoch=1,
            replay_after_wal_id=WalId(1),
            wal_id_last_seen=WalId(1),
            ssts={sst.id: sst for sst in sorted(ssts, key=lambda sst: sst.id)},
            tree=Tree(
                l0=(SstView.whole(second_l0.id), SstView.whole(first_l0.id)),
                runs=(SortedRun(RunId(0), tuple(SstView.whole(sst.id) for sst in run)),),
            ),
            last_l0_clock_tick=self.now_ms + in_tables,
            last_l0_seq=Seq(in_tables),
            recent_snapshot_min_seq=Seq(in_tables),
            sequence_tracker=SequenceTracker().record(Seq(1), self.now_ms // 1000),
        )
        ManifestStore(self.store, self.paths).create_next(manifest, None)


@pytest.mark.slow
@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name.lower())
def test_the_wheel_scans_gets_and_compacts_a_database_that_we_wrote(
    codec: Codec, tmp_path: Path, wheel: Any
) -> None:
    made = HandMade(tmp_path, SstOptions(codec=codec, min_filter_keys=100, filters=(BloomPolicy(),)))
    made.write()
    report = Admin("db", store=str(tmp_path)).verify()
    assert report.ok, report.findings

    assert wheel.scan(str(tmp_path), "db") == made.expected

    keys = [b"order/%08d" % number for number in range(0, ROWS + 20, 11)]
    assert wheel.get_many(str(tmp_path), "db", keys) == [made.expected.get(key) for key in keys]

    name = None if codec is Codec.NONE else codec.title
    assert wheel.compact_everything(str(tmp_path), "db", codec=name) == made.expected

    assert wheel.scan(str(tmp_path), "db") == made.expected
    after = Admin("db", store=str(tmp_path)).verify()
    assert after.ok, after.findings
    assert after.manifest_id is not None
    assert after.manifest_id > 1


@pytest.mark.slow
def test_the_wheel_opens_a_database_whose_parallel_writer_crashed_once_flagstone_has_closed_the_hole(
    tmp_path: Path, wheel: Any
) -> None:
    store = LocalStore(tmp_path, fsync=False)
    parallel = Settings(max_parallel_wal_writes=4, compactor_options=None)
    with flagstone.open("db", store=store, settings=parallel) as db:
        db.put(b"a", b"1", await_durable=True)
        wal = [meta.path for meta in store.list("db/wal")]
        lost = WalId(int(wal[-1][-24:-4]) + 1)
        # What its crash leaves: a file behind one that was never created.
        store.copy(wal[-1], DbPaths("db").wal(WalId(lost + 1)))
        crashed = tmp_path / "crashed"
        for meta in list(store.list("db")):
            LocalStore(crashed, fsync=False).put(meta.path, store.get(meta.path).data)
    Admin("db", store=LocalStore(crashed, fsync=False)).repair(plan_only=False)

    assert wheel.scan(str(crashed), "db") == {b"a": b"1"}
    wheel.apply(str(crashed), "db", [("put", b"b", b"2")])
    with flagstone.open("db", store=LocalStore(crashed, fsync=False), settings=parallel) as db:
        assert dict(db.scan()) == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize("block_bytes", [1024, 65536])
def test_the_wheel_reads_ssts_of_every_block_size(block_bytes: int, tmp_path: Path, wheel: Any) -> None:
    made = HandMade(tmp_path, SstOptions(block_bytes=block_bytes))
    made.write()
    assert wheel.scan(str(tmp_path), "db") == made.expected
