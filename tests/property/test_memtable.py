"""The memtable against a dictionary, in both forms of the kernel."""

from __future__ import annotations

import random
import struct
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.kernels import load_compiled, load_interpreted
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple
from kit.strategies import neighbours, short_keys

pytestmark = pytest.mark.slow

KERNELS = [pytest.param(load_interpreted("memtable"), id="interpreted")]
if load_compiled("memtable") is not None:
    KERNELS.append(pytest.param(load_compiled("memtable"), id="compiled"))
both_forms = pytest.mark.parametrize("kernel", KERNELS)

keys = st.one_of(
    short_keys(max_size=5),
    neighbours,
    st.binary(min_size=1, max_size=10),
    st.integers(0, 50).map(lambda number: b"shared-prefix-%04d" % number),
)
# Also numbers that do not fit into the short header of a row.
times = st.one_of(st.none(), st.integers(-5, 20), st.sampled_from([2**48 - 1, 2**48, 2**63 - 1, 1 - 2**63]))


@st.composite
def commits(draw: st.DrawFn) -> list[EntryTuple]:
    """Rows in commit order: sequence numbers ascend."""
    rows: list[EntryTuple] = []
    for number in range(draw(st.integers(0, 60))):
        kind = draw(st.sampled_from([VALUE, VALUE, TOMBSTONE, MERGE]))
        value = b"" if kind == TOMBSTONE else draw(st.binary(max_size=12))
        rows.append((draw(keys), number + 1, kind, value, draw(times), draw(times)))
    return rows


def filled(kernel: ModuleType, rows: list[EntryTuple], sort_after: int) -> Any:
    memtable = kernel.Memtable()
    for number, row in enumerate(rows):
        memtable.insert(*row)
        if number == sort_after:
            memtable.sort()
    return memtable


def versions(rows: list[EntryTuple], key: bytes, max_seq: int) -> list[EntryTuple]:
    return [row for row in reversed(rows) if row[0] == key and row[1] <= max_seq]


@both_forms
@given(rows=commits(), max_seq=st.integers(0, 70), sort_after=st.integers(0, 60))
def test_get_returns_the_newest_visible_row(
    kernel: ModuleType, rows: list[EntryTuple], max_seq: int, sort_after: int
) -> None:
    memtable = filled(kernel, rows, sort_after)
    assert len(memtable) == len(rows)
    for key in {row[0] for row in rows} | {b"absent"}:
        expected = versions(rows, key, max_seq)
        newest = expected[0] if expected else None
        assert memtable.versions(key, max_seq) == expected
        assert memtable.get(key, max_seq) == newest
        simple = newest is not None and newest[2] == VALUE and newest[5] is None
        assert memtable.get_value(key, max_seq) == (newest[3] if newest is not None and simple else newest)


@both_forms
@given(
    rows=commits(),
    max_seq=st.integers(0, 70),
    sort_after=st.integers(0, 60),
    start=st.none() | keys,
    stop=st.none() | keys,
    seek=st.none() | keys,
    reverse=st.booleans(),
    limit=st.integers(1, 9),
)
def test_scans_return_the_visible_rows_in_key_order(
    kernel: ModuleType,
    rows: list[EntryTuple],
    max_seq: int,
    sort_after: int,
    start: bytes | None,
    stop: bytes | None,
    seek: bytes | None,
    reverse: bool,
    limit: int,
) -> None:
    expected = []
    for key in sorted({row[0] for row in rows}, reverse=reverse):
        if (start is not None and key < start) or (stop is not None and key >= stop):
            continue
        if seek is not None and (key > seek if reverse else key < seek):
            continue
        for row in versions(rows, key, max_seq):
            expected.append(row)
            if row[2] != MERGE:
                break
    cursor = filled(kernel, rows, sort_after).scan(start, stop, max_seq, reverse)
    if seek is not None:
        cursor.seek(seek)
    found: list[EntryTuple] = []
    while some := cursor.next_rows(limit):
        found += some
    assert found == expected


def unpack(stream: bytes) -> list[EntryTuple]:
    rows: list[EntryTuple] = []
    at = 0
    while at < len(stream):
        key_size, value_size = struct.unpack_from("<HI", stream, at)
        at += 6
        key, value = stream[at : at + key_size], stream[at + key_size : at + key_size + value_size]
        at += key_size + value_size
        seq, flags = struct.unpack_from(">QB", stream, at)
        at += 9
        created = expires = None
        if flags & 0x02:
            (expires,) = struct.unpack_from(">q", stream, at)
            at += 8
        if flags & 0x04:
            (created,) = struct.unpack_from(">q", stream, at)
            at += 8
        rows.append((key, seq, flags & 0x09, value, created, expires))
    return rows


@both_forms
@given(rows=commits(), max_bytes=st.integers(2, 400))
def test_the_wal_gets_rows_in_commit_order(
    kernel: ModuleType, rows: list[EntryTuple], max_bytes: int
) -> None:
    memtable = filled(kernel, rows, 10)
    end = memtable.position()
    memtable.insert(b"later", 1000, VALUE, b"", None, None)
    position, found, stream = (0, 0), [], bytearray(max_bytes)
    while position != end:
        position, used = memtable.wal_stream(position, end, stream)
        found += unpack(bytes(stream[:used]))
    assert found == rows


