"""Scans of key ranges fetch the index of an SST without its filters, which point reads add later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from threading import Event

import pytest

from flagstone.errors import CorruptData, Unavailable
from flagstone.format.filter import FixedPrefix
from flagstone.format.sst import footer_range
from flagstone.lsm.tree import SstView
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.read.arrow import scan_arrow
from flagstone.read.drivers import get, multi_get
from flagstone.read.explanation import Trail
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.read.view import ReadView, ViewBuilder
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.sst.cache import SstCache
from flagstone.sst.reader import FILTERS, INDEX, META, Sst
from flagstone.sst.requests import Need, need_index, plan_requests
from flagstone.sst.store import SstStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import MAX_SEQ, KeyRange, Ulid
from kit.ssts import NOW_MS, Rig, put

ROWS = [put(number, value=b"v" * 200) for number in range(2000)]
RANGE = ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, keys=KeyRange(b"%08d" % 1000, b"%08d" % 1019))


class WatchedStore(MemoryStore):
    """Lists the byte ranges that are read; `before` is called with each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.before: Callable[[int, int], None] = lambda start, stop: None

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        self.before(start, stop)
        return super().get_range(path, start, stop)

    def take_asked(self) -> list[tuple[int, int]]:
        asked, self.asked = self.asked, []
        return asked


class Opened:
    """A database of one run on a watched store, with nothing in memory."""

    def __init__(
        self,
        *,
        ssts: int = 1,
        filters: bool = True,
        checked: bool = True,
        capacity_bytes: int = 1 << 30,
        small_sst_bytes: int = 0,
    ) -> None:
        rig = Rig(min_filter_keys=1 if filters else 10_000)
        step = len(ROWS) // ssts
        self.views: list[SstView] = [rig.add(ROWS[at : at + step]) for at in range(0, len(ROWS), step)]
        self.manifest: Manifest = replace(rig.manifest(rig.tree(runs=[self.views])), checked=checked)
        self.store = WatchedStore()
        for view in self.views:
            path = DbPaths("db").sst(view.sst_id)
            self.store.put(path, rig.store.get(path).data)
        self.metrics = Metrics()
        self.ssts = SstStore(
            self.store,
            DbPaths("db"),
            cache=SstCache(capacity_bytes=capacity_bytes, metrics=self.metrics),
            pool=IoPool(max_workers=0),
            metrics=self.metrics,
            small_sst_bytes=small_sst_bytes,
        )
        self.view: ReadView = ViewBuilder(self.ssts).build(self.manifest, ())

    @property
    def sst(self) -> Sst:
        found: Sst = self.view.layers[0].parts()[2][0]
        return found

    def scan(self, request: ScanRequest = RANGE) -> list[bytes]:
        return [key for key, _ in Scan(self.ssts, self.view, request)]

    def get(self, number: int) -> bool:
        return get(self.ssts, self.view, b"%08d" % number, MAX_SEQ) == ROWS[number]


def block_of(sst: Sst, number: int) -> tuple[int, int]:
    """Where the block of a row is."""
    index = sst.index
    assert index is not None
    at = max(sum(first < b"%08d" % number for first in index.first_keys) - 1, 0)
    return index.offsets[at], index.stops[at]


def index_range(sst: Sst) -> tuple[int, int]:
    return sst.info.index_offset, sst.info.index_offset + sst.info.index_len


def filter_range(sst: Sst) -> tuple[int, int]:
    return sst.info.filter_offset, sst.info.index_offset


@pytest.mark.parametrize("arrow", [False, True])
@pytest.mark.parametrize("filters", [False, True])
def test_a_scan_of_a_range_reads_the_index_and_the_blocks_of_the_range(filters: bool, arrow: bool) -> None:
    opened = Opened(filters=filters)
    if arrow:
        assert scan_arrow(opened.ssts, opened.view, RANGE).read_all().num_rows == 19
    else:
        assert opened.scan() == [b"%08d" % number for number in range(1000, 1019)]
    first, *blocks = opened.store.asked
    assert first == index_range(opened.sst)
    assert blocks[0][0] == block_of(opened.sst, 1000)[0]
    assert blocks[-1][1] == block_of(opened.sst, 1018)[1]
    assert all(one[1] == two[0] for one, two in pairwise(blocks))


