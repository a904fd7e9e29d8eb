"""Fills the cache on disk with the tables of a database that was just opened, in the background."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

from flagstone.errors import Unavailable
from flagstone.format.sst import footer_range
from flagstone.metadata.manifest import Manifest
from flagstone.store.caching import CachingStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing

_log = logging.getLogger("flagstone.db")


class CachePreload:
    """A background service that fetches one table after the other and then ends.

    It stops before the cache would have to evict, and gives up where the store does not answer: the cache promises
    speed only. Nothing is lost when it is cut off.
    """

    name = "cache-preload"

    def __init__(self, cache: CachingStore, tables: Iterable[tuple[str, int]]) -> None:
        self._cache = cache
        self._tables = iter(tables)

    def run_once(self) -> float | None:
        """Fetch what the cache lacks of one table."""
        found = next(self._tables, None)
        if found is None:
            return None
        path, size = found
        try:
            return 0.0 if self._cache.preload(path, size) else None
        except ObjectMissing:
            return 0.0  # compacted and collected since
        except Unavailable as error:
            _log.warning("stopped filling the cache on disk path=%s error=%s", path, error)
            return None


def plan_preload(
    manifest: Manifest, paths: DbPaths, which: Literal["L0Sst", "AllSst"]
) -> list[tuple[str, int]]:
    """The tables to fetch with their sizes: L0 first, newest first, then the runs."""
    views = [view for tree in manifest.trees for view in tree.l0]
    if which == "AllSst":
        views += [view for tree in manifest.trees for run in tree.runs for view in run.views]
    chosen: dict[str, int] = {}
    for view in views:
        table = manifest.table(view)
        owner = manifest.path_of_owner(table.id)
        path = (paths if owner is None else DbPaths(owner)).table(table.id)
        chosen.setdefault(path, footer_range(table.info, table.format_version)[1])
    return list(chosen.items())
