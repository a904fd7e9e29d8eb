"""Changes as columns: the same as the changes row by row, for every kind of row, file and load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone import Admin, CorruptData, InvalidRequest
from flagstone.changes.change import Change, change_of
from flagstone.changes.columns import (
    CHANGE_COLUMNS,
    FileRows,
    check_sequence,
    decode_load,
    file_batches,
    within,
)
from flagstone.format.codec import Codec
from flagstone.loads.edit import find_load
from flagstone.loads.rows import LoadRows, fetch_load_ssts, wanted_blocks
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import DatabaseAddress, open_manifests, open_store
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, KeyRange, WalId
from flagstone.wal.replay import WalRows, open_wal
from kit.databases import encode_wal
from kit.spark_loads import load, pairs
from kit.strategies import user_keys

TIMES = st.none() | st.integers(0, 2**50)


@st.composite
def rows(draw: st.DrawFn) -> list[EntryTuple]:
    kinds = draw(st.lists(st.sampled_from((VALUE, VALUE, TOMBSTONE, MERGE)), min_size=1, max_size=30))
    return [
        (
            draw(user_keys),
            seq,
            kind,
            b"" if kind == TOMBSTONE else draw(st.binary(max_size=20)),
            draw(TIMES),
            None if kind == TOMBSTONE else draw(TIMES),
        )
        for seq, kind in enumerate(kinds, draw(st.integers(1, 2**40)))
    ]


def changes_of(batches: Iterable[pa.RecordBatch]) -> list[Change]:
    made = list(batches)
    for batch in made:
        assert batch.schema == CHANGE_COLUMNS
        batch.validate(full=True)
    return [Change(**row) for batch in made for row in batch.to_pylist()]


def changes_in(files: list[list[EntryTuple]]) -> list[Change]:
    return [change_of(row, WalId(7 + at)) for at, each in enumerate(files) for row in each]


@given(st.lists(rows(), max_size=5), st.sampled_from((Codec.NONE, Codec.ZLIB)))
def test_columns_of_wal_files_equal_their_rows(files: list[list[EntryTuple]], codec: Codec) -> None:
    opened = [
        FileRows(WalId(7 + at), open_wal(encode_wal(each, codec=codec), "wal"))
        for at, each in enumerate(files)
    ]

    assert changes_of(file_batches(opened)) == changes_in(files)


@given(st.lists(rows(), max_size=3))
def test_columns_of_files_in_an_older_format_equal_their_rows(files: list[list[EntryTuple]]) -> None:
    opened = [FileRows(WalId(7 + at), WalRows.from_rows(each)) for at, each in enumerate(files)]

    assert changes_of(file_batches(opened)) == changes_in(files)


def test_a_large_file_comes_in_several_batches_and_small_ones_in_one() -> None:
    large = [(b"k%05d" % number, number, VALUE, bytes(1000), None, None) for number in range(1, 6001)]
    small = [[(b"s", 6000 + number, VALUE, b"v", None, None)] for number in range(1, 50)]
    files = [large, *small]
    opened = [FileRows(WalId(7 + at), open_wal(encode_wal(each), "wal")) for at, each in enumerate(files)]

    batches = list(file_batches(opened))

    assert len(batches) == 4
    assert changes_of(batches) == changes_in(files)


def test_a_fence_has_no_changes() -> None:
    assert list(file_batches([FileRows(WalId(1), open_wal(b"", "wal"))])) == []


@given(rows(), user_keys, user_keys)
def test_a_range_leaves_only_its_keys(each: list[EntryTuple], start: bytes, stop: bytes) -> None:
    (batch,) = file_batches([FileRows(WalId(7), WalRows.from_rows(each))])
    for keys in (KeyRange(start), KeyRange(None, stop), KeyRange(start, stop), KeyRange()):
        expected = [change for change in changes_in([each]) if change.key in keys]

        assert changes_of([within(batch, keys)]) == expected


def test_a_missing_sequence_number_raises_and_a_shared_one_does_not() -> None:
    def batch(*seqs: int) -> pa.RecordBatch:
        (made,) = file_batches(
            [FileRows(WalId(1), WalRows.from_rows([(b"k", seq, VALUE, b"", None, None) for seq in seqs]))]
        )
        return made

    assert check_sequence(batch(4, 4, 5, 5, 6), 3) == 6
    assert (
        check_sequence(batch(100, 101), -1) == 101
    )  # a consumer that begins at a file knows no number before it
    assert check_sequence(batch(2, 3), 7) == 7  # rows that came with the copy
    with pytest.raises(InvalidRequest, match="sequence numbers 5 to 5 are not in the WAL"):
        check_sequence(batch(4, 6), 3)
    with pytest.raises(InvalidRequest, match="sequence numbers 4 to 4 are not in the WAL"):
        check_sequence(batch(5, 6), 3)


def pieces_of(folder: Path, seq: int, keys: KeyRange) -> list[Any]:
    address = DatabaseAddress(str(folder))
    store, paths = open_store(address)
    manifests = open_manifests(address)
    found = find_load(manifests.require_latest().value, seq)
    assert found is not None
    reader = LoadRows(store, paths, pool=shared_pool())
    return [piece for sst in fetch_load_ssts(manifests, found) for piece in reader.encoded(found, sst, keys)]


def test_columns_of_a_load_equal_its_rows_and_other_blocks_are_not_read(tmp_path: Path) -> None:
    rows = pairs({b"k%05d" % number: bytes(100) for number in range(2000)})
    report = load(
        tmp_path / "db", [{**rows, "op": ["delete" if at % 3 == 0 else "put" for at in range(2000)]}]
    )
    keys = KeyRange(b"k00500", b"k00600")

    pieces = pieces_of(tmp_path / "db", report.seq, KeyRange())
    some = pieces_of(tmp_path / "db", report.seq, keys)

    expected = [change_of(row, None) for piece in pieces for row in piece.rows()]
    assert len(expected) == 2000
    assert changes_of(map(decode_load, pieces)) == expected
    assert sum(len(piece.blocks) for piece in some) < sum(len(piece.blocks) for piece in pieces) / 5
    assert changes_of(within(decode_load(piece), keys) for piece in some) == [
        change for change in expected if change.key in keys
    ]
    assert Admin(tmp_path / "db").verify().ok


def test_a_damaged_block_of_a_load_is_named(tmp_path: Path) -> None:
    report = load(tmp_path / "db", [pairs({b"k%05d" % number: bytes(100) for number in range(200)})])
    (piece, *_) = pieces_of(tmp_path / "db", report.seq, KeyRange())
    damaged = piece._replace(blocks=[piece.blocks[0], piece.blocks[1][:40], *piece.blocks[2:]])

    with pytest.raises(CorruptData, match="block 1") as raised:
        decode_load(damaged)
    assert raised.value.object == piece.sst.path


def test_blocks_are_chosen_by_their_first_keys() -> None:
    first_keys = [b"", b"b", b"d"]

    assert wanted_blocks(first_keys, KeyRange()) == range(3)
    assert wanted_blocks(first_keys, KeyRange(b"a", b"b")) == range(1)
    assert wanted_blocks(first_keys, KeyRange(b"b", b"c")) == range(2)
    assert wanted_blocks(first_keys, KeyRange(b"c")) == range(1, 3)
    assert wanted_blocks(first_keys, KeyRange(b"x", b"y")) == range(2, 3)
