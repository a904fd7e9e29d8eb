"""The inspector of a database in a folder, asked directly or over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flagstone.inspector.inspection import Inspection, inspect_database
from flagstone.inspector.server import serve
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.runtime.sync import Event
from flagstone.store.counting import CountingStore
from flagstone.store.local import LocalStore
from flagstone.store.port import ObjectStore
from golden.corpus import GoldenDatabase


@dataclass(frozen=True)
class Place:
    """A database, as the command line knows it; every request to its store is counted."""

    root: str
    store: CountingStore
    wal_store: ObjectStore | None = None

    @property
    def requests(self) -> int:
        return sum(self.store.totals()["requests"].values())


def place(folder: Path) -> Place:
    """The database at a path."""
    return Place(folder.name, CountingStore(LocalStore(folder.parent), component="test"))


def golden_place(database: GoldenDatabase) -> Place:
    """A golden database."""
    wal_store = None if database.wal_store is None else LocalStore(database.wal_store)
    return Place(database.path, CountingStore(LocalStore(database.store), component="test"), wal_store)


@contextmanager
def inspected(where: Place, merge_operator: MergeOperator | None = None) -> Iterator[Inspection]:
    """Its inspection, closed at the end."""
    found = inspect_database(where, merge_operator=merge_operator, refresh_s=0.2)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def served(inspection: Inspection) -> Iterator[str]:
    """The address of a server of that inspection, which runs in a thread."""
    stop, ready, addresses = Event(), threading.Event(), list[str]()

    def on_ready(address: str) -> None:
        addresses.append(address)
        ready.set()

    thread = threading.Thread(
        target=lambda: serve(inspection, port=0, refresh_s=0.2, stop=stop, ready=on_ready)
    )
    thread.start()
    try:
        assert ready.wait(10)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()
