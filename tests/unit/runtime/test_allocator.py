"""When the allocator of the process returns memory to the system."""

from __future__ import annotations

import ctypes
import sys

import pytest

from flagstone.runtime import allocator

MIB = 1 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs the allocator of glibc 2.33")
def test_the_free_bytes_grow_when_small_blocks_are_freed() -> None:
    count, size = 20_000, 4_000
    blocks = [bytearray(size) for _ in range(count)]
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    before = allocator._free_bytes(mallinfo2)
    del blocks[::2]
    freed = allocator._free_bytes(mallinfo2) - before
    assert 0.8 * count * size / 2 < freed < 1.3 * count * size / 2


class Libc:
    """An allocator that has so many bytes free."""

    def __init__(self) -> None:
        self.free = 0
        self.trimmed = 0
        self.limits: dict[int, int] = {}

    def mallinfo2(self) -> None:
        raise AssertionError("only `_free_bytes` reads it")

    def malloc_trim(self, _pad: int) -> None:
        self.trimmed += 1

    def mallopt(self, which: int, value: int) -> None:
        self.limits[which] = value


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Libc:
    libc = Libc()
    monkeypatch.setattr(allocator, "_libc", lambda: libc)
    monkeypatch.setattr(allocator, "_free_bytes", lambda _: libc.free)
    return libc


def test_little_free_memory_stays_with_the_process_and_much_goes_back(libc: Libc) -> None:
    allocator.trim_much()
    libc.free = 31 * MIB
    allocator.trim_much()
    assert libc.trimmed == 0
    libc.free = 32 * MIB
    allocator.trim_much()
    assert libc.trimmed == 1


@pytest.mark.parametrize(
    ("budget", "large"), [(4 * MIB, MIB // 8), (64 * MIB, MIB // 2), (8192 * MIB, 2 * MIB)]
)
def test_the_limits_of_the_allocator_follow_the_budget(libc: Libc, budget: int, large: int) -> None:
    allocator.bound(budget)
    assert libc.limits == {-3: large, -1: 2 * large, -8: 2}


def test_another_system_keeps_its_allocator_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    allocator.trim_much()
    allocator.trim()
    allocator.bound(64 * MIB)
