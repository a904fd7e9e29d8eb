"""The boundary: it only grows, must not be deleted, and is never read from a cache."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flagstone.errors import CorruptData, InternalError, Unavailable
from flagstone.metadata.boundary import Boundary
from flagstone.runtime.metrics import Distribution, Metrics
from flagstone.store.caching import CachingStore
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Fault, FaultyStore
from kit.faults import InterposingStore

PATH = "db/gc/manifest.boundary"


def test_a_boundary_that_never_existed_is_zero(store: MemoryStore) -> None:
    assert Boundary(store, PATH).read() == 0


def test_advance_creates_and_raises_the_boundary_and_never_lowers_it(store: MemoryStore) -> None:
    boundary = Boundary(store, PATH)
    assert boundary.advance(5) == 5
    assert store.get(PATH).data.strip() == b"5"
    assert boundary.advance(9) == 9
    assert boundary.advance(7) == 9
    assert Boundary(store, PATH).read() == 9


def test_a_lost_race_is_repeated_until_the_boundary_is_far_enough(store: MemoryStore) -> None:
    mine, other = Boundary(store, PATH), Boundary(store, PATH)
    mine.advance(3)
    other.advance(4)
    assert mine.advance(6) == 6
    assert other.advance(5) == 6


def test_a_boundary_that_another_process_creates_meanwhile_is_advanced(store: MemoryStore) -> None:
    racing = InterposingStore(store, lambda: store.put_if_absent(PATH, b"2"), op="put_if_absent")
    assert Boundary(racing, PATH).advance(8) == 8
    assert store.get(PATH).data.strip() == b"8"


def test_an_unchanged_boundary_is_not_transferred_again(store: MemoryStore) -> None:
    store.put(PATH, b"12")
    counting = CountingStore(store, component="test")
    boundary = Boundary(counting, PATH)
    assert [boundary.read() for _ in range(5)] == [12] * 5
    assert counting.totals()["requests"] == {"get": 1, "get_if_changed": 4}
    assert counting.totals()["bytes_read"] == 2


def test_a_deleted_boundary_raises_internal_error(store: MemoryStore) -> None:
    boundary = Boundary(store, PATH)
    boundary.advance(3)
    store.delete(PATH)
    with pytest.raises(InternalError, match="gone"):
        boundary.read()
    with pytest.raises(InternalError, match="gone"):
        boundary.advance(4)


def test_a_lowered_boundary_raises_corrupt_data(store: MemoryStore) -> None:
    boundary = Boundary(store, PATH)
    boundary.advance(3)
    store.put(PATH, b"2")
    with pytest.raises(CorruptData, match="went back"):
        boundary.read()


@pytest.mark.parametrize(
    ("data", "value"), [(b"12", 12), (b" 12\n", 12), (b"18446744073709551615", 2**64 - 1)]
)
def test_white_space_around_a_boundary_is_ignored(store: MemoryStore, data: bytes, value: int) -> None:
    store.put(PATH, data)
    assert Boundary(store, PATH).read() == value


@pytest.mark.parametrize(
    "data", [b"", b"-1", b"+1", b"1.0", b"0x1", b"1 2", b"18446744073709551616", b"9" * 500, "١".encode()]
)
def test_a_boundary_that_is_no_number_raises_corrupt_data(store: MemoryStore, data: bytes) -> None:
    store.put(PATH, data)
    with pytest.raises(CorruptData) as caught:
        Boundary(store, PATH).read()
    assert caught.value.object == PATH


def test_boundary_checks_are_measured_and_rejections_are_counted_and_logged(
    store: MemoryStore, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    boundary = Boundary(store, PATH, metrics=metrics)
    boundary.advance(4)
    with caplog.at_level(logging.WARNING):
        assert boundary.admits(5)
        assert caplog.records == []
        assert not boundary.admits(4)
    assert "stale write of id 4" in caplog.text
    values = {metric.name: metric.value for metric in metrics.snapshot()}
    assert values["flagstone.metadata.boundary_rejected_writes"] == 1
    assert values["flagstone.metadata.boundary_advance_attempts"] == 1
    checks = values["flagstone.metadata.boundary_check_seconds"]
    assert isinstance(checks, Distribution)
    assert checks.count == 3


def test_a_failed_advance_is_logged_and_raised(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    failing = FaultyStore(store, [Fault("error", op="put_if_absent")])
    with pytest.raises(Unavailable):
        Boundary(failing, PATH).advance(1)
    assert "could not be advanced" in caplog.text


def test_a_boundary_in_a_caching_store_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="cache"):
        Boundary(CachingStore(store, folder=tmp_path, max_bytes=2**24), PATH)


def test_a_boundary_above_the_largest_id_is_refused(store: MemoryStore) -> None:
    with pytest.raises(InternalError, match="not an id"):
        Boundary(store, PATH).advance(2**64)
