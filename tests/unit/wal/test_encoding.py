from __future__ import annotations

import pytest

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.codec import Codec, seal
from flagstone.format.sst import FORMAT_V1, encode_footer
from flagstone.format.sst_info import SsTableInfo, SstType
from flagstone.kernels import index as index_kernel
from flagstone.kernels import memtable as kernel
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple
from flagstone.wal.replay import decode_wal, open_wal
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


def test_rows_of_block_format_1_reach_a_memtable() -> None:
    entries = [b"\0\0\0\1" + b"a" + (5).to_bytes(8, "big") + b"\0" + (1).to_bytes(4, "big") + b"x"]
    entries.append(b"\0\1\0\1" + b"b" + (6).to_bytes(8, "big") + b"\1")
    offsets = b"".join(offset.to_bytes(2, "big") for offset in (0, len(entries[0])))
    data = seal(b"".join(entries) + offsets + b"\0\2")
    index = seal(index_kernel.encode_index([0], [b""]))
    info = SsTableInfo(None, None, len(data), len(index), len(data), 0, sst_type=SstType.WAL)
    content = open_wal(data + index + encode_footer(info, len(data) + len(index), FORMAT_V1), "wal")
    memtable = kernel.Memtable()

    assert (content.count, content.first_seq, content.last_seq) == (2, 5, 6)
    assert content.decode() == [(b"a", 5, VALUE, b"x", None, None), (b"ab", 6, TOMBSTONE, b"", None, None)]
    assert content.insert_into(memtable, after_seq=5) == (6, None)
    assert memtable.scan(None, None, 9, False).next_rows(9) == [(b"ab", 6, TOMBSTONE, b"", None, None)]
