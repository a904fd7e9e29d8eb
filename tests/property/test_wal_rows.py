"""Replay without a Python object per row accepts what the row decoder accepts, and builds the same memtable."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flagstone.errors import CorruptData
from flagstone.format import plain_wal
from flagstone.format.codec import Codec
from flagstone.format.plain_wal import find_plain_blocks
from flagstone.format.sst import decode_sst
from flagstone.format.sst_info import SstType
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.types import VALUE, EntryTuple
from flagstone.wal import replay
from flagstone.wal.replay import WalRows, decode_wal, open_wal
from kit.kernels import damaged, forms_of, outcome, replaced_kernels
from kit.strategies import entries, sorted_entries

both_forms = pytest.mark.parametrize("form", forms_of("block_reader"))
rows_of_a_file = st.lists(entries(), min_size=1, max_size=60)
damages = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=3)


def kernel_of(form: str, name: str) -> Any:
    return load_compiled(name) if form == "compiled" else load_interpreted(name)


def joined(blocks: list[bytes]) -> tuple[bytes, array[int]]:
    """The blocks as a chunk that has other bytes around each of them."""
    chunk, bounds = b"\xff", array("q")
    for block in blocks:
        bounds.extend((len(chunk), len(chunk) + len(block)))
        chunk += block + b"\xff\xff\xff\xff"
    return chunk, bounds


def contents(memtable: Any) -> tuple[Any, ...]:
    stream = bytearray(1 << 20)
    _, used = memtable.wal_stream((0, 0), memtable.position(), stream)
    return bytes(stream[:used]), len(memtable), memtable.size(), memtable.newest_seq(), memtable.merges()


def build(rows: list[EntryTuple], options: SstOptions, sst_type: SstType = SstType.WAL) -> bytes:
    return encode_sst(rows, options, sst_type=sst_type).data


def blocks_of(rows: list[EntryTuple], block_bytes: int = 65536) -> list[bytes]:
    """The blocks of a WAL file with these rows."""
    image = decode_sst(build(rows, SstOptions(block_bytes=block_bytes)), "wal")
    return [image.block(number) for number in range(len(image.index))]


def decoded(stored: bytes) -> list[EntryTuple]:
    """The rows of a file, by the general path alone."""
    return [row for block in decode_sst(stored, "wal").rows() for row in block]


@both_forms
@given(
    rows=rows_of_a_file, after_seq=st.one_of(st.just(0), entries().map(lambda row: row[1])), data=st.data()
)
def test_rows_inserted_from_blocks_are_those_inserted_as_tuples(
    form: str, rows: list[EntryTuple], after_seq: int, data: st.DataObject
) -> None:
    reader, memtable = kernel_of(form, "block_reader"), kernel_of(form, "memtable")
    chunk, bounds = joined(blocks_of(rows, data.draw(st.sampled_from([1024, 4096, 65536]))))
    numbers = [row[1] for row in rows]
    after_seq = data.draw(st.sampled_from([after_seq, *numbers]))

    assert reader.check_rows(chunk, bounds) == (
        len(rows),
        min(numbers),
        max(numbers),
        max(len(row[0]) for row in rows),
    )
    expected, found = memtable.Memtable(), memtable.Memtable()
    returned = expected.insert_rows([row for row in rows if row[1] > after_seq])

    assert found.insert_blocks(chunk, bounds, after_seq) == returned
    assert contents(found) == contents(expected)


@both_forms
@given(rows=st.lists(entries(), min_size=1, max_size=40), changes=damages, cut=st.integers(0, 3))
def test_a_damaged_block_is_accepted_or_refused_as_by_the_row_decoder(
    form: str, rows: list[EntryTuple], changes: list[tuple[int, int]], cut: int
) -> None:
    reader, memtable = kernel_of(form, "block_reader"), kernel_of(form, "memtable")
    block = damaged(blocks_of(rows)[0], changes, cut)
    expected = outcome(reader.decode_rows, block)
    chunk, bounds = joined([block])
    found = outcome(reader.check_rows, chunk, bounds)
    if not isinstance(expected, list):
        assert found == expected
        return
    assert found[:3] == (len(expected), min(row[1] for row in expected), max(row[1] for row in expected))
    one, other = memtable.Memtable(), memtable.Memtable()
    other.insert_rows(expected)
    one.insert_blocks(chunk, bounds, 0)
    assert len(one) == sum(row[1] > 0 for row in expected)
    assert one.newest_seq() == other.newest_seq()


@both_forms
@given(raw=st.binary(max_size=200), start=st.integers(-2, 220), stop=st.integers(-2, 220))
@example(raw=b"\0\0\0\0\0\0\1", start=0, stop=7)
def test_blocks_that_were_not_checked_never_reach_past_their_chunk(
    form: str, raw: bytes, start: int, stop: int
) -> None:
    memtable = kernel_of(form, "memtable").Memtable()
    bounds = array("q", [start, stop])
    try:
        memtable.insert_blocks(raw, bounds, 0)
    except ValueError:
        pass
    else:
        assert 0 <= start < stop <= len(raw)
    try:
        kernel_of(form, "block_reader").check_rows(raw, bounds)
    except (ValueError, CorruptData):
        return
    assert 0 <= start < stop <= len(raw)


@both_forms
@given(
    rows=rows_of_a_file,
    options=st.builds(
        SstOptions,
        block_bytes=st.sampled_from([1024, 65536]),
        codec=st.sampled_from([Codec.NONE, Codec.NONE, Codec.ZLIB]),
    ),
    changes=damages,
    cut=st.integers(0, 3),
)
def test_a_damaged_wal_file_gives_the_error_of_the_general_path(
    form: str, rows: list[EntryTuple], options: SstOptions, changes: list[tuple[int, int]], cut: int
) -> None:
    stored = damaged(build(rows, options), changes, cut)
    uses = {
        (replay, "block_reader"): "block_reader",
        (plain_wal, "sealing"): "sealing",
        (plain_wal, "index_kernel"): "index",
    }
    with replaced_kernels(form, uses):
        assert outcome(decode_wal, stored, "wal") == outcome(decoded, stored)


@given(rows=rows_of_a_file, block_bytes=st.sampled_from([1024, 4096, 65536]))
def test_an_uncompressed_wal_file_takes_the_fast_path(rows: list[EntryTuple], block_bytes: int) -> None:
    stored = build(rows, SstOptions(block_bytes=block_bytes))
    index = decode_sst(stored, "wal").index
    bounds = find_plain_blocks(stored)
    assert bounds is not None
    assert list(zip(bounds[::2], bounds[1::2], strict=True)) == [
        (start, stop - 4) for start, stop in zip(index.offsets, index.stops, strict=True)
    ]


@given(
    rows=sorted_entries(min_size=1, max_size=20), codec=st.sampled_from([Codec.ZLIB, Codec.LZ4, Codec.ZSTD])
)
def test_other_files_do_not_take_the_fast_path(rows: list[EntryTuple], codec: Codec) -> None:
    assert find_plain_blocks(build(rows, SstOptions(), SstType.COMPACTED)) is None
    compressed = build(rows, SstOptions(codec=codec))
    assert find_plain_blocks(compressed) is None
    assert open_wal(compressed, "wal").decode() == rows


@both_forms
def test_keys_that_are_too_long_for_a_memtable_are_found_and_not_inserted(form: str) -> None:
    reader, memtable = kernel_of(form, "block_reader"), kernel_of(form, "memtable").Memtable()
    size = 65_536
    # A row as SlateDB writes it: no shared bytes, the lengths of key and value, the key, sequence number and flags.
    row = b"\0" + b"\x80\x80\x04" + b"\0" + bytes(size) + (7).to_bytes(8, "big") + b"\0"
    block = row + b"\0\0" + b"\0\1"
    bounds = array("q", [0, len(block)])

    assert reader.check_rows(block, bounds) == (1, 7, 7, size)
    with pytest.raises(ValueError, match="too long"):
        memtable.insert_blocks(block, bounds, 0)
    content = WalRows(block, bounds)
    assert content.has_long_key
    assert content.decode() == [(bytes(size), 7, VALUE, b"", None, None)]
    assert len(memtable) == 0