def test_a_range_in_two_ssts_reads_both_indexes_and_no_filter() -> None:
    opened = Opened(ssts=2)
    assert len(opened.scan(replace(RANGE, keys=KeyRange(b"%08d" % 990, b"%08d" % 1010)))) == 20
    one, two = opened.view.layers[0].parts()[2]
    asked = opened.store.asked
    assert {index_range(one), index_range(two)} < set(asked)
    assert not any(
        stop > one.info.filter_offset for _, stop in set(asked) - {index_range(one), index_range(two)}
    )


def test_a_get_after_a_scan_reads_the_filters_alone() -> None:
    opened = Opened()
    opened.scan()
    opened.store.asked.clear()
    assert opened.get(5)
    assert opened.store.asked == [filter_range(opened.sst), block_of(opened.sst, 5)]
    assert opened.get(700)
    assert opened.store.asked[2:] == [block_of(opened.sst, 700)]


def test_a_get_of_an_absent_key_after_a_scan_asks_the_filter_and_no_block() -> None:
    opened = Opened()
    opened.scan()
    opened.store.asked.clear()
    assert get(opened.ssts, opened.view, b"00000005x", MAX_SEQ) is None
    assert opened.store.asked == [filter_range(opened.sst)]


def test_a_cold_get_reads_index_and_filters_in_one_request() -> None:
    opened = Opened()
    assert opened.get(5)
    assert opened.store.asked == [
        (opened.sst.info.filter_offset, footer_range(opened.sst.info, 2)[1]),
        block_of(opened.sst, 5),
    ]
    opened.store.asked.clear()
    opened.scan()
    assert index_range(opened.sst) not in opened.store.asked


def test_a_multi_get_after_scans_reads_what_each_sst_lacks_in_one_round() -> None:
    opened = Opened(ssts=4)
    opened.scan()
    opened.store.asked.clear()
    keys = [b"%08d" % number for number in (100, 700, 1200, 1700)]
    assert multi_get(opened.ssts, opened.view, keys, MAX_SEQ) == [ROWS[int(key)] for key in keys]
    ssts = opened.view.layers[0].parts()[2]
    expected = [(sst.info.filter_offset, footer_range(sst.info, 2)[1]) for sst in ssts]
    expected[2] = filter_range(ssts[2])
    assert opened.store.asked[:4] == expected
    assert len(opened.store.asked) == 8


def test_explain_counts_the_filters_alone_when_the_index_is_in_memory() -> None:
    opened = Opened()
    opened.scan()
    opened.store.asked.clear()
    trail = Trail(opened.ssts, opened.view, b"%08d" % 5, MAX_SEQ)
    trail.get()
    (step,) = trail.steps()
    assert step.fetched_bytes == sum(stop - start for start, stop in opened.store.asked)


def test_a_small_sst_comes_whole_with_its_filters() -> None:
    opened = Opened(small_sst_bytes=1 << 30)
    opened.scan()
    assert opened.store.take_asked() == [(0, footer_range(opened.sst.info, 2)[1])]
    assert opened.get(5)
    assert opened.sst.filters is not None
    # The scan does not fill the cache with blocks: the get fetches its block, and nothing else.
    assert opened.store.asked == [block_of(opened.sst, 5)]


def test_a_scan_that_tests_a_prefix_reads_index_and_filters_in_one_request() -> None:
    opened = Opened()
    probe = FixedPrefix("eight", 8), b"%08d" % 1000
    opened.scan(replace(RANGE, prefix_probe=probe))
    assert opened.store.asked[0] == (opened.sst.info.filter_offset, footer_range(opened.sst.info, 2)[1])
    again = Opened()
    again.scan()
    again.store.asked.clear()
    again.scan(replace(RANGE, prefix_probe=probe))
    assert again.store.asked[0] == filter_range(again.sst)


# -- the footer -----------------------------------------------------------------------------------------------


def test_without_a_checksum_of_the_manifest_the_index_comes_with_the_footer() -> None:
    opened = Opened(checked=False)
    opened.scan()
    start, stop = opened.store.asked[0]
    assert (start, stop) == (opened.sst.info.index_offset, footer_range(opened.sst.info, 2)[1])


def with_other_record(opened: Opened, **changed: object) -> Opened:
    """The same objects under a manifest whose record of the SST differs."""
    (sst,) = opened.manifest.ssts.values()
    other = SsTable(sst.id, replace(sst.info, **changed), sst.format_version)  # type: ignore[arg-type]
    opened.ssts.drop([sst.id])
    opened.view = ViewBuilder(opened.ssts).build(replace(opened.manifest, ssts={sst.id: other}), ())
    return opened


