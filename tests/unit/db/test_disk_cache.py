"""The cache on disk that the settings ask for."""

from __future__ import annotations

from pathlib import Path

import flagstone
from flagstone import ReaderSettings, Settings
from flagstone.store.memory import MemoryStore

KEYS = [b"%06d" % number for number in range(3000)]


def test_a_reader_with_a_cache_folder_reads_tables_from_disk_the_second_time(tmp_path: Path) -> None:
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


def test_a_writer_caches_what_it_flushes_when_asked_to(tmp_path: Path) -> None:
    options = {"root_folder": str(tmp_path), "cache_on_flush": True}
    settings = Settings(object_store_cache_options=options)  # type: ignore[arg-type]
    with flagstone.open("db", store=MemoryStore(), settings=settings) as db:
        db.put(b"key", b"value")
        db.flush()
        assert any(file.is_file() for file in tmp_path.rglob("*"))
        assert db.get(b"key") == b"value"
