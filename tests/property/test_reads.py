"""Reads through memtables, L0 and sorted runs equal a dictionary of rows, for any layout and cache."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.lsm.tree import SstView
from flagstone.read.arrow import COLUMNS, scan_arrow
from flagstone.read.drivers import get, get_async, multi_get, multi_get_async, visible_row
from flagstone.read.scan import AsyncScan, Scan
from flagstone.read.scan_cursor import ScanRequest
from flagstone.read.view import ReadView
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, KeyRange, Row
from kit.databases import Append
from kit.ssts import NOW_MS, PlainMemtable, Rig, VanishingSsts, oracle
from kit.strategies import neighbours, short_keys

pytestmark = pytest.mark.slow

keys = st.one_of(
    short_keys(max_size=4),
    neighbours,
    neighbours,
    st.integers(0, 60).map(lambda number: b"%03d" % number),
    st.sampled_from([b"\xff", b"\xff\xff", b"\0", b"a\0"]),
)
bounds = st.one_of(st.none(), keys)
values = st.one_of(st.binary(max_size=6), st.integers(200, 900).map(lambda size: b"v" * size))


@dataclass
class World:
    """One database, with every row that is in it."""

    rig: Rig
    view: ReadView
    rows: list[EntryTuple]
    max_seq: int


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A history, cut by time into sources: what is newer never holds older versions."""
    history: list[EntryTuple] = []
    for seq in range(1, draw(st.integers(0, 90)) + 1):
        kind = draw(st.sampled_from([VALUE, VALUE, VALUE, TOMBSTONE, MERGE]))
        expires = draw(st.sampled_from([None, None, NOW_MS - 1, NOW_MS, NOW_MS + 1]))
        value = b"" if kind == TOMBSTONE else draw(values)
        history.append((draw(keys), seq, kind, value, draw(st.sampled_from([None, seq])), expires))
    cuts = sorted(draw(st.lists(st.integers(0, len(history)), max_size=6)))
    parts = [history[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(history)], strict=True)]
    runs_end = draw(st.integers(0, len(parts)))
    l0_end = draw(st.integers(runs_end, len(parts)))
    rig = Rig(
        capacity_bytes=draw(st.sampled_from([0, 3000, 1 << 20])),
        min_filter_keys=draw(st.sampled_from([1, 1000])),
        small_sst_bytes=draw(st.sampled_from([0, 1 << 20])),
    )
    runs = [draw_tables(draw, rig, part) for part in parts[:runs_end] if part]
    l0 = [rig.add(part) for part in parts[runs_end:l0_end] if part]
    memtables = [PlainMemtable(part) for part in reversed(parts[l0_end:])]
    view = rig.view(rig.tree(l0=l0[::-1], runs=runs[::-1]), memtables)
    return World(rig, view, history, draw(st.integers(0, len(history))))


def draw_tables(draw: st.DrawFn, rig: Rig, rows: list[EntryTuple]) -> list[SstView]:
    """A sorted run of several SSTs, cut anywhere, also between two rows of a key."""
    ordered = sorted(rows, key=lambda row: (row[0], -row[1]))
    cuts = sorted(draw(st.lists(st.integers(0, len(ordered)), max_size=3)))
    places = [0, *cuts, len(ordered)]
    parts = [ordered[start:stop] for start, stop in pairwise(places)]
    return [rig.add(part) for part in parts if part]


def request(world: World, **options: Any) -> ScanRequest:
    return ScanRequest(max_seq=world.max_seq, now_ms=NOW_MS, merge_operator=Append(), **options)


def expected(world: World, keys: KeyRange, *, reverse: bool, include_expired: bool) -> list[Row]:
    found = oracle(world.rows, max_seq=world.max_seq, include_expired=include_expired)
    return [row for row in (found[::-1] if reverse else found) if row.key in keys]


@given(worlds(), st.lists(keys, max_size=5), st.booleans())
def test_gets_equal_the_model(world: World, strangers: list[bytes], include_expired: bool) -> None:
    known = {
        row.key: row for row in oracle(world.rows, max_seq=world.max_seq, include_expired=include_expired)
    }
    asked = sorted({row[0] for row in world.rows}) + strangers
    ssts, view, max_seq = world.rig.sst_store, world.view, world.max_seq
    one_by_one = [get(ssts, view, key, max_seq) for key in asked]
    seen = [
        visible_row(
            found,
            max_seq=max_seq,
            now_ms=NOW_MS,
            include_expired=include_expired,
            merge_operator=Append(),
        )
        for found in one_by_one
    ]
    assert seen == [known.get(key) for key in asked]
    assert multi_get(ssts, view, asked, max_seq) == one_by_one

    async def awaited() -> None:
        assert [await get_async(ssts, view, key, max_seq) for key in asked] == one_by_one
        assert await multi_get_async(ssts, view, asked, max_seq) == one_by_one

    asyncio.run(awaited())


