"""`seek` before and after the first row, forward and backward, through every way to scan a database.

All of them continue at the key itself, also if the next keys differ from it by one byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import flagstone
from flagstone import Db
from flagstone.aio import open as open_async
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET

NEIGHBOURS = [
    b"\0",
    b"\0\0",
    b"0",
    b"k",
    b"k\0",
    b"k\0\0",
    b"k\x01",
    b"k0",
    b"kA",
    b"k[",
    b"k\\",
    b"k\\0",
    b"ka",
]
NEIGHBOURS += [b"k\xff", b"l", b"\xff", b"\xff\xff"]
GOALS = [*NEIGHBOURS, b"", b"a", b"k\\\\", b"z", b"\xff\xff\xff"]

Keys = list[bytes]


def fill(db: Db, where: str) -> None:
    for key in NEIGHBOURS:
        db.put(key, b"v")
    if where == "ssts":
        db.flush()


@pytest.fixture(params=["memtable", "ssts"])
def store(request: pytest.FixtureRequest) -> Iterator[MemoryStore]:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=QUIET) as db:
        fill(db, request.param)
        if request.param == "memtable":
            db.flush("wal")
        yield store


def expected(goal: bytes, first: int, *, reverse: bool) -> Keys:
    order = sorted(NEIGHBOURS, reverse=reverse)[first:]
    return [key for key in order if (key <= goal if reverse else key >= goal)]


def sought(scan: flagstone.Scan, goal: bytes, first: int) -> Keys:
    with scan:
        for _ in range(first):
            next(scan)
        scan.seek(goal)
        return [key for key, _ in scan]


def check(scan: Callable[[bool], flagstone.Scan]) -> None:
    for reverse in (False, True):
        for first in (0, 1, 5):
            for goal in GOALS:
                found = sought(scan(reverse), goal, first)
                assert found == expected(goal, first, reverse=reverse), (goal, first, reverse)


@pytest.mark.parametrize("where", ["memtable", "ssts"])
def test_seek_in_a_reverse_scan_includes_the_key_itself_and_nothing_above(where: str) -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        fill(db, where)
        with db.scan(reverse=True) as scan:
            scan.seek(b"k")
            assert next(scan)[0] == b"k"
        check(lambda reverse: db.scan(reverse=reverse))
        with db.snapshot() as snapshot:
            check(lambda reverse: snapshot.scan(reverse=reverse))


def test_seek_in_a_scan_of_a_transaction_includes_its_own_writes() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        for key in NEIGHBOURS[::2]:
            db.put(key, b"v")
        with db.transaction() as transaction:
            for key in NEIGHBOURS[1::2]:
                transaction.put(key, b"own")
            check(lambda reverse: transaction.scan(reverse=reverse))


def test_seek_in_a_scan_of_a_reader_continues_at_the_key(store: MemoryStore) -> None:
    with flagstone.open_reader("db", store=store) as reader:
        check(lambda reverse: reader.scan(reverse=reverse))


def test_seek_before_the_first_row_of_an_async_scan_includes_the_key_itself_and_nothing_above() -> None:
    async def run() -> None:
        async with await open_async("db", store=MemoryStore(), settings=QUIET) as db:
            for key in NEIGHBOURS:
                await db.put(key, b"v")
            for reverse in (False, True):
                for goal in GOALS:
                    async with db.scan(reverse=reverse) as scan:
                        scan.seek(goal)
                        found = [key async for key, _ in scan]
                    assert found == expected(goal, 0, reverse=reverse), (goal, reverse)

    asyncio.run(run())


def test_several_seeks_before_the_first_row_all_apply() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        fill(db, "memtable")
        for reverse in (False, True):
            for one in GOALS:
                for other in GOALS:
                    with db.scan(reverse=reverse) as scan:
                        scan.seek(one)
                        scan.seek(other)
                        found = [key for key, _ in scan]
                    kept = expected(one, 0, reverse=reverse)
                    assert found == [key for key in kept if key in expected(other, 0, reverse=reverse)]


def test_seek_to_a_key_that_is_not_bytes_raises_invalid_request() -> None:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        fill(db, "memtable")
        for first in (0, 1):
            with db.scan(reverse=True) as scan:
                for _ in range(first):
                    next(scan)
                with pytest.raises(flagstone.InvalidRequest, match="bytes, not str"):
                    scan.seek("k")  # type: ignore[arg-type]
