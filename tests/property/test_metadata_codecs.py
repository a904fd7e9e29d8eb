"""Random manifests, compactions files and trackers survive the trip to bytes; damaged bytes only raise CorruptData."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flagstone.errors import CorruptData
from flagstone.format import flat
from flagstone.format.codec import Codec
from flagstone.format.sst_info import (
    SST_STATS,
    BlockStats,
    FilterFormat,
    SsTableInfo,
    SstStats,
    SstType,
    decode_info,
    decode_stats,
    encode_info,
    encode_stats,
)
from flagstone.kernels import load_compiled
from flagstone.lsm.sequence import SequenceTracker, decode_tracker, encode_tracker
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.compactions import (
    _COMPACTIONS,
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
from flagstone.metadata.manifest import Checkpoint, ExternalDb, Manifest, Segment, SsTable
from flagstone.metadata.manifest_codec import _MANIFEST, _MANIFEST_V1, decode_manifest, encode_manifest
from kit.kernels import both, damaged, outcome

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "golden" / "data"

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
keys = st.binary(max_size=20)
ulids: Any = st.integers(0, 2**128 - 1)
uuids = st.uuids()
texts = st.text(max_size=12)
bounds = st.one_of(
    st.just(Bound(BoundKind.UNBOUNDED)),
    st.builds(Bound, st.sampled_from([BoundKind.INCLUDED, BoundKind.EXCLUDED]), keys),
)
starts = st.one_of(st.just(Bound(BoundKind.UNBOUNDED)), st.builds(Bound, st.just(BoundKind.INCLUDED), keys))
ranges = st.builds(BytesRange, bounds, bounds)
visible_ranges = st.builds(BytesRange, starts, bounds)
infos = st.builds(
    SsTableInfo,
    *(st.none() | keys, st.none() | keys, u64, u64, u64, u64),
    codec=st.sampled_from(Codec),
    sst_type=st.sampled_from(SstType),
    stats_offset=u64,
    stats_len=u64,
    filter_format=st.sampled_from(FilterFormat),
)
ssts = st.builds(SsTable, ulids, infos, u16)
steps = st.one_of(
    st.just(0), st.integers(-300, 300), st.integers(-3000, 3000), st.integers(-(2**31), 2**31 - 1)
)


@st.composite
def trackers(draw: st.DrawFn) -> SequenceTracker:
    """Anything that can be stored: changes of 32 bits, and sums that wrap at 64."""
    columns = []
    count = draw(st.integers(0, 12))
    for bias in (0, 2**63):
        values, delta = [draw(st.integers(0, 2**64 - 1))], 0
        for _ in range(count - 1):
            delta += draw(steps)
            values.append((values[-1] + delta) % 2**64)
        columns.append(tuple((value + bias) % 2**64 - bias for value in values[:count]))
    return SequenceTracker(*columns)


block_stats = st.builds(BlockStats, u16, u16, u16)
stats = st.builds(SstStats, u64, u64, u64, u64, u64, st.lists(block_stats, max_size=5).map(tuple))


def tuples(of: st.SearchStrategy[Any], max_size: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=max_size).map(tuple)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    known = {sst.id: sst for sst in draw(st.lists(ssts, max_size=6))}
    views, runs = st.just(()), st.just(())
    if known:
        view = st.builds(SstView, ulids, st.sampled_from(sorted(known)), st.none() | visible_ranges)
        views = tuples(view)
        runs = tuples(st.builds(SortedRun, u32, views))
    trees = st.builds(Tree, views, runs, st.none() | ulids)
    segments = draw(st.lists(st.builds(Segment, keys, trees), max_size=3, unique_by=lambda held: held.prefix))
    return Manifest(
        initialized=draw(st.booleans()),
        writer_epoch=draw(u64),
        compactor_epoch=draw(u64),
        replay_after_wal_id=draw(u64),  # type: ignore[arg-type]
        wal_id_last_seen=draw(u64),  # type: ignore[arg-type]
        ssts=known,
        tree=draw(trees),
        segments=tuple(sorted(segments, key=lambda held: held.prefix)),
        segment_extractor_name=draw(st.none() | texts),
        last_l0_clock_tick=draw(st.integers(-(2**63), 2**63 - 1)),
        last_l0_seq=draw(u64),  # type: ignore[arg-type]
        recent_snapshot_min_seq=draw(u64),  # type: ignore[arg-type]
        sequence_tracker=draw(trackers()),
        checkpoints=draw(
            tuples(
                st.builds(
                    Checkpoint, uuids, u64, u32, st.none() | st.integers(1, 2**32 - 1), st.none() | texts
                )
            )
        ),
        external_dbs=draw(tuples(st.builds(ExternalDb, texts, uuids, st.none() | uuids, tuples(ulids)))),
    )


@st.composite
def compactions(draw: st.DrawFn) -> Compactions:
    specs = st.one_of(
        st.builds(TieredSpec, tuples(ulids), tuples(u32), u32, keys),
        st.builds(DrainSpec, keys, tuples(ulids), tuples(u32)),
    )
    contexts = st.builds(JobContext, tuples(st.builds(Subcompaction, ranges, tuples(ssts))), u64)
    jobs = []
    for job_id in sorted(draw(st.sets(ulids, max_size=4))):
        status = draw(st.sampled_from(JobStatus))
        done = status in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.COMPACTED)
        jobs.append(
            Job(
                job_id,
                draw(specs),
                status,
                draw(tuples(ssts)) if done else (),
                draw(st.none() | st.builds(Worker, texts, u64)),
                draw(st.none() | contexts),
            )
        )
    return Compactions(draw(u64), tuple(jobs))


@given(manifests())
def test_an_encoded_manifest_decodes_to_itself(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert encode_manifest(decode_manifest(data)) == data


@given(compactions())
def test_an_encoded_compactions_file_decodes_to_itself(held: Compactions) -> None:
    data = encode_compactions(held)
    assert decode_compactions(data) == held
    assert encode_compactions(decode_compactions(data)) == data


@given(trackers())
def test_an_encoded_sequence_tracker_decodes_to_itself(tracker: SequenceTracker) -> None:
    assert decode_tracker(encode_tracker(tracker)) == tracker


@given(st.lists(st.tuples(u64, st.integers(0, 2**40)), max_size=40))
def test_any_recorded_sequence_times_are_encodable_and_ordered(points: list[tuple[int, int]]) -> None:
    tracker = SequenceTracker()
    for sequence, second in points:
        tracker = tracker.record(sequence, second)
    assert decode_tracker(encode_tracker(tracker)) == tracker
    assert list(tracker.sequences) == sorted(set(tracker.sequences))
    assert list(tracker.seconds) == sorted(tracker.seconds)


@given(infos)
def test_an_encoded_sst_info_decodes_to_itself(info: SsTableInfo) -> None:
    assert decode_info(encode_info(info)) == info


@given(stats)
def test_encoded_sst_statistics_decode_to_themselves(held: SstStats) -> None:
    encoded = encode_stats(held)

    assert decode_stats(encoded) == held
    assert encoded == flat.encode(SST_STATS, held), "written by hand, but not otherwise than by the rules"


SAMPLES: list[tuple[str, Callable[[bytes], object], bytes]] = [
    (kind, decode, path.read_bytes())
    for kind, decode, path in [
        ("segments", decode_manifest, GOLDEN / "segments/db/manifest/00000000000000000011.manifest"),
        ("clone", decode_manifest, GOLDEN / "clone/projected/manifest/00000000000000000003.manifest"),
        ("v1", decode_manifest, GOLDEN / "handmade_v1/db/manifest/00000000000000000001.manifest"),
        ("running", decode_compactions, GOLDEN / "segments/db/compactions/00000000000000000007.compactions"),
        ("multi", decode_compactions, GOLDEN / "compaction/db/compactions/00000000000000000010.compactions"),
    ]
]
fuzzed = pytest.mark.parametrize(
    ("decode", "whole"), [sample[1:] for sample in SAMPLES], ids=[s[0] for s in SAMPLES]
)


def survive(decode: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(data)
    except CorruptData as error:
        assert error.offset is not None


@fuzzed
@settings(max_examples=300, suppress_health_check=[HealthCheck.differing_executors])
@given(data=st.data())
def test_damaged_metadata_raises_corrupt_data_or_decodes(
    decode: Callable[[bytes], object], whole: bytes, data: st.DataObject
) -> None:
    changed = bytearray(whole)
    for at, bit in data.draw(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 7)), min_size=1, max_size=6)
    ):
        changed[at] ^= 1 << bit
    survive(decode, bytes(changed))


@fuzzed
def test_every_truncation_of_metadata_raises_corrupt_data(
    decode: Callable[[bytes], object], whole: bytes
) -> None:
    for length in range(len(whole) - 24):
        with pytest.raises(CorruptData):
            decode(whole[:length])


@fuzzed
def test_every_flipped_bit_raises_corrupt_data_or_decodes(
    decode: Callable[[bytes], object], whole: bytes
) -> None:
    for at in range(len(whole)):
        for bit in range(8):
            survive(decode, whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])


@settings(max_examples=300)
@given(st.sampled_from([b"", b"\0\1", b"\0\2"]), st.binary(max_size=300))
def test_random_bytes_raise_corrupt_data_or_decode(envelope: bytes, noise: bytes) -> None:
    decoders: list[Callable[[bytes], object]] = [
        decode_manifest,
        decode_compactions,
        decode_info,
        decode_stats,
    ]
    for decode in decoders:
        survive(decode, envelope + noise)
    for tracker in (noise, b"\1" + noise, b"\1\1\0\0\0\0\0\0\1" + noise):
        survive(decode_tracker, tracker)


# -- both forms of the kernels ----------------------------------------------------------------------------

SHAPES: list[flat.Shape[Any]] = [_MANIFEST, _MANIFEST_V1, _COMPACTIONS]
compiled_too = pytest.mark.skipif(
    load_compiled("flat_reader") is None, reason="kernels were not compiled here"
)


def read_by(kernel: ModuleType, shape: flat.Shape[Any], data: bytes, strict: bool) -> Any:
    return outcome(kernel.decode, flat.reading_table(shape, kernel), data, 2, strict)


def written_by(kernel: ModuleType, shape: flat.Shape[Any], value: object) -> bytes:
    written: bytes = kernel.encode(flat.writing_table(shape, kernel), value, b"\0\2")
    return written


@compiled_too
@given(manifests() | compactions())
def test_both_kernels_write_the_same_bytes_and_read_the_same_value(held: Manifest | Compactions) -> None:
    shape: flat.Shape[Any] = _MANIFEST if isinstance(held, Manifest) else _COMPACTIONS
    written = {written_by(kernel, shape, held) for kernel in both("flat_writer")}
    assert len(written) == 1
    for kernel in both("flat_reader"):
        assert read_by(kernel, shape, *written, strict=False) == held
        assert read_by(kernel, shape, *written, strict=True) == held


@compiled_too
@settings(max_examples=300)
@given(data=st.data())
def test_both_kernels_read_or_refuse_damaged_metadata_alike(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([sample[2] for sample in SAMPLES]))
    changes = data.draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 8, 40]))
    stored, strict = damaged(whole, changes, cut), data.draw(st.booleans())
    for shape in SHAPES:
        compiled, interpreted = (read_by(kernel, shape, stored, strict) for kernel in both("flat_reader"))
        assert compiled == interpreted
