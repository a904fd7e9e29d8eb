"""The official wheel reads and rewrites metadata that our codecs encoded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.compactions import (
    Compactions,
    DrainSpec,
    Job,
    JobContext,
    JobStatus,
    Subcompaction,
    TieredSpec,
    Worker,
    decode_compactions,
    encode_compactions,
)
from flagstone.metadata.manifest import (
    Checkpoint,
    ExternalDb,
    Manifest,
    Segment,
    SsTable,
    new_manifest,
    replace_trees,
)
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.types import KeyRange, ManifestId, RunId, Seq, Ulid, WalId

pytest.importorskip("slatedb", reason="the official wheel is the judge here")


def ask_wheel(action: str, folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("wheel_metadata.py")
    run = subprocess.run(
        [sys.executable, str(script), action, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seen: dict[str, Any] = json.loads(run.stdout)
    return seen


def write(folder: Path, kind: str, number: int, data: bytes) -> None:
    path = folder / "db" / kind / f"{number:020d}.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def newest(folder: Path, kind: str) -> tuple[int, bytes]:
    path = max((folder / "db" / kind).iterdir())
    return int(path.stem), path.read_bytes()


def ulid(ms: int, salt: int = 0) -> Ulid:
    return Ulid(ms << 80 | salt)


def sst(ms: int, first: bytes = b"a", last: bytes = b"z") -> SsTable:
    return SsTable(
        ulid(ms), SsTableInfo(first, last, 4000 + ms, 60, 4000 + ms, 0, stats_offset=4060 + ms, stats_len=90)
    )


def test_the_wheel_opens_a_database_with_our_manifest(tmp_path: Path) -> None:
    checkpoint = Checkpoint(UUID(int=7 << 100 | 9), ManifestId(1), 1_700_000_000, None, "tägliche Sicherung")
    manifest = replace(
        new_manifest(),
        writer_epoch=4,
        compactor_epoch=2,
        last_l0_seq=Seq(300),
        recent_snapshot_min_seq=Seq(300),
        wal_id_last_seen=WalId(0),
        sequence_tracker=SequenceTracker(
            (100, 200, 280, 300), (1_700_000_000, 1_700_000_060, 1_700_000_200, 1_780_009_999)
        ),
        checkpoints=(checkpoint,),
    )
    write(tmp_path, "manifest", 1, encode_manifest(manifest))
    seen = ask_wheel("open", tmp_path)
    assert seen == {
        "id": 1,
        "writer_epoch": 4,
        "compactor_epoch": 2,
        "last_l0_seq": 300,
        "next_wal_sst_id": 1,
        "checkpoints": [[str(checkpoint.id), checkpoint.name, 1]],
        "time_of_150_down": 1_700_000_000,
        "time_of_150_up": 1_700_000_060,
        "rows": [[], []],
        "written": [[b"key".hex(), b"value".hex()]],
    }
    for path in sorted((tmp_path / "db" / "manifest").iterdir()):
        assert encode_manifest(decode_manifest(path.read_bytes())) == path.read_bytes()
    _, data = newest(tmp_path, "manifest")
    after = decode_manifest(data)
    assert after.writer_epoch == 5
    assert after.last_l0_seq == 301
    assert after.checkpoints == (checkpoint,)
    assert after.sequence_tracker.sequences[:4] == manifest.sequence_tracker.sequences


def everything() -> Manifest:
    """A manifest with every FlatBuffers table and field of the format."""
    clipped = BytesRange(Bound(BoundKind.INCLUDED, b"b"), Bound(BoundKind.EXCLUDED, b"m"))
    upper = BytesRange(Bound(BoundKind.INCLUDED, b"m"), Bound(BoundKind.INCLUDED, b"x"))
    lower = BytesRange(end=Bound(BoundKind.EXCLUDED, b"q"))
    return replace_trees(
        Manifest(
            writer_epoch=3,
            compactor_epoch=2,
            replay_after_wal_id=WalId(7),
            wal_id_last_seen=WalId(9),
            last_l0_clock_tick=1_700_000_000_000,
            last_l0_seq=Seq(1234),
            recent_snapshot_min_seq=Seq(1200),
            sequence_tracker=SequenceTracker((1, 5, 900), (1_700_000_000, 1_700_000_061, 1_700_000_400)),
            checkpoints=(
                Checkpoint(UUID(int=1 << 120 | 1), ManifestId(1), 1_700_000_000, 4_000_000_000, None),
                Checkpoint(UUID(int=2 << 120 | 2), ManifestId(1), 1_700_000_000, None, "named"),
            ),
            external_dbs=(
                ExternalDb("parent", UUID(int=3 << 120), UUID(int=4 << 120), (ulid(1), ulid(2))),
                ExternalDb("other/parent", UUID(int=5 << 120), None, ()),
            ),
        ),
        tree=Tree(
            (SstView.whole(ulid(9)), SstView(ulid(8, 5), ulid(8), clipped)),
            (
                SortedRun(RunId(3), (SstView(ulid(2, 1), ulid(2), lower), SstView.whole(ulid(5)))),
                SortedRun(
                    RunId(1), (SstView(ulid(1, 1), ulid(1), clipped), SstView(ulid(1, 2), ulid(1), upper))
                ),
            ),
            ulid(7),
        ),
        added=[sst(1), sst(2), sst(5, b"r", b"t"), sst(8), sst(9)],
    )


def test_the_wheel_writes_our_manifest_and_compactions_file_with_the_same_bytes(tmp_path: Path) -> None:
    manifest = everything()
    context = JobContext(
        (
            Subcompaction(BytesRange.of(KeyRange(None, b"m")), (sst(2_000_001), sst(2_000_002))),
            Subcompaction(BytesRange.of(KeyRange(b"m", None))),
        ),
        Seq(77),
    )
    mixed = TieredSpec((ulid(9), ulid(8, 5)), (RunId(3), RunId(1)), RunId(1))
    compactions = Compactions(
        2,
        (
            Job(ulid(1_000_000), mixed, JobStatus.COMPACTED, (sst(1_000_001),), Worker("w1", 5)),
            Job(
                ulid(2_000_000),
                TieredSpec((ulid(9),), (), RunId(4)),
                JobStatus.RUNNING,
                (),
                Worker("w2"),
                context,
            ),
            Job(ulid(3_000_000), DrainSpec(b"seg", (ulid(4),), (RunId(8), RunId(7))), JobStatus.SCHEDULED),
            Job(ulid(4_000_000), DrainSpec(b"seg"), JobStatus.FAILED),
        ),
    )
    write(tmp_path, "manifest", 1, encode_manifest(manifest))
    write(tmp_path, "compactions", 1, encode_compactions(compactions))
    seen = ask_wheel("rewrite", tmp_path)
    assert len(seen["jobs"]) == 4

    number, data = newest(tmp_path, "manifest")
    assert number == 2
    added = decode_manifest(data).checkpoints[-1]
    assert (added.name, added.manifest_id) == ("näme", 2)
    assert data == encode_manifest(replace(manifest, checkpoints=(*manifest.checkpoints, added)))

    number, data = newest(tmp_path, "compactions")
    assert number == 2
    submitted = decode_compactions(data).jobs[-1]
    assert submitted.spec == TieredSpec((), (RunId(3), RunId(1)), RunId(1))
    assert data == encode_compactions(replace(compactions, jobs=(*compactions.jobs, submitted)))


def test_the_wheel_writes_our_manifest_with_segments_with_the_same_bytes(tmp_path: Path) -> None:
    manifest = replace(
        replace_trees(
            new_manifest(segment_extractor_name="first3"),
            segments=[
                Segment(b"aaa", Tree((SstView.whole(ulid(3)),), (), None)),
                Segment(b"bbb", Tree((), (SortedRun(RunId(2), (SstView.whole(ulid(4)),)),), ulid(2))),
                Segment(b"ccc"),
            ],
            added=[sst(3, b"aaa1", b"aaa2"), sst(4, b"bbb1", b"bbb2")],
        ),
        initialized=True,
    )
    write(tmp_path, "manifest", 1, encode_manifest(manifest))
    write(tmp_path, "compactions", 1, encode_compactions(Compactions()))
    ask_wheel("rewrite", tmp_path)
    _, data = newest(tmp_path, "manifest")
    added = decode_manifest(data).checkpoints[-1]
    assert data == encode_manifest(replace(manifest, checkpoints=(added,)))
