"""`explain`: what it says about a read is what the read does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone import aio
from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.errors import InvalidRequest
from flagstone.lsm.operators import Concatenate
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL


def stored(settings: Settings = MANUAL) -> MemoryStore:
    """Three SSTs that overlap, and one row that is only in the WAL."""
    store = MemoryStore()
    with open_database("db", store=store, settings=settings, merge_operator=Concatenate()) as db:
        for key in (b"a", b"c", b"deleted", b"sum", b"z"):
            db.put(key, b"1" * 40)
        for number in range(2000):
            db.put(b"many/%05d" % number, bytes(100))
        db.flush()
        db.put(b"b", b"2")
        db.merge(b"sum", b"2")
        db.delete(b"deleted")
        db.put(b"zz", b"2")
        db.flush()
        db.put(b"a", b"3")
        db.put(b"zzz", b"3")
        db.flush()
    return store


def test_the_row_of_a_memtable_needs_no_request() -> None:
    with open_database("db", store=stored(), settings=MANUAL, merge_operator=Concatenate()) as db:
        db.put(b"a", b"newest")
        found = db.explain(b"a")
        assert (found.row.value if found.row else None, found.requests, found.bytes) == (b"newest", 0, 0)
        assert [step.source for step in found.steps] == ["memtable", "SST", "SST"]
        assert found.answered_by is found.steps[0]
        assert found.steps[1].outcome == "not asked: newer sources answer"


def test_filters_and_blocks_are_named() -> None:
    with open_reader("db", store=stored(), mode="latest", merge_operator=Concatenate()) as reader:
        found = reader.explain(b"many/01999")
        newest, middle, oldest = [step for step in found.steps if step.source == "SST"]
        assert (newest.versions, middle.versions) == (0, 0)
        assert oldest.filter is True
        assert oldest.answers
        assert oldest.block is not None
        assert oldest.block > 10
        assert found.rounds == 2
        again = reader.explain(b"many/01999")
        assert (again.rounds, again.requests, again.bytes) == (0, 0, 0)
        assert again.row == found.row


def test_merge_operands_are_followed_to_their_base_and_tombstones_end_a_read() -> None:
    with open_reader("db", store=stored(), mode="latest", merge_operator=Concatenate()) as reader:
        merged = [step for step in reader.explain(b"sum").steps if step.versions]
        assert [(step.outcome.split(",")[0], step.answers) for step in merged] == [
            ("merge operand", False),
            ("value", True),
        ]
        gone = reader.explain(b"deleted")
        assert gone.row is None
        assert gone.answered_by is not None
        assert gone.answered_by.outcome.startswith("tombstone")


def test_a_missing_key_has_no_answer() -> None:
    with open_reader("db", store=stored(), mode="latest", merge_operator=Concatenate()) as reader:
        found = reader.explain(b"missing")
        assert (found.row, found.answered_by) == (None, None)
        with pytest.raises(InvalidRequest):
            reader.explain("a")  # type: ignore[arg-type]


KEYS = [b"a", b"b", b"c", b"deleted", b"missing", b"sum", b"z", b"zz", b"zzz", b"many/00000", b"many/01000"]
STORE = stored()


@given(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
def test_an_explanation_counts_the_requests_that_a_get_makes(keys: list[bytes]) -> None:
    counting = CountingStore(STORE, component="test")

    def spent() -> tuple[int, int]:
        totals = counting.totals()
        return sum(totals["requests"].values()), totals["bytes_read"]

    def read(explaining: bool) -> list[Any]:
        answers: list[Any] = []
        with open_reader("db", store=counting, mode="latest", merge_operator=Concatenate()) as reader:
            for key in keys:
                before = spent()
                if explaining:
                    found = reader.explain(key)
                    row = found.row
                    after = spent()
                    assert (after[0] - before[0], after[1] - before[1]) == (found.requests, found.bytes)
                else:
                    row = reader.get_row(key)
                    after = spent()
                answers.append((row, after[0] - before[0], after[1] - before[1]))
        return answers

    assert read(explaining=True) == read(explaining=False)


def test_it_is_plain_data_and_has_an_async_form() -> None:
    async def explain() -> dict[str, Any]:
        async with aio.open("memory://explain/db", settings=MANUAL) as db:
            await db.put(b"a", b"1")
            return (await db.explain(b"a")).to_dict()

    found = asyncio.run(explain())
    assert found["found"] is True
    assert found["steps"][0]["outcome"] == "value, sequence number 1"
