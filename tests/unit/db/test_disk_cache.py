"""The cache on disk that the settings ask for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import flagstone
from flagstone import ReaderSettings, Settings
from flagstone.runtime.clock import VirtualClock
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL, Upkeep, eventually

KEYS = [b"%06d" % number for number in range(3000)]


def test_a_reader_with_a_cache_folder_reads_ssts_from_disk_the_second_time(tmp_path: Path) -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=Settings(flush_interval=None)) as db:
        for key in KEYS:
            db.put(key, b"v" * 50)
    settings = ReaderSettings(object_store_cache_options={"root_folder": str(tmp_path)})  # type: ignore[arg-type]

    for _ in range(2):
        with flagstone.open_reader("db", store=store, mode="latest", settings=settings) as reader:
            assert [value for _, value in reader.scan()] == [b"v" * 50] * len(KEYS)
            hits = reader.metrics()["slatedb.object_store_cache.part_hit_count"]

    assert any(file.is_file() for file in tmp_path.rglob("*"))
    assert hits > 0


def test_a_writer_with_cache_on_put_caches_the_ssts_it_flushes(tmp_path: Path) -> None:
    options = {"root_folder": str(tmp_path), "cache_on_flush": True}
    settings = Settings(object_store_cache_options=options)  # type: ignore[arg-type]
    with flagstone.open("db", store=MemoryStore(), settings=settings) as db:
        db.put(b"key", b"value")
        db.flush()
        assert any(file.is_file() for file in tmp_path.rglob("*"))
        assert db.get(b"key") == b"value"


@pytest.mark.parametrize(("which", "cached"), [("L0Sst", 1), ("AllSst", 2), (None, 0)])
def test_opening_a_database_preloads_the_cache_as_configured(
    tmp_path: Path, which: str | None, cached: int
) -> None:
    store, clock = MemoryStore(), VirtualClock()
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        for key in KEYS:
            db.put(key, b"v" * 50)
        db.flush()
        Upkeep(store, clock).compact(lifetime=None)
        db._engine.manifest.refresh()
        db.put(b"in L0", b"value")
    options = {
        "root_folder": str(tmp_path),
        "part_size_bytes": 32_768,
        "preload_disk_cache_on_startup": which,
    }
    with flagstone.open("db", store=store, settings=MANUAL.replace(object_store_cache_options=options)) as db:
        eventually(lambda: not any("preload" in thread.name for thread in threading.enumerate()))
        ssts = {file.parent for file in tmp_path.rglob("*.part")}
        assert len(ssts) == cached
        for meta in list(store.list("db/compacted")) if which == "AllSst" else []:
            store.delete(meta.path)
        if which == "AllSst":
            assert [db.get(key) for key in KEYS] == [b"v" * 50] * len(KEYS)


def test_a_flushed_sst_is_read_without_a_request() -> None:
    store = CountingStore(MemoryStore(), component="test")
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"key", b"value")
        db.flush()
        store.reset()
        assert db.get(b"key") == b"value"
        assert store.totals()["requests"] == {}, "a small SST stays in memory"
        for key in KEYS:
            db.put(key, b"v" * 50)
        db.flush()
        store.reset()
        assert db.get(b"nobody has it") is None
        assert db.get(KEYS[0]) == b"v" * 50
        assert store.totals()["requests"] == {"get_range": 1}, "of a large one index and filter do"
