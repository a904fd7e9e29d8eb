"""Databases, snapshots, transactions, readers and their slices as mappings."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flagstone
from flagstone import InvalidRequest, TransactionConflict, WriteBatch, aio
from flagstone.db.writer.database import Db
from flagstone.read.estimate import MAX_SSTS_READ
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL, QUIET

ROWS = {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def db(store: MemoryStore) -> Iterator[Db]:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.update(ROWS)
        yield db


@pytest.fixture(params=["db", "snapshot", "transaction", "reader", "slice", "slice of a slice"])
def rows(request: pytest.FixtureRequest, db: Db, store: MemoryStore) -> Iterator[Any]:
    match request.param:
        case "db":
            yield db
        case "snapshot":
            with db.snapshot() as snapshot:
                db[b"e"] = b"too late"
                yield snapshot
        case "transaction":
            del db[b"c"]
            with db.transaction() as transaction:
                transaction[b"c"] = b"3"
                yield transaction
        case "reader":
            db.flush("wal")
            with flagstone.open_reader("db", store=store) as reader:
                yield reader
        case "slice":
            db[b"z"] = b"outside"
            yield db[:b"z"]
        case _:
            db.update({b"A": b"outside", b"z": b"outside"})
            yield db[b"a":][:b"z"]


def test_every_handle_and_every_slice_is_a_mapping_in_key_order(rows: Any) -> None:
    assert isinstance(rows, Mapping)
    assert list(rows) == list(ROWS)
    assert list(reversed(rows)) == list(ROWS)[::-1]
    assert dict(rows) == ROWS
    assert {**rows} == ROWS
    assert rows.count() == len(ROWS)
    assert b"b" in rows
    assert b"z" not in rows
    assert rows.get(b"z") is None
    assert rows.get(b"z", 7) == 7
    with pytest.raises(KeyError):
        rows[b"z"]


def test_views_are_lazy_sorted_and_reversible(rows: Any) -> None:
    keys, values, items = rows.keys(), rows.values(), rows.items()

    assert (list(keys), list(values), list(items)) == (list(ROWS), list(ROWS.values()), list(ROWS.items()))
    assert list(reversed(keys)) == list(ROWS)[::-1]
    assert list(reversed(values)) == list(ROWS.values())[::-1]
    assert list(reversed(items)) == list(ROWS.items())[::-1]
    assert isinstance(keys, KeysView)
    assert isinstance(values, ValuesView)
    assert isinstance(items, ItemsView)
    assert bool(keys)
    assert bool(values)
    assert bool(items)


def test_views_know_membership_and_keys_and_items_are_sets(rows: Any) -> None:
    assert b"a" in rows.keys()  # noqa: SIM118 - the view is tested
    assert b"4" in rows.values()
    assert b"5" not in rows.values()
    assert (b"a", b"1") in rows.items()
    assert (b"a", b"2") not in rows.items()
    assert (b"y", b"2") not in rows.items()
    assert "pair" not in rows.items()
    assert rows.keys() == ROWS.keys()
    assert rows.keys() != {b"a"}
    assert rows.items() == ROWS.items()
    assert rows.keys() & {b"a", b"q"} == {b"a"}
    assert rows.items() - {(b"a", b"1")} == dict(list(ROWS.items())[1:]).items()


def test_views_compare_as_sets_without_a_length(rows: Any) -> None:
    assert rows.keys() <= {*ROWS, b"z"}
    assert not rows.keys() < set(ROWS)
    assert rows.keys() > {b"a"}
    assert rows.keys() >= set(ROWS)
    assert rows.items() <= ROWS.items()
    assert rows.items() < {**ROWS, b"z": b""}.items()
    assert not rows.items() > ROWS.items()
    with pytest.raises(TypeError):
        rows.keys() <= [b"a"]  # noqa: B015


def test_the_length_is_refused_with_what_to_call_instead(rows: Any) -> None:
    for sized in (rows, rows.keys(), rows.items(), rows.values()):
        with pytest.raises(TypeError, match=r"count\(\).*approximate_len\(\)"):
            len(sized)
    with pytest.raises(InvalidRequest):
        len(rows)
    assert rows.approximate_len() >= 4


def test_testing_a_handle_reads_nothing_and_is_true(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        before = db._context.scans
        assert db
        assert db.snapshot()
        assert db._context.scans == before
        assert not db.keys()
        assert not db[b"a":b"b"]


def test_a_slice_shows_later_writes_and_a_snapshots_slice_does_not(db: Db) -> None:
    with db.snapshot() as snapshot:
        live, frozen = db[b"b":b"d"], snapshot[b"b":b"d"]
        db[b"bb"] = b"new"
        assert list(live) == [b"b", b"bb", b"c"]
        assert list(frozen) == [b"b", b"c"]


def test_slices_have_half_open_bounds_as_scans_do(db: Db) -> None:
    assert dict(db[b"b":b"d"]) == {b"b": b"2", b"c": b"3"}
    assert dict(db[:b"b"]) == {b"a": b"1"}
    assert dict(db[b"c":]) == {b"c": b"3", b"d": b"4"}
    assert dict(db[:]) == ROWS
    part = db[b"b":b"d"]
    assert b"a" not in part
    assert b"d" not in part
    assert part == {b"b": b"2", b"c": b"3"}
    assert part[b"c":] == {b"c": b"3"}
    assert dict(part[:b"a"]) == {}
    assert part[:b"a"].count() == 0
    assert part.approximate_len() == 2
    with pytest.raises(KeyError):
        part[b"a"]


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (slice(b"a", b"b", 2), "no step"),
        (slice(b"b", b"a"), "inverted"),
        (slice("a", b"b"), "start is bytes, not str; encode it first"),
        (slice(1, None), "start is bytes, not int"),
    ],
)
def test_a_slice_with_a_step_or_bad_bounds_is_refused(db: Db, bounds: slice, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        db[bounds]
    with pytest.raises(InvalidRequest, match=text):
        db[b"a":][bounds]


def test_writing_to_or_deleting_a_slice_is_refused(db: Db) -> None:
    with pytest.raises(InvalidRequest, match="slice"):
        db[b"a":b"b"] = b"v"  # type: ignore[index]
    with pytest.raises(InvalidRequest, match="slice"):
        del db[b"a":b"b"]  # type: ignore[arg-type]
    assert dict(db) == ROWS


@pytest.mark.parametrize("kind", ["db", "transaction"])
def test_databases_and_transactions_change_like_dictionaries(db: Db, kind: str) -> None:
    rows: Any = db if kind == "db" else db.transaction()
    assert isinstance(rows, MutableMapping)

    assert rows.pop(b"a") == b"1"
    assert rows.pop(b"a", None) is None
    with pytest.raises(KeyError):
        rows.pop(b"a")
    assert rows.setdefault(b"b", b"x") == b"2"
    assert rows.setdefault(b"e", b"5") == b"5"
    assert rows.popitem() == (b"e", b"5")
    assert rows.popitem(last=False) == (b"b", b"2")
    rows.update({b"f": b"6"})
    rows.update([(b"g", b"7")])
    rows[b"h"] = b"8"
    del rows[b"h"]
    assert dict(rows) == {b"c": b"3", b"d": b"4", b"f": b"6", b"g": b"7"}
    if kind == "transaction":
        assert dict(db) == ROWS
        rows.commit()
        assert dict(db) == {b"c": b"3", b"d": b"4", b"f": b"6", b"g": b"7"}
    rows = db if kind == "db" else db.transaction()
    rows.clear()
    assert list(rows) == []
    with pytest.raises(KeyError):
        rows.popitem()


def test_a_batch_takes_item_assignment(db: Db) -> None:
    with db.batch() as batch:
        batch[b"e"] = b"5"
        del batch[b"a"]
    assert (db.get(b"e"), db.get(b"a")) == (b"5", None)


def test_update_and_clear_write_batches_of_bounded_size(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = Db.write

    def counted(self: Db, batch: WriteBatch, **options: Any) -> Any:
        sizes.append(len(batch))
        return write(self, batch, **options)

    monkeypatch.setattr(Db, "write", counted)
    db.update((b"k%05d" % number, b"v") for number in range(10_000))
    db.update((b"l%d" % number, b"v" * 300_000) for number in range(9))
    assert sizes == [4096, 4096, 1808, 4, 4, 1]
    sizes.clear()
    db.clear()
    assert sum(sizes) == 10_000 + 9 + len(ROWS)
    assert max(sizes) == 4096
    assert not db.keys()


def test_an_update_that_fails_keeps_the_whole_batches_before_it(db: Db) -> None:
    def broken() -> Iterator[tuple[bytes, bytes]]:
        for number in range(5000):
            yield b"k%05d" % number, b"v"
        raise OSError("the file ends")

    with pytest.raises(OSError, match="ends"):
        db.update(broken())
    assert db.count(prefix=b"k") == 4096


def test_concurrent_pops_give_each_row_to_one_thread(db: Db) -> None:
    db.update({b"%03d" % number: b"v" for number in range(60)})
    taken: list[bytes] = []

    def take() -> None:
        while True:
            try:
                key, _ = db.popitem(last=False)
            except KeyError:
                return
            taken.append(key)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 64
    assert len(set(taken)) == 64


def test_popping_a_row_in_a_transaction_conflicts_with_another_pop(db: Db) -> None:
    one, other = db.transaction(), db.transaction()
    assert one.pop(b"a") == other.pop(b"a") == b"1"
    one.commit()
    with pytest.raises(TransactionConflict):
        other.commit()


def test_counts_of_a_range_or_prefix_are_exact(db: Db) -> None:
    db.update({b"order/%d" % number: b"v" for number in range(300)})
    db.put(b"order/gone", b"v")
    db.delete(b"order/gone")
    db.flush()
    db.update({b"order/%d" % number: b"w" for number in range(10)})
    assert db.count(prefix=b"order/") == 300
    assert db.count(b"b", b"d") == 2
    assert db.count() == 304


def test_a_scan_counts_the_rows_it_has_not_shown_yet(db: Db) -> None:
    scan = db.scan()
    assert next(scan) == (b"a", b"1")
    assert scan.count_rest() == 3
    assert list(scan) == []
    assert db.scan(limit=2).count_rest() == 2
    assert db.scan(reverse=True).count_rest() == 4


def test_handles_equal_only_themselves_and_are_hashable(db: Db) -> None:
    snapshot = db.snapshot()
    assert db == db  # noqa: PLR0124
    assert db != snapshot
    assert db != ROWS
    assert len({db, snapshot, db}) == 2


def test_a_handle_cannot_be_pickled_and_the_error_gives_the_way(db: Db) -> None:
    for handle in (db, db.snapshot(), db.transaction()):
        with pytest.raises(TypeError, match="address of the database"):
            pickle.dumps(handle)


# -- the estimate -------------------------------------------------------------------------------------------


def test_the_estimate_of_flushed_rows_is_exact_and_of_a_range_near(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.update({b"k%05d" % number: b"v" * 50 for number in range(6000)})
        db.flush()
        db.update({b"m%05d" % number: b"v" * 50 for number in range(500)})
        assert db.approximate_len() == 6500
        assert db.approximate_len(prefix=b"m") == 500
        assert db.approximate_len(prefix=b"z") == 0
        assert abs(db.approximate_len(b"k02000", b"k03000") - 1000) < 150
        with flagstone.open_reader("db", store=store) as reader:
            assert reader.approximate_len(prefix=b"k") == 6000


def test_the_estimate_subtracts_deletions(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.update({b"k%05d" % number: b"v" for number in range(1000)})
        db.flush()
        for number in range(400):
            db.delete(b"k%05d" % number)
        assert db.approximate_len() == 600
        db.flush()
        assert db.approximate_len() == 600
        db.clear()
        assert db.approximate_len() == 0


def test_the_estimate_makes_a_bounded_number_of_requests(store: MemoryStore) -> None:
    settings = MANUAL.replace(l0_max_ssts=1000, l0_max_ssts_per_key=1000)
    with flagstone.open("db", store=store, settings=settings) as db:
        for number in range(MAX_SSTS_READ + 14):
            db[b"k%05d" % number] = b"v"
            db.flush()
        name = "flagstone.object_store.request_count"
        before = sum(value for key, value in db.metrics().items() if key.startswith(name))
        assert abs(db.approximate_len() - (MAX_SSTS_READ + 14)) <= 2
        after = sum(value for key, value in db.metrics().items() if key.startswith(name))
        assert after - before <= MAX_SSTS_READ


@given(st.lists(st.tuples(st.sampled_from("pdf"), st.integers(0, 30)), max_size=60), st.integers(0, 30))
def test_the_exact_count_equals_a_scan_and_the_estimate_is_never_negative(
    steps: list[tuple[str, int]], low: int
) -> None:
    with flagstone.open("db", store=MemoryStore(), settings=MANUAL) as db:
        for step, number in steps:
            key = b"%02d" % number
            if step == "p":
                db[key] = b"v"
            elif step == "d":
                del db[key]
            else:
                db.flush()
        start = b"%02d" % low
        assert db.count(start) == len(list(db.scan(start)))
        assert db.approximate_len(start) >= 0


# -- asyncio ------------------------------------------------------------------------------------------------


def test_async_handles_iterate_count_and_change(store: MemoryStore) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=QUIET) as db:
            await db.update(ROWS)
            assert [key async for key in db] == list(ROWS)
            assert [key async for key in db.keys()] == list(ROWS)  # noqa: SIM118
            assert [value async for value in db.values()] == list(ROWS.values())
            assert [item async for item in db.items()] == list(ROWS.items())
            assert await db.count() == 4
            assert await db.count(prefix=b"a") == 1
            assert await db.approximate_len() == 4
            assert await db.pop(b"a") == b"1"
            assert await db.pop(b"a", 0) == 0
            with pytest.raises(KeyError):
                await db.pop(b"a")
            assert await db.setdefault(b"a", b"x") == b"x"
            async with db.transaction() as tx:
                assert await tx.popitem() == (b"d", b"4")
            assert await db.popitem(last=False) == (b"a", b"x")
            await db.clear()
            assert await db.count() == 0

    asyncio.run(main())
