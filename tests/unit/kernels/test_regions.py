"""The memory of large memtables, in both forms of the kernel."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import pytest

import flagstone
from flagstone.kernels import load_compiled, load_interpreted, regions
from flagstone.kernels.regions import REGION_BYTES, Regions
from flagstone.store.memory import MemoryStore
from flagstone.types import MAX_SEQ, VALUE

KERNELS = [pytest.param(load_interpreted("memtable"), id="interpreted")]
if load_compiled("memtable") is not None:
    KERNELS.append(pytest.param(load_compiled("memtable"), id="compiled"))

ROWS = 560
VALUE_BYTES = 60_000
"""Together 34 MB: chunks of several regions."""


def value(number: int) -> bytes:
    return b"%06d" % number * (VALUE_BYTES // 6)


def filled(kernel: ModuleType) -> Any:
    memtable = kernel.Memtable()
    for number in range(ROWS):
        memtable.insert(b"key-%06d" % (number * 11 % ROWS), number + 1, VALUE, value(number), 5, None)
    return memtable


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Regions:
    """The regions of the process, without any that another test left."""
    monkeypatch.setattr(regions.SHARED, "free", [])
    monkeypatch.setattr(regions.SHARED, "limit", 2)
    return regions.SHARED


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_memtable_of_several_regions_has_every_row(kernel: ModuleType, shared: Regions) -> None:
    memtable = filled(kernel)
    for number in range(ROWS):
        assert memtable.get_value(b"key-%06d" % (number * 11 % ROWS), MAX_SEQ) == value(number)
    scan = memtable.scan(None, None, MAX_SEQ, False)
    rows = [row for batch in iter(lambda: scan.next_rows(50), []) for row in batch]
    assert [row[0] for row in rows] == [b"key-%06d" % number for number in range(ROWS)]
    assert all(row[3] == value(row[1] - 1) for row in rows)
    twin = memtable.copy_through(ROWS - 1)
    assert len(twin) == ROWS - 1
    assert twin.get_value(b"key-%06d" % (300 * 11 % ROWS), MAX_SEQ) == value(300)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_the_next_memtable_gets_the_regions_of_the_last(kernel: ModuleType, shared: Regions) -> None:
    memtable = filled(kernel)
    first = memtable.get_value(b"key-000000", MAX_SEQ)
    assert not shared.free
    del memtable
    assert len(shared.free) == 2  # the third went back to the system
    assert first == value(0)
    again = filled(kernel)
    assert not shared.free
    assert all(again.get_value(b"key-%06d" % (n * 11 % ROWS), MAX_SEQ) == value(n) for n in range(ROWS))


@pytest.mark.parametrize("kernel", KERNELS)
def test_regions_of_a_memtable_that_the_garbage_collector_found_can_be_used_again(
    kernel: ModuleType, shared: Regions
) -> None:
    # It clears the parts of a cycle in the order of their age, and regions may be older than their memtable.
    filled(kernel)
    cycle: list[Any] = []
    cycle += [filled(kernel), cycle]
    del cycle
    gc.collect()
    again = filled(kernel)
    assert all(again.get_value(b"key-%06d" % (n * 11 % ROWS), MAX_SEQ) == value(n) for n in range(ROWS))


def test_a_process_with_a_memory_budget_keeps_no_region(shared: Regions) -> None:
    shared.free.append(Regions().take())
    settings = flagstone.Settings(memory_budget=64 << 20)
    with flagstone.open("db", store=MemoryStore(), settings=settings):
        assert not shared.free
    filled(KERNELS[-1].values[0])
    assert not shared.free


def test_a_system_without_memory_gets_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(regions.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=str(REGION_BYTES)):
        Regions().take()
