from __future__ import annotations

import pytest

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.codec import Codec
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple
from flagstone.wal.replay import decode_wal
from kit.databases import encode_wal

ROWS: list[EntryTuple] = [
    (b"b", 1, VALUE, b"1", 10, None),
    (b"a", 2, TOMBSTONE, b"", 11, None),
    (b"b", 2, MERGE, b"2", 11, 99),
]


@pytest.mark.parametrize("codec", list(Codec))
def test_a_wal_file_decodes_to_its_rows_in_commit_order(codec: Codec) -> None:
    assert decode_wal(encode_wal(ROWS, codec=codec), "wal") == ROWS


def test_a_wal_file_of_many_blocks_decodes_to_all_rows() -> None:
    rows: list[EntryTuple] = [(b"%06d" % n, n, VALUE, bytes(200), n, None) for n in range(1, 2000)]

    assert decode_wal(encode_wal(rows), "wal") == rows


def test_an_empty_wal_file_decodes_as_a_fence() -> None:
    assert decode_wal(b"", "wal") == []


@pytest.mark.parametrize("kept", [1, 9, 10, 11, 60, -1])
def test_a_truncated_or_zeroed_wal_file_raises_corrupt_data(kept: int) -> None:
    for stored in (encode_wal(ROWS)[:kept], bytes(len(encode_wal(ROWS)[:kept]))):
        with pytest.raises(CorruptData, match="wal at byte"):
            decode_wal(stored, "wal")


def test_a_wal_file_without_rows_is_not_encoded() -> None:
    with pytest.raises(InvalidRequest):
        encode_wal([])


def test_a_compacted_sst_does_not_decode_as_a_wal_file() -> None:
    with pytest.raises(CorruptData, match="expected"):
        decode_wal(encode_sst(ROWS[:1], SstOptions()).data, "wal")
