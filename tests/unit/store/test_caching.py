"""The part cache returns the right bytes, even when it is small, full or damaged."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Barrier

import pytest

from flagstone.errors import InternalError, InvalidRequest, Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.metrics import Metrics
from flagstone.store import caching
from flagstone.store.caching import CachingStore
from flagstone.store.counting import CountingStore
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectMissing

SST = "db/compacted/01ARZ3NDEKTSV4RRFFQ69G5FAV.sst"
PART = 4096
CONTENT = Random(7).randbytes(10 * PART + 123)


class World:
    """A cache over a counting store with one SST."""

    def __init__(self, folder: Path, *, max_bytes: int = 1 << 20, cache_on_put: bool = False) -> None:
        self.folder = folder
        self.metrics = Metrics()
        self.inner = MemoryStore()
        self.counted = CountingStore(self.inner, component="test")
        self.store = CachingStore(
            self.counted,
            folder=folder,
            max_bytes=max_bytes,
            part_bytes=PART,
            cache_on_put=cache_on_put,
            metrics=self.metrics,
        )
        self.inner.put(SST, CONTENT)

    def requests(self) -> dict[str, int]:
        requests = self.counted.totals()["requests"]
        self.counted.reset()
        return requests

    def metric(self, name: str) -> float:
        value = self.metrics.as_dict()[f"slatedb.object_store_cache.{name}"]
        assert isinstance(value, int | float)
        return value

    def files(self) -> list[Path]:
        return sorted(file for file in self.folder.rglob("*") if file.is_file())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_repeated_read_needs_no_request(world: World) -> None:
    assert world.store.get_range(SST, 5000, 5010) == CONTENT[5000:5010]
    assert world.requests() == {"get_range": 1}

    assert world.store.get_range(SST, 4096, 8192) == CONTENT[4096:8192]

    assert world.requests() == {}
    assert (world.metric("part_access_count"), world.metric("part_hit_count")) == (2, 1)


def test_adjacent_missing_parts_are_fetched_in_one_request(world: World) -> None:
    world.store.get_range(SST, 3 * PART, 3 * PART + 1)
    world.requests()

    assert world.store.get_range(SST, 10, 8 * PART) == CONTENT[10 : 8 * PART]

    assert world.requests() == {"get_range": 2}


def test_any_range_equals_the_uncached_one(world: World) -> None:
    chance = Random(1)
    for _ in range(300):
        start = chance.randrange(0, len(CONTENT) + 2 * PART)
        stop = start + chance.choice([0, 1, 100, PART, 3 * PART, 20 * PART])
        assert world.store.get_range(SST, start, stop) == CONTENT[start:stop]
    ranges = [(9 * PART, 11 * PART), (0, 5), (50 * PART, 51 * PART)]
    assert world.store.get_ranges(SST, ranges) == [CONTENT[start:stop] for start, stop in ranges]


def test_whole_objects_and_tails_come_from_the_cache_too(world: World) -> None:
    first = world.store.get(SST)
    assert first.data == CONTENT
    world.requests()

    again = world.store.get(SST)
    tail = world.store.get_tail(SST, 100)

    assert again == first
    assert (tail.data, tail.meta) == (CONTENT[-100:], first.meta)
    assert world.requests() == {}


def test_another_process_reads_the_cached_parts(world: World, tmp_path: Path) -> None:
    world.store.get_range(SST, 0, len(CONTENT))
    other = CachingStore(world.counted, folder=tmp_path, max_bytes=1 << 20, part_bytes=PART)
    world.requests()

    assert other.get_range(SST, 100, 9 * PART) == CONTENT[100 : 9 * PART]

    assert world.requests() == {}


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(content)


def flip_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip,
        flip_header,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"x" * 50),
    ],
)
def test_damaged_parts_are_fetched_again(world: World, damage: Callable[[Path], None]) -> None:
    world.store.get(SST)
    for file in world.files():
        damage(file)
    world.requests()

    assert world.store.get_tail(SST, 200).data == CONTENT[-200:]
    assert world.store.get_range(SST, 0, len(CONTENT)) == CONTENT

    assert world.requests()
    assert world.store.get_range(SST, 0, len(CONTENT)) == CONTENT
    assert world.requests() == {}


def test_a_part_under_the_name_of_another_is_fetched_again(world: World) -> None:
    world.store.get_range(SST, 0, 2 * PART)
    first, second = world.files()
    second.write_bytes(first.read_bytes())

    assert world.store.get_range(SST, 0, 2 * PART) == CONTENT[: 2 * PART]


def test_the_cache_stays_within_its_size_and_keeps_the_parts_used_last(tmp_path: Path) -> None:
    world = World(tmp_path, max_bytes=20 * PART)
    ssts = [f"db/compacted/{number:026d}.sst" for number in range(40)]
    for sst in ssts:
        world.inner.put(sst, CONTENT[:PART])
    for number, sst in enumerate(ssts):
        world.store.get_range(sst, 0, 10)
        for file in world.files():
            os.utime(file, ns=(number, number)) if file.stat().st_mtime_ns > 10**15 else None

    assert sum(file.stat().st_size for file in world.files()) <= 20 * PART
    assert world.metric("evicted_keys") >= 20
    assert world.metric("evicted_bytes") >= 20 * PART
    assert world.metric("cache_bytes") <= 20 * PART
    world.requests()
    world.store.get_range(ssts[-1], 0, 10)
    assert world.requests() == {}
    world.store.get_range(ssts[0], 0, 10)
    assert world.requests() == {"get_range": 1}


def test_a_cache_that_cannot_write_still_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching, "stage_part", full)

    for _ in range(2):
        assert world.store.get_range(SST, 0, len(CONTENT)) == CONTENT
        assert world.store.get(SST).data == CONTENT


def test_many_readers_of_a_missing_part_make_one_request(world: World) -> None:
    arrived, inner_get_range = Barrier(8), world.inner.get_range

    def slow(path: str, start: int, stop: int) -> bytes:
        time.sleep(0.1)  # for the other readers to come to the missing part
        return inner_get_range(path, start, stop)

    world.inner.get_range = slow  # type: ignore[method-assign]

    def read(_: int) -> bytes:
        arrived.wait()
        return world.store.get_range(SST, 100, 5 * PART)

    with ThreadPoolExecutor(8) as readers:
        assert set(readers.map(read, range(8))) == {CONTENT[100 : 5 * PART]}
    assert world.requests() == {"get_range": 1}


def test_a_failed_fetch_fails_only_its_caller(world: World) -> None:
    inner_get_range = world.inner.get_range

    def fail(*_: object) -> bytes:
        raise Unavailable("503")

    world.inner.get_range = fail  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        world.store.get_range(SST, 0, 10)
    world.inner.get_range = inner_get_range  # type: ignore[method-assign]
    assert world.store.get_range(SST, 0, 10) == CONTENT[:10]


def test_puts_fill_the_cache_with_cache_on_put(tmp_path: Path) -> None:
    world = World(tmp_path, cache_on_put=True)
    world.store.put("db/compacted/new.sst", CONTENT)
    world.requests()

    assert world.store.get_range("db/compacted/new.sst", 5, 5000) == CONTENT[5:5000]

    assert world.requests() == {}


def test_a_deleted_sst_is_removed_from_the_cache(world: World) -> None:
    world.store.get(SST)
    world.store.delete(SST)

    assert world.files() == []
    for read in (world.store.get, world.store.head, lambda path: world.store.get_range(path, 0, 5)):
        with pytest.raises(ObjectMissing):
            read(SST)


def test_wal_files_are_not_cached(world: World) -> None:
    path = "db/wal/00000000000000000001.sst"
    world.store.put_if_absent(path, b"rows")
    for _ in range(2):
        assert world.store.get(path).data == b"rows"
        assert world.store.get_range(path, 0, 1) == b"r"
    assert world.requests() == {"put_if_absent": 1, "get": 2, "get_range": 2}
    assert world.files() == []


@pytest.mark.parametrize("folder", ["manifest", "compactions", "gc"])
def test_metadata_through_a_cache_raises_internal_error(world: World, folder: str) -> None:
    path = f"db/{folder}/x"
    store = world.store
    version = world.inner.put(path, b"")
    calls: list[Callable[[], object]] = [
        lambda: store.get(path),
        lambda: store.get_if_changed(path, version),
        lambda: store.get_range(path, 0, 1),
        lambda: store.get_ranges(path, [(0, 1)]),
        lambda: store.get_tail(path, 1),
        lambda: store.head(path),
        lambda: store.list(f"db/{folder}"),
        lambda: store.put(path, b""),
        lambda: store.put_if_absent(path, b""),
        lambda: store.put_if_match(path, b"", version),
        lambda: store.copy(path, SST),
        lambda: store.copy(SST, path),
        lambda: store.delete(path),
        lambda: store.delete_many([SST, path]),
    ]
    for call in calls:
        with pytest.raises(InternalError, match="must not pass through a cache"):
            call()
    assert world.requests() == {}


def test_a_cache_too_small_for_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="too small"):
        CachingStore(MemoryStore(), folder=tmp_path, max_bytes=1 << 20)


def test_a_preload_fetches_what_is_missing_in_few_requests(world: World) -> None:
    world.store.get_range(SST, 5 * PART, 5 * PART + 1)
    world.requests()

    assert world.store.preload(SST, len(CONTENT))

    assert world.requests() == {"get_range": 4}, "parts 0-3, 4, 6-9, and the rest"
    assert world.store.get_range(SST, 0, len(CONTENT)) == CONTENT
    assert world.store.preload(SST, len(CONTENT))
    assert world.requests() == {}


def test_a_preload_evicts_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, max_bytes=6 * PART)
    assert not world.store.preload(SST, len(CONTENT))
    assert 0 < len(world.files()) <= 5
    assert world.metric("evicted_keys") == 0


def test_a_preload_of_a_missing_sst_raises_object_missing(world: World) -> None:
    world.inner.delete(SST)
    with pytest.raises(ObjectMissing):
        world.store.preload(SST, len(CONTENT))


def test_parts_of_other_processes_are_counted_after_the_scan_interval(tmp_path: Path) -> None:
    clock, metrics = VirtualClock(), Metrics()
    inner = MemoryStore()
    inner.put(SST, CONTENT)
    ours, theirs = (
        CachingStore(
            inner,
            folder=tmp_path,
            max_bytes=32 * PART,
            part_bytes=PART,
            scan_interval_s=60,
            clock=clock,
            metrics=seen,
        )
        for seen in (metrics, Metrics())
    )
    ours.get_range(SST, 0, 1)
    theirs.get_range(SST, 5 * PART, 6 * PART)
    ours.get_range(SST, PART, PART + 1)
    held = "slatedb.object_store_cache.cache_keys"
    assert metrics.as_dict()[held] == 1, "measured at the first part, and not since"
    clock.advance(61_000)
    ours.get_range(SST, 2 * PART, 2 * PART + 1)
    assert metrics.as_dict()[held] == 4


def test_a_pickled_cache_has_the_same_options(world: World) -> None:
    plain = CachingStore(LocalStore(world.folder), folder=world.folder, max_bytes=1 << 30, scan_interval_s=7)
    again = pickle.loads(pickle.dumps(plain))
    assert (repr(again), again._scan_interval_s) == (repr(plain), 7)
