"""Compaction takes over blocks as they are stored where their rows overlap no other source and nothing would change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from flagstone.errors import CorruptData
from flagstone.format.codec import Codec, seal
from flagstone.format.filter import BloomPolicy, FixedPrefix
from flagstone.format.sst import SstImage, decode_sst
from flagstone.format.sst_info import SstType
from flagstone.lsm.compaction_filter import Decision
from flagstone.lsm.tree import BytesRange, SstView
from flagstone.metadata.manifest import SsTable
from flagstone.sst.builder import BLOCKS_PER_SHORT_ONE, SstOptions
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, KeyRange, Row
from flagstone.verification.ssts import check_sst
from kit.executor import PATHS, SMALL, ExecutorRig
from kit.ssts import ordered

OPTIONS = replace(SMALL, filters=(BloomPolicy(), BloomPolicy(extractor=FixedPrefix("p5", 5))))


def series(first: int, count: int, *, seq: int = 1, size: int = 60) -> list[EntryTuple]:
    """Rows with ascending keys, about ten in a block."""
    return [
        (b"key-%06d" % number, seq + number, VALUE, b"%06d" % number * (size // 6), 1_000 + number, None)
        for number in range(first, first + count)
    ]


def rig_of(sources: Sequence[Sequence[EntryTuple]], *, min_seq: int = 1 << 40, **changes: Any) -> ExecutorRig:
    rig = ExecutorRig(**{"options": OPTIONS, "bytes_to_fetch": 1 << 20, **changes})
    rig.set_sources(sources, min_seq=min_seq, clock_ms=50)
    return rig


def stored_blocks(image: SstImage) -> list[bytes]:
    return [
        image.data[start:stop] for start, stop in zip(image.index.offsets, image.index.stops, strict=True)
    ]


def taken_over(rig: ExecutorRig, ssts: Sequence[SsTable]) -> tuple[int, int]:
    """How many blocks of the output are blocks of a source, byte for byte, and how many it has."""
    source_ids = [view.sst_id for view in rig.manifest.tree.l0]
    source_ids += [view.sst_id for run in rig.manifest.tree.runs for view in run.views]
    sources = {
        block
        for sst_id in source_ids
        for block in stored_blocks(decode_sst(rig.store.get(PATHS.sst(sst_id)).data, "source"))
    }
    blocks = [block for sst in ssts for block in stored_blocks(decode_sst(rig.data(sst), "output"))]
    return sum(block in sources for block in blocks), len(blocks)


def assert_sound(rig: ExecutorRig, ssts: Sequence[SsTable]) -> None:
    """Assert that index, filters, statistics and row order of every output agree with its rows."""
    for sst in ssts:
        check = check_sst(rig.data(sst), "output", SstType.COMPACTED)
        assert check.problems == []
        assert check.info == sst.info
        image = decode_sst(rig.data(sst), "output")
        stats, rows = image.stats(), [row for rows in image.rows() for row in rows]
        assert stats is not None
        assert stats.raw_key_size == sum(len(row[0]) for row in rows)
        assert stats.raw_val_size == sum(len(row[3]) for row in rows)
        filters = image.filters()
        assert filters is not None
        extractor = FixedPrefix("p5", 5)
        assert all(filters.may_contain(row[0]) for row in rows)
        assert all(filters.may_contain_prefix(row[0][:5], extractor) for row in rows)
        # The shortest separators, as a merge writes them.
        for (last, first), separator in zip(pairwise_edges(image), image.index.first_keys[1:], strict=True):
            assert last < separator <= first or last == separator == first
            assert separator[:-1] <= last


def pairwise_edges(image: SstImage) -> list[tuple[bytes, bytes]]:
    blocks = list(image.rows())
    return [(one[-1][0], two[0][0]) for one, two in pairwise(blocks)]


@pytest.mark.parametrize("codec", list(Codec))
def test_blocks_of_sources_that_do_not_overlap_stay_as_they_are_stored(codec: Codec) -> None:
    sources = [series(number * 1500, 1500) for number in (3, 1, 2, 0)]
    rig = rig_of(sources, options=replace(OPTIONS, codec=codec))
    ssts = rig.run()
    assert rig.rows(ssts) == series(0, 6000)
    kept, blocks = taken_over(rig, ssts)
    assert kept >= blocks * 0.9
    assert_sound(rig, ssts)


def test_a_single_run_in_one_sst_is_copied_byte_for_byte() -> None:
    rig = rig_of([series(0, 2000)])
    (sst,) = rig.run()
    assert rig.data(sst) == rig.store.get(PATHS.sst(rig.manifest.tree.runs[0].views[0].sst_id)).data


def test_outputs_are_cut_at_their_size_within_taken_blocks() -> None:
    rig = rig_of([series(2000, 2000), series(0, 2000)], max_sst_bytes=20_000)
    ssts = rig.run()
    assert rig.rows(ssts) == series(0, 4000)
    sizes = [sst.info.filter_offset for sst in ssts]
    assert all(20_000 < size <= 20_000 + 2 * 1100 for size in sizes[:-1])
    assert taken_over(rig, ssts)[0] > 100
    assert_sound(rig, ssts)


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, block_bytes=4096),
        replace(OPTIONS, block_bytes=2048, codec=Codec.LZ4),
        replace(OPTIONS, codec=Codec.ZSTD),
    ],
)
def test_blocks_of_another_size_or_codec_are_rewritten(options: SstOptions) -> None:
    rig = rig_of([series(1000, 1000), series(0, 1000)])
    rig.options = options
    ssts = rig.run()
    assert rig.rows(ssts) == series(0, 2000)
    assert taken_over(rig, ssts)[0] == 0
    again = rig_of([series(0, 2000)], options=options)
    assert decode_sst(rig.data(ssts[0]), "").index == decode_sst(again.data(again.run()[0]), "").index


def changed(at: int, row: EntryTuple) -> list[EntryTuple]:
    rows = series(0, 1000)
    rows[at] = (rows[at][0], *row[1:])
    return rows


@pytest.mark.parametrize(
    ("kind", "expires_ms", "kept"),
    [(TOMBSTONE, None, False), (VALUE, 50, False), (VALUE, 51, True), (MERGE, None, True)],
)
def test_rows_that_a_compaction_changes_are_changed_among_taken_blocks(
    kind: int, expires_ms: int | None, kept: bool
) -> None:
    rows = changed(500, (b"", 501, kind, b"" if kind == TOMBSTONE else b"v", 7, expires_ms))
    rig = rig_of([rows])
    ssts = rig.run()
    assert [row for row in rows if kept or row is not rows[500]] == rig.rows(ssts)
    assert taken_over(rig, ssts)[0] > 50
    assert_sound(rig, ssts)


@pytest.mark.parametrize("min_seq", [0, 10_500, 1 << 40])
def test_versions_of_a_key_on_both_sides_of_a_block_border_are_judged_together(min_seq: int) -> None:
    rows = series(0, 2000, seq=20_000)
    for number in range(0, 2000, 37):
        rows += [(rows[number][0], 10_000 + seq, VALUE, b"old" * 20, 5, None) for seq in range(number % 14)]
    rig = rig_of([ordered(rows)], min_seq=min_seq)
    newest: dict[bytes, list[EntryTuple]] = {}
    for row in ordered(rows):
        versions = newest.setdefault(row[0], [])
        if not versions or versions[-1][1] > min_seq:
            versions.append(row)
    ssts = rig.run()
    assert rig.rows(ssts) == [row for versions in newest.values() for row in versions]
    assert_sound(rig, ssts)


def test_a_newer_version_in_another_source_wins_at_the_edge_of_a_block() -> None:
    rows = series(0, 1000)
    edges = [row for number, row in enumerate(rows) if number % 9 in (0, 8)][::12]
    newer = [(row[0], 90_000 + row[1], VALUE, b"newer", 1, None) for row in edges]
    rig = rig_of([newer, rows])
    by_key = {row[0]: row for row in newer}
    ssts = rig.run()
    assert rig.rows(ssts) == [by_key.get(row[0], row) for row in rows]
    assert_sound(rig, ssts)


def test_only_visible_rows_of_a_projected_sst_are_taken() -> None:
    rig = rig_of([])
    whole = rig.add_sst(series(0, 2000))
    seen = BytesRange.of(KeyRange(b"key-000303", b"key-001507"))
    rig.set_tree([SstView(rig.ids.ulid(), whole.sst_id, seen)])
    ssts = rig.run()
    assert rig.rows(ssts) == series(303, 1204)
    assert taken_over(rig, ssts)[0] > 90


def test_a_resumed_job_takes_blocks_behind_its_last_row() -> None:
    rig = rig_of([series(1000, 1000), series(0, 1000)], max_sst_bytes=30_000)
    whole = rig.run()
    for context in list(rig.records):
        again = rig.run(context=context)
        assert rig.rows(again) == rig.rows(whole)
        assert_sound(rig, again)
        assert taken_over(rig, again)[0] > 100


def test_a_damaged_block_is_never_copied() -> None:
    rig = rig_of([series(1000, 1000), series(0, 1000)])
    path = PATHS.sst(rig.manifest.tree.l0[0].sst_id)
    image = decode_sst(rig.store.get(path).data, path)
    for number in (0, 40, len(image.index) - 1):
        data = bytearray(image.data)
        data[image.index.offsets[number] + 30] ^= 1
        rig.store.put(path, bytes(data))
        with pytest.raises(CorruptData, match="checksum") as raised:
            rig.run()
        assert (raised.value.object, raised.value.offset) == (path, image.index.offsets[number])
    assert not [sst for context in rig.records for part in context.subcompactions for sst in part.output_ssts]


def test_damage_behind_a_valid_checksum_is_not_copied_either() -> None:
    rig = rig_of([series(1000, 1000), series(0, 1000)])
    path = PATHS.sst(rig.manifest.tree.l0[0].sst_id)
    image = decode_sst(rig.store.get(path).data, path)
    start, stop = image.index.offsets[40], image.index.stops[40]
    raw = bytearray(image.data[start : stop - 4])
    raw[0] = 7  # the first key of a block shares nothing
    rig.store.put(path, image.data[:start] + seal(bytes(raw)) + image.data[stop:])
    with pytest.raises(CorruptData, match="block 40") as raised:
        rig.run()
    assert (raised.value.object, raised.value.offset) == (path, start)


def test_restart_points_that_are_wrong_behind_a_valid_checksum_are_rewritten() -> None:
    rows = [(row[0], row[1], VALUE, b"", None, None) for row in series(0, 1000)]
    rig = rig_of([rows])
    path = PATHS.sst(rig.manifest.tree.runs[0].views[0].sst_id)
    image = decode_sst(rig.store.get(path).data, path)
    start, stop = image.index.offsets[3], image.index.stops[3]
    raw = bytearray(image.data[start : stop - 4])
    raw[-4:-2] = b"\0\1"
    rig.store.put(path, image.data[:start] + seal(bytes(raw)) + image.data[stop:])
    ssts = rig.run()
    assert rig.data(ssts[0]) == image.data


def test_repeated_compactions_of_scattered_rows_keep_the_size_of_blocks() -> None:
    source = random.Random(5)
    rig = rig_of([series(0, 3000)])
    image = decode_sst(rig.data(rig.run()[0]), "")
    first_blocks = len(image.index)
    kept_in_all = 0
    rows = {row[0]: row for row in series(0, 3000)}
    for turn in range(1, 25):
        numbers = sorted(source.sample(range(3000), 10))
        newer = [
            (b"key-%06d" % number, 10_000 * turn + number, VALUE, b"%06d" % turn * 10, 1, None)
            for number in numbers
        ]
        rows |= {row[0]: row for row in newer}
        view = rig.add_sst(newer)
        rig.set_tree([view], [(0, rig.manifest.tree.runs[0].views)])
        ssts = rig.run()
        kept, blocks = taken_over(rig, ssts)
        kept_in_all += kept
        assert blocks <= first_blocks * (BLOCKS_PER_SHORT_ONE + 1) / BLOCKS_PER_SHORT_ONE + 1
        rig.manifest = replace(rig.manifest, ssts={sst.id: sst for sst in ssts})
        rig.set_tree([], [(0, [SstView.whole(sst.id) for sst in ssts])])
    assert rig.rows(ssts) == [rows[key] for key in sorted(rows)]
    assert kept_in_all > 24 * first_blocks / 3
    assert_sound(rig, ssts)


def test_a_compaction_filter_sees_the_rows_of_blocks_that_overlap_nothing() -> None:
    class Odd:
        def filter(self, row: Row) -> Decision:
            return Decision.DROP if int(row.key[-1:]) % 2 else Decision.KEEP

    rig = rig_of([series(0, 2000)], compaction_filter=lambda _: Odd())
    assert rig.rows(rig.run()) == series(0, 2000)[::2]