@both_forms
@given(rows=commits(), min_seq=st.integers(0, 70), now_ms=st.integers(-10, 30), max_bytes=st.integers(2, 400))
def test_a_flush_gets_rows_in_key_order_without_those_that_retention_drops(
    kernel: ModuleType, rows: list[EntryTuple], min_seq: int, now_ms: int, max_bytes: int
) -> None:
    memtable = filled(kernel, rows, 10)
    assert memtable.merges() is any(row[2] == MERGE for row in rows)
    run = memtable.sort_completely()
    total = len(run[0])
    names = sorted({row[0] for row in rows})
    assert total == len(names)
    at, found, stream = 0, [], bytearray(max_bytes)
    while at < total:
        at, used = memtable.sorted_stream(run, at, stream, min_seq, now_ms)
        found += unpack(bytes(stream[:used]))
        if at < total and any(row[2] == MERGE for row in memtable.versions_at(run, at)) and not used:
            assert memtable.versions_at(run, at) == versions(rows, names[at], 100)
            found += memtable.versions_at(run, at)
            at += 1

    expected = []
    for key in names:
        kept = []
        for row in versions(rows, key, 100):
            kept.append(row)
            if row[2] == MERGE:
                kept = versions(rows, key, 100)
                break
            if row[1] <= min_seq:
                break
        if not any(row[2] == MERGE for row in kept):
            kept = [
                (*row[:2], TOMBSTONE, b"", row[4], None)
                if row[2] == VALUE and row[5] is not None and row[5] <= now_ms
                else row
                for row in kept
            ]
        expected += kept
    assert found == expected


@both_forms
def test_many_keys_and_rows_larger_than_a_chunk_are_read_back(kernel: ModuleType) -> None:
    memtable = kernel.Memtable()
    count = 3000
    for number in range(count):
        memtable.insert(
            b"%05d" % ((number * 7) % count),
            number + 1,
            VALUE,
            b"x" * (300_000 if number == 5 else 3),
            1,
            None,
        )
    assert memtable.get(b"00035", 10**9)[3] == b"x" * 300_000
    assert all(memtable.get_value(b"%05d" % number, 10**9) is not None for number in range(count))
    cursor = memtable.scan(None, None, 10**9, False)
    names: list[bytes] = []
    while some := cursor.next_rows(500):
        names += [row[0] for row in some]
    assert names == [b"%05d" % number for number in range(count)]


def keys_that_agree_for_long(chooser: random.Random) -> list[bytes]:
    """Many keys that differ late, at many different depths, or only in how many zeros they end with."""
    deep = [b"a" * 8 * depth + b"b%03d" % number for depth in range(35) for number in range(40)]
    zeros = [b"a" * 8 * (number % 3) + b"\0" * (number % 90 + 1) for number in range(270)]
    binary = [bytes(chooser.choices((0, 1, 255), k=chooser.randrange(1, 40))) for _ in range(5_000)]
    return [*{*deep, *zeros, *binary}]


@both_forms
@pytest.mark.parametrize("seed", range(3))
def test_keys_that_agree_for_long_are_sorted_at_once_and_in_several_runs(
    kernel: ModuleType, seed: int
) -> None:
    chooser = random.Random(seed)
    names = keys_that_agree_for_long(chooser)
    chooser.shuffle(names)
    memtable = kernel.Memtable()
    steps = {chooser.randrange(len(names)) for _ in range(8 * seed)}
    for number, name in enumerate(names):
        memtable.insert(name, number + 1, VALUE, b"", None, None)
        if number in steps:
            memtable.sort_some()

    run = memtable.sort_completely()

    assert [memtable.versions_at(run, at)[0][0] for at in range(len(run[0]))] == sorted(names)


@both_forms
def test_a_sequence_number_is_accepted_only_once(kernel: ModuleType) -> None:
    memtable = kernel.Memtable()
    size = memtable.insert(b"a", 5, VALUE, b"1", 1, None)
    assert memtable.newest_seq() == 5
    assert memtable.insert(b"b", 5, VALUE, b"2", 1, None) == -1
    assert memtable.insert_batch([(b"b", VALUE, b"2", None)], 4, 1) == -1
    assert (len(memtable), memtable.size()) == (1, size)
    assert memtable.insert_batch([(b"b", VALUE, b"2", None), (b"c", MERGE, b"3", 9)], 6, 1) > size
    assert [row[0] for row in memtable.scan(None, None, 10, False).next_rows(10)] == [b"a", b"b", b"c"]


@both_forms
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(b"abcdefgh"), st.binary(max_size=9)), min_size=1), max_size=30
    )
)
def test_a_copy_has_the_rows_up_to_a_sequence_number_at_their_positions(
    kernel: ModuleType, batches: list[list[tuple[int, bytes]]]
) -> None:
    tables = [kernel.Memtable()]
    whole = kernel.Memtable()
    for seq, batch in enumerate(batches, 1):
        rows = [(bytes([key]), VALUE, value, None) for key, value in batch]
        whole.insert_batch(rows, seq, seq)
        tables.append(whole.copy_through(seq))
    for seq, memtable in enumerate(tables):
        again = whole.copy_through(seq)
        for copied in (memtable, again):
            assert copied.newest_seq() == seq
            assert len(copied) == sum(map(len, batches[:seq]))
            for key in range(ord("a"), ord("i")):
                assert copied.versions(bytes([key]), 10**6) == whole.versions(bytes([key]), seq)
        assert memtable.position() == again.position()
