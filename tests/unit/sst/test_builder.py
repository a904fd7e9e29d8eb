"""`SstBuilder`: what it builds at the limits, and what it refuses."""

from __future__ import annotations

import pytest

from flagstone.errors import InvalidRequest
from flagstone.format.sst import decode_sst
from flagstone.format.sst_info import SstType
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.types import TOMBSTONE, VALUE, EntryTuple
from kit.ssts import MemoryBuilder


def row(key: bytes, seq: int = 1, value: bytes = b"value", kind: int = VALUE) -> EntryTuple:
    return (key, seq, kind, value, 1_700_000_000_000, None)


def rebuilt(rows: list[EntryTuple], **options: int) -> list[EntryTuple]:
    encoded = encode_sst(rows, SstOptions(**options))  # type: ignore[arg-type]
    return [found for block in decode_sst(encoded.data, "sst").rows() for found in block]


def test_an_sst_without_rows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one row"):
        encode_sst([])


def test_the_longest_key_and_a_value_larger_than_a_block_are_read_back() -> None:
    rows = [row(b"a", value=b"v" * 300_000), row(b"k" * 65_535), row(b"z", value=b"")]
    assert rebuilt(rows, block_bytes=1024) == rows


def test_versions_of_one_key_in_several_blocks_are_read_back() -> None:
    rows = [row(b"hot", seq, b"x" * 100) for seq in range(500, 0, -1)]
    assert rebuilt(rows, block_bytes=1024) == rows


@pytest.mark.parametrize("key", [b"", b"k" * 65_536])
def test_keys_outside_the_limits_are_refused(key: bytes) -> None:
    with pytest.raises(InvalidRequest, match="1 to 65535 bytes"):
        encode_sst([row(key)])


def test_a_tombstone_with_a_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is not a row"):
        encode_sst([row(b"k", kind=TOMBSTONE, value=b"x")])


@pytest.mark.parametrize(
    "rows",
    [
        [row(b"b"), row(b"a")],
        [row(b"ab"), row(b"a")],
        [row(b"a", 1), row(b"a", 2)],
        [row(b"a", 1), row(b"a", 1)],
    ],
)
def test_rows_out_of_order_are_refused_even_across_calls(rows: list[EntryTuple]) -> None:
    builder = MemoryBuilder()
    builder.add_rows(rows[:1])
    with pytest.raises(InvalidRequest, match="row 1"):
        builder.add_rows(rows[1:])


def test_a_wal_file_accepts_any_order_and_has_neither_filter_nor_statistics() -> None:
    rows = [row(b"b", 1), row(b"a", 2), row(b"b", 3)]
    image = decode_sst(encode_sst(rows, SstOptions(min_filter_keys=1), sst_type=SstType.WAL).data, "wal")
    assert [found for block in image.rows() for found in block] == rows
    assert (image.info.filter_len, image.info.stats_len, image.info.last_entry) == (0, 0, None)
    assert image.info.first_entry == (1).to_bytes(8, "big")


def test_an_sst_has_a_filter_from_min_filter_keys_on() -> None:
    for count, expected in ((9, False), (10, True)):
        encoded = encode_sst(
            [row(b"%03d" % number) for number in range(count)], SstOptions(min_filter_keys=10)
        )
        assert (decode_sst(encoded.data, "sst").filters() is not None) is expected


@pytest.mark.parametrize("size", [0, 1000, 131_072])
def test_a_block_size_that_the_format_lacks_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match="choose one of 1024"):
        SstOptions(block_bytes=size)