def test_a_scan_finds_a_record_that_is_not_that_of_the_footer() -> None:
    opened = with_other_record(Opened(checked=False), last_entry=b"%08d" % 1010)
    with pytest.raises(CorruptData, match="last_entry differ") as error:
        opened.scan()
    assert (error.value.object, error.value.offset) == (opened.sst.path, footer_range(opened.sst.info, 2)[0])


@pytest.mark.parametrize("changed", [{"last_entry": b"%08d" % 1010}, {"first_entry": b"%08d" % 500}])
def test_a_scan_finds_an_index_whose_keys_are_not_those_of_the_record(changed: dict[str, bytes]) -> None:
    opened = with_other_record(Opened(), **changed)
    with pytest.raises(CorruptData, match="between the first and the last key") as error:
        opened.scan()
    assert (error.value.object, error.value.offset) == (opened.sst.path, opened.sst.info.index_offset)


# -- damage, failures, interrupts -----------------------------------------------------------------------------


@pytest.mark.parametrize("part", [INDEX, FILTERS])
def test_damage_is_named_by_object_and_offset_and_nothing_of_it_stays(part: int) -> None:
    opened = Opened()
    if part == FILTERS:
        opened.scan()
    start, _ = index_range(opened.sst) if part == INDEX else filter_range(opened.sst)
    sound = opened.store.get(opened.sst.path).data
    damaged = bytearray(sound)
    damaged[start + 20] ^= 1
    opened.store.delete(opened.sst.path)
    opened.store.put(opened.sst.path, bytes(damaged))
    held = opened.ssts.cache.held_bytes
    with pytest.raises(CorruptData) as error:
        opened.scan() if part == INDEX else opened.get(5)
    assert (error.value.object, error.value.offset) == (opened.sst.path, start)
    assert opened.ssts.cache.held_bytes == held
    assert not opened.ssts._flights
    opened.store.delete(opened.sst.path)
    opened.store.put(opened.sst.path, sound)
    assert opened.scan()
    assert opened.get(5)


@pytest.mark.parametrize("kind", [Unavailable, KeyboardInterrupt])
@pytest.mark.parametrize("part", [INDEX, FILTERS, META])
def test_a_fetch_that_fails_or_is_interrupted_leaves_nothing_half_made(
    part: int, kind: type[BaseException]
) -> None:
    opened = Opened()
    if part == FILTERS:
        opened.scan()
    held = opened.ssts.cache.held_bytes

    def fail(start: int, stop: int) -> None:
        raise kind("not now")

    opened.store.before = fail
    with pytest.raises(kind):
        opened.scan() if part == INDEX else opened.get(5)
    assert opened.ssts.cache.held_bytes == held
    assert not opened.ssts._flights
    opened.store.before = lambda start, stop: None
    opened.store.asked.clear()
    assert opened.get(5)
    assert len(opened.store.asked) == 2


class Gate:
    """Holds requests that begin at some offsets until `go` is set; the first `failures` of them then fail."""

    def __init__(self, store: WatchedStore, *starts: int, failures: int = 0) -> None:
        self.starts, self.failures = starts, failures
        self.come, self.go = Event(), Event()
        store.before = self

    def __call__(self, start: int, stop: int) -> None:
        if start in self.starts:
            self.come.set()
            assert self.go.wait(10)
            if self.failures:
                self.failures -= 1
                raise Unavailable("not now")


def test_a_get_beside_a_scan_that_fetches_the_index_fetches_the_filters_at_the_same_time() -> None:
    opened = Opened()
    gate = Gate(opened.store, opened.sst.info.index_offset)
    with ThreadPoolExecutor(2) as threads:
        scan = threads.submit(opened.scan)
        assert gate.come.wait(10)
        point = threads.submit(opened.get, 5)
        while filter_range(opened.sst) not in opened.store.asked:
            pass
        gate.go.set()
        assert len(scan.result(10)) == 19
        assert point.result(10)
    assert opened.store.asked.count(index_range(opened.sst)) == 1
    assert opened.ssts.cache.held_bytes >= opened.sst.info.index_len + opened.sst.info.filter_len
    assert opened.sst.meta is not None


