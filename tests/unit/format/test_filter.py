"""Filters: names, prefixes, and how old and unknown ones are read."""

from __future__ import annotations

import pytest

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.filter import (
    BloomPolicy,
    FilterBuilder,
    Filters,
    FixedPrefix,
    decode_filters,
    encode_filters,
)
from flagstone.format.sst_info import FilterFormat

FOUR = FixedPrefix("p4", 4)


def built(policy: BloomPolicy, keys: list[bytes]) -> bytes:
    builder = FilterBuilder(policy)
    builder.add_keys(keys)
    return builder.finish()


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (BloomPolicy(), "_bf"),
        (BloomPolicy(extractor=FOUR), "_bf:p=p4"),
        (BloomPolicy(extractor=FOUR, whole_keys=False), "_bf:p=p4:wh=0"),
    ],
)
def test_the_name_of_a_policy_says_what_is_hashed(policy: BloomPolicy, name: str) -> None:
    assert policy.name == name


def test_probe_counts_are_computed_in_single_precision() -> None:
    assert [BloomPolicy(bits).probes for bits in (1, 10, 16, 100)] == [0, 6, 11, 69]


def test_a_whole_key_filter_has_no_false_negative_and_few_false_positives() -> None:
    keys = [b"key%05d" % number for number in range(2000)]
    filters = Filters({"_bf": built(BloomPolicy(), keys)})
    assert all(filters.may_contain(key) for key in keys)
    passed = sum(filters.may_contain(b"stranger%05d" % number) for number in range(2000))
    assert passed < 60


def test_a_prefix_filter_answers_for_prefixes_only() -> None:
    policy = BloomPolicy(16, FOUR, whole_keys=False)
    filters = Filters({policy.name: built(policy, [b"aaaa1", b"aaaa2", b"bbbb1"])})
    assert filters.may_contain_prefix(b"aaaa", FOUR)
    assert not filters.may_contain_prefix(b"zzzz", FOUR)
    assert filters.may_contain(b"zzzz9"), "a filter without whole keys excludes no key"


def test_keys_too_short_for_the_prefix_are_never_excluded() -> None:
    policy = BloomPolicy(10, FOUR)
    filters = Filters({policy.name: built(policy, [b"abc", b"abcdef"])})
    assert filters.may_contain(b"abc")


def test_an_unknown_filter_excludes_nothing() -> None:
    raw = encode_filters([("cuckoo", b"\x01\x02\x03")])
    assert decode_filters(raw, FilterFormat.COMPOSITE).may_contain(b"anything")


def test_a_legacy_block_is_a_bare_bloom_filter() -> None:
    filters = decode_filters(built(BloomPolicy(), [b"a"]), FilterFormat.LEGACY)
    assert filters.may_contain(b"a")
    assert not filters.may_contain(b"nothing like it")


def test_an_empty_bit_array_matches_nothing() -> None:
    assert not Filters({"_bf": b"\x00\x06"}).may_contain(b"a")


@pytest.mark.parametrize("raw", [b"", b"\x00\x01", b"\x00\x01\x00\x03_b", encode_filters([("_bf", b"\x00")])])
def test_a_damaged_filter_block_raises_corrupt_data(raw: bytes) -> None:
    with pytest.raises(CorruptData):
        decode_filters(raw, FilterFormat.COMPOSITE)


@pytest.mark.parametrize("arguments", [{"bits_per_key": 0}, {"bits_per_key": 2000}, {"whole_keys": False}])
def test_invalid_filter_policies_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        BloomPolicy(**arguments)  # type: ignore[arg-type]
