"""Ranges given for the sources of a union must be adjacent; a gap or an overlap is refused."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone import InvalidRequest, KeyRange
from flagstone.clones.origin import CheckpointedSource, CloneSource
from flagstone.clones.union import check_adjacent
from flagstone.metadata.manifest import Manifest
from kit.databases import World, numbered
from kit.strategies import short_keys


def source(path: str, start: bytes | None = None, stop: bytes | None = None) -> CloneSource:
    return CloneSource(path, None, KeyRange(start, stop))


@pytest.fixture
def parts(world: World) -> World:
    world.write("p", numbered(0, 10))
    world.write("q", numbered(20, 30))
    world.write("r", numbered(40, 50))
    return world


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        (
            [source("p", None, b"k005"), source("q", b"k020")],
            r"'p' with .* and 'q' with .* gap \[b'k005', b'k020'\)",
        ),
        ([source("q", b"k020"), source("p", None, b"k005")], r"gap \[b'k005', b'k020'\)"),
        ([source("p", None, b"k020"), source("q", b"k020\0")], r"gap \[b'k020', b'k020\\x00'\)"),
        ([source("p", None, b"k021"), source("q", b"k020")], r"overlap in \[b'k020', b'k021'\)"),
        ([source("p", None, b"k020\0"), source("q", b"k020")], r"overlap in \[b'k020', b'k020\\x00'\)"),
        ([source("p", b"k000"), source("q", b"k020")], r"overlap in \[b'k020', end\)"),
        ([source("p", b"k000", None), source("q", None, b"k000\0")], r"overlap in \[b'k000', b'k000\\x00'\)"),
        (
            [source("p", None, b"k015"), source("q", b"k015", b"k035"), source("r", b"k036")],
            r"'q' with .* and 'r' with .* gap \[b'k035', b'k036'\)",
        ),
    ],
)
def test_a_union_of_ranges_that_are_not_adjacent_is_refused(
    parts: World, sources: list[CloneSource], named: str
) -> None:
    before = parts.objects()
    with pytest.raises(InvalidRequest, match=named):
        parts.admin("p").union("u", sources)
    assert parts.objects() == before


def test_a_union_of_adjacent_ranges_is_made_in_any_order(parts: World) -> None:
    ranges = [source("r", b"k045", None), source("p", b"k002", b"k015"), source("q", b"k015", b"k045")]
    parts.admin("p").union("u", ranges)
    assert parts.scan("u") == numbered(2, 10) | numbered(20, 30) | numbered(45, 50)


def test_a_source_without_a_range_may_lie_in_the_gap(parts: World) -> None:
    parts.admin("p").union("u", [source("p", None, b"k015"), CloneSource("q"), source("r", b"k035")])
    assert parts.scan("u") == numbered(0, 10) | numbered(20, 30) | numbered(40, 50)


def test_a_source_without_a_range_that_lies_elsewhere_does_not_fill_the_gap(parts: World) -> None:
    before = parts.objects()
    with pytest.raises(InvalidRequest, match=r"gap \[b'k015', b'k018'\)"):
        parts.admin("p").union(
            "u", [source("p", None, b"k015"), source("q", b"k018", b"k035"), CloneSource("r")]
        )
    assert parts.objects() == before


def test_sources_without_ranges_need_not_touch(parts: World) -> None:
    parts.admin("p").union("u", ["q", "r"])
    assert parts.scan("u") == numbered(0, 10) | numbered(20, 30) | numbered(40, 50)
    parts.admin("p").union("v", [source("p", None, b"k005"), "q"])
    assert parts.scan("v") == numbered(0, 5) | numbered(20, 30)


bounds = st.none() | short_keys(max_size=2)
ranges = st.builds(KeyRange, bounds, bounds).filter(lambda keys: not keys.empty and keys.stop != b"")


@given(st.lists(ranges, min_size=1, max_size=4))
def test_ranges_are_accepted_exactly_if_each_begins_where_another_ends(given_ranges: list[KeyRange]) -> None:
    ordered = sorted(given_ranges, key=lambda keys: keys.start or b"")
    adjacent = all(one.stop is not None and one.stop == other.start for one, other in pairwise(ordered))
    sources = [
        CheckpointedSource(f"db-{number}", UUID(int=number), Manifest())
        for number in range(len(given_ranges))
    ]
    if adjacent:
        check_adjacent(sources, given_ranges)
    else:
        with pytest.raises(InvalidRequest, match=r"overlap in|leave the gap"):
            check_adjacent(sources, given_ranges)
