"""A snapshot of a database: its manifest, the manifests of its checkpoints, its jobs, and a list of its objects.

It reads no SST and writes nothing. The parts are read one after the other and may be of slightly different times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flagstone.errors import InvalidRequest
from flagstone.inspector.text import json_text, time_text
from flagstone.lsm.tree import Tree
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMeta, ObjectMissing, ObjectStore
from flagstone.types import Ulid


@dataclass(frozen=True, slots=True)
class DatabaseSnapshot:
    """The state of a database, and when it was read."""

    url: str
    root: str
    manifest: Versioned[Manifest]
    compactions: Compactions | None
    overview: Overview
    now_s: int

    @property
    def expired(self) -> list[Checkpoint]:
        """The checkpoints that the next garbage collection removes."""
        held = self.manifest.value.checkpoints
        return [entry for entry in held if entry.expires_s is not None and entry.expires_s <= self.now_s]

    def facts(self) -> dict[str, Any]:
        """The facts of the manifest as plain values for JSON."""
        manifest = self.manifest.value
        last_tick = manifest.last_l0_clock_tick if manifest.last_l0_clock_tick > 0 else None
        return {
            "path": self.root,
            "store": self.url,
            "manifest_id": self.manifest.id,
            "initialized": manifest.initialized,
            "writer_epoch": manifest.writer_epoch,
            "compactor_epoch": manifest.compactor_epoch,
            "last_l0_seq": manifest.last_l0_seq,
            "last_l0_time": time_text(None if last_tick is None else last_tick / 1000),
            "checkpoints": {
                "total": len(manifest.checkpoints),
                "named": sum(1 for entry in manifest.checkpoints if entry.name),
                "permanent": sum(1 for entry in manifest.checkpoints if entry.expires_s is None),
                "expired": len(self.expired),
            },
        }


def take_snapshot(
    store: ObjectStore, wal_store: ObjectStore | None, root: str, *, jobs: bool = False
) -> DatabaseSnapshot:
    """Read the state of a database; the compactions file only with `jobs`.

    Raises:
        InvalidRequest: there is no database.

    """
    paths = DbPaths(root)
    manifests = ManifestStore(store, paths)
    latest = manifests.latest()
    if latest is None:
        raise InvalidRequest(f"no database at {root!r} in {store.url}; check the path")

    def load(manifest_id: int) -> Manifest | None:
        try:
            return manifests.load(manifest_id)
        except ObjectMissing:
            return None  # its checkpoint expired, and garbage collection deleted the manifest

    wanted = sorted({checkpoint.manifest_id for checkpoint in latest.value.checkpoints} - {latest.id})
    of_checkpoints = [found for found in shared_pool().map_ordered(load, wanted) if found is not None]
    everything = list(store.list(root))
    wal_files = [meta for meta in everything if meta.path.startswith(f"{paths.wal_folder}/")]
    objects = [meta for meta in everything if not meta.path.startswith(f"{paths.wal_folder}/")]
    if wal_store is not None:
        wal_files += wal_store.list(paths.wal_folder)
    compactions = CompactionsStore(store, paths).latest() if jobs else None
    return DatabaseSnapshot(
        store.url,
        root,
        latest,
        None if compactions is None else compactions.value,
        overview(latest.value, of_checkpoints, paths, objects, wal_files),
        SYSTEM_CLOCK.now_ms() // 1000,
    )


@dataclass(frozen=True, slots=True)
class Weight:
    """A number of objects, and their total size."""

    count: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Weight:
        found = list(sizes)
        return cls(len(found), sum(found))


@dataclass(frozen=True, slots=True)
class RunOverview:
    """One sorted run. The field names of all overviews are keys of the JSON that `stats` prints."""

    id: int
    tables: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TreeOverview:
    """The levels of one segment, or of the keys without a segment."""

    prefix: str
    l0: Weight
    runs: tuple[RunOverview, ...]


@dataclass(frozen=True, slots=True)
class WalOverview:
    """The WAL: the files that a writer would replay, the files that are already flushed, and the fences."""

    replay_after: int
    last: int | None
    to_replay: Weight
    flushed: Weight
    fences: int


@dataclass(frozen=True, slots=True)
class ExternalOverview:
    """The SSTs that are borrowed from another database."""

    path: str
    tables: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SstsOverview:
    """The SSTs of this database by what refers to them, and those it borrows.

    The current manifest refers to `live`, only the manifests of checkpoints refer to `pinned`, and no manifest refers
    to `unreferenced`: output of a running compaction or flush, or garbage that is not collected yet.
    """

    live: Weight
    pinned: Weight
    unreferenced: Weight
    borrowed: Weight


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures that follow from a manifest, the manifests of its checkpoints, and listings."""

    trees: tuple[TreeOverview, ...]
    tables: SstsOverview
    log: WalOverview
    external_dbs: tuple[ExternalOverview, ...]
    objects: Mapping[str, Weight]
    space_amplification: float | None
    """Bytes of all levels over bytes of the oldest sorted runs, as if newer rows only replaced older ones.

    None without sorted runs.
    """
    storage_overhead: float | None
    """Bytes of all objects over bytes of live SSTs; None without live SSTs."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def overview(
    manifest: Manifest,
    of_checkpoints: Iterable[Manifest],
    paths: DbPaths,
    objects: Sequence[ObjectMeta],
    wal_files: Sequence[ObjectMeta],
) -> Overview:
    """The figures. `of_checkpoints` are manifests; `objects` are all objects except `wal_files`."""
    sizes = {sst_id: meta.size for meta in objects if (sst_id := paths.parse_sst(meta.path)) is not None}
    live = {view.sst_id for view in manifest.views}
    only_in_checkpoints = {view.sst_id for other in of_checkpoints for view in other.views} - live
    referenced = live | only_in_checkpoints
    owned_live = Weight.of(size for sst_id, size in sizes.items() if sst_id in live)
    stored = sum(meta.size for meta in (*objects, *wal_files))
    return Overview(
        trees=tuple(_trees(manifest)),
        tables=SstsOverview(
            live=owned_live,
            pinned=Weight.of(size for sst_id, size in sizes.items() if sst_id in only_in_checkpoints),
            unreferenced=Weight.of(size for sst_id, size in sizes.items() if sst_id not in referenced),
            borrowed=_weigh(manifest, live - sizes.keys()),
        ),
        log=_wal(manifest, paths, wal_files),
        external_dbs=tuple(
            ExternalOverview(external.path, weight.count, weight.bytes)
            for external in manifest.external_dbs
            for weight in (_weigh(manifest, live.intersection(external.sst_ids)),)
        ),
        objects=_by_folder(paths, (*objects, *wal_files)),
        space_amplification=_space_amplification(manifest),
        storage_overhead=stored / owned_live.bytes if owned_live.bytes else None,
    )


def _trees(manifest: Manifest) -> Iterable[TreeOverview]:
    named = [(b"", manifest.tree), *((segment.prefix, segment.tree) for segment in manifest.segments)]
    for prefix, tree in named:
        if prefix or not tree.empty or not manifest.segments:
            runs = tuple(
                RunOverview(
                    run.id,
                    len(run.views),
                    sum(manifest.sst(view).info.estimated_size for view in run.views),
                )
                for run in tree.runs
            )
            l0 = Weight.of(manifest.sst(view).info.estimated_size for view in tree.l0)
            yield TreeOverview(json_text(prefix), l0, runs)


def _weigh(manifest: Manifest, sst_ids: Iterable[Ulid]) -> Weight:
    return Weight.of(manifest.ssts[sst_id].info.estimated_size for sst_id in sst_ids)


def _wal(manifest: Manifest, paths: DbPaths, objects: Sequence[ObjectMeta]) -> WalOverview:
    files = [(wal_id, meta.size) for meta in objects if (wal_id := paths.parse_wal(meta.path)) is not None]
    after = manifest.replay_after_wal_id
    return WalOverview(
        replay_after=after,
        last=max((wal_id for wal_id, _ in files), default=None),
        to_replay=Weight.of(size for wal_id, size in files if size and wal_id > after),
        flushed=Weight.of(size for wal_id, size in files if size and wal_id <= after),
        fences=sum(1 for _, size in files if not size),
    )


def _by_folder(paths: DbPaths, objects: Iterable[ObjectMeta]) -> dict[str, Weight]:
    sizes: dict[str, list[int]] = {}
    for meta in objects:
        inside = meta.path.removeprefix(f"{paths.root}/")
        sizes.setdefault(inside.rpartition("/")[0] or ".", []).append(meta.size)
    return {folder: Weight.of(found) for folder, found in sorted(sizes.items())}


def _space_amplification(manifest: Manifest) -> float | None:
    total = bottom = 0
    for tree in manifest.trees:
        if tree.runs:
            total += _tree_bytes(manifest, tree)
            bottom += sum(manifest.sst(view).info.estimated_size for view in tree.runs[-1].views)
    return total / bottom if bottom else None


def _tree_bytes(manifest: Manifest, tree: Tree) -> int:
    return sum(manifest.sst(view).info.estimated_size for view in tree.views)
