"""Where a database is, said so that executors find it too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flagstone.errors import InvalidRequest
from flagstone.spark.options import Place
from flagstone.store.remote_options import OptionValue


def shared_place(
    url: str | os.PathLike[str],
    *,
    store: str | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: str | None = None,
) -> Place:
    """The place that an address means here, for processes that work in other folders.

    Raises:
        InvalidRequest: it is in the memory of this process, where no other can read it.

    """
    path = os.fspath(url)
    for each in (path, store, wal_store):
        if each is not None and each.startswith("memory://"):
            raise InvalidRequest(
                f"{each} is in the memory of this process, where executors cannot read it; use a folder or a bucket"
            )
    # With a store, the path is inside of it.
    return Place(
        _absolute(path) if store is None else path,
        None if store is None else _absolute(store),
        None if wal_store is None else _absolute(wal_store),
        dict(store_options or {}),
    )


def _absolute(address: str) -> str:
    return address if "://" in address else str(Path(address).absolute())
