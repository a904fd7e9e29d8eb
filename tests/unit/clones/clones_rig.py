"""Databases in memory, a clock that moves only when told, and an operator."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flagstone.config import Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.store.memory import MemoryStore
from kit.databases import Rows, numbered

__all__ = ["Rows", "World", "numbered"]


class World:
    """One store with databases in it."""

    def __init__(self, store: MemoryStore | None = None, wal_store: MemoryStore | None = None) -> None:
        self.clock = VirtualClock()
        self.store = store or MemoryStore(clock=self.clock)
        self.wal_store = wal_store
        self.ids = Ids(7, clock=self.clock)

    def admin(self, path: str) -> Admin:
        return Admin(path, store=self.store, wal_store=self.wal_store, clock=self.clock, ids=self.ids)

    def open(self, path: str, *, wal_enabled: bool = True, **options: Any) -> Db:
        settings = Settings(
            wal_enabled=wal_enabled,
            flush_interval=None,
            manifest_poll_interval=timedelta(hours=1),
            compactor_options=None,
            garbage_collector_options=None,
        )
        return open_database(
            path,
            store=self.store,
            wal_store=self.wal_store,
            settings=settings,
            clock=self.clock,
            ids=self.ids,
            **options,
        )

    def write(self, path: str, rows: Rows, **options: Any) -> None:
        """Open, put, flush into a table, close."""
        with self.open(path, **options) as db:
            for key, value in rows.items():
                db.put(key, value)
            db.flush()
        self.clock.advance(1_000)

    def scan(self, path: str, checkpoint: Any = None) -> Rows:
        with open_reader(
            path,
            store=self.store,
            wal_store=self.wal_store,
            mode="latest",
            checkpoint=checkpoint,
            clock=self.clock,
        ) as reader:
            return dict(reader.scan())

    def objects(self, path: str = "") -> dict[str, bytes]:
        """Everything on the stores below a path."""
        stores = [self.store] if self.wal_store is None else [self.store, self.wal_store]
        return {meta.path: store.get(meta.path).data for store in stores for meta in store.list(path)}
