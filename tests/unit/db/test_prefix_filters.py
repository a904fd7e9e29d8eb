"""Scans of a prefix skip the SSTs whose filters exclude it."""

from __future__ import annotations

import pytest

import flagstone
from flagstone.db.writer.database import Db
from flagstone.format.filter import FixedPrefix, PrefixExtractor
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

SETTINGS = MANUAL.replace(min_filter_keys=1, block_cache_bytes=0)


class UpToSlash:
    """`user/17` has the prefix `user/`."""

    name = "up-to-slash"

    def prefix(self, key: bytes) -> bytes | None:
        head, slash, _ = key.partition(b"/")
        return head + slash if slash else None


def fill(db: Db) -> None:
    """Two SSTs over the same range of keys, with different prefixes."""
    for table in (b"even", b"odd"):
        for number in range(500):
            db.put(b"a%03d-%s/%d" % (number, table, number), b"v" * 100)
        db.flush()


@pytest.mark.parametrize("extractor", [None, UpToSlash(), FixedPrefix("nine", 9)])
def test_a_prefix_scan_reads_only_ssts_that_may_have_the_prefix(extractor: PrefixExtractor | None) -> None:
    store = CountingStore(MemoryStore(), component="test")
    with flagstone.open("db", store=store, settings=SETTINGS, prefix_extractor=extractor) as db:
        fill(db)
        everything = list(db.scan())
        fetched = 0
        for number in range(0, 500, 50):
            prefix = b"a%03d-even/" % number
            store.reset()
            assert list(db.scan(prefix=prefix)) == [row for row in everything if row[0].startswith(prefix)]
            fetched += store.totals()["requests"].get("get_range", 0)
        assert fetched >= 18 if extractor is None else fetched <= 12
        for prefix in (b"a", b"a1", b"a100", b"a100-odd/1", b"", b"b"):
            rows = [row for row in everything if row[0].startswith(prefix)]
            assert list(db.scan(prefix=prefix)) == rows
            assert list(db.scan(prefix=prefix, reverse=True)) == rows[::-1]
            assert db.scan_arrow(prefix=prefix).read_all().num_rows == len(rows)


def test_a_prefix_scan_reads_ssts_written_without_the_extractor() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=SETTINGS) as db:
        fill(db)
    with flagstone.open("db", store=store, settings=SETTINGS, prefix_extractor=UpToSlash()) as db:
        assert len(list(db.scan(prefix=b"a007-odd/"))) == 1
