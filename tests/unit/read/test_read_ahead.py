"""Read-ahead: how far a scan fetches before it needs the blocks, in how many requests, and within which bounds."""

from __future__ import annotations

import gc

import pytest

from flagstone.read import read_ahead
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import Chunk, Lacking, ScanCursor, ScanRequest
from flagstone.read.view import ReadView
from flagstone.runtime.grants import MemoryPart
from flagstone.runtime.pool import Future, IoPool
from flagstone.sst.requests import Need
from flagstone.sst.store import DEFAULT_READ_AHEAD_BUDGET, Pinned
from flagstone.types import MAX_SEQ, EntryTuple
from kit.ssts import NOW_MS, Rig, put

KIB = 1024
ROWS = [put(number, value=b"v" * 200) for number in range(4000)]


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the real sizes, so that small SSTs need every kind of request."""
    monkeypatch.setattr(read_ahead, "FIRST_READ_BYTES", 4 * KIB)
    monkeypatch.setattr(read_ahead, "SHORT_READ_BYTES", 8 * KIB)
    monkeypatch.setattr(read_ahead, "MIN_PARALLEL_BYTES", 16 * KIB)
    monkeypatch.setattr(read_ahead, "MAX_REQUEST_BYTES", 32 * KIB)


class Drive:
    """A scan driven by hand: fetches of blocks end only when the cursor waits for them, those of indexes at once."""

    def __init__(self, rig: Rig, view: ReadView, budget: MemoryPart | None = None, **options: object) -> None:
        self.ssts = rig.sst_store
        self.budget = budget or MemoryPart(DEFAULT_READ_AHEAD_BUDGET)
        self.cursor = ScanCursor(view, ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, **options))  # type: ignore[arg-type]
        self.rows: Chunk = []
        self.steps: list[int] = []
        """Bytes that were requested, at the end of each step."""
        self.waits = 0
        """Requests that the scan had to make itself."""
        self.most_under_way = 0
        self._inline = IoPool(max_workers=0)
        self._under_way: dict[Future[Pinned], read_ahead.Stretch] = {}
        self._requested = 0

    def step(self) -> bool:
        """The next chunk; False at the end."""
        while isinstance(chunk := self.cursor.probe_chunk(), Lacking):
            for need in chunk.needs:
                self._requested += _size(need)
                self.waits += 1
            if chunk.needs:
                self.cursor.accept(self.ssts.fetch(chunk.needs))
            for future in chunk.pending:
                stretch = self._under_way.pop(future, None)
                if stretch is not None:
                    future.set_result(self.ssts.fetch_request(stretch.need))
                self.cursor.settle(future)
        for stretch in self.cursor.plan_ahead(self.budget):
            self._requested += _size(stretch.need)
            stretch.future = Future()
            if stretch.need.index is not None:
                self._under_way[stretch.future] = stretch
            else:
                stretch.future.set_result(self.ssts.fetch_request(stretch.need))
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        self.steps.append(self._requested)
        self.rows += chunk or []
        return chunk is not None

    def finish(self) -> Drive:
        while self.step():
            pass
        return self


def _size(need: read_ahead.Need) -> int:
    """The size of its blocks; an index does not count."""
    if need.index is None:
        return 0
    return sum(need.index.stops[number] - need.index.offsets[number] for number in need.numbers)


def pairs(rows: list[EntryTuple]) -> list[tuple[bytes, bytes]]:
    return [(row[0], row[3]) for row in rows]


def one_run(rig: Rig, ssts: int = 1) -> ReadView:
    step = len(ROWS) // ssts
    return rig.view(rig.tree(runs=[[rig.add(ROWS[at : at + step]) for at in range(0, len(ROWS), step)]]))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ssts", [1, 8, 50])
def test_a_long_scan_reads_ahead_with_several_requests_across_the_ssts_of_a_run(
    ssts: int, reverse: bool
) -> None:
    rig = Rig(capacity_bytes=0)
    drive = Drive(rig, one_run(rig, ssts), reverse=reverse).finish()
    assert drive.rows == pairs(ROWS[::-1] if reverse else ROWS)
    assert drive.most_under_way == read_ahead.MAX_REQUESTS
    # The first index and the first block; the rest was on its way when the scan came to it.
    assert drive.waits <= 4


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_that_is_stopped_early_has_not_read_far_ahead(reverse: bool) -> None:
    rig = Rig()
    drive = Drive(rig, one_run(rig), reverse=reverse)
    drive.step()
    assert drive.steps[-1] <= 3 * 5 * KIB
    while drive.step():
        read = len(drive.rows) * len(ROWS[0][3])
        # Twice what was reached, later four times; the request that the scan has just begun counts as reached.
        most = 10 if read < read_ahead.SHORT_READ_BYTES // 5 else 26
        assert drive.steps[-1] <= most * read + 12 * KIB


def test_a_scan_of_blocks_in_memory_does_not_read_ahead() -> None:
    rig = Rig()
    view = one_run(rig)
    list(Scan(rig.sst_store, view, ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, cache_blocks=True)))
    rig.store.reset()
    drive = Drive(rig, view).finish()
    assert drive.rows == pairs(ROWS)
    assert drive.steps[-1] == 0


@pytest.mark.parametrize("reverse", [False, True])
def test_the_bytes_ahead_of_all_sources_stay_within_the_bound(reverse: bool) -> None:
    rig = Rig()
    l0 = [rig.add(ROWS[shift::4]) for shift in range(4)]
    drive = Drive(rig, rig.view(rig.tree(l0=l0[::-1])), reverse=reverse, read_ahead_bytes=64 * KIB)
    largest = 0
    while drive.step():
        assert drive.cursor.grant is not None
        largest = max(largest, drive.cursor.grant.size)
    assert drive.rows == pairs(ROWS[::-1] if reverse else ROWS)
    # What the scan needs at once may come on top: one request of each source.
    assert 32 * KIB < largest <= 64 * KIB + 4 * 16 * KIB


def test_a_spent_budget_stops_the_read_ahead_but_not_the_scan() -> None:
    rig = Rig()
    view = one_run(rig)
    budget = MemoryPart(0)
    drive = Drive(rig, view, budget).finish()
    assert drive.rows == pairs(ROWS)
    assert drive.most_under_way == 0
    assert drive.waits > 20


def test_a_dropped_scan_gives_its_bytes_back_to_the_budget() -> None:
    rig = Rig()
    budget = MemoryPart(100 * KIB)
    gc.disable()
    try:
        drive = Drive(rig, one_run(rig), budget)
        for _ in range(5):
            drive.step()
        assert 0 < budget.held_bytes <= 100 * KIB + 16 * KIB
        del drive
        assert budget.held_bytes == 0
    finally:
        gc.enable()


def test_a_finished_scan_holds_no_index_of_the_ssts_it_has_left() -> None:
    rig = Rig(capacity_bytes=0)
    drive = Drive(rig, one_run(rig, ssts=50)).finish()
    assert drive.cursor._pinned == {}


def test_a_block_that_the_cache_evicts_before_the_scan_comes_to_it_is_fetched() -> None:
    rig = Rig()
    view = one_run(rig)
    list(Scan(rig.sst_store, view, ScanRequest(max_seq=MAX_SEQ, now_ms=NOW_MS, cache_blocks=True)))
    (sst,) = {sst for layer in view.layers for sst in layer.parts()[2]}
    for number in (0, 1, 2, 3, 40, 200):
        sst.release_block(number)
    drive = Drive(rig, view)
    drive.step()
    drive.step()
    for number in range(10, 600):
        sst.release_block(number)
    assert drive.finish().rows == pairs(ROWS)


@pytest.mark.parametrize("reverse", [False, True])
def test_an_index_that_the_cache_evicts_while_the_scan_uses_it_stays_with_the_scan(reverse: bool) -> None:
    rig = Rig()
    view = one_run(rig, ssts=4)
    every = [sst for layer in view.layers for sst in layer.parts()[2]]
    rig.sst_store.fetch([Need(sst, None, []) for sst in every])
    drive = Drive(rig, view, MemoryPart(0), reverse=reverse)
    while drive.step():
        for sst in every:
            sst.release_parts()
    assert drive.rows == pairs(ROWS[::-1] if reverse else ROWS)
