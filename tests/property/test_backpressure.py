"""The sweep over key ranges against counting key by key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flagstone.types import KeyRange
from flagstone.write.backpressure import deepest_cover

edges = st.one_of(st.none(), st.integers(1, 8).map(lambda number: bytes([number])))
ranges = st.builds(KeyRange, edges, edges)
# Every edge and a key between each two: the maximum is reached at one of these.
EVERY_KEY = [key for number in range(10) for key in (bytes([number]), bytes([number, 0]))]


@given(st.lists(ranges, max_size=12), ranges)
def test_the_deepest_cover_equals_the_maximum_over_all_keys(tables: list[KeyRange], within: KeyRange) -> None:
    counted = (sum(key in table for table in tables) for key in EVERY_KEY if key in within)

    assert deepest_cover(tables, within) == max(counted, default=0)
