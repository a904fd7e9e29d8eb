"""Finding the databases below a folder of a store, by their manifests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flagstone.store.paths import (
    COMPACTIONS_FOLDER,
    GC_FOLDER,
    MANIFEST_FOLDER,
    OWN_FOLDER,
    TABLE_FOLDER,
    WAL_FOLDER,
    DbPaths,
)
from flagstone.store.port import ObjectStore

_FOLDERS: Final = frozenset(
    [COMPACTIONS_FOLDER, GC_FOLDER, MANIFEST_FOLDER, OWN_FOLDER, TABLE_FOLDER, WAL_FOLDER]
)
_BEHIND: Final = "~"
"""Sorts behind every name that a database gives an object."""


def find_databases(store: ObjectStore, prefix: str = "") -> Iterator[str]:
    """The paths below `prefix` ("": the whole store) at which there is, or was, a database; ascending by listing.

    Reads the beginning of each folder of each database and skips the rest of it: about six listings for each database,
    however large it is. A path whose database was destroyed is among them as long as something of it is left.
    """
    after: str | None = None
    found: set[str] = set()
    while True:
        skipped: str | None = None
        for meta in store.list(prefix, after=after):
            after = meta.path
            root, folder = _split(meta.path)
            if folder is None:
                continue
            if root not in found and root and DbPaths(root).parse_manifest(meta.path) is not None:
                found.add(root)
                yield root
            skipped = f"{root}/{folder}/{_BEHIND}" if root else f"{folder}/{_BEHIND}"
            break
        if skipped is None:
            return
        # Strictly forward, also past a foreign name that sorts behind ours: so this ends with the listing.
        after = max(skipped, after or "")


def _split(path: str) -> tuple[str, str | None]:
    """The database that an object of this path would belong to, and the folder in it; None for a foreign object."""
    parts = path.split("/")
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] in _FOLDERS:
            return "/".join(parts[:index]), parts[index]
    return "", None
