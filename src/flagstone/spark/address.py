"""Database addresses that resolve the same way on every executor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagstone.errors import InvalidRequest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.store.retrying import with_retries

if TYPE_CHECKING:
    from flagstone.db.admin.admin import Admin


@dataclass(frozen=True, slots=True)
class DatabaseAddress:
    """The URL of a database and the options of its stores: plain text, which each process opens for itself.

    Within one process the stores may be objects, and have a clock and ids of their own.
    """

    path: str
    store: StoreLike | None = None
    wal_store: StoreLike | None = None
    store_options: Mapping[str, OptionValue] = field(default_factory=dict)
    clock: Clock = field(default=SYSTEM_CLOCK, compare=False)
    ids: Ids = field(default=SYSTEM_IDS, compare=False)

    def __repr__(self) -> str:
        return f"DatabaseAddress({self.path!r}, store={self.store!r})"  # options may be credentials

    @property
    def name(self) -> str:
        """The last part of the path, for logs and job descriptions."""
        return self.path.rstrip("/").rpartition("/")[2] or self.path

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `flagstone.open`, `open_reader` and `Admin`, besides the path."""
        return {
            "store": self.store,
            "wal_store": self.wal_store,
            "store_options": dict(self.store_options) or None,
            "clock": self.clock,
            "ids": self.ids,
        }

    def admin(self) -> Admin:
        from flagstone.db.admin.admin import Admin  # noqa: PLC0415 - reads do not need it

        return Admin(self.path, **self.arguments)


def shared_address(
    url: str | os.PathLike[str],
    *,
    store: str | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: str | None = None,
) -> DatabaseAddress:
    """The address with relative folders made absolute, for processes with another working directory.

    Raises:
        InvalidRequest: the database is in the memory of this process, which executors cannot read.

    """
    path = os.fspath(url)
    for each in (path, store, wal_store):
        if each is not None and each.startswith("memory://"):
            raise InvalidRequest(
                f"{each} is in the memory of this process, where executors cannot read it; use a folder or a bucket"
            )
    # With a store, the path is inside of it.
    return DatabaseAddress(
        _absolute(path) if store is None else path,
        None if store is None else _absolute(store),
        None if wal_store is None else _absolute(wal_store),
        dict(store_options or {}),
    )


def open_store(address: DatabaseAddress) -> tuple[ObjectStore, DbPaths]:
    """The main store of a database, with retries, and the paths of its objects."""
    found, root = resolve_database(address.path, address.store, address.store_options)
    if not root:
        raise InvalidRequest(f"{address.path!r} names a whole store; a database needs a path inside it")
    return with_retries(found, clock=address.clock, ids=address.ids), DbPaths(root)


def open_manifests(address: DatabaseAddress) -> ManifestStore:
    """The manifests of a database."""
    store, paths = open_store(address)
    return ManifestStore(store, paths, clock=address.clock, ids=address.ids)


def open_wal_store(address: DatabaseAddress, main: ObjectStore) -> ObjectStore:
    """The store of the WAL, with retries: `main`, unless the address names another one."""
    found = resolve_wal_store(address.wal_store, main, address.store_options)
    return with_retries(found, clock=address.clock, ids=address.ids)


def _absolute(address: str) -> str:
    return address if "://" in address else str(Path(address).absolute())
