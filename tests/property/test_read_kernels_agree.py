"""The compiled read kernels and their interpreted form give the same answers, also on damaged blocks."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.errors import CorruptData
from flagstone.kernels import load_compiled, load_interpreted
from flagstone.lsm.retention import visible_value
from flagstone.types import MAX_SEQ, VALUE, EntryTuple, Row
from kit.databases import Append
from kit.kernels import blocks_of, both
from kit.ssts import NOW_MS, oracle
from kit.strategies import keys, neighbours, seqs, sorted_entries

pytestmark = pytest.mark.skipif(load_compiled("scan") is None, reason="kernels were not compiled here")

bounds = st.one_of(st.none(), keys)


def sieve(kernel: ModuleType, max_seq: int, whole_rows: bool, hide_expired: bool = True) -> Any:
    def fold(rows: list[EntryTuple]) -> Row | None:
        return visible_value(
            rows,
            max_seq=max_seq,
            now_ms=NOW_MS,
            include_expired=not hide_expired,
            merge_operator=Append(),
        )

    return kernel.Sieve(max_seq, NOW_MS, hide_expired, whole_rows, fold)


@given(sorted_entries(), seqs, bounds, bounds, st.booleans(), st.booleans(), st.data())
def test_both_kernels_select_the_visible_rows_of_the_model(
    rows: list[EntryTuple],
    max_seq: int,
    start: bytes | None,
    stop: bytes | None,
    whole_rows: bool,
    hide_expired: bool,
    data: st.DataObject,
) -> None:
    seen = oracle(rows, max_seq=max_seq, include_expired=not hide_expired)
    inside = [row for row in seen if (start is None or row.key >= start) and (stop is None or row.key < stop)]
    expected = inside if whole_rows else [(row.key, row.value) for row in inside]
    cut = data.draw(st.integers(0, len(rows)))
    for kernel in both("scan"):
        by_block = sieve(kernel, max_seq, whole_rows, hide_expired)
        out: list[Any] = []
        by_block.add_blocks(blocks_of(rows) if rows else [], start, stop, out)
        by_block.finish(out)
        assert out == expected
        mixed = sieve(kernel, max_seq, whole_rows, hide_expired)
        out = []
        if rows[:cut]:
            mixed.add_blocks(blocks_of(rows[:cut]), None, None, out)
        mixed.add_rows(rows[cut:], out)
        mixed.finish(out)
        assert out == (seen if whole_rows else [(row.key, row.value) for row in seen])


@given(sorted_entries(min_size=1, max_size=20), st.data())
def test_both_kernels_report_a_damaged_block_alike(rows: list[EntryTuple], data: st.DataObject) -> None:
    block = bytearray(blocks_of(rows, 65536)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    raw = bytes(block[: data.draw(st.integers(0, len(block)))]) if data.draw(st.booleans()) else bytes(block)
    outcomes = []
    for kernel in both("scan"):
        out: list[Any] = []
        tested = sieve(kernel, MAX_SEQ, True, False)
        try:
            tested.add_blocks([raw], None, None, out)
            tested.finish(out)
        except CorruptData as error:
            outcomes.append((str(error), tested.blocks_done(), out))
        else:
            outcomes.append(("", tested.blocks_done(), out))
    assert outcomes[0] == outcomes[1]


def make(kernel: ModuleType, tables: list[list[EntryTuple]]) -> tuple[Any, dict[Any, Any]]:
    """A layer of these SSTs with nothing in memory; the probe keeps all parts itself."""
    reader = load_interpreted("block_reader")
    residents, pinned = [], {}
    for rows in tables:
        resident = kernel.Resident(
            lambda bloom, key: key in bloom, reader.lookup, reader.lookup_versions, reader.lookup_value
        )
        blocks = blocks_of(rows)
        first_keys = [b"", *(reader.decode_rows(block)[0][0] for block in blocks[1:])]
        pinned[resident, -1] = (first_keys, first_keys, {row[0] for row in rows})
        pinned.update({(resident, number): block for number, block in enumerate(blocks)})
        residents.append(resident)
    starts = [rows[0][0] for rows in tables]
    stops = [rows[-1][0] + b"\0" for rows in tables]
    return kernel.Layer(starts, stops, residents), pinned


@pytest.mark.slow
@given(sorted_entries(min_size=1), st.lists(st.integers(0, 80), max_size=3), keys, seqs, st.booleans())
def test_probes_of_both_kernels_equal_a_linear_search(
    rows: list[EntryTuple], cuts: list[int], stranger: bytes, max_seq: int, resident: bool
) -> None:
    places = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    tables = [rows[start:stop] for start, stop in pairwise(places)]
    compiled = load_compiled("probe")
    assert compiled is not None
    for kernel in (compiled, load_interpreted("probe")):
        layer, everything = make(kernel, tables)
        if resident:
            for (table, number), piece in everything.items():
                if number < 0:
                    table.hold_meta(*piece)
            for (table, number), piece in everything.items():
                if number >= 0:
                    table.hold_block(number, piece, 1000)
        for key in {row[0] for row in rows} | {stranger}:
            versions = [row for row in rows if row[0] == key and row[1] <= max_seq]
            answer: Any = next(iter(versions), None)
            if versions and versions[0][2] == 0x08:
                end = next((at + 1 for at, row in enumerate(versions) if row[2] != 0x08), len(versions))
                answer = versions[:end]
            pinned: dict[Any, Any] = {}
            found = kernel.find((), [layer], key, max_seq, pinned)
            while isinstance(found, kernel.Need):
                wanted = [(found.sst, number) for number in found.numbers or [-1]]
                assert not resident
                assert not set(wanted) <= set(pinned)
                pinned.update({place: everything[place] for place in wanted})
                found = kernel.find((), [layer], key, max_seq, pinned)
            assert found == answer
            if isinstance(answer, tuple) and answer[2] == VALUE and answer[5] is None:
                answer = answer[3]
            assert kernel.find((), [layer], key, max_seq, pinned, True) == answer


@given(st.sets(st.one_of(keys, neighbours, st.binary(max_size=12)), min_size=1, max_size=60), st.data())
def test_the_index_leads_to_the_block_that_may_hold_a_key(names: set[bytes], data: st.DataObject) -> None:
    prefix = data.draw(st.sampled_from([b"", b"a", b"shared prefix "]))
    first_keys = [b"", *sorted({prefix + name for name in names} - {b""})]
    asked = [*first_keys[1:], data.draw(keys), prefix + data.draw(keys), prefix[:3] + b"\xff", b"\0"]
    for kernel in both("probe"):
        resident = kernel.Resident(None, None, None)
        resident.hold_meta(None, first_keys, None)
        layer = kernel.Layer([b""], [None], [resident])
        for key in asked:
            need = kernel.find((), [layer], key, 1, None)
            assert need.numbers[0] == bisect_left(first_keys, key) - 1
