"""The cache: its bound, what it prefers to keep, and who is not allowed to flush it."""

from __future__ import annotations

import pytest

from flagstone.errors import InvalidRequest
from flagstone.read.drivers import get
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.read.view import ReadView
from flagstone.sst.cache import CACHE_BYTES, CACHE_EVICTIONS
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
        assert get(rig.tables, view, b"%08d" % number, MAX_SEQ) == ROWS[number]
    return sum(rig.store.totals()["requests"].values())


def test_the_bound_holds_and_everything_is_still_found() -> None:
    rig, view = warm(60_000)
    for number in range(0, 2000, 3):
        read(rig, view, number)
        assert rig.tables.cache.held_bytes <= 60_000
    counts = rig.metrics.as_dict()
    assert counts[CACHE_BYTES] == rig.tables.cache.held_bytes
    assert counts[CACHE_EVICTIONS] > 100  # type: ignore[operator]


def test_what_is_used_again_survives_a_flood_of_blocks_read_once() -> None:
    rig, view = warm(60_000)
    hot = [5, 100, 200, 300]
    for _ in range(3):
        read(rig, view, *hot)
    for start in range(400, 2000, 40):
        read(rig, view, *range(start, start + 40, 8), *hot)
    assert read(rig, view, *hot) == 0


def test_a_scan_neither_fills_nor_flushes_the_cache() -> None:
    rig, view = warm(60_000)
    for _ in range(2):
        read(rig, view, 5, 500)
    held = rig.tables.cache.held_bytes
    scan = Scan(rig.tables, view, ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS))
    assert sum(1 for _ in scan) == 2000
    assert rig.tables.cache.held_bytes == held
    assert read(rig, view, 5, 500) == 0


def test_a_scan_that_may_fill_the_cache_does() -> None:
    rig, view = warm(1 << 30)
    scan = Scan(rig.tables, view, ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, cache_blocks=True))
    assert sum(1 for _ in scan) == 2000
    assert read(rig, view, *range(0, 2000, 50)) == 0


def test_a_cache_without_room_keeps_nothing() -> None:
    rig, view = warm(0)
    assert read(rig, view, 5) == 2
    assert read(rig, view, 5) == 2
    assert rig.tables.cache.held_bytes == 0


def test_dropping_tables_again_and_again_leaves_no_trace() -> None:
    rig = Rig(min_filter_keys=10_000)
    for _ in range(8):
        sst = rig.add(ROWS)
        rig.ssts = {sst.sst_id: rig.ssts[sst.sst_id]}
        view = rig.view(rig.tree(l0=[sst]))
        read(rig, view, *range(0, 2000, 4))
    in_use = rig.tables.cache.held_bytes
    assert in_use < 600_000
    queued = len(rig.tables.cache._main) + len(rig.tables.cache._small)
    assert queued < 3000
    rig.ssts = {}
    rig.view(rig.tree())
    assert rig.tables.cache.held_bytes == 0


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0"):
        Rig(capacity_bytes=-1)
