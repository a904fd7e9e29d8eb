"""The part of the store contract that is about several callers at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, TypeVar

import pytest

from flagstone.store.port import ObjectChanged, ObjectExists, ObjectStore

_T = TypeVar("_T")


def together(calls: list[Callable[[], _T]], *, threads: int = 8) -> list[_T]:
    """The results of all calls, made from that many threads."""
    with ThreadPoolExecutor(threads) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class StoreRaces:
    """What must hold however calls overlap."""

    objects_are_immutable: ClassVar[bool] = False
    """Whether the store may count on nobody replacing an object while others read it, as a cache does."""
    race_rounds: ClassVar[int] = 50
    racers: ClassVar[int] = 8

    def test_of_many_creators_one_wins(self, store: ObjectStore, folder: str) -> None:
        with ThreadPoolExecutor(self.racers) as racers:
            for number in range(self.race_rounds):
                path = f"{folder}/{number:06d}"
                outcomes = list(racers.map(partial(_won, store, path), range(self.racers)))

                winners = [name for name, won in enumerate(outcomes) if won]
                assert len(winners) == 1, f"round {number} had winners {winners}"
                assert store.get(path).data == b"%d" % winners[0]

    def test_no_increment_of_a_shared_counter_is_lost(self, store: ObjectStore, folder: str) -> None:
        if self.objects_are_immutable:
            pytest.skip("this store is for objects that never change")
        path, each = f"{folder}/counter", 10
        store.put_if_absent(path, b"0")

        def count() -> None:
            done = 0
            while done < each:
                found = store.get(path)
                try:
                    store.put_if_match(path, b"%d" % (int(found.data) + 1), found.meta.version)
                except ObjectChanged:
                    continue
                done += 1

        together([count] * self.racers, threads=self.racers)

        assert int(store.get(path).data) == each * self.racers

    def test_a_reader_sees_the_old_or_the_new_bytes(self, store: ObjectStore, folder: str) -> None:
        if self.objects_are_immutable:
            pytest.skip("this store is for objects that never change")
        path = f"{folder}/x"
        versions = [bytes([letter]) * size for letter, size in ((65, 70_000), (66, 70_000), (67, 30_000))]
        store.put(path, versions[0])

        def write() -> None:
            for number in range(30):
                store.put(path, versions[number % 3])

        def read() -> None:
            for _ in range(60):
                found = store.get(path)
                assert found.data in versions
                assert found.meta.size == len(found.data)

        together([write, read, read], threads=3)


def _won(store: ObjectStore, path: str, name: int) -> bool:
    try:
        store.put_if_absent(path, b"%d" % name)
    except ObjectExists:
        return False
    return True
