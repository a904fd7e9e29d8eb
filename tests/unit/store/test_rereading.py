"""A bad answer of the store or of the disk cache is read once more and never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import ReaderSettings
from flagstone.errors import CorruptData
from flagstone.store.caching import CachingStore, read_checked
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

KEYS = [b"key%05d" % number for number in range(3000)]


class Lying(MemoryStore):
    """Answers the next `lies` ranges of SSTs with one wrong bit each, or cut short."""

    lies = 0
    short = False
    asked = 0

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        data = super().get_range(path, start, stop)
        if "/compacted/" not in path:
            return data
        self.asked += 1
        if self.lies:
            self.lies -= 1
            if self.short:
                return data[: len(data) // 2]
            return bytes([data[0] ^ 1]) + data[1:-1] + bytes([data[-1] ^ 1])
        return data


@pytest.fixture
def store() -> Lying:
    store = Lying()
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        for key in KEYS:
            db.put(key, b"value" * 4)
    return store


@pytest.fixture(params=[True, False], ids=["cached", "plain"])
def reader(store: Lying, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[flagstone.DbReader]:
    options = {"root_folder": str(tmp_path), "part_size_bytes": 32_768} if request.param else {}
    settings = ReaderSettings(object_store_cache_options=options, block_cache_bytes=0, meta_cache_bytes=0)
    with flagstone.open_reader("db", store=store, mode="latest", settings=settings) as opened:
        yield opened


READS: list[Callable[[flagstone.DbReader], Any]] = [
    lambda reader: reader.get(KEYS[7]),
    lambda reader: len(list(reader.scan())),
    lambda reader: reader.scan_arrow().read_all().num_rows,
    lambda reader: reader.multi_get(KEYS[::500]),
]


@pytest.mark.slow
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("read", READS)
def test_reads_survive_one_bad_answer_of_the_store(
    store: Lying, reader: flagstone.DbReader, read: Callable[[flagstone.DbReader], Any], short: bool
) -> None:
    expected = read(reader)
    store.short = short
    for _ in range(3):
        store.lies = 1
        assert read(reader) == expected
        store.lies = 0
        assert read(reader) == expected


def test_a_cached_bad_answer_is_replaced(store: Lying, tmp_path: Path) -> None:
    options = {"root_folder": str(tmp_path), "part_size_bytes": 32_768}
    settings = ReaderSettings(object_store_cache_options=options)
    store.lies, raised = 3, 0
    for _ in range(3):
        with flagstone.open_reader("db", store=store, mode="latest", settings=settings) as reader:
            try:
                assert len(list(reader.scan())) == len(KEYS)
            except CorruptData:
                raised += 1
    assert raised <= 1, "an error takes two of the three bad answers"
    with flagstone.open_reader("db", store=store, mode="latest", settings=settings) as reader:
        assert len(list(reader.scan())) == len(KEYS)


def test_damage_of_the_object_itself_is_raised_after_the_second_read(store: Lying, tmp_path: Path) -> None:
    path = next(iter(store.list("db/compacted"))).path
    data = bytearray(store.get(path).data)
    data[10] ^= 1
    store.put(path, bytes(data))
    options = {"root_folder": str(tmp_path), "part_size_bytes": 32_768}
    with flagstone.open_reader(
        "db", store=store, mode="latest", settings=ReaderSettings(object_store_cache_options=options)
    ) as reader:
        assert reader.get(KEYS[-1]) is not None
        for _ in range(2):
            store.asked = 0
            with pytest.raises(CorruptData) as caught:
                reader.get(KEYS[0])
            assert caught.value.object == path
            assert store.asked == 2
            assert not any(tmp_path.rglob("*.part")), "no part of it is cached"


@pytest.mark.parametrize("at", [0, 13, 40, -1])
def test_damaged_files_of_the_cache_change_no_row(store: Lying, tmp_path: Path, at: int) -> None:
    options = {"root_folder": str(tmp_path), "part_size_bytes": 32_768}
    settings = ReaderSettings(object_store_cache_options=options)

    def rows() -> list[tuple[bytes, bytes]]:
        with flagstone.open_reader("db", store=store, mode="latest", settings=settings) as reader:
            return list(reader.scan())

    expected = rows()
    parts = list(tmp_path.rglob("*.part"))
    assert parts
    for part in parts:
        data = bytearray(part.read_bytes())
        data[at] ^= 0x55
        part.write_bytes(data)
    assert rows() == expected


def test_a_truncated_answer_is_not_cached(tmp_path: Path) -> None:
    inner = Lying()
    path = "db/compacted/00000000000000000000000001.sst"
    inner.put(path, bytes(range(256)) * 40)
    cache = CachingStore(inner, folder=tmp_path, max_bytes=1 << 20, part_bytes=4096)
    inner.lies, inner.short = 1, True
    assert len(cache.get_range(path, 0, 10_240)) < 10_240
    assert cache.get_range(path, 0, 10_240) == bytes(range(256)) * 40


def test_a_range_far_beyond_the_object_ends_with_it(tmp_path: Path) -> None:
    inner = MemoryStore()
    path = "db/compacted/00000000000000000000000001.sst"
    inner.put(path, b"x" * 10_000)
    cache = CachingStore(inner, folder=tmp_path, max_bytes=1 << 20, part_bytes=4096)
    assert cache.get_range(path, 5_000, 2**60) == b"x" * 5_000


def test_a_refused_decoding_is_tried_twice() -> None:
    store = MemoryStore()
    store.put("a", b"abc")
    seen: list[bytes] = []

    def refuse(data: bytes) -> None:
        seen.append(data)
        raise CorruptData("no")

    with pytest.raises(CorruptData, match="no"):
        read_checked(store, "a", 0, 3, refuse)
    assert seen == [b"abc", b"abc"]
