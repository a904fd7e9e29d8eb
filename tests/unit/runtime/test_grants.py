"""Parts of the memory budget: a limit, and the grants of their users."""

from __future__ import annotations

import gc
import threading

import pytest

from flagstone.errors import InvalidRequest
from flagstone.runtime.grants import MemoryPart


def test_a_grant_grows_up_to_the_limit_of_its_part_and_is_refused_more() -> None:
    part = MemoryPart(100)
    one, two = part.open(), part.open()
    assert one.grow(60)
    assert not two.grow(41)
    assert two.size == 0
    assert two.grow(40)
    assert part.held_bytes == 100
    one.size = 10
    assert two.grow(50)


def test_a_user_that_exceeds_the_limit_leaves_nothing_to_others() -> None:
    part = MemoryPart(100)
    one, two = part.open(), part.open()
    one.size = 150
    assert not two.grow(1)
    assert part.held_bytes == 150
    one.size = 0
    assert two.grow(1)


def test_a_dropped_grant_counts_as_free() -> None:
    part = MemoryPart(100)
    one, two = part.open(), part.open()
    assert one.grow(100)
    gc.disable()
    try:
        del one
        assert part.held_bytes == 0
    finally:
        gc.enable()
    assert two.grow(100)


def waiting(part: MemoryPart, size: int) -> tuple[threading.Thread, list[int]]:
    """A thread that takes `size` bytes, and holds them until the list of held bytes was read."""
    held: list[int] = []

    def run() -> None:
        grant = part.take(size)
        held.append(part.held_bytes)
        part.give_back(grant)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, held


def test_a_thread_that_waits_continues_when_others_give_back_or_the_part_grows() -> None:
    part = MemoryPart(100)
    first = part.take(80)
    thread, held = waiting(part, 50)
    part.give_back(first)
    part.give_back(first)
    thread.join(20)
    assert held == [50]
    first = part.take(80)
    thread, held = waiting(part, 50)
    part.resize(130)
    thread.join(20)
    assert held == [130]
    assert part.held_bytes == 80


def test_a_wait_that_its_check_ends_leaves_no_grant() -> None:
    part = MemoryPart(100)
    first = part.take(1000)

    def cancel() -> None:
        raise InvalidRequest("cancelled")

    with pytest.raises(InvalidRequest, match="cancelled"):
        part.take(1, cancel)
    assert part.held_bytes == 1000
    del first
    assert part.held_bytes == 0
