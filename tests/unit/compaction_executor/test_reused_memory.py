"""The executor on a folder: chunks are read into memory that earlier chunks had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flagstone.compaction.executor import plan_output_bytes, plan_threads
from flagstone.compaction.inputs import Part, Source, SstFetcher
from flagstone.config.settings import CompactionWorkerOptions
from flagstone.errors import CorruptData
from flagstone.format.codec import Codec
from flagstone.runtime.pool import IoPool
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectStore
from flagstone.types import VALUE, EntryTuple, KeyRange
from kit.executor import PATHS, SMALL, ExecutorRig

CHUNK_BYTES = 16_000


def many(first_seq: int, step: int) -> list[EntryTuple]:
    """Values differ from row to row, so that bytes of another chunk are never the right ones."""
    return [
        (
            b"key-%06d" % (number * step),
            first_seq + number,
            VALUE,
            b"%09d" % (first_seq + number) * 9,
            1,
            None,
        )
        for number in range(4000 // step)
    ]


def compacted(store: ObjectStore, codec: Codec) -> list[EntryTuple]:
    rig = ExecutorRig(
        store=store,
        options=replace(SMALL, codec=codec),
        bytes_to_fetch=CHUNK_BYTES,
        max_subcompactions=3,
        pool=IoPool(max_workers=4),
    )
    rig.set_sources([many(30_000, 3), many(20_000, 2), many(10_000, 1)], min_seq=0, clock_ms=0)
    return rig.rows(rig.run())


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZLIB])
def test_a_folder_and_memory_give_the_same_rows(tmp_path: Path, codec: Codec) -> None:
    rows = compacted(LocalStore(tmp_path, fsync=False), codec)
    assert len(rows) == 4000 + 2000 + 1333  # a snapshot may need every version
    assert rows == compacted(MemoryStore(), codec)


def one_source(store: ObjectStore, *, reuse: bool) -> Source:
    rig = ExecutorRig(store=store)
    view = rig.add_sst(many(1, 1))
    part = Part(rig.manifest.sst(view), PATHS.sst(view.sst_id), KeyRange())
    return Source(
        [part],
        SstFetcher(store),
        pool=IoPool(max_workers=0),
        bytes_to_fetch=CHUNK_BYTES,
        max_fetch_tasks=1,
        reuse=reuse,
    )


def test_a_source_needs_the_memory_of_two_chunks(tmp_path: Path) -> None:
    source = one_source(LocalStore(tmp_path, fsync=False), reuse=True)
    memories = []
    while (chunk := source.next_chunk()) is not None:
        assert isinstance(chunk.data, memoryview)
        memories.append(chunk.data.obj)
    assert len(memories) > 10
    assert len({id(memory) for memory in memories}) == 2


def test_a_source_that_does_not_reuse_memory_gives_chunks_that_stay_valid(tmp_path: Path) -> None:
    source = one_source(LocalStore(tmp_path, fsync=False), reuse=False)
    chunks = [chunk.data for chunk in iter(source.next_chunk, None)]
    assert len(chunks) > 10
    assert all(isinstance(data, bytes) for data in chunks)
    assert len(set(chunks)) == len(chunks)


def test_damage_in_reused_memory_names_object_and_block(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    rig = ExecutorRig(store=store, bytes_to_fetch=CHUNK_BYTES)
    view = rig.add_sst(many(1, 1))
    rig.set_tree([view])
    path = PATHS.sst(view.sst_id)
    data = bytearray(store.get(path).data)
    data[100_000] ^= 1
    store.put(path, bytes(data))
    with pytest.raises(CorruptData) as caught:
        rig.run()
    assert caught.value.object == path
    assert caught.value.offset is not None
    assert 95_000 < caught.value.offset <= 100_000


def test_a_store_without_a_network_is_merged_by_as_many_threads_as_there_are_processors() -> None:
    work = CompactionWorkerOptions(max_subcompactions=4)
    assert plan_threads(work, "file:///data", 2) == 2
    assert plan_threads(work, "memory://7", 16) == 4
    assert plan_threads(work, "s3://bucket", 2) == 4


def test_a_merge_reserves_memory_for_all_of_an_sst_only_if_the_store_is_far_away() -> None:
    work = CompactionWorkerOptions(max_sst_size=64 << 20)
    assert plan_output_bytes(work, "s3://bucket") == 64 << 20
    assert plan_output_bytes(work, "file:///data") == plan_output_bytes(work, "memory://7") == 16 << 20
