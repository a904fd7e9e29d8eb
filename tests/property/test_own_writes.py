"""A transaction reads its own writes, in any order of writes, reads and scans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.db.open import open_database
from flagstone.lsm.operators import Concatenate
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL
from kit.strategies import neighbours

keys = neighbours
steps = st.one_of(
    st.tuples(st.just("put"), keys, st.binary(max_size=3)),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("merge"), keys, st.binary(min_size=1, max_size=2)),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("open scan"), keys, keys, st.booleans()),
    st.tuples(st.just("open and seek"), keys, st.booleans()),
    st.tuples(st.just("take"), st.integers(0, 3)),
    st.tuples(st.just("seek"), keys),
)


@pytest.mark.slow
@given(st.dictionaries(keys, st.binary(max_size=3)), st.lists(steps, max_size=60))
def test_reads_see_the_writes_before_them_and_scans_those_before_they_began(
    before: dict[bytes, bytes], history: list[tuple[Any, ...]]
) -> None:
    with open_database("db", store=MemoryStore(), settings=MANUAL, merge_operator=Concatenate()) as db:
        for key, value in before.items():
            db.put(key, value)
        model = dict(before)
        transaction = db.transaction()
        scan: Any = None
        left: list[tuple[bytes, bytes]] = []
        reverse = False
        for verb, *arguments in history:
            match verb:
                case "put":
                    transaction.put(*arguments)
                    model[arguments[0]] = arguments[1]
                case "delete":
                    transaction.delete(*arguments)
                    model.pop(arguments[0], None)
                case "merge":
                    transaction.merge(*arguments)
                    model[arguments[0]] = model.get(arguments[0], b"") + arguments[1]
                case "get":
                    assert transaction.get(*arguments) == model.get(arguments[0])
                case "open scan":
                    low, high, reverse = min(arguments[:2]), max(arguments[:2]), arguments[2]
                    scan = transaction.scan(low, high, reverse=reverse)
                    left = sorted(
                        ((key, value) for key, value in model.items() if low <= key < high), reverse=reverse
                    )
                case "open and seek":
                    key, reverse = arguments
                    scan = transaction.scan(reverse=reverse)
                    scan.seek(key)
                    left = sorted(
                        (row for row in model.items() if (row[0] <= key if reverse else row[0] >= key)),
                        reverse=reverse,
                    )
                case "take" if scan is not None:
                    for _ in range(arguments[0]):
                        assert next(scan, None) == (left.pop(0) if left else None)
                case "seek" if scan is not None:
                    scan.seek(arguments[0])
                    left = [
                        row for row in left if (row[0] <= arguments[0] if reverse else row[0] >= arguments[0])
                    ]
        if scan is not None:
            assert list(scan) == left
        assert dict(transaction.scan()) == model
        transaction.commit()
        assert dict(db.scan()) == model
