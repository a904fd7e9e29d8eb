"""The sequence tracker: recording rules, lookups and the bit stream."""

from __future__ import annotations

import pytest

from flagstone.errors import CorruptData, InternalError
from flagstone.lsm.sequence import CAPACITY, SequenceTracker, decode_tracker, encode_tracker

HOUR = SequenceTracker((10, 20, 35), (1000, 1060, 1180))


def test_the_empty_tracker_is_thirteen_bytes() -> None:
    assert encode_tracker(SequenceTracker()).hex() == "01" + "00000000" * 3
    assert decode_tracker(bytes.fromhex("01" + "00000000" * 3)) == SequenceTracker()


def test_steps_of_every_width_are_read_back() -> None:
    steps = [0, 1, 63, -63, 64, -255, 255, 256, -2047, 2047, 2048, -2048, 2**31 - 1, -(2**31), 0]
    values, delta = [10**12], 0
    for step in steps:
        delta += step
        values.append(values[-1] + delta)
    tracker = SequenceTracker(tuple(values), tuple(range(len(values))))
    data = encode_tracker(tracker)
    assert decode_tracker(data) == tracker
    widths = [1, 9, 9, 9, 12, 12, 12, 16, 16, 16, 36, 36, 36, 36, 1]
    seconds_bits = 32 + 64 + 9 + len(steps) - 1
    assert len(data) == 5 + (32 + 64 + sum(widths) + 7) // 8 + (seconds_bits + 7) // 8


def test_a_tracker_encodes_to_these_bytes() -> None:
    tracker = SequenceTracker((1, 3), (1000, 1060))
    bits = f"{2:032b}{1:064b}10{2:07b}" + "0" * 7 + f"{2:032b}{1000:064b}10{60:07b}" + "0" * 7
    assert encode_tracker(tracker) == b"\x01\x02\0\0\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")


def test_points_that_slatedb_truncated_are_kept_unchanged() -> None:
    """A database with meaningless points must open, and its points must not change when they are written again."""
    odd = SequenceTracker((5, 2**64 - 3, 1), (-7, 60, 0))
    assert decode_tracker(encode_tracker(odd)) == odd


def test_a_step_beyond_32_bits_is_never_encoded() -> None:
    with pytest.raises(InternalError, match="32 bits"):
        encode_tracker(SequenceTracker((0, 2**31), (0, 60)))


def test_a_tracker_records_at_most_one_point_per_minute() -> None:
    tracker = SequenceTracker().record(1, 1000).record(2, 1059)
    assert tracker.sequences == (1,)
    assert tracker.record(3, 1060).sequences == (1, 3)


def test_the_first_point_after_opening_is_always_accepted() -> None:
    tracker = decode_tracker(encode_tracker(SequenceTracker().record(1, 1000)))
    assert tracker.record(2, 1001).sequences == (1, 2)


def test_a_point_before_the_last_one_is_ignored() -> None:
    assert HOUR.record(35, 2000) is HOUR
    assert HOUR.record(36, 1179) is HOUR


def test_a_jump_beyond_32_bits_drops_the_points_before_it() -> None:
    tracker = SequenceTracker().record(1, 0).record(2, 60).record(2**40, 120).record(2**40 + 5, 180)
    assert tracker.sequences == (2**40, 2**40 + 5)
    assert decode_tracker(encode_tracker(tracker)) == tracker


def test_a_full_tracker_keeps_every_second_point() -> None:
    tracker = SequenceTracker(tuple(range(CAPACITY)), tuple(range(0, 60 * CAPACITY, 60)))
    thinned = tracker.record(CAPACITY, 60 * CAPACITY)
    assert thinned.sequences == tuple(range(0, CAPACITY + 1, 2))
    assert len(thinned) == CAPACITY // 2 + 1


def test_thinning_makes_no_step_beyond_32_bits() -> None:
    step = 2**31 - 1
    tracker = SequenceTracker(tuple(step * i for i in range(CAPACITY)), tuple(range(CAPACITY)))
    thinned = tracker.record(step * CAPACITY, CAPACITY)
    assert len(decode_tracker(encode_tracker(thinned))) >= 1


def test_extend_follows_the_rules_of_record() -> None:
    memtable = SequenceTracker().record(40, 1190).record(50, 1250)
    assert HOUR.extend(memtable).sequences == (10, 20, 35, 40, 50)
    recorded = SequenceTracker().record(35, 1180)
    assert recorded.extend(memtable).sequences == (35, 50)


def test_lookups_round_down_or_up() -> None:
    assert [HOUR.time_of(seq) for seq in (9, 10, 34, 99)] == [None, 1000, 1060, 1180]
    assert [HOUR.time_of(seq, "up") for seq in (9, 20, 21, 36)] == [1000, 1060, 1180, None]
    assert [HOUR.sequence_at(second) for second in (999, 1060, 1179, 5000)] == [None, 20, 20, 35]
    assert [HOUR.sequence_at(second, "up") for second in (1, 1061, 1181)] == [10, 35, None]
    assert SequenceTracker().time_of(1) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\0\0\0",
        b"\x02" + b"\0" * 12,
        b"\x01" + b"\0" * 11,
        b"\x01" + b"\0" * 13,
        b"\x01\x01" + b"\0" * 11,
        b"\x01" + b"\xff" * 20,
        encode_tracker(HOUR)[:-1],
        encode_tracker(HOUR) + b"\0",
    ],
)
def test_bytes_that_are_not_exactly_one_tracker_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptData):
        decode_tracker(data)
