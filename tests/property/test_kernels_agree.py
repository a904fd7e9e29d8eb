"""Compiled and interpreted kernels give the same answers, on good input and on damaged input."""

from __future__ import annotations

import random
import zlib
from array import array
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.kernels import load_compiled, load_interpreted
from flagstone.types import MAX_SEQ, MERGE, TOMBSTONE, VALUE, EntryTuple
from kit.kernels import both, damaged, outcome
from kit.strategies import entries, keys, seqs, sorted_entries

pytestmark = pytest.mark.skipif(
    load_compiled("block_reader") is None, reason="kernels were not compiled here"
)

block_sizes = st.sampled_from([1024, 4096, 65536])


def encode(kernel: ModuleType, rows: list[EntryTuple], size: int, ordered: bool) -> Any:
    """The blocks, and what the writer tells about them."""
    writer = kernel.BlockWriter(size, ordered=ordered, want_keys=True)
    writer.add_rows(rows)
    totals = writer.finish_sst()
    data, bounds, *notes = writer.take(7)
    return [bytes(data[at:stop]) for at, stop in zip(bounds[::2], bounds[1::2], strict=True)], totals, notes


@given(sorted_entries(), block_sizes)
def test_both_kernels_encode_sorted_rows_to_the_same_blocks(rows: list[EntryTuple], size: int) -> None:
    compiled, interpreted = both("block_writer")
    assert encode(compiled, rows, size, True) == encode(interpreted, rows, size, True)


@given(st.lists(entries(), max_size=40), block_sizes, st.booleans())
def test_both_kernels_encode_or_refuse_any_rows_alike(
    rows: list[EntryTuple], size: int, ordered: bool
) -> None:
    compiled, interpreted = both("block_writer")
    assert outcome(encode, compiled, rows, size, ordered) == outcome(encode, interpreted, rows, size, ordered)


@pytest.mark.slow
@given(sorted_entries(min_size=1), block_sizes, keys, seqs)
def test_lookups_of_both_kernels_equal_a_linear_search(
    rows: list[EntryTuple], size: int, stranger: bytes, max_seq: int
) -> None:
    compiled, interpreted = both("block_reader")
    for raw in encode(load_interpreted("block_writer"), rows, size, True)[0]:
        held = compiled.decode_rows(raw)
        assert held == interpreted.decode_rows(raw)
        for key in {row[0] for row in held} | {stranger}:
            for limit in (max_seq, MAX_SEQ):
                expected = [row for row in held if row[0] == key and row[1] <= limit]
                for kernel in (compiled, interpreted):
                    row = expected[0] if expected else None
                    assert kernel.lookup(raw, key, limit) == row
                    simple = row is not None and row[2] == VALUE and row[5] is None
                    assert kernel.lookup_value(raw, key, limit) == (row[3] if row and simple else row)
                    assert kernel.lookup_versions(raw, key, limit) == expected


def columns(kernel: ModuleType, raws: list[bytes]) -> Any:
    rows, key_bytes, value_bytes = kernel.measure(raws)

    def room(code: str, count: int) -> memoryview:
        return memoryview(bytearray(count * array(code).itemsize)).cast(code)

    filled = [
        room("i", rows + 1),
        room("B", key_bytes),
        room("i", rows + 1),
        room("B", value_bytes),
        room("Q", rows),
        room("B", rows),
        room("q", rows),
        room("B", rows),
        room("q", rows),
        room("B", rows),
    ]
    assert kernel.decode_columns(raws, *filled) == rows
    return [column.tolist() for column in filled]


@pytest.mark.slow
@given(sorted_entries(), block_sizes)
def test_both_kernels_decode_blocks_to_the_same_columns(rows: list[EntryTuple], size: int) -> None:
    compiled, interpreted = both("block_reader")
    raws = encode(load_interpreted("block_writer"), rows, size, True)[0]
    assert columns(compiled, raws) == columns(interpreted, raws)


@pytest.mark.slow
@given(sorted_entries(min_size=1, max_size=40), st.data())
def test_both_kernels_decode_or_refuse_a_damaged_block_alike(
    rows: list[EntryTuple], data: st.DataObject
) -> None:
    compiled, interpreted = both("block_reader")
    raw = bytearray(encode(load_interpreted("block_writer"), rows, 4096, True)[0][0])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw)
    for verb in ("decode_rows", "measure"):
        argument: Any = [damaged] if verb == "measure" else damaged
        assert outcome(getattr(compiled, verb), argument) == outcome(getattr(interpreted, verb), argument)
    assert outcome(columns, compiled, [damaged]) == outcome(columns, interpreted, [damaged])
    for key in (rows[0][0], rows[-1][0], b"absent"):
        assert outcome(compiled.lookup_versions, damaged, key, MAX_SEQ) == outcome(
            interpreted.lookup_versions, damaged, key, MAX_SEQ
        )


@given(st.binary(max_size=300))
def test_both_kernels_decode_or_refuse_random_bytes_alike(raw: bytes) -> None:
    compiled, interpreted = both("block_reader")
    assert outcome(compiled.decode_rows, raw) == outcome(interpreted.decode_rows, raw)
    assert outcome(compiled.lookup, raw, b"key", MAX_SEQ) == outcome(interpreted.lookup, raw, b"key", MAX_SEQ)
    compiled_index, interpreted_index = both("index")
    assert outcome(compiled_index.decode_index, raw) == outcome(interpreted_index.decode_index, raw)


