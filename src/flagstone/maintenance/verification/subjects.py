"""The SSTs that a verification reads, and who reads them: this process, or many at once elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from flagstone.format.sst_info import SstType
from flagstone.maintenance.verification.tables import TableCheck, check_table
from flagstone.runtime.pool import shared_pool
from flagstone.store.port import ObjectMissing, ObjectStore

_FETCHED_OBJECTS: Final = 8
_FETCHED_BYTES: Final = 64 * 1024 * 1024
"""How much is fetched at once: enough to hide latency, little enough for memory. A larger object comes alone."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An SST to check: a table, or a file of the log. `bytes` is about its size."""

    path: str
    kind: SstType
    bytes: int


class Checker(Protocol):
    """Reads SSTs and checks each for itself. What refers to them is not its business."""

    def check(self, subjects: Sequence[Subject]) -> Iterable[TableCheck | None]:
        """What was found, in the same order; None for one that is not there.

        Raises `Unavailable` when the store does not answer.
        """
        ...


class LocalChecker:
    """Checks in this process, one SST after the other, and fetches some at once."""

    def __init__(self, store: ObjectStore, wal_store: ObjectStore) -> None:
        self._store = store
        self._wal_store = wal_store

    def check(self, subjects: Sequence[Subject]) -> Iterator[TableCheck | None]:
        """See `Checker`."""
        for batch in plan_batches(subjects):
            fetched = shared_pool().map_ordered(self._fetch, batch)
            for subject in batch:
                data = fetched.pop(0)
                yield None if data is None else check_table(data, subject.path, subject.kind)

    def _fetch(self, subject: Subject) -> bytes | None:
        store = self._wal_store if subject.kind is SstType.WAL else self._store
        try:
            return store.get(subject.path).data
        except ObjectMissing:
            return None


def plan_batches(subjects: Sequence[Subject]) -> Iterator[list[Subject]]:
    """Neighbours that are fetched together. Pure."""
    batch: list[Subject] = []
    size = 0
    for subject in subjects:
        if batch and (len(batch) == _FETCHED_OBJECTS or size + subject.bytes > _FETCHED_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(subject)
        size += subject.bytes
    if batch:
        yield batch
