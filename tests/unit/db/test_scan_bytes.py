"""Which parts of SSTs scans and gets of open databases and readers fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

import flagstone
from flagstone.db.writer.database import Db
from flagstone.metadata.manifest import SsTable
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

ROWS = {b"row%05d" % number: b"v" * 100 for number in range(4000)}
SETTINGS = MANUAL.replace(block_cache_bytes=0)


class WatchedStore(MemoryStore):
    """Lists the byte ranges of SSTs that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        if path.endswith(".sst"):
            self.asked.append((start, stop))
        return super().get_range(path, start, stop)


def fill(db: Db) -> None:
    with db.batch() as batch:
        for key, value in ROWS.items():
            batch.put(key, value)
    db.flush()


@pytest.fixture(scope="module")
def filled() -> WatchedStore:
    store = WatchedStore()
    with flagstone.open("db", store=store, settings=SETTINGS) as db:
        fill(db)
    return store


def sst_of(store: WatchedStore) -> SsTable:
    (sst,) = flagstone.Admin("db", store=store).manifest().value.ssts.values()
    return sst


def with_db(store: WatchedStore) -> Iterator[int]:
    with flagstone.open("db", store=store, settings=SETTINGS) as db:
        yield len(list(db.scan(b"row00100", b"row00200")))


def with_mapping(store: WatchedStore) -> Iterator[int]:
    with flagstone.open("db", store=store, settings=SETTINGS) as db:
        yield len(list(db[b"row00100":b"row00200"]))


def with_snapshot(store: WatchedStore) -> Iterator[int]:
    with flagstone.open("db", store=store, settings=SETTINGS) as db, db.snapshot() as snapshot:
        yield len(list(snapshot.scan(b"row00100", b"row00200", reverse=True)))


def with_reader(store: WatchedStore) -> Iterator[int]:
    with flagstone.open_reader("db", store=store) as reader:
        yield len(list(reader.scan(prefix=b"row001")))


def with_arrow(store: WatchedStore) -> Iterator[int]:
    with flagstone.open_reader("db", store=store) as reader:
        yield reader.scan_arrow(b"row00100", b"row00200").read_all().num_rows


def with_count(store: WatchedStore) -> Iterator[int]:
    with flagstone.open_reader("db", store=store) as reader:
        yield reader.count(b"row00100", b"row00200")


@pytest.mark.parametrize("way", [with_db, with_mapping, with_snapshot, with_reader, with_arrow, with_count])
def test_a_scan_fetches_the_index_and_blocks_and_no_filter(
    filled: WatchedStore, way: Callable[[WatchedStore], Iterator[int]]
) -> None:
    info = sst_of(filled).info
    filled.asked.clear()
    with closing(way(filled)) as running:  # type: ignore[type-var]
        assert next(running) == 100
        asked = set(filled.asked)
    index = info.index_offset, info.index_offset + info.index_len
    assert index in asked
    assert asked > {index}
    assert all(stop <= info.filter_offset for _, stop in asked - {index})


def test_a_get_after_a_scan_fetches_the_filters_once(filled: WatchedStore) -> None:
    info = sst_of(filled).info
    with flagstone.open_reader("db", store=filled) as reader:
        list(reader.scan(b"row00100", b"row00200"))
        filled.asked.clear()
        assert reader.get(b"row00300") == b"v" * 100
        assert filled.asked[0] == (info.filter_offset, info.index_offset)
        assert reader.get(b"row03000") == b"v" * 100
        assert len(filled.asked) == 3


def test_a_scan_of_an_sst_that_was_just_uploaded_keeps_its_filters() -> None:
    store = WatchedStore()
    with flagstone.open("db", store=store, settings=SETTINGS) as db:
        fill(db)
        assert len(list(db.scan(b"row00100", b"row00200"))) == 100
        blocks = len(store.asked)
        assert db.get(b"row00300") == b"v" * 100
        offset = sst_of(store).info.filter_offset
        assert all(stop <= offset for _, stop in store.asked)
        assert len(store.asked) == blocks + 1