def test_checksums_of_all_sizes_equal_those_of_zlib() -> None:
    data = random.Random(1).randbytes(1 << 17)
    for kernel in both("sealing"):
        for size in (*range(400), 4093, 65_536, len(data)):
            assert kernel.checksum(data[size % 7 : size]) == zlib.crc32(data[size % 7 : size])


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=10), st.data())
def test_both_kernels_seal_blocks_alike_and_find_the_first_damaged_one(
    blocks: list[bytes], data: st.DataObject
) -> None:
    bounds = array("q")
    sealed = bytearray()
    for block in blocks:
        bounds.extend((len(sealed), len(sealed) + len(block)))
        sealed += block + bytes(4)
    expected = b"".join(block + zlib.crc32(block).to_bytes(4, "big") for block in blocks)
    at = data.draw(st.integers(0, len(expected) - 1))
    broken = bytearray(expected)
    broken[at] ^= 1
    for kernel in both("sealing"):
        written = bytearray(sealed)
        kernel.stamp(written, bounds)
        assert written == expected
        assert kernel.first_damaged(expected, bounds) == -1
        assert kernel.first_damaged(bytes(broken), bounds) == sum(stop + 4 <= at for stop in bounds[1::2])


@given(st.lists(st.binary(max_size=40), max_size=50), st.integers(1, 30))
def test_both_kernels_build_the_same_bloom_filters(names: list[bytes], bits: int) -> None:
    compiled, interpreted = both("bloom")
    hashes = compiled.hash_keys(names)
    assert hashes == interpreted.hash_keys(names)
    size = (len(names) * bits + 7) // 8
    built = compiled.build(hashes, size, 6)
    assert built == interpreted.build(hashes, size, 6)
    filled = b"\x00\x06" + built
    for name in [*names, b"stranger"]:
        assert compiled.may_contain_key(filled, name) is interpreted.may_contain_key(filled, name)
    assert all(compiled.may_contain_key(filled, name) for name in names)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=30)), max_size=40), st.data())
def test_both_kernels_encode_and_decode_whole_and_damaged_indexes_alike(
    pairs: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    compiled, interpreted = both("index")
    offsets, names = [offset for offset, _ in pairs], [name for _, name in pairs]
    raw = compiled.encode_index(offsets, names)
    assert raw == interpreted.encode_index(offsets, names)
    assert compiled.decode_index(raw) == interpreted.decode_index(raw) == (offsets, names)
    damaged = bytearray(raw)
    damaged[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    assert outcome(compiled.decode_index, bytes(damaged)) == outcome(interpreted.decode_index, bytes(damaged))


@given(keys, keys)
def test_both_kernels_make_the_same_separators_and_they_separate(one: bytes, two: bytes) -> None:
    last, first = sorted((one, two))
    # Each value fills a block.
    rows: list[EntryTuple] = [(last, 2, 0, bytes(1024), None, None), (first, 1, 0, bytes(1024), None, None)]
    separators = [encode(kernel, rows, 1024, True)[2][1] for kernel in both("block_writer")]
    start, between = separators[0]
    assert separators[0] == separators[1]
    assert start == b""
    assert between <= first
    assert between > last or first == last
    assert all(last >= first[:size] for size in range(len(between))) or first == last


def choose_blocks(
    kernel: ModuleType, chunk: bytes, bounds: array[int], previous: bytes, opening: bool, policy: Any
) -> Any:
    choice = kernel.WholeBlocks(1024, want_keys=True, **policy)
    found = []
    at = 0
    while at + 1 < len(bounds) // 2:
        taken = choice.read(chunk, bounds, at, len(bounds) // 2 - 1, previous, opening)
        # Behind a block that was read and does not stay, nothing of it may be left.
        found.append((taken, choice.take() if taken else None))
        at += taken + 1
    return found


series = st.builds(
    lambda first, count, size, kind: [
        (
            b"%06d" % number,
            900 - number,
            kind if number == 40 else VALUE,
            b"" if number == 40 else b"v" * size,
            7,
            None,
        )
        for number in range(first, first + count)
    ],
    st.integers(0, 30),
    st.integers(30, 90),
    st.sampled_from([0, 30, 90, 1100]),
    st.sampled_from([VALUE, TOMBSTONE, MERGE]),
)


@given(
    pieces=st.one_of(sorted_entries(min_size=1), series),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=2),
    previous=st.one_of(st.just(b""), keys),
    opening=st.booleans(),
    policy=st.fixed_dictionaries(
        {"min_seq": seqs, "clock_ms": st.integers(-5, 1 << 40), "keep_tombstones": st.booleans()}
    ),
)
def test_both_kernels_choose_the_same_blocks(
    pieces: list[EntryTuple],
    changes: list[tuple[int, int]],
    previous: bytes,
    opening: bool,
    policy: dict[str, Any],
) -> None:
    compiled, interpreted = both("whole_blocks")
    blocks = encode(load_interpreted("block_writer"), pieces, 1024, True)[0]
    bounds = array("q")
    at = 0
    for block in blocks:
        bounds.extend((at, at + len(block)))
        at += len(block)
    chunk = damaged(b"".join(blocks), changes, 0)
    results = [
        choose_blocks(kernel, chunk, bounds, previous, opening, policy) for kernel in (compiled, interpreted)
    ]
    assert results[0] == results[1]
