from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flagstone.store.port import MAX_FETCH_BYTES, cut_pieces, plan_fetches

RANGES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 60)).map(lambda r: (r[0], r[0] + r[1])), max_size=12
)


@given(ranges=RANGES, gap=st.integers(0, 30), size=st.integers(0, 250))
def test_pieces_cut_from_planned_fetches_equal_the_requested_ranges(
    ranges: list[tuple[int, int]], gap: int, size: int
) -> None:
    content = bytes(range(250))[:size]

    fetches = plan_fetches(ranges, max_gap_bytes=gap)
    fetched = [content[start:stop] for start, stop in fetches]

    assert cut_pieces(ranges, fetches, fetched) == [content[start:stop] for start, stop in ranges]
    for (_, before), (after, _) in pairwise(fetches):
        assert after > before + gap


def test_close_ranges_are_fetched_together_and_distant_ones_are_not() -> None:
    assert plan_fetches([(100, 200), (0, 50)], max_gap_bytes=50) == [(0, 200)]
    assert plan_fetches([(101, 200), (0, 50)], max_gap_bytes=50) == [(0, 50), (101, 200)]
    assert plan_fetches([(5, 5)]) == []


def test_ranges_that_together_exceed_the_largest_fetch_stay_apart() -> None:
    half = MAX_FETCH_BYTES // 2 + 1
    assert plan_fetches([(0, half), (half, 2 * half)]) == [(0, half), (half, 2 * half)]
    assert plan_fetches([(0, half), (half - 1, 2 * half)]) == [(0, 2 * half)]
