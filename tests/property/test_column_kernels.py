"""Columns out of blocks and blocks out of columns: both forms of the kernels, and the row-wise way, give the same."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.errors import InvalidRequest
from flagstone.format.codec import Codec
from flagstone.format.columns import SCHEMA
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.read import arrow
from flagstone.read.scan_cursor import ScanRequest
from flagstone.spark.load.task import row_columns
from flagstone.sst import builder as output
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple
from kit.databases import Append
from kit.kernels import blocks_of, forms_of, replaced_kernels
from kit.ssts import NOW_MS, MemoryBuilder, oracle
from kit.strategies import keys, seqs, sorted_entries

FORMS = forms_of("scan")
KERNELS: dict[tuple[Any, str], str] = {(arrow, "scan"): "scan", (output, "block_writer"): "block_writer"}
COLUMNS = ("key", "value", "seq", "created_ms", "expires_ms")

bounds = st.one_of(st.none(), keys)


def joined(blocks: list[bytes]) -> tuple[bytes, array[int]]:
    """The blocks with something between them, as in a file."""
    found, at = array("q"), 0
    for block in blocks:
        found.extend((at, at + len(block)))
        at += len(block) + 4
    return b"".join(block + b"CRC!" for block in blocks), found


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@given(
    rows=sorted_entries(),
    max_seq=seqs,
    start=bounds,
    stop=bounds,
    include_expired=st.booleans(),
    columns=st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True),
    data=st.data(),
)
def test_blocks_decode_to_the_batches_of_the_model(
    form: str,
    rows: list[EntryTuple],
    max_seq: int,
    start: bytes | None,
    stop: bytes | None,
    include_expired: bool,
    columns: list[str],
    data: st.DataObject,
) -> None:
    seen = oracle(rows, max_seq=max_seq, include_expired=include_expired)
    inside = [row for row in seen if (start is None or row.key >= start) and (stop is None or row.key < stop)]
    expected = [tuple(getattr(row, name) for name in columns) for row in inside]
    blocks = blocks_of(rows) if rows else []
    places = sorted(data.draw(st.lists(st.integers(0, len(blocks)), max_size=3)))
    request = ScanRequest(
        max_seq=max_seq,
        now_ms=NOW_MS,
        include_expired=include_expired,
        merge_operator=Append(),
        whole_rows=True,
    )

    with replaced_kernels(form, KERNELS):
        sink = arrow.ArrowSink(request, pa.schema([SCHEMA.field(name) for name in columns]))
        out: list[Any] = []
        for first, last in pairwise([0, *places, len(blocks)]):
            if first < last:
                chunk, bounds = joined(blocks[first:last])
                memory = bytearray(chunk)
                sink.add_chunk(memoryview(memory), bounds, start, stop, out)
                memory[:] = bytes(len(memory))  # its reader uses it for the next chunk
        sink.finish(out)
    assert [tuple(row.values()) for batch in out for row in batch.to_pylist()] == expected


@given(rows=sorted_entries(min_size=1, max_size=20), data=st.data())
def test_a_damaged_block_is_left_to_the_slow_path_that_raises_the_detailed_error(
    rows: list[EntryTuple], data: st.DataObject
) -> None:
    chunk, found = joined(blocks_of(rows))
    at = data.draw(st.integers(0, len(chunk) - 5))
    damaged = chunk[:at] + bytes([data.draw(st.integers(0, 255))]) + chunk[at + 1 :]
    if data.draw(st.booleans()):
        found = array("q", [min(bound, at) for bound in found])
    outcomes = []
    for form in FORMS:
        kernel: Any = load_compiled("scan") if form == "compiled" else load_interpreted("scan")
        sieve = kernel.ColumnSieve(1 << 40, NOW_MS, True)
        sizes = sieve.measure(damaged, found)
        # Also with room for what was there before the damage: it must not be overrun.
        for total, key_bytes, value_bytes in filter(None, (sizes, sieve.measure(*joined(blocks_of(rows))))):
            room = [
                memoryview(bytearray(4 * (total + 1))).cast("i"),
                memoryview(bytearray(key_bytes)),
                memoryview(bytearray(4 * (total + 1))).cast("i"),
                memoryview(bytearray(value_bytes)),
                memoryview(bytearray(8 * total)).cast("Q"),
                memoryview(bytearray(8 * total)).cast("q"),
                memoryview(bytearray(total)),
                memoryview(bytearray(8 * total)).cast("q"),
                memoryview(bytearray(total)),
            ]
            shown = sieve.fill(damaged, found, b"", None, None, *room)
            outcomes.append((form, sizes, total, shown, bytes(room[1]) if shown >= 0 else b""))
    for one, other in zip(
        (each[1:] for each in outcomes if each[0] == "compiled"),
        (each[1:] for each in outcomes if each[0] == "interpreted"),
        strict=len(FORMS) == 2,
    ):
        assert one == other


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Rows of a load: keys ascend; kinds and ends of life where there are columns for them."""
    chosen = sorted(draw(st.sets(keys, min_size=1, max_size=60)))
    kinds = [
        draw(st.sampled_from([VALUE, TOMBSTONE, MERGE])) if draw(st.booleans()) else VALUE for _ in chosen
    ]
    with_kinds = draw(st.booleans())
    sizes = st.sampled_from([0, 1, 100, 127, 128, 1500])
    values = [
        b"" if with_kinds and kind == TOMBSTONE else bytes([97 + number % 26]) * draw(sizes)
        for number, kind in enumerate(kinds)
    ]
    columns: dict[str, pa.Array] = {
        "key": pa.array(chosen, pa.binary()),
        "value": pa.array(values, pa.binary()),
    }
    if with_kinds:
        columns["kind"] = pa.array(kinds, pa.uint8())
    if draw(st.booleans()):
        ends = st.one_of(st.none(), st.integers(-1, 1 << 50)) if draw(st.booleans()) else st.integers(0, 9)
        columns["expires_ms"] = pa.array([draw(ends) for _ in chosen], pa.int64())
    whole = pa.RecordBatch.from_pydict(columns)
    return whole.slice(draw(st.integers(0, whole.num_rows - 1)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@given(
    batch=batches(),
    codec=st.sampled_from([Codec.NONE, Codec.LZ4]),
    max_bytes=st.sampled_from([1, 3000, 1 << 30]),
    cut=st.integers(0, 60),
)
def test_ssts_written_from_columns_equal_those_written_from_rows(
    form: str, batch: pa.RecordBatch, codec: Codec, max_bytes: int, cut: int
) -> None:
    options = SstOptions(block_bytes=1024, codec=codec, min_filter_keys=3)
    found: list[bytes] = []
    splits: list[int] = []
    with replaced_kernels(form, KERNELS):
        writer = MemoryBuilder(options, max_bytes=max_bytes)

        def take() -> None:
            if writer.rows:
                sst = writer.encoded()
                found.append(sst.data)
                splits.append(sst.rows)

        for part in (batch.slice(0, cut), batch.slice(cut)):
            at = 0
            while at < part.num_rows:
                at = writer.write_columns(row_columns(part), at, seq=7, created_ms=123)
                if writer.full:
                    take()
        take()

    expected, at = [], 0
    for rows in splits:
        part = [
            (row["key"], 7, row.get("kind", VALUE), row["value"], 123, row.get("expires_ms"))
            for row in batch.slice(at, rows).to_pylist()
        ]
        expected.append(encode_sst(part, options).data)
        at += rows
    assert at == batch.num_rows
    assert found == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "cells",
    [
        {"key": [b"a", b""], "value": [b"1", b"2"]},
        {"key": [b"a", b"b" * 65_536], "value": [b"1", b"2"]},
        {"key": [b"b", b"a"], "value": [b"1", b"2"]},
        {"key": [b"a", b"a"], "value": [b"1", b"2"]},
        {"key": [b"a", b"b"], "value": [b"1", b"2"], "kind": [VALUE, TOMBSTONE]},
        {"key": [b"a", b"b"], "value": [b"1", b"2"], "kind": [VALUE, 9]},
        {"key": [b"a", b"b"], "value": [b"1", b"2"], "kind": [VALUE, 2]},
    ],
)
def test_columns_with_invalid_rows_are_refused(form: str, cells: dict[str, list[Any]]) -> None:
    types = {"key": pa.binary(), "value": pa.binary(), "kind": pa.uint8()}
    batch = pa.RecordBatch.from_pydict({name: pa.array(cells[name], types[name]) for name in cells})
    with replaced_kernels(form, KERNELS):
        writer = MemoryBuilder()
        with pytest.raises(InvalidRequest, match="row 1 "):
            writer.write_columns(row_columns(batch), 0, seq=7, created_ms=123)
