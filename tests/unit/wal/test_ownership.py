"""When a writer reads the manifest to check its epoch, and the error for a lost WAL id."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flagstone.config import GarbageCollectorOptions, Settings
from flagstone.config.settings import GcFenceOptions
from flagstone.errors import Closed, Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.wal.writer import TRUSTED_S, Ownership, trusted_s


class Manifest:
    """A manifest whose refresh the test decides."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self.refresh = refresh


def test_a_read_of_the_manifest_is_trusted_for_twenty_seconds() -> None:
    clock, reads = VirtualClock(), []
    ownership = Ownership(Manifest(lambda: reads.append(clock.monotonic())), clock=clock)
    for _ in range(100):
        ownership.ensure()
        clock.advance(1000)
    assert reads == [0.0, 20.0, 40.0, 60.0, 80.0]


def test_the_twenty_seconds_count_from_before_the_read() -> None:
    clock, reads = VirtualClock(), []

    def slow() -> None:
        reads.append(clock.monotonic())
        clock.advance(1000 * TRUSTED_S)

    ownership = Ownership(Manifest(slow), clock=clock)
    ownership.ensure()
    ownership.ensure()
    assert len(reads) == 2


def test_after_a_jump_of_the_wall_clock_the_manifest_is_read_again() -> None:
    clock, reads = VirtualClock(), []
    ownership = Ownership(Manifest(lambda: reads.append(1)), clock=clock)
    ownership.ensure()
    clock.shift_wall(60_000)
    ownership.ensure()
    assert len(reads) == 2


@pytest.mark.parametrize("error", [Closed("replaced", reason="fenced"), Unavailable("no answer")])
def test_a_failed_read_of_the_manifest_is_not_trusted(error: Exception) -> None:
    answers: list[Exception | None] = [error, error, None]

    def ask() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    ownership = Ownership(Manifest(ask), clock=VirtualClock())
    for _ in range(2):
        with pytest.raises(type(error)):
            ownership.ensure()
    ownership.ensure()
    ownership.ensure()
    assert answers == []


def test_with_fences_deleted_the_manifest_is_read_after_every_wal_file() -> None:
    assert trusted_s(Settings()) == TRUSTED_S
    assert trusted_s(Settings(garbage_collector_options=None)) == TRUSTED_S
    deleting = GarbageCollectorOptions(wal_fence_options=GcFenceOptions(dry_run=False))
    assert trusted_s(Settings(garbage_collector_options=deleting)) == 0
    reads: list[int] = []
    ownership = Ownership(Manifest(lambda: reads.append(1)), clock=VirtualClock(), limit_s=0)
    for _ in range(3):
        ownership.ensure()
    assert len(reads) == 3


def test_a_lost_wal_id_names_the_newer_writer_if_the_manifest_does() -> None:
    def fenced() -> None:
        raise Closed("writer 7 took over", reason="fenced")

    assert "writer 7" in str(Ownership(Manifest(fenced), clock=VirtualClock()).lost())
    unnamed = Ownership(Manifest(lambda: None), clock=VirtualClock()).lost()
    assert unnamed.reason == "fenced"
    assert "next WAL id" in str(unnamed)
