"""Copies of a load's SSTs with another sequence number: only the numbers change, in every format that a load writes."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.errors import CorruptData, Unavailable
from flagstone.format.codec import Codec
from flagstone.format.sst import SstImage, decode_sst
from flagstone.kernels import block_reader, block_writer, load_compiled, load_interpreted
from flagstone.loads.edit import Load
from flagstone.metadata.manifest import SsTable
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.heartbeat import Heartbeat
from flagstone.spark.load.renumber import renumber_load
from flagstone.spark.load.request import begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.sst.builder import SstOptions
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import Seq, Ulid
from kit.faults import InterposingStore

ROWS = st.dictionaries(
    st.binary(min_size=1, max_size=40),
    st.tuples(
        st.sampled_from(["put", "delete", "merge"]),
        st.binary(max_size=300),
        st.none() | st.integers(0, 2**40),
    ),
    min_size=1,
    max_size=60,
)
SEQS = st.integers(1, 2**63)
KERNELS = [
    kernel for kernel in (load_compiled("renumber"), load_interpreted("renumber")) if kernel is not None
]


def blocks_of(rows: dict[bytes, Any]) -> tuple[bytearray, array[int]]:
    writer = block_writer.BlockWriter(1024, ordered=True, want_hashes=False)
    kinds = {"put": 0, "delete": 1, "merge": 8}
    writer.add_rows(
        [
            (key, 7, kinds[op], b"" if op == "delete" else value, 5, expires)
            for key, (op, value, expires) in sorted(rows.items())
        ]
    )
    blocks, bounds = writer.finish_blocks(), array("q")
    at = 0
    for block in blocks:
        bounds.extend((at, at + len(block)))
        at += len(block)
    return bytearray(b"".join(blocks)), bounds


def decoded(data: bytearray, bounds: array[int]) -> list[Any]:
    pieces = zip(bounds[::2], bounds[1::2], strict=True)
    return [row for begin, end in pieces for row in block_reader.decode_rows(bytes(data[begin:end]))]


@given(ROWS, SEQS)
def test_only_the_sequence_numbers_of_blocks_change(rows: dict[bytes, Any], seq: int) -> None:
    for kernel in KERNELS:
        data, bounds = blocks_of(rows)
        before = decoded(data, bounds)
        assert kernel.renumber(data, bounds, seq) == len(rows)
        assert decoded(data, bounds) == [(row[0], seq, *row[2:]) for row in before]


@given(ROWS, st.integers(0, 2**31), st.integers(0, 255))
def test_a_damaged_block_raises_or_stays_inside_of_its_bytes(
    rows: dict[bytes, Any], where: int, byte: int
) -> None:
    outcomes = []
    for kernel in KERNELS:
        data, bounds = blocks_of(rows)
        data[where % len(data)] = byte
        data += b"guard"
        try:
            kernel.renumber(data, bounds, 2**40)
            outcomes.append(bytes(data))
        except CorruptData as error:
            outcomes.append(bytes(str(error), "utf-8"))
        assert data.endswith(b"guard")
    assert len(set(outcomes)) == 1


def load_of(store: MemoryStore, codec: Codec, *, min_filter_keys: int = 1) -> tuple[Any, Load]:
    draw = random.Random(3)
    address = DatabaseAddress("db", store=store)
    plan = begin_load(address)
    keys = sorted({draw.randbytes(draw.randrange(1, 30)) for _ in range(3000)})
    batch = pa.RecordBatch.from_pydict(
        {
            "key": keys,
            "value": [draw.randbytes(draw.randrange(60)) * draw.randrange(3) for _ in keys],
            "op": [draw.choice(["put", "put", "delete", "merge"]) for _ in keys],
            "expires_ms": pa.array([draw.choice([None, 4_000_000_000_000]) for _ in keys], pa.int64()),
        }
    )
    options = WriteOptions(
        address, max_sst_bytes=60_000, sst_options=SstOptions(codec=codec, min_filter_keys=min_filter_keys)
    )
    made = write_ssts([batch], plan, options)
    return plan, Load(tuple(each.sst for each in made), plan.seq, plan.created_ms, Ulid(1))


def image(store: MemoryStore, sst: SsTable) -> SstImage:
    path = DbPaths("db").sst(sst.id)
    return decode_sst(store.get(path).data, path)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("min_filter_keys", [1, 1_000_000])
def test_a_copied_sst_has_the_same_rows_filters_and_statistics(codec: Codec, min_filter_keys: int) -> None:
    store = MemoryStore()
    plan, load = load_of(store, codec, min_filter_keys=min_filter_keys)
    copied = renumber_load(plan, load, Seq(2**50), Heartbeat(plan))

    assert copied.seq == 2**50
    assert len(copied.ssts) == len(load.ssts) > 1
    assert replace(copied, ssts=(), seq=load.seq) == replace(load, ssts=())
    for before, after in zip(load.ssts, copied.ssts, strict=True):
        assert before.id != after.id
        assert before.id >> 48 == after.id >> 48, "garbage collection knows both as SSTs of this load"
        old, new = image(store, before), image(store, after)
        assert new.info == after.info
        rows = [row for block in old.rows() for row in block]
        assert [row for block in new.rows() for row in block] == [(row[0], 2**50, *row[2:]) for row in rows]
        assert new.index.first_keys == old.index.first_keys
        assert new.stats() == old.stats()
        mine, theirs = new.filters(), old.filters()
        assert (mine is None) == (theirs is None) == (min_filter_keys > 1)
        assert (
            new.data[new.info.filter_offset :][: new.info.filter_len]
            == (old.data[old.info.filter_offset :][: old.info.filter_len])
        )


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_damaged_sst_is_not_copied(codec: Codec) -> None:
    store = MemoryStore()
    plan, load = load_of(store, codec)
    path = DbPaths("db").sst(load.ssts[0].id)
    data = bytearray(store.get(path).data)
    data[1000] ^= 1
    store.put(path, bytes(data))
    before = {meta.path for meta in store.list("db/compacted")}

    with pytest.raises(CorruptData) as caught:
        renumber_load(plan, replace(load, ssts=load.ssts[:1]), Seq(2**50), Heartbeat(plan))

    assert caught.value.object == path
    assert {meta.path for meta in store.list("db/compacted")} == before


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_an_sst_that_another_process_deletes_during_the_copy_ends_it_as_unavailable(codec: Codec) -> None:
    # The driver of another load had found this one expired: a bare "no object" reached the caller (world 500111).
    memory = MemoryStore()
    plan, load = load_of(memory, codec)
    path = DbPaths("db").sst(load.ssts[0].id)
    data = memory.get(path).data
    endings = []
    for nth in count(1):
        memory.put(path, data)
        deleting = InterposingStore(memory, lambda: memory.delete(path), path=path, nth=nth)
        sent = replace(plan, address=replace(plan.address, store=deleting))
        try:
            renumber_load(sent, replace(load, ssts=load.ssts[:1]), Seq(2**50), Heartbeat(plan))
        except Unavailable as error:
            endings.append(str(error))
        if not deleting.acted:
            break
    assert len(endings) == nth - 1 >= 3
    assert all(path in ending for ending in endings)
