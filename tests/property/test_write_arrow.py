"""Rows written as Arrow columns against the same rows written one by one, in both forms of the memtable."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.changes.reader import WalReader
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.lsm.operators import Concatenate
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.write import state
from kit.databases import IDLE
from kit.kernels import forms_of, replaced_kernels
from kit.strategies import neighbours, user_keys

pytestmark = pytest.mark.slow

FORMS = pytest.mark.parametrize("form", forms_of("memtable"))
KERNELS = {(state, "kernel"): "memtable"}
TYPES = (pa.binary(), pa.large_binary(), pa.binary_view())


class Written(NamedTuple):
    key: bytes
    op: str | None
    value: bytes
    ttl_ms: int | None


rows = st.lists(
    st.builds(
        Written,
        st.one_of(neighbours, user_keys),
        st.sampled_from([None, "put", "put", "delete", "merge"]),
        st.binary(max_size=20),
        st.none() | st.integers(1, 3_000),
    ),
    max_size=40,
)


def write_one_by_one(db: Db, written: list[Written], *, timed: bool) -> None:
    for key, op, value, ttl_ms in written:
        never = timedelta.max if timed else None
        ttl = never if ttl_ms is None or not timed else timedelta(milliseconds=ttl_ms)
        match op:
            case "delete":
                db.delete(key)
            case "merge":
                db.merge(key, value, ttl=ttl)
            case _:
                db.put(key, value, ttl=ttl)


def as_table(written: list[Written], kind: pa.DataType, batch_rows: int) -> pa.Table:
    table = pa.table(
        {
            "key": pa.array([row.key for row in written], kind),
            # A deletion needs no value, and ignores the one it has.
            "value": pa.array(
                [row.value if row.op != "delete" or row.value else None for row in written], kind
            ),
            "op": pa.array([row.op for row in written], pa.string()),
            "ttl_ms": pa.array([row.ttl_ms for row in written], pa.int32()),
        }
    )
    return pa.Table.from_batches(table.to_batches(batch_rows), schema=table.schema)


def contents(db: Db) -> list[tuple[Any, ...]]:
    return [(row.key, row.value, row.created_ms, row.expires_ms) for row in db.scan().rows()]


@FORMS
@given(
    before=rows,
    written=rows,
    kind=st.sampled_from(TYPES),
    batch_rows=st.integers(1, 50),
    timed=st.booleans(),
    default_ttl_ms=st.none() | st.integers(1, 3_000),
    advance_ms=st.integers(0, 3_000),
)
def test_rows_of_columns_are_the_rows_of_single_writes(
    form: str,
    before: list[Written],
    written: list[Written],
    kind: pa.DataType,
    batch_rows: int,
    timed: bool,
    default_ttl_ms: int | None,
    advance_ms: int,
) -> None:
    found = []
    with replaced_kernels(form, KERNELS):
        for by_column in (True, False):
            clock = VirtualClock()
            store = MemoryStore(clock=clock)
            settings = IDLE.replace(default_ttl_millis=default_ttl_ms)
            seen = []
            with open_database(
                "db", store=store, settings=settings, merge_operator=Concatenate(), clock=clock
            ) as db:
                write_one_by_one(db, before, timed=timed)
                with db.snapshot() as old:
                    if by_column:
                        table = as_table(written, kind, batch_rows)
                        ttl_ms = "ttl_ms" if timed else None
                        count = db.write_arrow(table, op="op", ttl_ms=ttl_ms, await_durable=False)
                        assert count == len(written)
                    else:
                        write_one_by_one(db, written, timed=timed)
                    seen += [contents(db), list(old.scan())]
                    clock.advance(advance_ms)
                    seen.append(contents(db))
                    db.flush("wal")
                    changes = list(WalReader("db", store=store, clock=clock).changes())
                    seen.append(
                        [(change.op, change.key, change.value, change.expires_ms) for change in changes]
                    )
                    for one, two in pairwise(changes):
                        assert one.seq < two.seq or (one.seq == two.seq and one.key < two.key)
                    db.flush()
                    seen += [contents(db), list(old.scan())]
            with open_database(
                "db", store=store, settings=settings, merge_operator=Concatenate(), clock=clock
            ) as db:
                seen.append(contents(db))
            found.append(seen)
    assert found[0] == found[1]
