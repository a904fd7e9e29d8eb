"""Other stores of a world: a commit log that decides conditional writes, and a store for the WAL alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from flagstone.store.commit_log import CommitRecord, RecordState, folder_bounds
from flagstone.store.memory import MemoryStore
from flagstone.testing.simulation.network import Link, Network
from flagstone.testing.simulation.scheduler import Process

T = TypeVar("T")


class LogLink:
    """The commit log of a two-phase store as one process reaches it. All processes share `table`."""

    def __init__(self, network: Network, process: Process, table: dict[str, CommitRecord]) -> None:
        self._network = network
        self._process = process
        self._table = table

    def find(self, destination: str) -> CommitRecord | None:
        return self._call("find", destination, lambda: self._table.get(destination))

    def insert(self, record: CommitRecord) -> bool:
        def effect() -> bool:
            return self._table.setdefault(record.destination, record) is record

        return self._call("insert", record.destination, effect)

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        def effect() -> bool:
            same = self._is_current(old)
            if same:
                self._table[new.destination] = new
            return same

        return self._call("replace", old.destination, effect)

    def remove(self, record: CommitRecord) -> bool:
        def effect() -> bool:
            same = self._is_current(record)
            if same:
                del self._table[record.destination]
            return same

        return self._call("remove", record.destination, effect)

    def pending(self, prefix: str) -> list[CommitRecord]:
        found = self._call("pending", prefix, lambda: self._below(prefix))
        return [record for record in found if record.state is RecordState.PENDING]

    def records(self, prefix: str) -> Iterator[CommitRecord]:
        return iter(self._call("records", prefix, lambda: self._below(prefix)))

    def close(self) -> None:
        pass

    def _below(self, prefix: str) -> list[CommitRecord]:
        bounds = folder_bounds(prefix)
        return [
            record
            for destination, record in sorted(self._table.items())
            if bounds is None or bounds[0] <= destination < bounds[1]
        ]

    def _is_current(self, record: CommitRecord) -> bool:
        held = self._table.get(record.destination)
        return held is not None and (held.version, held.source, held.state) == (
            record.version,
            record.source,
            record.state,
        )

    def _call(self, op: str, destination: str, effect: Callable[[], T]) -> T:
        return self._network.call(self._process, f"log {op}", destination, effect)


class WalLink(Link):
    """The store of the WAL as one process reaches it, over the same network."""

    def __init__(self, network: Network, process: Process, store: MemoryStore) -> None:
        super().__init__(network, process)
        self._wal_store = store

    @property
    def url(self) -> str:
        return "simulated-wal://"

    @property
    def _store(self) -> MemoryStore:
        return self._wal_store
