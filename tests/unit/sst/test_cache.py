"""The cache: its capacity, what it evicts, and which reads fill it."""

from __future__ import annotations

import pytest

from flagstone.errors import InvalidRequest
from flagstone.read.drivers import get
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.read.view import ReadView
from flagstone.runtime.metric_names import DB_CACHE_BYTES, DB_CACHE_EVICTIONS
from flagstone.types import MAX_SEQ
from kit.ssts import NOW_MS, Rig, put

ROWS = [put(number, value=b"v" * 200) for number in range(2000)]


def warm(capacity_bytes: int) -> tuple[Rig, ReadView]:
    rig = Rig(capacity_bytes=capacity_bytes, min_filter_keys=10_000)
    return rig, rig.view(rig.tree(runs=[[rig.add(ROWS)]]))


def read(rig: Rig, view: ReadView, *numbers: int) -> int:
    """Read these rows; returns how many requests that took."""
    rig.store.reset()
    for number in numbers:
        assert get(rig.sst_store, view, b"%08d" % number, MAX_SEQ) == ROWS[number]
    return sum(rig.store.totals()["requests"].values())


def test_the_cache_stays_within_its_capacity_and_all_rows_are_found() -> None:
    rig, view = warm(60_000)
    for number in range(0, 2000, 3):
        read(rig, view, number)
        assert rig.sst_store.cache.held_bytes <= 60_000
    counts = rig.metrics.as_dict()
    assert counts[DB_CACHE_BYTES] == rig.sst_store.cache.held_bytes
    assert counts[DB_CACHE_EVICTIONS] > 100  # type: ignore[operator]


def test_blocks_that_are_read_once_do_not_evict_blocks_in_use() -> None:
    rig, view = warm(60_000)
    hot = [5, 100, 200, 300]
    for _ in range(3):
        read(rig, view, *hot)
    for start in range(400, 2000, 40):
        read(rig, view, *range(start, start + 40, 8), *hot)
    assert read(rig, view, *hot) == 0


def test_a_scan_neither_fills_nor_evicts_the_cache() -> None:
    rig, view = warm(60_000)
    for _ in range(2):
        read(rig, view, 5, 500)
    held = rig.sst_store.cache.held_bytes
    scan = Scan(rig.sst_store, view, ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS))
    assert sum(1 for _ in scan) == 2000
    assert rig.sst_store.cache.held_bytes == held
    assert read(rig, view, 5, 500) == 0


def test_a_scan_with_cache_blocks_fills_the_cache() -> None:
    rig, view = warm(1 << 30)
    scan = Scan(rig.sst_store, view, ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, cache_blocks=True))
    assert sum(1 for _ in scan) == 2000
    assert read(rig, view, *range(0, 2000, 50)) == 0


def test_a_cache_with_capacity_0_keeps_nothing() -> None:
    rig, view = warm(0)
    assert read(rig, view, 5) == 2
    assert read(rig, view, 5) == 2
    assert rig.sst_store.cache.held_bytes == 0


def test_dropped_ssts_leave_no_bytes_and_few_queue_entries() -> None:
    rig = Rig(min_filter_keys=10_000)
    for _ in range(8):
        sst = rig.add(ROWS)
        rig.ssts = {sst.sst_id: rig.ssts[sst.sst_id]}
        view = rig.view(rig.tree(l0=[sst]))
        read(rig, view, *range(0, 2000, 4))
    in_use = rig.sst_store.cache.held_bytes
    assert in_use < 600_000
    queued = len(rig.sst_store.cache._main) + len(rig.sst_store.cache._small)
    assert queued < 3000
    rig.ssts = {}
    rig.view(rig.tree())
    assert rig.sst_store.cache.held_bytes == 0


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0"):
        Rig(capacity_bytes=-1)
