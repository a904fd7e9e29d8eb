"""Rows in any order become stretches in key order; no row is lost or repeated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.errors import InvalidRequest
from flagstone.spark.load.task import check_sorted, one_per_key, ordered_stretches

BATCHES = st.lists(st.lists(st.binary(min_size=1, max_size=2), max_size=6), max_size=8)


def numbered(keys: list[list[bytes]]) -> list[pa.RecordBatch]:
    """Batches whose values contain the position of each row."""
    count = 0
    made = []
    for batch in keys:
        values = [b"%06d" % number for number in range(count, count + len(batch))]
        count += len(batch)
        made.append(
            pa.RecordBatch.from_arrays(
                [pa.array(batch, pa.binary()), pa.array(values, pa.binary())], ["key", "value"]
            )
        )
    return made


def rows_of(batches: Any) -> list[tuple[bytes, bytes]]:
    return [(row["key"], row["value"]) for batch in batches for row in batch.to_pylist()]


@given(keys=BATCHES, sort_bytes=st.sampled_from([1, 40, 10_000]))
def test_sorted_stretches_are_stable_and_complete(keys: list[list[bytes]], sort_bytes: int) -> None:
    given_rows = rows_of(numbered(keys))

    # A generator, as in tasks.
    stretches = [rows_of(stretch) for stretch in ordered_stretches((b for b in numbered(keys)), sort_bytes)]

    assert sorted(row for stretch in stretches for row in stretch) == sorted(given_rows)
    for stretch in stretches:
        assert stretch == sorted(stretch)  # by key, and rows of one key in their original order
    if given_rows == sorted(given_rows):
        assert len([stretch for stretch in stretches if stretch]) <= 1


@given(keys=BATCHES)
def test_only_rows_in_key_order_count_as_sorted(keys: list[list[bytes]]) -> None:
    flat = [key for batch in keys for key in batch]
    if flat == sorted(flat):
        assert rows_of(check_sorted(numbered(keys))) == rows_of(numbered(keys))
    else:
        with pytest.raises(InvalidRequest, match="not sorted"):
            list(check_sorted(numbered(keys)))


@given(keys=BATCHES)
def test_of_each_key_only_the_last_row_is_kept(keys: list[list[bytes]]) -> None:
    ordered = sorted(key for batch in keys for key in batch)
    sizes = [len(batch) for batch in keys]
    cut = [ordered[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    rows = rows_of(numbered(cut))

    left = rows_of(one_per_key(numbered(cut)))

    assert left == sorted(dict(rows).items())
    if any(a[0] == b[0] for a, b in pairwise(rows)):
        with pytest.raises(InvalidRequest, match="occurs more than once"):
            list(one_per_key(numbered(cut), refuse=True))