@given(
    worlds(),
    bounds,
    bounds,
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 10)),
    st.booleans(),
)
def test_scans_equal_the_model(
    world: World,
    start: bytes | None,
    stop: bytes | None,
    reverse: bool,
    include_expired: bool,
    limit: int | None,
    cache_blocks: bool,
) -> None:
    wanted = KeyRange(start, stop)
    asked = request(
        world,
        keys=wanted,
        reverse=reverse,
        include_expired=include_expired,
        limit=limit,
        cache_blocks=cache_blocks,
        read_ahead_bytes=2048,
    )
    rows = expected(world, wanted, reverse=reverse, include_expired=include_expired)[:limit]
    ssts, view = world.rig.sst_store, world.view
    assert list(Scan(ssts, view, asked).rows()) == rows
    assert list(Scan(ssts, view, asked)) == [(row.key, row.value) for row in rows]

    async def awaited() -> None:
        async with AsyncScan(ssts, view, asked) as scan:
            assert [row async for row in scan.rows()] == rows
        async with AsyncScan(ssts, view, asked) as scan:
            assert [pair async for pair in scan] == [(row.key, row.value) for row in rows]

    asyncio.run(awaited())


@given(
    worlds(),
    st.none() | bounds,
    st.none() | bounds,
    st.booleans(),
    # Before the first row as often as behind it.
    st.lists(st.tuples(st.sampled_from([0, 0, 1, 4]), neighbours | keys), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(0, 10)),
)
def test_a_seek_skips_the_rows_before_it_and_never_goes_back(
    world: World,
    start: bytes | None,
    stop: bytes | None,
    reverse: bool,
    moves: list[tuple[int, bytes]],
    limit: int | None,
) -> None:
    wanted = KeyRange(start, stop)
    left = expected(world, wanted, reverse=reverse, include_expired=False)
    budget = len(left) if limit is None else limit
    scan = Scan(world.rig.sst_store, world.view, request(world, keys=wanted, reverse=reverse, limit=limit))
    rows = scan.rows() if moves and moves[0][0] else None
    for steps, target in moves:
        if rows is None and steps:
            rows = scan.rows()
        for _ in range(steps):
            assert rows is not None
            assert next(rows, None) == (left[0] if left and budget else None)
            if left and budget:
                left.pop(0)
                budget -= 1
        scan.seek(target)
        left = [row for row in left if (row.key <= target if reverse else row.key >= target)]
    assert list(scan.rows()) == left[:budget]


@given(worlds(), bounds, bounds, st.booleans(), st.integers(1, 20))
def test_arrow_scans_equal_the_model(
    world: World, start: bytes | None, stop: bytes | None, include_expired: bool, batch_rows: int
) -> None:
    wanted = KeyRange(start, stop)
    asked = request(world, keys=wanted, include_expired=include_expired)
    rows = expected(world, wanted, reverse=False, include_expired=include_expired)
    reader = scan_arrow(world.rig.sst_store, world.view, asked, columns=COLUMNS, batch_rows=batch_rows)
    batches = list(reader)
    assert [Row(**row) for batch in batches for row in batch.to_pylist()] == rows
    assert all(batch.num_rows == batch_rows for batch in batches[:-1])
    table = scan_arrow(world.rig.sst_store, world.view, asked, columns=("key",)).read_all()
    assert table.column("key").to_pylist() == [row.key for row in rows]


@given(
    worlds(),
    bounds,
    bounds,
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 10)),
    st.sets(st.integers(1, 12), max_size=3),
    st.booleans(),
)
def test_a_scan_continues_at_its_key_when_its_ssts_are_gone(
    world: World,
    start: bytes | None,
    stop: bytes | None,
    reverse: bool,
    limit: int | None,
    gone: set[int],
    rewritten: bool,
) -> None:
    wanted = KeyRange(start, stop)
    other = world.view
    if rewritten and world.rows:
        # What a compaction leaves: everything in one run, cut elsewhere.
        other = world.rig.view(world.rig.tree(runs=[[world.rig.add(world.rows)]]))
    views = [world.view, other]

    def renew(lost: ReadView) -> ReadView:
        return views[lost is world.view]

    asked = request(world, keys=wanted, reverse=reverse, limit=limit, read_ahead_bytes=1024, renew=renew)
    rows = expected(world, wanted, reverse=reverse, include_expired=False)[:limit]
    ssts: Any = VanishingSsts(world.rig.sst_store, gone)
    assert list(Scan(ssts, world.view, asked).rows()) == rows
    ssts = VanishingSsts(world.rig.sst_store, gone)
    assert list(Scan(ssts, world.view, asked)) == [(row.key, row.value) for row in rows]
    if not reverse and limit is None:
        ssts = VanishingSsts(world.rig.sst_store, gone)
        reader = scan_arrow(ssts, world.view, asked, columns=COLUMNS, batch_rows=7)
        assert [Row(**row) for batch in reader for row in batch.to_pylist()] == rows
