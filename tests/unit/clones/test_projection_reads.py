"""Reads of a projection: a read wholly outside of its range is refused, as a write is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import flagstone
from flagstone import InvalidRequest, KeyRange
from flagstone.aio import open as open_async
from flagstone.aio import open_reader as open_reader_async
from flagstone.clones.origin import CloneSource
from flagstone.db.read_methods import Reads
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Crashed, FaultyStore
from flagstone.write.key_check import KeyRanges
from kit.databases import World, numbered

OUTSIDE = [b"\0", b"k", b"k001", b"k001\xff", b"k005", b"k005\0", b"z", b"\xff"]
SCANS_OUTSIDE: list[dict[str, Any]] = [
    {"stop": b"k002"},
    {"start": b"k005"},
    {"start": b"k000", "stop": b"k001\xff"},
    {"start": b"z"},
    {"prefix": b"k001"},
    {"prefix": b"k005"},
    {"prefix": b"\xff"},
    {"prefix": b"k00", "start": b"k006"},
]


@pytest.fixture
def projected(world: World) -> World:
    world.write("p", numbered(0, 10))
    world.admin("p").clone("a", range=(b"k002", b"k005"))
    return world


def check(reads: Reads) -> None:
    assert reads.get(b"k002") == b"v2"
    assert reads.get(b"k003x", b"none") == b"none"
    assert reads.multi_get([b"k004", b"k0045"]) == [b"v4", None]
    assert b"k003" in reads
    for key in OUTSIDE:
        for read in (
            lambda key=key: reads.get(key),
            lambda key=key: reads.get(key, b"default", include_expired=True),
            lambda key=key: reads.get_row(key),
            lambda key=key: reads.multi_get([b"k003", key]),
            lambda key=key: reads[key],
            lambda key=key: key in reads,
        ):
            with pytest.raises(InvalidRequest, match=r"outside the .* b'k002' up to b'k005'; read it from"):
                read()
    for scan in SCANS_OUTSIDE:
        with pytest.raises(InvalidRequest, match=r"outside the .* b'k002' up to b'k005'; scan the database"):
            reads.scan(**scan, reverse=True)
        with pytest.raises(InvalidRequest, match=r"outside the .* b'k002' up to b'k005'; scan the database"):
            reads.scan_arrow(**scan)
    for overlapping in ({}, {"stop": b"k0021"}, {"start": b"k004\xff"}, {"prefix": b"k"}, {"prefix": b""}):
        expected = [
            pair
            for pair in numbered(2, 5).items()
            if pair[0] in KeyRange(overlapping.get("start"), overlapping.get("stop"))
        ]
        assert list(reads.scan(**overlapping)) == expected  # type: ignore[arg-type]
        assert list(reads.scan(**overlapping, reverse=True)) == expected[::-1]  # type: ignore[arg-type]
        assert reads.scan_arrow(**overlapping).read_all().num_rows == len(expected)  # type: ignore[arg-type]
    assert list(reads.scan(b"x", b"x")) == []


def test_an_open_database_refuses_reads_outside_of_its_range(projected: World) -> None:
    with projected.open("a") as db:
        check(db)
        db.put(b"k003y", b"new")  # reads through the memtable are refused, too
        db.delete(b"k003y")
        check(db)
        for wanted in ({"durable_only": True}, {"dirty": True}):
            with pytest.raises(InvalidRequest, match="outside"):
                db.get(b"k005", **wanted)
        with pytest.raises(InvalidRequest, match="bytes"):
            db.get("k003")  # type: ignore[arg-type]


def test_snapshots_and_transactions_refuse_reads_outside_of_their_range(projected: World) -> None:
    with projected.open("a") as db:
        with db.snapshot() as snapshot:
            check(snapshot)
        for isolation in ("snapshot", "serializable"):
            with db.transaction(isolation) as transaction:  # type: ignore[arg-type]
                check(transaction)
                transaction.put(b"k003", b"own")
                assert transaction.get(b"k003") == b"own"
                with pytest.raises(InvalidRequest, match="outside"):
                    transaction.get(b"k001")
                transaction.rollback()


@pytest.mark.parametrize("options", [{}, {"mode": "latest"}, {"as_of": 10**6}, {"checkpoint": True}])
def test_readers_refuse_reads_outside_of_their_range(projected: World, options: dict[str, Any]) -> None:
    if "checkpoint" in options:
        options = {"checkpoint": projected.admin("a").create_checkpoint().id}
    if "as_of" in options:
        options = {"as_of": projected.admin("a").manifest().value.last_l0_seq}
    with flagstone.open_reader("a", store=projected.store, clock=projected.clock, **options) as reader:
        check(reader)


def test_the_async_interfaces_refuse_reads_outside_of_their_range(projected: World) -> None:
    async def check_all(reads: Any) -> None:
        assert await reads.get(b"k002") == b"v2"
        assert await reads.multi_get([b"k003", b"k0033"]) == [b"v3", None]
        for key in OUTSIDE:
            for read in (
                reads.get,
                reads.get_row,
                lambda key: reads.get(key, b"default"),
                lambda key: reads.multi_get([b"k003", key]),
            ):
                with pytest.raises(InvalidRequest, match=r"outside the .* b'k002' up to b'k005'"):
                    await read(key)
        for scan in SCANS_OUTSIDE:
            with pytest.raises(InvalidRequest, match="outside"):
                reads.scan(**scan)
            with pytest.raises(InvalidRequest, match="outside"):
                reads.scan_arrow(**scan)
        assert [pair async for pair in reads.scan(prefix=b"k")] == list(numbered(2, 5).items())

    async def run() -> None:
        async with await open_async("a", store=projected.store, clock=projected.clock) as db:
            await check_all(db)
            await db.put(b"k004x", b"new")
            await db.delete(b"k004x")
            await check_all(db)
            async with db.snapshot() as snapshot:
                await check_all(snapshot)
            async with db.transaction() as transaction:
                await check_all(transaction)
        async with await open_reader_async("a", store=projected.store, clock=projected.clock) as reader:
            await check_all(reader)

    asyncio.run(run())


def test_a_clone_and_a_union_pass_the_range_on_to_reads(projected: World) -> None:
    world = projected
    world.admin("a").clone("b")
    world.admin("p").clone("c", range=(b"k007", None))
    world.admin("a").union("u", ["c"])
    world.admin("p").clone("low", range=(None, b"k002"))
    world.admin("p").clone("middle", range=(b"k005", b"k007"))
    world.admin("a").union("whole", ["low", "middle", "c"])

    with flagstone.open_reader("b", store=world.store) as reader:
        check(reader)
    with world.open("u") as db:
        assert db.get(b"k004") == b"v4"
        assert db.get(b"k009") == b"v9"
        with pytest.raises(InvalidRequest, match=r"b'k002' up to b'k005' and b'k007' up to the end"):
            db.get(b"k006")
        with pytest.raises(InvalidRequest, match="outside"):
            db.scan(b"k005", b"k007")
        assert dict(db.scan(b"k004", b"k008")) == numbered(4, 5) | numbered(7, 8)
    with world.open("whole") as db:
        assert db.get(b"nowhere") is None
        assert dict(db.scan()) == numbered(0, 10)


def test_databases_without_a_range_answer_reads_of_every_key(world: World) -> None:
    world.write("p", numbered(0, 3))
    world.admin("p").clone("c")
    for path in ("p", "c"):
        with world.open(path) as db:
            assert db.get(b"\xff") is None
            assert list(db.scan(b"z")) == []
        with flagstone.open_reader(path, store=world.store) as reader:
            assert reader.get(b"\xff") is None


def test_a_projection_of_an_empty_range_refuses_reads_outside_of_it(world: World) -> None:
    world.write("p", numbered(0, 3))
    world.admin("p").clone("a", range=(b"x", b"y"))
    with world.open("a") as db:
        assert list(db.scan()) == []
        assert db.get(b"x") is None
        with pytest.raises(InvalidRequest, match="outside"):
            db.get(b"k000")


@pytest.mark.parametrize("border", [b"", b"\0", b"a", b"m", b"m\0", b"m\\", b"z\xff", b"\xff"])
def test_a_key_is_in_key_ranges_exactly_if_one_of_them_contains_it(border: bytes) -> None:
    ranges = [KeyRange(None, b"a\0"), KeyRange(b"m", b"m\\"), KeyRange(b"z", None)]
    held = KeyRanges(ranges)

    def refused(check: Callable[[], None]) -> bool:
        try:
            check()
        except InvalidRequest:
            return True
        return False

    assert (border in held) == any(border in one for one in ranges)
    assert refused(lambda: held.check_read(border)) == (border not in held)
    for other in (b"", b"\0", b"a", b"m", b"m\0", b"m\\", b"z\xff", b"\xff", None):
        asked = KeyRange(border or None, other)
        expected = not asked.empty and all(asked.intersect(one).empty for one in ranges)
        assert refused(lambda asked=asked: held.check_scan(asked)) == expected


def test_a_union_refuses_reads_outside_of_the_range_given_for_its_source(world: World) -> None:
    world.write("p", numbered(0, 10))
    world.write("q", {b"z": b"1"})
    world.admin("p").union(
        "u", [CloneSource("p", None, KeyRange(b"k004", b"m")), CloneSource("q", None, KeyRange(b"m", None))]
    )
    with world.open("u") as db:
        assert dict(db.scan()) == numbered(4, 10) | {b"z": b"1"}
        with pytest.raises(InvalidRequest, match=r"b'k004' up to the end"):
            db.get(b"k003")


def leave_in_the_wal(world: World, key: bytes) -> None:
    """Write a row as a writer of SlateDB does that crashes before a flush: it does not know the writable range."""
    origin = DbPaths("a").own("origin")
    kept = world.store.get(origin).data
    world.store.delete(origin)
    dying = FaultyStore(world.store)
    db = flagstone.open("a", store=dying)
    db.put(key, b"1", await_durable=True)
    dying.crash()
    with suppress(Crashed, flagstone.FlagstoneError):
        db.close()
    world.store.put(origin, kept)


def test_a_row_that_slatedb_wrote_outside_of_the_range_is_refused_by_get_and_returned_by_scan(
    projected: World,
) -> None:
    async def check_awaited() -> None:
        async with await open_async("a", store=projected.store) as db:
            with pytest.raises(InvalidRequest, match="outside"):
                await db.get(b"outside")
            assert (b"outside", b"1") in [pair async for pair in db.scan()]

    leave_in_the_wal(projected, b"outside")
    with projected.open("a") as db:
        with pytest.raises(InvalidRequest, match="outside"):
            db.get(b"outside")
        assert dict(db.scan())[b"outside"] == b"1"
    leave_in_the_wal(projected, b"outside")
    asyncio.run(check_awaited())
