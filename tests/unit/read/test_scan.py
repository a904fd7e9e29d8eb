"""Scans: which requests they make, what they merge, how they end."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from flagstone.errors import Closed, CorruptData, InvalidRequest
from flagstone.format.codec import seal
from flagstone.format.filter import BloomPolicy, FixedPrefix
from flagstone.lsm.tree import SstView
from flagstone.metadata.manifest import Segment, SsTable
from flagstone.read.arrow import scan_arrow
from flagstone.read.scan import AsyncScan, Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.read.view import ReadView
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.sst.reader import META
from flagstone.sst.requests import Need
from flagstone.sst.store import SstGone
from flagstone.store.paths import DbPaths
from flagstone.types import MAX_SEQ, MERGE, KeyRange, Ulid
from kit.ssts import NOW_MS, PlainMemtable, Rig, put

ROWS = [put(number, value=b"v" * 200) for number in range(2000)]
ALL = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS)


def pairs(rows: list) -> list:  # type: ignore[type-arg]
    return [(row[0], row[3]) for row in rows]


def one_run(rig: Rig, ssts: int = 1) -> ReadView:
    step = len(ROWS) // ssts
    return rig.view(rig.tree(runs=[[rig.add(ROWS[at : at + step]) for at in range(0, len(ROWS), step)]]))


@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_cold_scan_makes_few_requests_of_growing_size(threads: int, reverse: bool) -> None:
    rig = Rig(threads=threads)
    view = one_run(rig)
    rig.store.reset()
    request = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, reverse=reverse)
    expected = pairs(ROWS[::-1] if reverse else ROWS)
    assert list(Scan(rig.sst_store, view, request)) == expected
    # The index, then 16, 32, 64, 128 and 256 KiB of about 450.
    assert sum(rig.store.totals()["requests"].values()) <= 7
    assert rig.store.totals()["bytes_read"] < 1.1 * 480_000


def test_a_scan_with_a_small_limit_fetches_few_bytes() -> None:
    rig = Rig()
    view = one_run(rig)
    rig.store.reset()
    request = ScanRequest(
        max_seq=MAX_SEQ, now_ms=NOW_MS, keys=KeyRange(b"%08d" % 1000, b"%08d" % 1005), limit=3
    )
    assert list(Scan(rig.sst_store, view, request)) == pairs(ROWS[1000:1003])
    assert sum(rig.store.totals()["requests"].values()) == 2
    info = rig.ssts[Ulid(1)].info
    assert 0 < rig.store.totals()["bytes_read"] - info.index_len < 4096


def test_a_cold_scan_fetches_from_all_sources_in_the_same_round() -> None:
    rig = Rig(threads=8)
    l0 = [rig.add([put(number, 10 + shift) for number in range(shift, 400, 4)]) for shift in range(4)]
    view = rig.view(rig.tree(l0=l0[::-1]))
    scan = Scan(rig.sst_store, view, ALL)
    assert len(list(scan)) == 400


def test_ssts_of_a_run_are_scanned_in_order_in_both_directions() -> None:
    rig = Rig(threads=2)
    view = one_run(rig, ssts=8)
    assert list(Scan(rig.sst_store, view, ALL)) == pairs(ROWS)
    backward = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, reverse=True)
    assert list(Scan(rig.sst_store, view, backward)) == pairs(ROWS[::-1])


def test_few_rows_of_a_memtable_are_merged_between_whole_blocks() -> None:
    rig = Rig()
    changed = {500: put(500, 7, b"new"), 1500: (b"%08d" % 1500, 8, 1, b"", None, None)}
    view = one_run(rig).with_memtables([PlainMemtable(changed.values())])
    expected = [changed.get(number, row) for number, row in enumerate(ROWS) if number != 1500]
    assert list(Scan(rig.sst_store, view, ALL)) == pairs(expected)


def test_segments_and_visible_ranges_are_scanned_in_one_key_order() -> None:
    rig = Rig()
    left = [put(b"a/%03d" % number, 1) for number in range(100)]
    right = [put(b"c/%03d" % number, 2) for number in range(100)]
    segments = [
        Segment(b"a/", rig.tree(l0=[rig.add(left[50:])], runs=[[rig.add(left[:50])]])),
        Segment(b"c/", rig.tree(l0=[rig.add(right, visible=KeyRange(b"c/010", b"c/020"))])),
    ]
    between = put(b"b/x", 3)
    view = rig.builder.build(rig.manifest(segments=segments), [PlainMemtable([between])])
    expected = pairs([*left, between, *right[10:20]])
    assert list(Scan(rig.sst_store, view, ALL)) == expected
    backward = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, reverse=True)
    assert list(Scan(rig.sst_store, view, backward)) == expected[::-1]
    part = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, keys=KeyRange(b"a/099", b"c/011"))
    assert list(Scan(rig.sst_store, view, part)) == expected[99:102]


def test_ssts_whose_filter_lacks_the_prefix_are_skipped() -> None:
    extractor = FixedPrefix("p2", 2)
    rig = Rig()
    views = []
    for prefix in (b"aa", b"bb"):
        encoded = encode_sst(
            [put(prefix + b"%04d" % number) for number in range(500)] + [put(b"zz")],
            SstOptions(block_bytes=1024, min_filter_keys=1, filters=(BloomPolicy(extractor=extractor),)),
        )
        rig.made += 1
        rig.store.put(DbPaths("db").sst(Ulid(rig.made)), encoded.data)
        rig.ssts[Ulid(rig.made)] = SsTable(Ulid(rig.made), encoded.info)
        views.append(SstView.whole(Ulid(rig.made)))
    view = rig.view(rig.tree(l0=views))
    rig.store.reset()
    request = ScanRequest(
        max_seq=MAX_SEQ, now_ms=NOW_MS, keys=KeyRange.of_prefix(b"bb"), prefix_probe=(extractor, b"bb")
    )
    assert len(list(Scan(rig.sst_store, view, request))) == 500
    asked_without_filter = 4
    assert sum(rig.store.totals()["requests"].values()) <= asked_without_filter


def test_iterating_a_scan_as_pairs_and_rows_or_after_close_is_refused() -> None:
    rig = Rig()
    view = one_run(rig)
    with Scan(rig.sst_store, view, ALL) as scan:
        assert next(scan) == pairs(ROWS)[0]
        assert next(iter(scan)) == pairs(ROWS)[1]
        with pytest.raises(InvalidRequest, match="not both"):
            scan.rows()
        rest = iter(scan)
    assert list(rest) == []
    with pytest.raises(Closed):
        next(scan)


def test_a_dropped_scan_releases_its_read_view_at_once() -> None:
    rig = Rig()
    gc.disable()
    try:
        memtable = PlainMemtable([put(1)])
        gone = weakref.ref(memtable)
        scan = Scan(rig.sst_store, one_run(rig).with_memtables([memtable]), ALL)
        next(scan)
        del memtable, scan
        assert gone() is None
    finally:
        gc.enable()


def test_an_async_scan_seeks_and_stops_at_its_end() -> None:
    rig = Rig(threads=2)
    view = one_run(rig, ssts=4)

    async def read() -> None:
        scan = AsyncScan(rig.sst_store, view, ALL)
        assert await anext(scan) == pairs(ROWS)[0]
        scan.seek(b"%08d" % 1990)
        assert [pair async for pair in scan] == pairs(ROWS[1990:])
        await scan.close()

    asyncio.run(read())


def test_a_scan_of_a_deleted_object_raises_sst_gone() -> None:
    rig = Rig(threads=2)
    view = one_run(rig, ssts=4)
    scan = Scan(rig.sst_store, view, ALL)
    first = next(scan)
    rig.store.delete(DbPaths("db").sst(Ulid(3)))
    with pytest.raises(SstGone):
        list(scan)
    assert first == pairs(ROWS)[0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_a_scan_of_a_damaged_block_raises_its_object_and_block(reverse: bool, checked: bool) -> None:
    """Unchecked damage has a right checksum: the writer was wrong, not the disk."""
    rig = Rig()
    sst = rig.add(ROWS)
    path = DbPaths("db").sst(sst.sst_id)
    opened = rig.sst_store.open(sst.sst_id, rig.ssts[sst.sst_id].info)
    index = rig.sst_store.fetch([Need(opened, None, [])])[opened, META][0]
    start, stop = index.offsets[7], index.stops[7]
    data = rig.store.get(path).data
    block = bytearray(data[start : stop - 4])
    block[0] = 9  # the first key claims to share bytes with a key before it
    stored = bytes(block) + data[stop - 4 : stop] if checked else seal(bytes(block))
    rig.store.put(path, data[:start] + stored + data[stop:])
    view = rig.view(rig.tree(l0=[sst]))
    request = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, reverse=reverse)
    with pytest.raises(CorruptData) as caught:
        list(Scan(rig.sst_store, view, request))
    assert caught.value.object == path
    assert caught.value.offset == start
    if not reverse:
        with pytest.raises(CorruptData, match=path):
            scan_arrow(rig.sst_store, view, request).read_all()


def test_arrow_scans_refuse_unknown_columns_empty_batches_and_reverse() -> None:
    rig = Rig()
    view = one_run(rig)
    for options in ({"columns": ("kind",)}, {"columns": ()}, {"batch_rows": 0}):
        with pytest.raises(InvalidRequest):
            scan_arrow(rig.sst_store, view, ALL, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="forward"):
        scan_arrow(rig.sst_store, view, ScanRequest(max_seq=1, now_ms=1, reverse=True))


def test_merge_operands_without_a_merge_operator_are_refused() -> None:
    rig = Rig()
    view = rig.view(rig.tree(l0=[rig.add([(b"k", 1, MERGE, b"x", None, None)])]))
    with pytest.raises(InvalidRequest, match="merge operator"):
        list(Scan(rig.sst_store, view, ALL))


@pytest.mark.parametrize("capacity_bytes", [0, 1 << 30])
def test_a_prefix_filter_that_the_cache_evicted_is_still_used(capacity_bytes: int) -> None:
    extractor = FixedPrefix("p2", 2)
    rig = Rig(capacity_bytes=capacity_bytes)
    encoded = encode_sst(
        [put(b"aa%04d" % number) for number in range(500)] + [put(b"zz")],
        SstOptions(block_bytes=1024, min_filter_keys=1, filters=(BloomPolicy(extractor=extractor),)),
    )
    rig.store.put(DbPaths("db").sst(Ulid(1)), encoded.data)
    rig.ssts[Ulid(1)] = SsTable(Ulid(1), encoded.info)
    view = rig.view(rig.tree(l0=[SstView.whole(Ulid(1))]))
    rig.store.reset()
    request = ScanRequest(
        max_seq=MAX_SEQ, now_ms=NOW_MS, keys=KeyRange.of_prefix(b"bb"), prefix_probe=(extractor, b"bb")
    )
    assert list(Scan(rig.sst_store, view, request)) == []
    assert rig.store.totals()["requests"] == {"get_range": 1}, "index and filter, and no block"


@pytest.mark.parametrize("start", [0, 700])
def test_a_scan_that_uses_all_of_a_request_in_one_step_makes_larger_ones(start: int) -> None:
    rig = Rig(block_bytes=4096)
    view = rig.view(
        rig.tree(runs=[[rig.add([put(b"row%08d" % at, value=b"v" * 192) for at in range(5000)])]])
    )
    rig.store.reset()
    keys = KeyRange(b"row%08d" % start, b"row%08d" % (start + 500))
    request = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, keys=keys)
    assert scan_arrow(rig.sst_store, view, request).read_all().num_rows == 500
    # The index, then 16, 32, 48 KiB and the rest of 108; the first steps use four blocks, then eight, a whole request.
    assert rig.store.totals()["requests"]["get_range"] <= 5
