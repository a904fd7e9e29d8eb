"""`SstStore`: few requests, none twice, and every waiting read ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident

import pytest

from flagstone.errors import Unavailable
from flagstone.read.drivers import get, multi_get
from flagstone.runtime.pool import IoPool
from flagstone.sst.cache import SstCache
from flagstone.sst.reader import INDEX, META
from flagstone.sst.requests import Need, plan_requests
from flagstone.sst.store import SstStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import MAX_SEQ, Ulid
from kit.ssts import Rig, put

ROWS = [put(number, value=b"v" * 200) for number in range(2000)]


class SlowStore(MemoryStore):
    """Delays every range request until `go` is set; the first `failures` of them fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.go = Event()
        self.asked: list[tuple[int, int]] = []
        self.failures = failures

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        assert self.go.wait(10)
        if self.failures:
            self.failures -= 1
            raise Unavailable("not now")
        return super().get_range(path, start, stop)


def slow_ssts(failures: int = 0) -> tuple[Rig, SlowStore, SstStore]:
    rig = Rig()
    sst = rig.add(ROWS)
    store = SlowStore(failures)
    path = DbPaths("db").sst(sst.sst_id)
    store.put(path, rig.store.get(path).data)
    ssts = SstStore(store, DbPaths("db"), cache=SstCache(capacity_bytes=0), pool=IoPool(), small_sst_bytes=0)
    return rig, store, ssts


class CountedEvent(Event):
    """An event that lists the threads that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiters: list[int] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waiters.append(get_ident())
        return super().wait(timeout)


@pytest.mark.parametrize("failures", [0, 1])
def test_concurrent_reads_share_one_request_and_only_the_read_that_made_it_gets_its_error(
    failures: int,
) -> None:
    rig, store, ssts = slow_ssts(failures)
    sst = ssts.open(Ulid(1), rig.ssts[Ulid(1)].info)
    followers = 5

    def read() -> object:
        try:
            return ssts.fetch([Need(sst, None, [])])[sst, META][1]
        except Unavailable:
            return "failed"

    with ThreadPoolExecutor(1 + followers) as threads:
        leader = threads.submit(read)
        while not store.asked:
            pass
        landed = ssts._flights[sst, INDEX].landed = CountedEvent()
        futures = [threads.submit(read) for _ in range(followers)]
        while len(landed.waiters) < followers:
            pass
        store.go.set()
        answers = [future.result(10) for future in futures]
        assert (leader.result(10) == "failed") == bool(failures)
    assert "failed" not in answers
    assert len(store.asked) == 1 + failures * followers
    assert ssts._flights == {}


@pytest.mark.parametrize("numbers", [[2, 3, 4, 5], [5, 4, 3, 2], [4, 2, 5, 3]])
def test_a_read_in_any_order_makes_its_own_request_when_the_read_it_waited_for_has_failed(
    numbers: list[int],
) -> None:
    # A backward scan wants blocks in descending order: it requested a range that ended before its start (world 500533).
    rig, store, ssts = slow_ssts()
    sst = ssts.open(Ulid(1), rig.ssts[Ulid(1)].info)
    store.go.set()
    index = ssts.fetch([Need(sst, None, [])])[sst, META][0]
    store.go.clear()
    store.asked.clear()
    store.failures = 1

    with ThreadPoolExecutor(2) as threads:
        leader = threads.submit(ssts.fetch_request, Need(sst, index, [2, 3, 4, 5]))
        while not store.asked:
            pass
        landed = ssts._flights[sst, 2].landed = CountedEvent()
        follower = threads.submit(ssts.fetch_request, Need(sst, index, numbers))
        while not landed.waiters:
            pass
        store.go.set()
        with pytest.raises(Unavailable):
            leader.result(10)
        found = follower.result(10)
    raws = [found[sst, number] for number in (2, 3, 4, 5)]
    assert raws == sst.decode_blocks(
        store.get(sst.path).data[index.offsets[2] : index.stops[5]], index, range(2, 6), index.offsets[2]
    )
    assert store.asked == [(index.offsets[2], index.stops[5])] * 2


def test_many_threads_with_a_tiny_cache_read_every_row() -> None:
    rig = Rig(capacity_bytes=20_000, threads=4)
    view = rig.view(rig.tree(runs=[[rig.add(ROWS[:1000]), rig.add(ROWS[1000:])]]))

    def read(shift: int) -> None:
        for number in range(shift, 2000, 7):
            assert get(rig.sst_store, view, b"%08d" % number, MAX_SEQ) == ROWS[number]
        keys = [row[0] for row in ROWS[shift::5]]
        assert multi_get(rig.sst_store, view, keys, MAX_SEQ) == ROWS[shift::5]

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(read, shift) for shift in range(6)]:
            future.result(60)
    assert rig.sst_store.cache.held_bytes <= 20_000


def test_adjacent_blocks_are_one_request_and_distant_blocks_another() -> None:
    rig = Rig()
    view = rig.add([put(number, value=b"v" * 900) for number in range(500)])
    sst = rig.sst_store.open(view.sst_id, rig.ssts[view.sst_id].info)
    index = rig.sst_store.fetch([Need(sst, None, [])])[sst, META][0]
    needs = [
        Need(sst, index, [3]),
        Need(sst, index, [1, 2]),
        Need(sst, None, []),
        Need(sst, index, [3]),
        Need(sst, index, [300]),
    ]
    planned = [need.numbers for need in plan_requests(needs)]
    assert planned == [[], [1, 2, 3], [300]]


def test_an_sst_uploaded_twice_has_the_same_bytes() -> None:
    rig = Rig()
    sst = rig.add(ROWS)
    path = DbPaths("db").sst(sst.sst_id)
    before = rig.store.get(path).data
    rig.made = 0
    rig.add(ROWS)
    assert rig.store.get(path).data == before
