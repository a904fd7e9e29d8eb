from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import SYSTEM_IDS, Ids, parse_ulid, ulid_ms, ulid_text
from flagstone.types import Ulid


def test_a_ulid_contains_the_time_of_the_clock() -> None:
    ids = Ids(1, clock=VirtualClock(start_ms=1_234))

    assert ulid_ms(ids.ulid()) == 1_234


def test_a_ulid_has_at_least_the_time_that_the_caller_gives() -> None:
    ids = Ids(1, clock=VirtualClock(start_ms=1_234))

    assert ulid_ms(ids.ulid(not_before_ms=5_000)) == 5_000
    assert ulid_ms(ids.ulid(not_before_ms=1_000)) == 1_234


def test_a_time_beyond_48_bits_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="48-bit"):
        SYSTEM_IDS.ulid(not_before_ms=2**48)


def test_the_same_seed_gives_the_same_identifiers() -> None:
    clock = VirtualClock()
    first, second = Ids(7, clock=clock), Ids(7, clock=clock)

    assert [first.ulid(), first.uuid(), first.token(), first.uniform(0, 1)] == [
        second.ulid(),
        second.uuid(),
        second.token(),
        second.uniform(0, 1),
    ]
    assert Ids(8, clock=clock).ulid() != Ids(7, clock=clock).ulid()


def test_a_uuid_is_of_version_4() -> None:
    assert SYSTEM_IDS.uuid().version == 4


@pytest.mark.slow
def test_many_threads_never_get_the_same_token() -> None:
    ids = Ids(3)
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: ids.token(), range(4_000)))

    assert len(set(tokens)) == 4_000


def test_ulid_text_equals_the_example_of_the_specification() -> None:
    # The first ten characters encode the time: the specification's own example.
    assert ulid_text(Ulid(1_469_918_176_385 << 80)).startswith("01ARYZ6S41")
    assert ulid_text(Ulid(0)) == "0" * 26
    assert ulid_text(Ulid(2**128 - 1)) == "7" + "Z" * 25


def test_ulid_text_parses_back_and_sorts_like_the_ulids() -> None:
    ulids = sorted(SYSTEM_IDS.ulid() for _ in range(200))
    texts = [ulid_text(ulid) for ulid in ulids]

    assert [parse_ulid(text) for text in texts] == ulids
    assert texts == sorted(texts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 characters"),
        ("0" * 25, "25 characters"),
        ("0" * 25 + "U", "'U' at position 25"),
        ("0" * 25 + "a", "upper-case"),
        ("8" + "0" * 25, "larger than 128 bits"),
        ("0" * 25 + "é", "position 25"),
    ],
)
def test_parsing_an_invalid_ulid_raises_an_error_that_says_why(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        parse_ulid(text)


def test_uniform_and_jitter_stay_within_their_bounds() -> None:
    ids = Ids(11)

    assert all(2 <= ids.uniform(2, 3) <= 3 for _ in range(200))
    assert all(0.75 <= ids.jitter(1.0, 0.25) <= 1.25 for _ in range(200))
    assert ids.jitter(4.0, 0) == 4.0


def test_a_jitter_fraction_above_one_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="between 0 and 1"):
        SYSTEM_IDS.jitter(1.0, 1.5)


def test_pickled_ids_repeat_the_results_of_their_seed() -> None:
    assert pickle.loads(pickle.dumps(SYSTEM_IDS)).token() != SYSTEM_IDS.token()
    assert pickle.loads(pickle.dumps(Ids(5))).uuid() == Ids(5).uuid()
