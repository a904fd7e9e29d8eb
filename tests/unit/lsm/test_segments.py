"""Segments: how keys are routed, and which prefixes exclude each other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.filter import FixedPrefix
from flagstone.lsm.segments import (
    add_prefix,
    check_extractor,
    check_segments,
    route,
    segment_of,
    segments_in,
)
from flagstone.types import KeyRange

FIRST3 = FixedPrefix("first3", 3)
PREFIXES = (b"aaa", b"bbb", b"ccc")


@dataclass(frozen=True)
class Constant:
    """Returns the same prefix for every key."""

    prefix_given: bytes
    name: str = "constant"

    def prefix(self, key: bytes) -> bytes | None:
        return self.prefix_given


def test_a_key_is_routed_to_the_segment_of_its_prefix() -> None:
    assert route(FIRST3, b"abcdef") == b"abc"
    assert route(FIRST3, b"abc") == b"abc"


@pytest.mark.parametrize(
    ("extractor", "message"),
    [
        (FIRST3, "'first3' finds no prefix in the key b'ab'"),
        (Constant(b""), "'constant' finds no prefix"),
        (Constant(b"x"), "gives b'x' for the key b'ab', which does not begin with it"),
    ],
)
def test_a_key_without_a_segment_is_refused(extractor: FixedPrefix | Constant, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        route(extractor, b"ab")


def test_a_new_prefix_is_inserted_in_order() -> None:
    assert add_prefix((), b"b") == (b"b",)
    assert add_prefix(PREFIXES, b"abc") == (b"aaa", b"abc", b"bbb", b"ccc")
    assert add_prefix(PREFIXES, b"bbb") == PREFIXES


@pytest.mark.parametrize("prefix", [b"b", b"bb", b"bbbb", b"c", b"cccc", b"a"])
def test_a_prefix_that_overlaps_another_is_refused(prefix: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no prefix may begin with another"):
        add_prefix(PREFIXES, prefix)


@pytest.mark.parametrize("stored", [(b"b", b"a"), (b"a", b"a"), (b"a", b"ab"), (b"", b"a")])
def test_stored_segments_must_ascend_and_not_overlap(stored: tuple[bytes, ...]) -> None:
    check_segments(PREFIXES)
    check_segments(())
    with pytest.raises(CorruptData):
        check_segments(stored)


def test_a_database_opens_only_with_its_own_extractor() -> None:
    check_extractor(FIRST3, stored_name="first3", prefixes=PREFIXES)
    check_extractor(None, stored_name=None, prefixes=())
    with pytest.raises(InvalidRequest, match="has the segment extractor 'first3', but none was given"):
        check_extractor(None, stored_name="first3", prefixes=PREFIXES)
    with pytest.raises(InvalidRequest, match="has no segments, but 'first3' was given"):
        check_extractor(FIRST3, stored_name=None, prefixes=())
    with pytest.raises(InvalidRequest, match="'first3', but 'first4' was given"):
        check_extractor(FixedPrefix("first4", 4), stored_name="first3", prefixes=PREFIXES)
    with pytest.raises(InvalidRequest, match="gives b'aa' for the segment b'aaa'"):
        check_extractor(FixedPrefix("first3", 2), stored_name="first3", prefixes=PREFIXES)
    with pytest.raises(InvalidRequest, match="gives None for the segment b'aaa'"):
        check_extractor(FixedPrefix("first3", 4), stored_name="first3", prefixes=PREFIXES)


def test_a_key_that_no_segment_can_hold_has_no_segment() -> None:
    assert segment_of(b"bbb", PREFIXES) == b"bbb"
    assert segment_of(b"bbbz", PREFIXES) == b"bbb"
    for key in (b"", b"aa", b"abc", b"bb", b"bbc", b"zzz"):
        assert segment_of(key, PREFIXES) is None


words = st.binary(max_size=4).map(lambda word: bytes(byte % 3 for byte in word)) | st.binary(max_size=3)


@given(st.lists(words.filter(bool), max_size=8), st.none() | words, st.none() | words, words)
def test_a_range_finds_exactly_the_segments_that_can_hold_its_keys(
    candidates: list[bytes], start: bytes | None, stop: bytes | None, key: bytes
) -> None:
    prefixes: tuple[bytes, ...] = ()
    for candidate in candidates:
        try:
            prefixes = add_prefix(prefixes, candidate)
        except InvalidRequest:
            assert any(candidate.startswith(held) or held.startswith(candidate) for held in prefixes)
    check_segments(prefixes)
    keys = KeyRange(start, stop)
    shared = [prefix for prefix in prefixes if not KeyRange.of_prefix(prefix).intersect(keys).empty]

    assert list(segments_in(keys, prefixes)) == ([] if keys.empty else shared)
    assert segment_of(key, prefixes) == next((held for held in prefixes if key.startswith(held)), None)
