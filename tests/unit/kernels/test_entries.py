"""How a memtable stores rows: short headers, and the wide ones of rows whose numbers do not fit."""

from __future__ import annotations

from types import ModuleType

import pytest

from flagstone.kernels import load_compiled, load_interpreted
from flagstone.types import MAX_SEQ, MERGE, TOMBSTONE, VALUE, EntryTuple

KERNELS = [pytest.param(load_interpreted("memtable"), id="interpreted")]
if load_compiled("memtable") is not None:
    KERNELS.append(pytest.param(load_compiled("memtable"), id="compiled"))
both_forms = pytest.mark.parametrize("kernel", KERNELS)

LARGE_VALUE = bytes(range(256)) * (1 << 16)
"""16 MiB: the first size that a short header cannot hold."""

ROWS: list[EntryTuple] = [
    (b"short", 1, VALUE, b"v", 0, None),
    (b"short", 2, VALUE, b"w" * 1_000, 2**48 - 1, None),
    (b"expires", 3, VALUE, b"v", 5, -1),
    (b"expires", 4, TOMBSTONE, b"", 5, 2**63 - 1),
    (b"late", 5, VALUE, b"v", 2**48, None),
    (b"early", 6, VALUE, b"v", -1, 1 - 2**63),
    (b"early", 7, MERGE, b"operand", -(2**63), None),
    (b"large", 8, VALUE, LARGE_VALUE[:-1], 5, None),
    (b"large", 9, VALUE, LARGE_VALUE, 5, 6),
    (b"timeless", 10, VALUE, b"", None, None),
    (b"short", 2**40 - 1, VALUE, b"x", 7, None),
    (b"short", 2**40, VALUE, b"y", 7, None),
    (b"k" * 65_535, 2**40 + 1, VALUE, b"z", 7, 8),
    (b"short", MAX_SEQ, VALUE, b"z", 7, None),
]


def headers(kernel: ModuleType, row: EntryTuple) -> int:
    memtable = kernel.Memtable()
    memtable.insert(*row)
    assert memtable.size() == memtable.headers() + len(row[0]) + len(row[3])
    size: int = memtable.headers()
    return size


@both_forms
def test_rows_whose_numbers_are_too_large_for_a_short_header_are_read_as_written(kernel: ModuleType) -> None:
    memtable = kernel.Memtable()
    for row in ROWS:
        memtable.insert(*row)
    for key in {row[0] for row in ROWS}:
        assert memtable.versions(key, MAX_SEQ) == [row for row in reversed(ROWS) if row[0] == key]
    for row in ROWS:
        assert memtable.get(row[0], row[1]) == row
    newest = {row[0]: row for row in ROWS}
    scan = memtable.scan(None, None, MAX_SEQ, False)
    found = [row for rows in iter(lambda: scan.next_rows(3), []) for row in rows]
    assert [row for row in found if row[1] != 6] == [newest[key] for key in sorted(newest)]
    twin = memtable.copy_through(2**40)
    assert [twin.get(b"short", MAX_SEQ), len(twin)] == [ROWS[11], 12]


@both_forms
def test_streams_have_rows_with_every_kind_of_header(kernel: ModuleType) -> None:
    memtable = kernel.Memtable()
    rows = [row for row in ROWS if row[2] != MERGE]
    for row in rows:
        memtable.insert(*row)
    end, position, logged = memtable.position(), (0, 0), b""
    stream = bytearray(64)
    while position != end:
        position, used = memtable.wal_stream(position, end, stream)
        logged += stream[:used]
    in_order, at = b"", 0
    run = memtable.sort_completely()
    while at < len(run[0]):
        at, used = memtable.sorted_stream(run, at, stream, 0, -(2**63))
        in_order += stream[:used]
    assert parsed(logged) == rows
    assert parsed(in_order) == sorted(rows, key=lambda row: (row[0], -row[1]))


def parsed(stream: bytes) -> list[EntryTuple]:
    """The rows of a stream; `_rows.py` has its layout."""
    rows: list[EntryTuple] = []
    at = 0
    while at < len(stream):
        key_bytes = int.from_bytes(stream[at : at + 2], "little")
        value_bytes = int.from_bytes(stream[at + 2 : at + 6], "little")
        at += 6
        key, value = stream[at : at + key_bytes], stream[at + key_bytes : at + key_bytes + value_bytes]
        at += key_bytes + value_bytes
        seq, flags = int.from_bytes(stream[at : at + 8], "big"), stream[at + 8]
        at += 9
        times: list[int | None] = []
        for flag in (0x02, 0x04):
            times.append(int.from_bytes(stream[at : at + 8], "big", signed=True) if flags & flag else None)
            at += 8 if flags & flag else 0
        rows.append((key, seq, flags & 0x09, value, times[1], times[0]))
    return rows


@both_forms
def test_a_row_has_22_bytes_of_header_8_more_with_an_expiry_and_20_more_with_large_numbers(
    kernel: ModuleType,
) -> None:
    assert headers(kernel, (b"k", 1, VALUE, b"v", 1_763_591_936_000, None)) == 22
    assert headers(kernel, (b"k", 1, VALUE, b"v", None, 5)) == 30
    assert headers(kernel, (b"k", 2**40, VALUE, b"v", 5, None)) == 42
    assert headers(kernel, (b"k", 1, VALUE, b"v", -1, 5)) == 50
