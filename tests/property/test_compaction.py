"""Compaction by kernels equals compaction by a simple model, SST for SST and byte for byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.compaction import inputs, merging
from flagstone.errors import CorruptData
from flagstone.format.codec import Codec
from flagstone.format.filter import BloomPolicy, FixedPrefix
from flagstone.format.sst_info import SstType
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.lsm.retention import RetentionPolicy, condense, retain
from flagstone.lsm.tree import BytesRange, SstView
from flagstone.metadata.compactions import JobContext, Subcompaction
from flagstone.sst import builder as output
from flagstone.sst.builder import SstOptions
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, KeyRange
from flagstone.verification.ssts import check_sst
from kit.databases import Append
from kit.executor import ExecutorRig, by_hand
from kit.kernels import forms_of, replaced_kernels
from kit.ssts import ordered
from kit.strategies import neighbours, short_keys

pytestmark = pytest.mark.slow

CLOCK_MS = 50
FORMS = forms_of("merge")
KERNELS = {
    (merging, "merge"): "merge",
    (output, "block_writer"): "block_writer",
    (output, "sealing"): "sealing",
    (output, "whole_blocks"): "whole_blocks",
    (inputs, "sealing"): "sealing",
}


few_keys = st.one_of(
    short_keys(max_size=4),
    neighbours,
    st.integers(0, 40).map(lambda number: b"a-common-prefix-%02d" % number),
    st.sampled_from([b"\xff" * 9, b"\xff" * 8, b"\0" * 8, b"k" * 200, b"k" * 201, b"\0"]),
)
times = st.one_of(st.none(), st.integers(0, 100), st.sampled_from([CLOCK_MS, CLOCK_MS + 1, -1]))


@st.composite
def rows(draw: st.DrawFn) -> list[EntryTuple]:
    """Rows of different sequence numbers, in ascending order of them."""
    found = []
    for seq in range(1, 1 + draw(st.integers(0, 60))):
        kind = draw(st.sampled_from([VALUE, VALUE, TOMBSTONE, MERGE]))
        size = draw(st.sampled_from([0, 1, 5, 100, 127, 128, 1500]))
        value = b"" if kind == TOMBSTONE else bytes([97 + seq % 26]) * size
        found.append((draw(few_keys), seq, kind, value, draw(times), draw(times)))
    return found


@st.composite
def cut(draw: st.DrawFn, pieces: list[EntryTuple]) -> list[list[EntryTuple]]:
    """Sources, newest first: the rows cut anywhere in their sequence."""
    places = sorted(draw(st.lists(st.integers(0, len(pieces)), max_size=6)))
    edges = [0, *places, len(pieces)]
    return [ordered(pieces[start:stop]) for start, stop in pairwise(edges) if start < stop][::-1]


sources = rows().flatmap(cut)

table_options = st.builds(
    SstOptions,
    block_bytes=st.sampled_from([1024, 4096]),
    codec=st.sampled_from([Codec.NONE, Codec.NONE, Codec.LZ4, Codec.ZSTD]),
    min_filter_keys=st.sampled_from([0, 5, 1000]),
    filters=st.sampled_from(
        [
            (),
            (BloomPolicy(),),
            (BloomPolicy(bits_per_key=16, extractor=FixedPrefix("p2", 2)), BloomPolicy()),
        ]
    ),
)


@pytest.mark.parametrize("form", FORMS)
@given(
    sources=sources,
    options=table_options,
    min_seq=st.integers(0, 65),
    max_bytes=st.sampled_from([1, 1500, 5000, 1 << 30]),
    last=st.booleans(),
)
def test_compacted_ssts_equal_those_of_the_model(
    form: str,
    sources: list[list[EntryTuple]],
    options: SstOptions,
    min_seq: int,
    max_bytes: int,
    last: bool,
) -> None:
    rig = ExecutorRig(options=options, max_sst_bytes=max_bytes, bytes_to_fetch=1500)
    rig.set_sources(sources, min_seq=min_seq, clock_ms=CLOCK_MS)
    policy = RetentionPolicy(
        min_seq=min_seq, clock_ms=CLOCK_MS, keep_tombstones=not last, merge_operator=Append()
    )
    expected = by_hand(sources, policy, options=options, max_bytes=max_bytes)
    with replaced_kernels(form, KERNELS):
        # Any other destination than run 0 is not the last run; without sources every one is.
        found = rig.run(rig.spec(0 if last else 9)) if sources else ()
    assert [rig.data(sst) for sst in found] == expected


@st.composite
def long_sources(draw: st.DrawFn) -> list[list[EntryTuple]]:
    """Sources, newest first, with long series of keys that overlap in places, and rows of every kind."""
    found = []
    for number in range(draw(st.integers(1, 3)), 0, -1):
        by_version = {}
        for _ in range(draw(st.integers(1, 2))):
            first = draw(st.integers(0, 60)) * 5
            size = draw(st.sampled_from([0, 20, 90, 400, 700]))
            for at in range(first, first + draw(st.sampled_from([1, 10, 120, 250]))):
                row = (b"key-%05d" % at, 1000 * number, VALUE, b"%05d" % at * (size // 5), 7, None)
                by_version[row[:2]] = row
        for _ in range(draw(st.integers(0, 4))):
            kind = draw(st.sampled_from([VALUE, TOMBSTONE, MERGE]))
            seq = 1000 * number - draw(st.sampled_from([-1, 0, 1, 2]))
            value = b"" if kind == TOMBSTONE else b"other"
            row = (b"key-%05d" % draw(st.integers(0, 550)), seq, kind, value, None, draw(times))
            by_version[row[:2]] = row
        found.append(ordered(by_version.values()))
    return found


@pytest.mark.parametrize("form", FORMS)
@given(
    sources=long_sources(),
    options=table_options,
    min_seq=st.sampled_from([0, 999, 1000, 2001, 9999]),
    max_bytes=st.sampled_from([1, 5000, 1 << 30]),
    bytes_to_fetch=st.sampled_from([100_000, 1 << 20]),
    last=st.booleans(),
    data=st.data(),
)
def test_taking_whole_blocks_changes_no_row(
    form: str,
    sources: list[list[EntryTuple]],
    options: SstOptions,
    min_seq: int,
    max_bytes: int,
    bytes_to_fetch: int,
    last: bool,
    data: st.DataObject,
) -> None:
    options = replace(options, block_bytes=1024, codec=data.draw(st.sampled_from(Codec)))
    rig = ExecutorRig(options=options, max_sst_bytes=max_bytes, bytes_to_fetch=bytes_to_fetch)
    rig.set_sources(sources, min_seq=min_seq, clock_ms=CLOCK_MS)
    policy = RetentionPolicy(
        min_seq=min_seq, clock_ms=CLOCK_MS, keep_tombstones=not last, merge_operator=Append()
    )
    with replaced_kernels(form, KERNELS):
        found = rig.run(rig.spec(0 if last else 9))
        recorded = data.draw(st.sampled_from(rig.records))
        resumed = rig.run(rig.spec(0 if last else 9), context=recorded)
    expected = list(retain(ordered(row for rows in sources for row in rows), policy))
    assert rig.rows(found) == expected
    assert rig.rows(resumed) == expected
    for sst in (*found, *resumed):
        check = check_sst(rig.data(sst), "output", SstType.COMPACTED)
        assert check.problems == []
        assert check.info == sst.info


@pytest.mark.parametrize("form", FORMS)
@given(sources=sources, min_seq=st.integers(0, 65), data=st.data())
def test_a_resumed_job_writes_the_same_ssts_as_an_uninterrupted_one(
    form: str, sources: list[list[EntryTuple]], min_seq: int, data: st.DataObject
) -> None:
    rig = ExecutorRig(max_sst_bytes=data.draw(st.sampled_from([1, 1500, 3000])))
    rig.set_sources(sources, min_seq=min_seq, clock_ms=CLOCK_MS)
    if not sources:
        return
    boundary = data.draw(few_keys)
    ranges = (BytesRange.of(KeyRange(None, boundary)), BytesRange.of(KeyRange(boundary, None)))
    start = JobContext(tuple(Subcompaction(keys) for keys in ranges), rig.manifest.recent_snapshot_min_seq)
    with replaced_kernels(form, KERNELS):
        whole = rig.run(context=start)
        recorded = data.draw(st.sampled_from(rig.records))
        # The snapshots of the newest manifest must not matter any more.
        rig.set_barrier(0, CLOCK_MS)
        again = rig.run(context=recorded)
    assert rig.rows(again) == rig.rows(whole)
    kept = {sst.id for part in recorded.subcompactions for sst in part.output_ssts}
    assert kept <= {sst.id for sst in again}


@pytest.mark.parametrize("form", FORMS)
@given(pieces=rows(), data=st.data())
def test_rows_outside_of_visible_ranges_are_not_compacted(
    form: str, pieces: list[EntryTuple], data: st.DataObject
) -> None:
    if not pieces:
        return
    rig = ExecutorRig(bytes_to_fetch=1)
    whole = rig.add_sst(ordered(pieces))
    borders = sorted(set(data.draw(st.lists(few_keys, min_size=2, max_size=4))))
    views, visible = [], []
    info = rig.manifest.sst(whole).info
    for start, stop in pairwise(borders):
        seen = BytesRange.of(KeyRange(start, stop))
        view = SstView(rig.ids.ulid(), whole.sst_id, seen)
        if not view.effective_range(info).empty and data.draw(st.booleans()):
            views.append(view)
            visible += [row for row in pieces if row[0] in seen.keys]
    if not views:
        return
    rig.set_tree(runs=[(3, views)])
    rig.set_barrier(30, CLOCK_MS)
    policy = RetentionPolicy(min_seq=30, clock_ms=CLOCK_MS, keep_tombstones=False, merge_operator=Append())
    with replaced_kernels(form, KERNELS):
        found = rig.run()
    assert [rig.data(sst) for sst in found] == by_hand([visible], policy)


@pytest.mark.parametrize("form", FORMS)
@given(pieces=rows(), data=st.data())
def test_a_damaged_source_raises_corrupt_data(
    form: str, pieces: list[EntryTuple], data: st.DataObject
) -> None:
    """Damage behind a right checksum, as a broken writer would leave it: an error, or rows that it could mean."""
    if not pieces:
        return
    kernel = (load_compiled if form == "compiled" else load_interpreted)("merge")
    assert kernel is not None
    writer = load_interpreted("block_writer").BlockWriter(1024)
    writer.add_rows(ordered(pieces))
    block = bytearray(writer.finish_blocks()[0])
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    raw = bytes(block[: data.draw(st.integers(0, len(block)))])
    merger = kernel.Merger(1, min_seq=9, clock_ms=0, keep_tombstones=True, has_operator=True)
    merger.feed(0, raw, inputs.array("q", [0, len(raw)]), None, None)
    try:
        while (status := merger.run()) != kernel.DONE:
            if status == kernel.NEED:
                merger.end(0)
            merger.rows()
    except CorruptData as error:
        assert error.offset is not None
        assert merger.failed_at() == (0, 0)


def test_the_form_of_a_kernel_chosen_for_a_test_is_the_one_that_runs() -> None:
    """The form chosen for a test is the one that runs."""
    with replaced_kernels("interpreted", KERNELS):
        assert merging.merge.__name__ == "flagstone.kernels._merge"
    assert replace(SstOptions(), block_bytes=1024).block_bytes == 1024


@given(pieces=rows(), min_seq=st.integers(0, 65), last=st.booleans(), data=st.data())
def test_merging_some_rows_of_a_key_early_changes_no_result(
    pieces: list[EntryTuple], min_seq: int, last: bool, data: st.DataObject
) -> None:
    policy = RetentionPolicy(
        min_seq=min_seq, clock_ms=CLOCK_MS, keep_tombstones=not last, merge_operator=Append()
    )
    versions = [(b"k", *row[1:]) for row in reversed(pieces)]
    at = data.draw(st.integers(0, len(versions)))
    condensed = condense(versions[:at], policy)
    assert list(retain(condensed + versions[at:], policy)) == list(retain(versions, policy))
