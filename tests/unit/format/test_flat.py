"""FlatBuffers: the exact bytes are written, and any bytes decode to values or raise `CorruptData`."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from flagstone.errors import CorruptData, InternalError
from flagstone.format import flat
from flagstone.format.codec import Codec
from flagstone.format.sst_info import (
    BlockStats,
    SsTableInfo,
    SstStats,
    SstType,
    decode_info,
    decode_stats,
    encode_info,
    encode_stats,
)


def plain(name: str, *fields: flat.Field, order: tuple[int, ...] | None = None) -> flat.Shape[Any]:
    return flat.Shape(name, *fields, make=tuple, take=lambda value: value, order=order)


PAIR = plain("Pair", flat.U64, flat.U64)
LEAF = plain("Leaf", flat.U64, flat.Bytes(required=True))
INDEX = plain("Index", flat.Children(LEAF, required=True))
EVERYTHING = plain(
    "Everything",
    flat.BOOL,
    flat.I8,
    flat.OPTIONAL_U16,
    flat.U32,
    flat.I64,
    flat.Text(),
    flat.Numbers(),
    flat.Child(PAIR),
    flat.Children(LEAF),
    flat.U8,
    flat.Union({1: PAIR, 2: LEAF}),
)
FULL = (
    *(True, -3, 0, 7, -(2**63), "größe", (1, 2**32 - 1), (5, 2**64 - 1), ((0, b""), (9, b"k")), 2),
    (1, b"union"),
)


def test_the_smallest_buffer_has_the_known_bytes() -> None:
    empty = plain("Empty", flat.U64, flat.Children(PAIR, required=True))
    assert flat.encode(empty, (0, ())).hex() == "0c0000000800080000000400080000000400000000000000"


def test_a_buffer_with_every_kind_of_field_decodes_to_its_values() -> None:
    assert flat.decode(EVERYTHING, flat.encode(EVERYTHING, FULL)) == FULL


def test_defaults_are_not_written_and_are_decoded() -> None:
    nothing = (False, 0, None, 0, 0, None, None, None, None, 0, None)
    data = flat.encode(EVERYTHING, nothing)
    assert len(data) == 12  # offset of the root, bare vtable, distance to it
    assert flat.decode(EVERYTHING, memoryview(data)) == nothing


def test_an_optional_number_is_written_even_when_zero() -> None:
    shape = plain("Optional", flat.OPTIONAL_U16)
    assert flat.decode(shape, flat.encode(shape, (0,))) == (0,)
    assert flat.decode(shape, flat.encode(shape, (None,))) == (None,)


def test_equal_vtables_are_written_once() -> None:
    data = flat.encode(INDEX, (((4, b"abcd"),) * 10,))
    assert data.count(struct.pack("<4H", 8, 16, 8, 4)) == 1


def test_children_are_written_in_the_order_of_the_shape() -> None:
    forth = plain("Forth", flat.Bytes(), flat.Bytes())
    back = plain("Back", flat.Bytes(), flat.Bytes(), order=(1, 0))
    value = (b"first", b"other")
    assert flat.encode(forth, value).index(b"first") > flat.encode(forth, value).index(b"other")
    assert flat.encode(back, value).index(b"first") < flat.encode(back, value).index(b"other")
    assert flat.decode(back, flat.encode(back, value)) == value


def test_an_order_that_lacks_a_child_is_refused() -> None:
    with pytest.raises(InternalError, match="order"):
        plain("Wrong", flat.Bytes(), flat.Bytes(), order=(1,))


def test_unknown_newer_fields_are_ignored() -> None:
    newer = plain("Newer", flat.U64, flat.U64, flat.Bytes())
    assert flat.decode(PAIR, flat.encode(newer, (1, 2, b"new"))) == (1, 2)


def test_a_missing_required_field_is_refused_on_encoding_and_decoding() -> None:
    loose = plain("Leaf", flat.U64, flat.Bytes())
    with pytest.raises(CorruptData, match="lacks required field 1"):
        flat.decode(LEAF, flat.encode(loose, (3, None)))
    with pytest.raises(InternalError, match="required field 1"):
        flat.encode(LEAF, (3, None))


def test_a_number_that_does_not_fit_raises_internal_error() -> None:
    with pytest.raises(InternalError, match="Pair"):
        flat.encode(PAIR, (2**64, 0))


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 4, b"\0" * 7, b"\0" * 8, b"\xff" * 64, b"\x08\0\0\0" + b"\0" * 16]
)
def test_garbage_raises_corrupt_data_with_an_offset(data: bytes) -> None:
    with pytest.raises(CorruptData) as caught:
        flat.decode(EVERYTHING, data)
    assert caught.value.offset is not None


def patched(data: bytes, at: int, code: str, value: int) -> bytes:
    copy = bytearray(data)
    struct.pack_into(code, copy, at, value)
    return bytes(copy)


TEXT = plain("T", flat.Text())


def test_a_string_without_its_terminator_raises_corrupt_data() -> None:
    data = flat.encode(TEXT, ("abc",))
    at = data.index(b"abc\0") + 3
    with pytest.raises(CorruptData, match="NUL") as caught:
        flat.decode(TEXT, patched(data, at, "B", 1))
    assert caught.value.offset == at


def test_a_string_that_is_not_utf8_raises_corrupt_data() -> None:
    data = flat.encode(TEXT, ("abc",))
    at = data.index(b"abc")
    with pytest.raises(CorruptData, match="UTF-8") as caught:
        flat.decode(TEXT, patched(data, at + 1, "B", 0xFF))
    assert caught.value.offset == at + 1


def test_a_vector_past_the_end_of_the_buffer_raises_corrupt_data() -> None:
    data = flat.encode(plain("B", flat.Bytes()), (b"abcd",))
    with pytest.raises(CorruptData, match="past the end"):
        flat.decode(plain("B", flat.Bytes()), patched(data, data.index(b"abcd") - 4, "<I", 2**32 - 1))


def test_misaligned_fields_are_refused() -> None:
    data = flat.encode(PAIR, (1, 2))
    shifted = struct.pack("<I", struct.unpack_from("<I", data)[0] + 4) + b"\0" * 4 + data[4:]
    with pytest.raises(CorruptData, match="misaligned"):
        flat.decode(PAIR, shifted)


def test_fields_that_overlap_are_refused() -> None:
    vtable = struct.pack("<4H", 8, 12, 4, 4)
    data = struct.pack("<I", 12) + vtable + struct.pack("<iII", 8, 0, 0)
    with pytest.raises(CorruptData, match="misplaced"):
        flat.decode(plain("Two", flat.U32, flat.U32), data)


def test_a_union_of_an_unknown_kind_raises_corrupt_data() -> None:
    data = flat.encode(EVERYTHING, FULL)
    unknown = plain("Everything", *EVERYTHING.fields[:10], flat.Union({1: PAIR}))
    with pytest.raises(CorruptData, match="unknown kind 2") as caught:
        flat.decode(unknown, data)
    assert caught.value.offset is not None


def test_an_error_raised_by_make_gets_an_offset() -> None:
    def refuse(values: list[Any]) -> None:
        raise CorruptData(f"bad pair {values}")

    picky = flat.Shape("Pair", flat.U64, flat.U64, make=refuse, take=lambda _: ())
    with pytest.raises(CorruptData, match="bad pair") as caught:
        flat.decode(picky, flat.encode(PAIR, (1, 2)))
    assert caught.value.offset is not None


@pytest.mark.slow
def test_a_small_buffer_that_expands_to_a_huge_value_raises_corrupt_data() -> None:
    """Of 20 000 offsets each leads to the same table, which has 20 000 children of its own."""
    inner = plain("Inner", flat.Children(PAIR))
    outer = plain("Outer", flat.Children(inner))
    count = 20_000
    data = flat.encode(outer, (((((1, 2),) * count,),),))
    table = struct.unpack_from("<I", data)[0]
    vector = table + 4 + struct.unpack_from("<I", data, table + 4)[0]
    target = vector + 4 + struct.unpack_from("<I", data, vector + 4)[0]
    front = struct.pack("<IHHHHiI", 12, 6, 8, 4, 0, 8, 4)
    offsets = [4 * (count - position) + target for position in range(count)]
    bomb = front + struct.pack(f"<{count + 1}I", count, *offsets) + data
    with pytest.raises(CorruptData, match="exceed the size of the buffer"):
        flat.decode(outer, bomb)


@pytest.mark.slow
def test_any_damaged_byte_gives_a_value_or_corrupt_data() -> None:
    whole = flat.encode(EVERYTHING, FULL)
    places = set()
    for at in range(len(whole)):
        for byte in range(256):
            try:
                flat.decode(EVERYTHING, whole[:at] + bytes([byte]) + whole[at + 1 :])
            except CorruptData as error:
                places.add(error.offset)
    assert len(places) > 20
    assert None not in places


def test_every_truncation_raises_corrupt_data() -> None:
    whole = flat.encode(EVERYTHING, FULL)
    for length in range(len(whole) - 8):
        with pytest.raises(CorruptData):
            flat.decode(EVERYTHING, whole[:length])


def test_an_encoded_sst_info_decodes_to_itself() -> None:
    info = SsTableInfo(b"a", None, 1, 2, 3, 4, Codec.ZSTD, SstType.WAL, 5, 6)
    assert decode_info(encode_info(info)) == info


@pytest.mark.parametrize("slot", [5, 6, 10])
def test_an_sst_info_with_an_unknown_enumeration_raises_corrupt_data(slot: int) -> None:
    values: list[Any] = [b"k", 0, 0, 0, 0, 0, 0, None, 0, 0, 0]
    values[slot] = 99
    loose = plain(
        *("SsTableInfo", flat.Bytes(), flat.U64, flat.U64, flat.U64, flat.U64, flat.I8, flat.I8),
        *(flat.Bytes(), flat.U64, flat.U64, flat.I8),
    )
    with pytest.raises(CorruptData, match="99"):
        decode_info(flat.encode(loose, values))


def test_encoded_sst_statistics_decode_to_themselves() -> None:
    stats = SstStats(1, 2, 3, 4, 5, (BlockStats(0, 0, 0), BlockStats(1, 2, 65535)))
    assert decode_stats(encode_stats(stats)) == stats
    assert decode_stats(encode_stats(SstStats())) == SstStats()


def test_codec_titles_are_those_of_the_settings() -> None:
    assert [codec.title for codec in Codec] == ["None", "Snappy", "Zlib", "Lz4", "Zstd"]