@pytest.mark.parametrize("failures", [0, 1])
def test_a_scan_beside_a_get_that_fetches_the_index_makes_no_request_for_it(failures: int) -> None:
    opened = Opened()
    gate = Gate(opened.store, opened.sst.info.filter_offset, failures=failures)
    with ThreadPoolExecutor(2) as threads:
        point = threads.submit(opened.get, 5)
        assert gate.come.wait(10)
        scan = threads.submit(opened.scan)
        gate.go.set()
        assert len(scan.result(10)) == 19
        if failures:
            with pytest.raises(Unavailable):
                point.result(10)
        else:
            assert point.result(10)
    assert opened.store.asked.count(index_range(opened.sst)) == failures
    assert not opened.ssts._flights


@pytest.mark.parametrize("capacity_bytes", [0, 1 << 30])
def test_many_gets_and_scans_at_once_share_the_requests_for_index_and_filters(capacity_bytes: int) -> None:
    opened = Opened(capacity_bytes=capacity_bytes)
    gate = Gate(opened.store, opened.sst.info.index_offset, opened.sst.info.filter_offset)
    with ThreadPoolExecutor(8) as threads:
        scans = [threads.submit(opened.scan) for _ in range(4)]
        assert gate.come.wait(10)
        gets = [threads.submit(opened.get, 5) for _ in range(4)]
        gate.go.set()
        assert all(len(scan.result(10)) == 19 for scan in scans)
        assert all(get.result(10) for get in gets)
    if capacity_bytes:
        parts = [start for start, _ in opened.store.asked if start >= opened.sst.info.filter_offset]
        assert len(parts) == len(set(parts)) <= 2


# -- the cache ------------------------------------------------------------------------------------------------


def test_the_cache_counts_the_index_first_and_the_filters_when_they_come() -> None:
    opened = Opened()
    info = opened.sst.info
    opened.scan()
    assert opened.ssts.cache.held_bytes == info.index_len
    opened.ssts.fetch([Need(opened.sst, None, [])])
    assert opened.ssts.cache.held_bytes == info.index_len + info.filter_len
    opened.scan()
    assert opened.ssts.cache.held_bytes == info.index_len + info.filter_len
    opened.ssts.drop([opened.sst.id])
    assert opened.ssts.cache.held_bytes == 0
    assert opened.sst.index is None
    assert opened.sst.filters is None


def test_filters_that_the_cache_has_no_room_for_leave_the_index_in_it() -> None:
    opened = Opened()
    info = opened.sst.info
    opened.ssts.cache.resize(info.index_len + info.filter_len - 1)
    opened.scan()
    for _ in range(2):
        opened.store.asked.clear()
        assert opened.get(5)
        assert opened.store.asked[0] == filter_range(opened.sst)
    assert opened.ssts.cache.held_bytes <= info.index_len + info.filter_len - 1
    opened.store.asked.clear()
    opened.scan()
    assert index_range(opened.sst) not in opened.store.asked


def test_indexes_that_scans_use_stay_longer_in_a_full_cache() -> None:
    opened = Opened(ssts=4)
    ssts = opened.view.layers[0].parts()[2]
    opened.ssts.cache.resize(3 * max(sst.info.index_len for sst in ssts))
    for at in (0, 1, 2):
        opened.ssts.fetch([need_index(ssts[at])])
    for at in (0, 2):
        assert ssts[at].use_index() is not None
    opened.ssts.fetch([need_index(ssts[3])])
    assert [sst.index is not None for sst in ssts] == [True, False, True, True]


def test_the_metrics_count_each_part_that_is_missed() -> None:
    opened = Opened()
    opened.scan()
    opened.get(5)
    counts = opened.metrics.as_dict()
    missed = [
        counts[f"slatedb.db_cache.access_count{{entry_kind={kind},result=miss}}"]
        for kind in ("index", "filter")
    ]
    assert missed == [1, 1]


def test_a_need_for_the_index_is_planned_once_and_with_the_filters_if_they_are_needed() -> None:
    opened = Opened(ssts=2)
    one, two = opened.view.layers[0].parts()[2]
    needs = [need_index(one), need_index(two), Need(two, None, []), need_index(one)]
    assert [(need.sst, need.numbers) for need in plan_requests(needs)] == [(one, [INDEX]), (two, [])]
    assert one.id == Ulid(1)
