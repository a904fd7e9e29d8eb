"""The stores of a world: objects that can be damaged, a commit log that decides conditional writes, a WAL store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Final, TypeVar

from flagstone.runtime.clock import Clock
from flagstone.store.commit_log import CommitRecord, RecordState, folder_bounds
from flagstone.store.memory import PART_BYTES, MemoryStore
from flagstone.store.port import Range, StoredObject
from flagstone.testing.simulation.network import Link, Network
from flagstone.testing.simulation.scheduler import Process

T = TypeVar("T")

_DAMAGED_ANSWERS: Final = 0.1


class DamageableStore(MemoryStore):
    """A store that loses bits without notice: the version and the time of a damaged object stay as they were."""

    def __init__(self, *, clock: Clock, part_bytes: int = PART_BYTES) -> None:
        super().__init__(clock=clock, part_bytes=part_bytes)
        self.ever_damaged: set[str] = set()
        self._whole: dict[str, tuple[bytes, bytes]] = {}
        """For each damaged object: its bytes, and the damaged ones."""

    @property
    def is_damaged(self) -> bool:
        return bool(self._whole)

    def damage(self, path: str, data: bytes) -> None:
        """Replace the bytes of an object."""
        entry = self._entries[path]
        whole, _ = self._whole.get(path, (entry.data, b""))
        self._whole[path] = (whole, data)
        self.ever_damaged.add(path)
        self._entries[path] = entry._replace(data=data)

    def whole(self, path: str) -> bytes:
        """The bytes of an object without any damage."""
        data = self._entries[path].data
        whole, damaged = self._whole.get(path, (data, data))
        return whole if data == damaged else data

    def mend(self) -> None:
        """Put back the bytes of every damaged object that was not deleted or replaced meanwhile."""
        for path, (whole, data) in self._whole.items():
            entry = self._entries.get(path)
            if entry is not None and entry.data == data:
                self._entries[path] = entry._replace(data=whole)
        self._whole.clear()

    def copy(self, source: str, destination: str) -> None:
        super().copy(source, destination)
        if source in self._whole:
            # The store copies damaged bytes as they are.
            self._whole[destination] = self._whole[source]
            self.ever_damaged.add(destination)


def damaged(random: Random, data: bytes) -> bytes:
    """The data with one flipped bit, or without its end."""
    at = random.randrange(len(data))
    if random.random() < 0.3:
        return data[:at]
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


class NoisyLink(Link):
    """A link that damages some answers. Their objects count as damaged."""

    def __init__(self, network: Network, process: Process, objects: DamageableStore) -> None:
        super().__init__(network, process)
        self._objects = objects
        self._random = network.scheduler.random

    def get(self, path: str) -> StoredObject:
        return self._damage_object(super().get(path))

    def get_tail(self, path: str, length: int) -> StoredObject:
        return self._damage_object(super().get_tail(path, length))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._damage(path, super().get_range(path, start, stop))

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        return [self._damage(path, data) for data in super().get_ranges(path, ranges)]

    def _damage_object(self, stored: StoredObject) -> StoredObject:
        return replace(stored, data=self._damage(stored.meta.path, stored.data))

    def _damage(self, path: str, data: bytes) -> bytes:
        if not data or self._random.random() >= _DAMAGED_ANSWERS:
            return data
        self._objects.ever_damaged.add(path)
        return damaged(self._random, bytes(data))


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
            # A request that lands twice loses against itself.
            absent = record.destination not in self._table
            if absent:
                self._table[record.destination] = record
            return absent

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
