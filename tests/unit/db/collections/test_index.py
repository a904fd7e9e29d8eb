"""Secondary indexes: kept in the same transaction, unique ones, existing rows, programs that do not know them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flagstone
from flagstone import InvalidRequest, TransactionConflict, keys
from flagstone.db.collections.index import Problem, UniqueViolation
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL, QUIET


@dataclass(frozen=True)
class User:
    email: str
    city: str | None = None
    tags: list[str] | None = None


@dataclass(frozen=True)
class Person:
    """Without a list: its rows are encoded and decoded in microseconds."""

    email: str
    city: str | None = None


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def db(store: MemoryStore) -> Iterator[Db]:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        yield db


@pytest.fixture
def users(db: Db) -> Any:
    return db.collection("users", key=int, value=User)


def test_an_index_leads_to_rows_and_follows_every_change(db: Db, users: Any) -> None:
    by_city = users.index("by_city", lambda user: user.city)
    users[1] = User("a@x", "Rome")
    users[2] = User("b@x", "Oslo")
    users[3] = User("c@x", "Rome")
    users[4] = User("d@x")
    assert list(by_city.scan("Rome")) == [(1, users[1]), (3, users[3])]
    assert list(by_city.keys()) == [2, 1, 3]
    assert [user.email for user in by_city.values(reverse=True)] == ["c@x", "a@x", "b@x"]
    assert [key for key, _ in by_city.scan(start="P")] == [1, 3]
    assert (by_city.count(), by_city.count("Rome")) == (3, 2)
    assert by_city.get("Oslo") == users[2]
    assert by_city.get("Paris") is None
    assert "Rome" in by_city
    assert "Paris" not in by_city

    users[1] = User("a@x", "Oslo")
    del users[3]
    users.pop(2)
    assert list(by_city.keys("Oslo")) == [1]
    assert list(by_city.keys("Rome")) == []
    users.update({number: User(f"{number}@x", "Rome") for number in range(10, 1000)})
    assert by_city.count("Rome") == 990
    users.clear()
    assert by_city.count() == 0
    assert users.check_indexes() == []


def test_rows_and_entries_become_visible_together(db: Db, users: Any) -> None:
    by_city = users.index("by_city", lambda user: user.city)
    users[1] = User("a", "Rome")
    transaction = db.transaction()
    inside = users.within(transaction)
    inside[1] = User("a", "Oslo")
    inside[2] = User("b", "Rome")
    assert list(by_city.within(transaction).keys("Rome")) == [2]
    assert list(inside.indexes["by_city"].keys("Oslo")) == [1]
    assert list(by_city.keys("Rome")) == [1]
    transaction.commit()
    assert (list(by_city.keys("Rome")), list(by_city.keys("Oslo"))) == ([2], [1])
    with pytest.raises(InvalidRequest, match="use a transaction"), db.batch() as batch:
        users.within(batch)[3] = User("c", "Rome")


def test_an_index_of_several_parts_and_of_lists(db: Db, users: Any) -> None:
    by_place = users.index("by_place", lambda user: (user.city, user.email))
    by_tag = users.index("by_tag", lambda user: user.tags or [])
    users[1] = User("a", "Rome", ["new", "vip"])
    users[2] = User("b", "Rome", ["vip"])
    assert list(by_place.keys("Rome")) == [1, 2]
    assert list(by_place.keys("Rome", "b")) == [2]
    assert list(by_tag.keys("vip")) == [1, 2]
    users[1] = replace(users[1], tags=["old"])
    assert list(by_tag.keys("vip")) == [2]
    assert list(by_tag.keys("old")) == [1]


def test_a_unique_index_finds_one_row_and_refuses_a_second(db: Db, users: Any) -> None:
    by_email = users.index("by_email", lambda user: user.email, unique=True)
    users[1] = User("a@x")
    assert by_email["a@x"] == User("a@x")
    with pytest.raises(KeyError):
        by_email["b@x"]
    with pytest.raises(
        UniqueViolation, match="'by_email' of the collection 'users' has this key for the row 1"
    ):
        users[2] = User("a@x")
    assert users.get(2) is None
    users[1] = User("a@x", "Rome")
    users[1] = User("b@x")
    users[2] = User("a@x")
    assert list(by_email.scan()) == [(2, User("a@x")), (1, User("b@x"))]
    with pytest.raises(InvalidRequest, match="not unique"):
        users.index("by_city", lambda user: user.city)["Rome"]
    assert users.check_indexes() == []


def test_of_two_transactions_with_the_same_unique_key_one_conflicts(db: Db, users: Any) -> None:
    users.index("by_email", lambda user: user.email, unique=True)
    one, other = db.transaction(), db.transaction()
    users.within(one)[1] = User("a@x")
    users.within(other)[2] = User("a@x")
    one.commit()
    with pytest.raises(TransactionConflict):
        other.commit()


def test_threads_that_add_the_same_unique_key_add_it_once(db: Db, users: Any) -> None:
    users.index("by_email", lambda user: user.email, unique=True)
    refused: list[int] = []

    def add(number: int) -> None:
        try:
            users[number] = User("a@x")
        except UniqueViolation:
            refused.append(number)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(refused), users.count()) == (7, 1)
    assert users.check_indexes() == []


def test_an_index_gets_the_rows_that_exist_while_others_are_written(db: Db) -> None:
    users = db.collection("people", key=int, value=Person)
    users.update({number: Person(f"{number}@x", "Rome") for number in range(2000)})
    begun = threading.Event()
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            users[number % 3000] = Person(f"{number}@y", "Oslo" if number % 2 else None)
            del users[(number * 7) % 3000]
            number += 1
            begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    users.index("by_city", lambda user: user.city)
    stop.set()
    writer.join()
    assert users.check_indexes() == []


def test_a_unique_index_over_rows_with_equal_keys_is_refused_and_leaves_nothing(db: Db, users: Any) -> None:
    users.update({1: User("a@x"), 2: User("a@x")})
    with pytest.raises(UniqueViolation):
        users.index("by_email", lambda user: user.email, unique=True)
    assert users.indexes == {}
    assert [key for key in db if keys.decode(key)[0] is None] == []
    users[3] = User("a@x")


def test_an_index_whose_function_fails_for_a_row_does_not_exist_afterwards(db: Db, users: Any) -> None:
    """Else no program could write the collection: each write would fail, or lack the declaration."""
    users[1] = User("a@x")

    def failing(user: User) -> str:
        raise LookupError(user.email)

    with pytest.raises(LookupError, match="a@x"):
        users.index("bad", failing)
    assert users.indexes == {}
    users[2] = User("b@x")
    assert db.collection("users", key=int, value=User).indexes == {}
    assert list(users) == [1, 2]


def test_entries_of_rows_that_do_not_expire_do_not_expire_with_the_default(store: MemoryStore) -> None:
    clock = VirtualClock()
    with open_database("db", store=store, settings=QUIET, clock=clock) as db:
        db.collection("users", key=int, value=User)[1] = User("a@x")
    expiring = QUIET.replace(default_ttl_millis=1000)
    with open_database("db", store=store, settings=expiring, clock=clock) as db:
        users = db.collection("users", key=int, value=User)
        by_email = users.index("by_email", lambda user: user.email)
        users[2] = User("b@x")
        clock.advance(2000)
        assert list(users) == list(by_email.keys()) == [1]
        assert users.check_indexes() == []


def test_a_transaction_from_before_the_declaration_conflicts(db: Db, users: Any) -> None:
    transaction = db.transaction()
    users.within(transaction)[1] = User("a", "Rome")
    by_city = users.index("by_city", lambda user: user.city)
    with pytest.raises(TransactionConflict):
        transaction.commit()
    assert list(by_city.keys()) == []


def test_a_program_that_has_not_declared_an_index_may_read_but_not_write(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        users = db.collection("users", key=int, value=User)
        users.index("by_city", lambda user: user.city)
        users[1] = User("a", "Rome")
    with flagstone.open("db", store=store, settings=QUIET) as db:
        users = db.collection("users", key=int, value=User)
        assert users[1] == User("a", "Rome")
        for write in (lambda: users.put(2, User("b")), lambda: users.delete(1), users.clear, users.popitem):
            with pytest.raises(
                InvalidRequest, match="has the index 'by_city', which this program has not declared"
            ):
                write()
        by_city = users.index("by_city", lambda user: user.city)
        users[2] = User("b", "Rome")
        assert list(by_city.keys("Rome")) == [1, 2]
        with pytest.raises(InvalidRequest, match="exists and is not unique"):
            users.index("by_city", lambda user: user.city, unique=True)
        users.drop_index("by_city")
        users.drop_index("by_city")
        users[3] = User("c")
        assert [keys.decode(key)[0] for key in db] == ["users"] * 3


def test_a_declaration_that_was_cut_off_is_repeated(db: Db, store: MemoryStore) -> None:
    users = db.collection("people", key=int, value=Person)
    users.update({number: Person(f"{number}@x", "Rome") for number in range(600)})
    calls: list[int] = []

    def city(user: Person) -> str | None:
        calls.append(1)
        if len(calls) == 400:
            raise KeyboardInterrupt
        return user.city

    with pytest.raises(KeyboardInterrupt):
        users.index("by_city", city)
    db.close()
    with flagstone.open("db", store=store, settings=QUIET) as again:
        users = again.collection("people", key=int, value=Person)
        by_city = users.index("by_city", lambda user: user.city)
        assert by_city.count("Rome") == 600
        assert users.check_indexes() == []


def test_entries_expire_with_their_rows(db: Db, users: Any) -> None:
    users.put(1, User("a", "Rome"), ttl="1h")
    users.index("by_city", lambda user: user.city)
    users.put(2, User("b", "Rome"), ttl="2h")
    rows = {row.key: row.expires_ms for row in db.scan().rows()}
    for number in (1, 2):
        entry = keys.encode(None, "users", "by_city", "Rome", number)
        assert rows[entry] == rows[keys.encode("users", number)] is not None


def test_the_check_finds_what_was_written_past_the_collection(db: Db, users: Any) -> None:
    by_city = users.index("by_city", lambda user: user.city)
    users[1] = User("a", "Rome")
    users[2] = User("b", "Oslo")
    db.delete(keys.encode(None, "users", "by_city", "Rome", 1))
    db.delete(keys.encode("users", 2))
    assert users.check_indexes() == [
        Problem("by_city", "missing", ("Rome",), 1),
        Problem("by_city", "stale", ("Oslo",), 2),
    ]
    with pytest.raises(flagstone.CorruptData, match="drop the index and declare it again"):
        list(by_city.scan("Oslo"))
    users.drop_index("by_city")
    users.index("by_city", lambda user: user.city)
    assert users.check_indexes() == []


def test_indexes_are_declared_on_a_database_only_and_need_keys(db: Db, users: Any) -> None:
    with db.transaction() as tx, pytest.raises(InvalidRequest, match="of a database"):
        users.within(tx).index("by_city", lambda user: user.city)
    users.index("by_user", lambda user: user)
    with pytest.raises(InvalidRequest, match="the index 'by_user'"):
        users[1] = User("a")
    assert users.get(1) is None
    with pytest.raises(InvalidRequest, match="name of an index"):
        users.index("", lambda user: user.city)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "pop", "flush", "tx"]), st.integers(0, 5), st.sampled_from("abc")
    ),
    max_size=40,
)


@given(steps=STEPS, declared_at=st.integers(0, 40))
def test_indexes_agree_with_the_rows_after_any_steps(
    steps: list[tuple[str, int, str]], declared_at: int
) -> None:
    with flagstone.open("db", store=MemoryStore(), settings=MANUAL) as db:
        users = db.collection("users", key=int, value=User)
        model: dict[int, User] = {}
        for number, (step, key, city) in enumerate([*steps, ("flush", 0, "a")]):
            if number == declared_at:
                users.index("by_city", lambda user: user.city)
            user = User("e", city)
            if step == "put":
                users[key] = model[key] = user
            elif step == "delete":
                del users[key]
                model.pop(key, None)
            elif step == "pop":
                assert users.pop(key, None) == model.pop(key, None)
            elif step == "flush":
                db.flush()
            else:
                with db.transaction() as tx:
                    users.within(tx)[key] = user
                    users.within(tx)[key + 1] = user
                model[key] = model[key + 1] = user
        by_city = users.index("by_city", lambda user: user.city)
        assert dict(users.items()) == model
        assert users.check_indexes() == []
        for city in "abc":
            assert list(by_city.keys(city)) == sorted(key for key, user in model.items() if user.city == city)
