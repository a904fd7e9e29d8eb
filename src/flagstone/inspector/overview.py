"""What a database consists of and what it weighs: the numbers of `stats`, computed from manifests and listings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flagstone.inspector.text import json_text
from flagstone.lsm.tree import Tree
from flagstone.metadata.manifest import Manifest
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMeta
from flagstone.types import Ulid


@dataclass(frozen=True, slots=True)
class Weight:
    """How many objects, and how many bytes they have together."""

    count: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Weight:
        found = list(sizes)
        return cls(len(found), sum(found))


@dataclass(frozen=True, slots=True)
class RunOverview:
    """One sorted run."""

    id: int
    tables: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TreeOverview:
    """One tree: the root, or that of a segment."""

    prefix: str
    l0: Weight
    runs: tuple[RunOverview, ...]


@dataclass(frozen=True, slots=True)
class LogOverview:
    """The write-ahead log: what a writer would replay, what is left over, and its fences."""

    replay_after: int
    last: int | None
    to_replay: Weight
    flushed: Weight
    fences: int


@dataclass(frozen=True, slots=True)
class ExternalOverview:
    """What is borrowed from another database."""

    path: str
    tables: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TablesOverview:
    """The tables of this database by who needs them, and those it borrows.

    `live` are in the current state, `pinned` only in that of a checkpoint, `unreferenced` in neither: the work of
    a compaction or flush that is going on, or garbage that is not collected yet.
    """

    live: Weight
    pinned: Weight
    unreferenced: Weight
    borrowed: Weight


@dataclass(frozen=True, slots=True)
class Overview:
    """All of `stats` that follows from a manifest, the manifests its checkpoints pin, and listings."""

    trees: tuple[TreeOverview, ...]
    tables: TablesOverview
    log: LogOverview
    external_dbs: tuple[ExternalOverview, ...]
    objects: Mapping[str, Weight]
    space_amplification: float | None
    """Bytes of the trees over bytes of their oldest runs: as if what is newer only replaced rows. None without runs."""
    storage_overhead: float | None
    """Bytes of all objects over bytes of live tables; None without any."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def overview(
    manifest: Manifest,
    pinned: Iterable[Manifest],
    paths: DbPaths,
    objects: Sequence[ObjectMeta],
    log: Sequence[ObjectMeta],
) -> Overview:
    """The numbers. `pinned` are the manifests of checkpoints; `objects` is the database without its `log`."""
    sizes = {table: meta.size for meta in objects if (table := paths.parse_table(meta.path)) is not None}
    live = {view.sst_id for view in manifest.views}
    held = {view.sst_id for other in pinned for view in other.views} - live
    needed = live | held
    owned_live = Weight.of(size for table, size in sizes.items() if table in live)
    stored = sum(meta.size for meta in (*objects, *log))
    return Overview(
        trees=tuple(_trees(manifest)),
        tables=TablesOverview(
            live=owned_live,
            pinned=Weight.of(size for table, size in sizes.items() if table in held),
            unreferenced=Weight.of(size for table, size in sizes.items() if table not in needed),
            borrowed=_weigh(manifest, live - sizes.keys()),
        ),
        log=_log(manifest, paths, log),
        external_dbs=tuple(
            ExternalOverview(external.path, weight.count, weight.bytes)
            for external in manifest.external_dbs
            for weight in (_weigh(manifest, live.intersection(external.sst_ids)),)
        ),
        objects=_by_folder(paths, (*objects, *log)),
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
                    sum(manifest.table(view).info.estimated_size for view in run.views),
                )
                for run in tree.runs
            )
            l0 = Weight.of(manifest.table(view).info.estimated_size for view in tree.l0)
            yield TreeOverview(json_text(prefix), l0, runs)


def _weigh(manifest: Manifest, tables: Iterable[Ulid]) -> Weight:
    return Weight.of(manifest.ssts[table].info.estimated_size for table in tables)


def _log(manifest: Manifest, paths: DbPaths, log: Sequence[ObjectMeta]) -> LogOverview:
    files = [(wal_id, meta.size) for meta in log if (wal_id := paths.parse_wal(meta.path)) is not None]
    after = manifest.replay_after_wal_id
    return LogOverview(
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
            bottom += sum(manifest.table(view).info.estimated_size for view in tree.runs[-1].views)
    return total / bottom if bottom else None


def _tree_bytes(manifest: Manifest, tree: Tree) -> int:
    return sum(manifest.table(view).info.estimated_size for view in tree.views)
