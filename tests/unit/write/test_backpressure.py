from __future__ import annotations

import pytest

from flagstone.config import Settings
from flagstone.types import KeyRange
from flagstone.write.backpressure import (
    L0Pressure,
    Pause,
    deepest_cover,
    plan_upload_pause,
    plan_write_limits,
    plan_write_pause,
)
from flagstone.write.flusher import plan_flushes

ALL = KeyRange()


def span(start: str | None, stop: str | None) -> KeyRange:
    return KeyRange(None if start is None else start.encode(), None if stop is None else stop.encode())


def test_writers_continue_below_the_limit_and_wait_at_it() -> None:
    assert plan_write_pause(unflushed_bytes=99, max_unflushed_bytes=100) is None

    pause = plan_write_pause(unflushed_bytes=100, max_unflushed_bytes=100)

    assert pause is not None
    assert pause.reason == "unflushed_bytes"
    assert "max_unflushed_bytes is 100" in pause.message


def test_writers_slow_down_at_three_memtables_or_a_sixth_of_the_limit() -> None:
    default = plan_write_limits(l0_sst_size_bytes=64 << 20, max_unflushed_bytes=1 << 30)
    assert (default.slow_from_bytes, default.stop_at_bytes, default.slow_s) == (192 << 20, 1 << 30, 2.0)
    assert plan_write_limits(l0_sst_size_bytes=1000, max_unflushed_bytes=90_000).slow_from_bytes == 15_000
    for limit in (2_000, 4_000):
        narrow = plan_write_limits(l0_sst_size_bytes=1000, max_unflushed_bytes=limit)
        assert narrow.slow_from_bytes > narrow.stop_at_bytes


def test_the_message_of_a_waiting_writer_names_what_blocks_the_uploads() -> None:
    upload = Pause("num_ssts", "L0 is full")

    pause = plan_write_pause(unflushed_bytes=5, max_unflushed_bytes=5, upload_pause=upload)

    assert pause is not None
    assert pause.message.endswith("L0 is full")


@pytest.mark.parametrize(
    ("live", "in_flight", "reason"), [(6, 1, None), (7, 1, "num_ssts"), (4, 4, "num_ssts")]
)
def test_an_upload_waits_when_l0_is_full(live: int, in_flight: int, reason: str | None) -> None:
    load = L0Pressure([span("a", "b")] * live, [span("a", "b")] * in_flight, span("x", "y"))

    pause = plan_upload_pause([load], l0_max_ssts=8, l0_max_ssts_per_key=8)

    assert (pause and pause.reason) == reason


def test_an_upload_waits_when_too_many_ssts_cover_one_of_its_keys() -> None:
    live, in_flight = [span("a", "m"), span("f", "z")], [span("k", "l")]
    limits = {"l0_max_ssts": 100, "l0_max_ssts_per_key": 3}

    pause = plan_upload_pause([L0Pressure(live, in_flight, span("a", "z"))], **limits)

    assert pause is not None
    assert pause.reason == "num_ssts_per_key"
    assert plan_upload_pause([L0Pressure(live, in_flight, span("a", "k"))], **limits) is None
    assert plan_upload_pause([L0Pressure(live, in_flight, span("l", "z"))], **limits) is None


def test_an_upload_waits_until_every_segment_of_its_memtable_has_room() -> None:
    roomy = L0Pressure([], [], span("a", "b"), segment=b"a")
    full = L0Pressure([span("b", "c")] * 2, [], span("b", "c"), segment=b"b")

    pause = plan_upload_pause([roomy, full], l0_max_ssts=2, l0_max_ssts_per_key=2)

    assert pause is not None
    assert "segment b'b' has 2 SSTs" in pause.message
    assert plan_upload_pause([roomy], l0_max_ssts=2, l0_max_ssts_per_key=2) is None


@pytest.mark.parametrize(
    ("ranges", "within", "depth"),
    [
        ([], ALL, 0),
        ([ALL, ALL, ALL], ALL, 3),
        ([span("a", "b"), span("b", "c")], ALL, 1),
        ([span("a", "b\0"), span("b", "c")], ALL, 2),
        ([span(None, "b"), span("a", None)], ALL, 2),
        ([span(None, "b"), span("b", None)], ALL, 1),
        ([span("b", "a"), span("a", "a")], ALL, 0),
        ([span("a", "f"), span("a", "f"), span("m", "z")], span("f", "n"), 1),
    ],
)
def test_the_deepest_cover_counts_the_ssts_over_one_key(
    ranges: list[KeyRange], within: KeyRange, depth: int
) -> None:
    assert deepest_cover(ranges, within) == depth


def test_a_disk_gets_as_many_flushes_at_a_time_as_there_are_processors_but_two_at_least() -> None:
    settings = Settings(l0_flush_parallelism=4)
    assert [plan_flushes(settings, on_disk=True, available=count) for count in (1, 2, 3, 16)] == [2, 2, 3, 4]
    assert plan_flushes(settings, on_disk=False, available=1) == 4
    assert plan_flushes(Settings(l0_flush_parallelism=1), on_disk=True, available=16) == 1
