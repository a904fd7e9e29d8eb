"""WAL files in memory, and the requests made to read them."""

from __future__ import annotations

from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import VALUE, EntryTuple, WalId
from kit.databases import encode_wal

PATHS = DbPaths("db")


def row(seq: int, key: bytes = b"k", value: bytes = b"v") -> EntryTuple:
    return (key, seq, VALUE, value, 1_700_000_000_000 + seq, None)


class WalFiles:
    """The WAL of a database, and a store that counts the requests to it."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.store = CountingStore(self.memory, component="test")

    def add(self, wal_id: int, *rows: EntryTuple) -> None:
        """Add one WAL file; without rows it is a fence."""
        self.memory.put_if_absent(PATHS.wal(WalId(wal_id)), encode_wal(list(rows)) if rows else b"")

    def add_files(self, first: int, last: int) -> None:
        for wal_id in range(first, last + 1):
            self.add(wal_id, row(wal_id))

    def remove(self, *wal_ids: int) -> None:
        for wal_id in wal_ids:
            self.memory.delete(PATHS.wal(WalId(wal_id)))

    @property
    def requests(self) -> dict[str, int]:
        return self.store.totals()["requests"]
