"""Round trips of the whole format, and the promise that damage is always found."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format import columns
from flagstone.format.codec import Codec, decompress, seal, unseal
from flagstone.format.filter import BloomPolicy, FixedPrefix, decode_filters
from flagstone.format.sst import decode_footer, decode_sst
from flagstone.format.sst_info import FilterFormat, SstType
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.types import EntryTuple
from kit.ssts import MemoryBuilder
from kit.strategies import entries, sorted_entries

codecs = st.sampled_from(list(Codec))
options = st.builds(
    SstOptions,
    block_bytes=st.sampled_from([1024, 4096, 65536]),
    codec=codecs,
    min_filter_keys=st.sampled_from([1, 20]),
    filters=st.sampled_from([(), (BloomPolicy(),), (BloomPolicy(), BloomPolicy(7, FixedPrefix("two", 2)))]),
)


def build(rows: list[EntryTuple], chosen: SstOptions, sst_type: SstType = SstType.COMPACTED) -> bytes:
    builder = MemoryBuilder(chosen, sst_type=sst_type)
    for start in range(0, len(rows), 7):
        builder.add_rows(rows[start : start + 7])
    return builder.encoded().data


def read_everything(data: bytes) -> list[EntryTuple]:
    image = decode_sst(data, "sst")
    image.filters()
    image.stats()
    return [row for block in image.rows() for row in block]


@pytest.mark.slow
@given(sorted_entries(min_size=1), options)
def test_an_sst_decodes_to_its_rows(rows: list[EntryTuple], chosen: SstOptions) -> None:
    data = build(rows, chosen)
    image = decode_sst(data, "sst")
    assert [row for block in image.rows() for row in block] == rows
    assert (image.info.first_entry, image.info.last_entry) == (rows[0][0], rows[-1][0])
    filters = image.filters()
    assert (filters is not None) == (bool(chosen.filters) and len(rows) >= chosen.min_filter_keys)
    for row in rows:
        assert filters is None or filters.may_contain(row[0])


@given(st.lists(entries(), min_size=1, max_size=60), codecs)
def test_a_wal_file_keeps_commit_order(rows: list[EntryTuple], codec: Codec) -> None:
    rows.sort(key=lambda row: row[1])
    assert read_everything(build(rows, SstOptions(codec=codec), SstType.WAL)) == rows


@given(sorted_entries(min_size=1, max_size=40), options, st.data())
def test_one_changed_byte_of_an_sst_raises_corrupt_data(
    rows: list[EntryTuple], chosen: SstOptions, data: st.DataObject
) -> None:
    raw = bytearray(build(rows, chosen))
    raw[data.draw(st.integers(0, len(raw) - 1), label="offset")] ^= data.draw(
        st.integers(1, 255), label="bits"
    )
    with pytest.raises(CorruptData) as caught:
        read_everything(bytes(raw))
    assert caught.value.object == "sst"
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(raw)


@given(sorted_entries(min_size=1, max_size=40), options, st.data())
def test_a_truncated_sst_raises_corrupt_data(
    rows: list[EntryTuple], chosen: SstOptions, data: st.DataObject
) -> None:
    raw = build(rows, chosen)
    with pytest.raises(CorruptData):
        read_everything(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(st.binary(max_size=400))
def test_random_bytes_never_decode_as_an_sst(raw: bytes) -> None:
    with pytest.raises(CorruptData):
        read_everything(raw)


@given(st.binary(max_size=3000), codecs)
def test_a_sealed_block_opens_to_the_same_bytes(raw: bytes, codec: Codec) -> None:
    assert unseal(seal(raw, codec), codec) == raw


@given(st.binary(max_size=200), st.sampled_from([codec for codec in Codec if codec is not Codec.NONE]))
def test_random_bytes_decompress_or_raise_corrupt_data(raw: bytes, codec: Codec) -> None:
    try:
        assert isinstance(decompress(codec, raw), bytes)
    except CorruptData as error:
        assert codec.title in error.problem


@given(st.binary(max_size=100), st.sampled_from(FilterFormat))
def test_random_filter_blocks_decode_or_raise_corrupt_data(raw: bytes, form: FilterFormat) -> None:
    try:
        decode_filters(raw, form).may_contain(b"key")
    except CorruptData as error:
        assert error.offset is not None


@given(st.binary(min_size=10, max_size=64), st.integers(0, 2**40))
def test_random_footers_need_more_bytes_or_raise_corrupt_data(tail: bytes, size: int) -> None:
    try:
        needed = decode_footer(tail, size)
    except CorruptData:
        return
    assert isinstance(needed, int)
    assert len(tail) < needed <= size


@given(sorted_entries())
def test_columns_decode_to_the_same_rows(rows: list[EntryTuple]) -> None:
    assume(rows)
    image = decode_sst(encode_sst(rows, SstOptions(min_filter_keys=1)).data, "sst")
    batch = columns.decode_columns([image.block(number) for number in range(len(image.index))])
    names = ("key", "seq", "kind", "value", "created_ms", "expires_ms")
    assert [tuple(row[name] for name in names) for row in batch.to_pylist()] == rows


@given(st.lists(entries(), min_size=2, max_size=20))
def test_an_sst_builder_refuses_rows_out_of_order(rows: list[EntryTuple]) -> None:
    ordered = sorted(rows, key=lambda row: (row[0], -row[1]))
    assume(rows != ordered)
    with pytest.raises(InvalidRequest, match="row"):
        encode_sst(rows)
