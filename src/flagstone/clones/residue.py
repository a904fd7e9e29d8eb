"""The objects of a destroyed database: which are deleted, and which stay as the residue.

The residue proves which ids were used (see `destroy.py`). This module only lists, deletes and empties objects; the
destroyer decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Final

from flagstone.metadata.annotations import RETENTION_MANIFEST_ID
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.destruction import find_mark
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMeta, ObjectStore, find_inside
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.types import CompactionsId, ManifestId, WalId
from flagstone.wal.frontier import FENCE

PURGE_AGE: Final = timedelta(days=1)
"""The residue stays at least this long: no request is under way for that long."""


def plan_kept_wal(files: Mapping[WalId, ObjectMeta], fence_id: WalId | None) -> set[WalId]:
    """The WAL files that stay: the fences of the last day before the destruction, and the file before each. Pure.

    A fence stops the writer before it. The file before the fence is the only one whose creation that writer may still
    be retrying. Older fences are not needed: no request is under way for that long.
    """
    if fence_id is None or fence_id not in files:
        return set()
    since_ms = files[fence_id].last_modified_ms - round(PURGE_AGE.total_seconds() * 1000)
    fences = {
        wal_id for wal_id, meta in files.items() if meta.size == 0 and meta.last_modified_ms >= since_ms
    }
    return {wal_id for wal_id in files if wal_id in fences or wal_id + 1 in fences}


class DestroyedObjects:
    """The objects of the database at `paths`, for its destroyer."""

    def __init__(
        self, store: ObjectStore, paths: DbPaths, *, wal_store: ObjectStore, compactions: CompactionsStore
    ) -> None:
        self._store = store
        self._wal_store = wal_store
        self._paths = paths
        self._compactions = compactions

    def kept_wal(self, manifest: Manifest) -> dict[str, ObjectMeta]:
        """The WAL files of the residue, by path."""
        parse = self._paths.parse_wal
        listed = ((parse(meta.path), meta) for meta in self._wal_store.list(self._paths.wal_folder))
        files = {wal_id: meta for wal_id, meta in listed if wal_id is not None}
        entry = find_mark(manifest)
        kept = plan_kept_wal(files, None if entry is None else entry.mark.fence_id)
        return {meta.path: meta for wal_id, meta in files.items() if wal_id in kept}

    def empty_kept_wal(self, vacant: Versioned[Manifest]) -> None:
        for path, meta in self.kept_wal(vacant.value).items():
            if meta.size:
                self._wal_store.put(path, FENCE)

    def kept(self, vacant: Versioned[Manifest]) -> tuple[str, ...]:
        """The paths of the residue, which proves which ids were used."""
        paths, jobs = self._paths, self._compactions.latest()
        return (
            paths.manifest(ManifestId(vacant.id)),
            paths.boundary("manifest"),
            *self.kept_wal(vacant.value),
            *(
                ()
                if jobs is None
                else (paths.compactions(CompactionsId(jobs.id)), paths.boundary("compactions"))
            ),
        )

    def planned(self, latest: Versioned[Manifest]) -> tuple[str, ...]:
        """The existing objects that destroying the database would delete."""
        entry, jobs = find_mark(latest.value), self._compactions.latest()
        kept: set[str] = set()
        if entry is not None and entry.mark.fence_id is not None:
            kept |= self.kept_wal(latest.value).keys()
            if jobs is not None:
                kept.add(self._paths.compactions(CompactionsId(jobs.id)))
        return tuple(path for path in self.doomed(None) if path not in kept)

    def doomed(self, vacant: Versioned[Manifest] | None) -> tuple[str, ...]:
        """Every object of the database; at a vacant path, those that are left and not residue.

        Objects whose names do not belong to a database stay.
        """
        paths = self._paths
        found = [
            *_ours(self._wal_store, paths.wal_folder, paths.parse_wal),
            *_ours(self._store, paths.sst_folder, paths.parse_sst),
            *_ours(self._store, paths.compactions_folder, paths.parse_compactions),
            *_ours(self._store, paths.manifest_folder, paths.parse_manifest),
        ]
        if vacant is None:
            return (*found, *(meta.path for meta in self._store.list(paths.own_folder)))
        kept = set(self.kept(vacant))
        return tuple(path for path in found if path not in kept)

    def delete_named(self) -> tuple[str, ...]:
        """Delete the objects whose names the next database would use again, while the mark still keeps it out."""
        paths = self._paths
        named = tuple(meta.path for meta in self._store.list(paths.own_folder))
        self._store.delete_many(named)
        self._store.delete(paths.manifest(RETENTION_MANIFEST_ID))
        self.forget_records(paths.own_folder, lambda _: True)
        self.forget_records(
            paths.manifest_folder, lambda path: paths.parse_manifest(path) == RETENTION_MANIFEST_ID
        )
        return named

    def forget_used_up(self, vacant: Versioned[Manifest], jobs: Versioned[Compactions] | None) -> None:
        for folder in (self._paths.wal_folder, self._paths.compactions_folder, self._paths.manifest_folder):
            self.forget_records(folder, lambda path: self.is_used_up(path, vacant, jobs))

    def is_used_up(self, path: str, vacant: Versioned[Manifest], jobs: Versioned[Compactions] | None) -> bool:
        """Whether the id in the path is below the residue, so that only a former process can write it."""
        paths = self._paths
        manifest_id, wal_id = paths.parse_manifest(path), paths.parse_wal(path)
        jobs_id = paths.parse_compactions(path)
        return (
            (manifest_id is not None and RETENTION_MANIFEST_ID < manifest_id < vacant.id)
            or (wal_id is not None and wal_id <= vacant.value.replay_after_wal_id)
            or (jobs_id is not None and jobs is not None and jobs_id < jobs.id)
        )

    def delete_all(self, doomed: tuple[str, ...]) -> None:
        wal_files = {path for path in doomed if self._paths.parse_wal(path) is not None}
        self._wal_store.delete_many(sorted(wal_files))
        self._store.delete_many([path for path in doomed if path not in wal_files])

    def forget_records(self, folder: str, chosen: Callable[[str], bool]) -> None:
        """On a two-phase store, delete the records of deleted objects, and temporaries, of the chosen paths."""
        stores = (find_inside(each, TwoPhaseStore) for each in (self._store, self._wal_store))
        for store in dict.fromkeys(stores):
            if store is not None:
                store.collect_garbage(prefix=folder, min_age_ms=0, chosen=chosen)


def _ours(store: ObjectStore, folder: str, parse: Callable[[str], object | None]) -> Iterable[str]:
    return [meta.path for meta in store.list(folder) if parse(meta.path) is not None]
