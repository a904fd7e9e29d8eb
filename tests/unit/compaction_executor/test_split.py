"""Where a job is cut into ranges."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flagstone.compaction.inputs import WHOLE, Anchor, SampledView, plan_ranges, sample_view
from flagstone.format.sst import BlockIndex
from flagstone.lsm.tree import BytesRange
from flagstone.types import KeyRange


def index(*first_keys: bytes, size: int = 100) -> BlockIndex:
    offsets = [size * number for number in range(len(first_keys))]
    return BlockIndex(offsets, [offset + size for offset in offsets], list(first_keys))


def borders(ranges: tuple[BytesRange, ...]) -> list[bytes | None]:
    return [keys.keys.start for keys in ranges[1:]]


def test_the_first_block_gives_no_anchor_because_its_key_is_empty() -> None:
    view = sample_view(index(b"", b"c", b"e"), KeyRange(b"a", b"f"), 500)
    assert view == SampledView(500, (Anchor(b"c", 100), Anchor(b"e", 100)))


def test_only_visible_keys_are_anchors() -> None:
    view = sample_view(index(b"", b"c", b"e", b"g"), KeyRange(b"d", b"f"), 500)
    assert view.anchors == (Anchor(b"e", 100),)


def test_a_large_sst_has_at_most_128_anchors_spread_over_it() -> None:
    keys = [b""] + [b"%04d" % number for number in range(1, 300)]
    view = sample_view(index(*keys), KeyRange(), 30_000)
    assert len(view.anchors) == 100
    assert sum(anchor.size for anchor in view.anchors) == 30_000
    assert view.anchors[1] == Anchor(b"0003", 300)


def test_a_job_too_small_to_split_is_one_range() -> None:
    view = SampledView(100, (Anchor(b"a", 50), Anchor(b"b", 50)))
    assert plan_ranges([], 4) == WHOLE
    assert plan_ranges([SampledView(5, ())], 4) == WHOLE
    assert plan_ranges([view, view], 1) == WHOLE
    # A range is at least as large as the largest SST.
    assert plan_ranges([view], 4) == WHOLE


def test_boundaries_divide_the_bytes_evenly() -> None:
    views = [
        SampledView(40, tuple(Anchor(b"%d%d" % (tens, ones), 10) for tens in range(4))) for ones in range(4)
    ]
    ranges = plan_ranges(views, 4)
    assert borders(ranges) == [b"10", b"20", b"30"]
    assert ranges[0] == BytesRange.of(KeyRange(None, b"10"))
    assert ranges[3] == BytesRange.of(KeyRange(b"30", None))


def test_all_rows_of_a_key_are_in_one_range() -> None:
    """Equal anchors give one boundary. The first key gives none, because the range before it would be empty."""
    views = [SampledView(10, (Anchor(b"k", 10), Anchor(b"z", 10))) for _ in range(8)]
    assert borders(plan_ranges(views, 4)) == [b"z"]


anchors = st.builds(Anchor, st.binary(min_size=1, max_size=2), st.integers(1, 1000))
views = st.builds(SampledView, st.integers(0, 3000), st.lists(anchors, max_size=20).map(tuple))


@given(st.lists(views, max_size=8), st.integers(1, 8))
def test_ranges_are_adjacent_and_cover_all_keys(sampled: list[SampledView], limit: int) -> None:
    ranges = [found.keys for found in plan_ranges(sampled, limit)]
    assert 1 <= len(ranges) <= limit
    assert ranges[0].start is None
    assert ranges[-1].stop is None
    for before, after in pairwise(ranges):
        assert before.stop == after.start
        assert not before.empty
