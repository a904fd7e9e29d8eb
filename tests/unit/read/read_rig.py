"""Builds databases for read tests: rows spread over memtables, L0 tables and runs, with the oracle of what is seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flagstone.format.codec import Codec
from flagstone.lsm.retention import visible_value
from flagstone.lsm.tree import BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, Segment, SsTable
from flagstone.read.view import ReadView, ViewBuilder
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.table.builder import TableBuilder, TableOptions
from flagstone.table.cache import TableCache
from flagstone.table.table_store import TableStore
from flagstone.types import MERGE, EntryTuple, KeyRange, Row, RunId, Ulid

NOW_MS = 1_000_000


class PlainMemtable:
    """The memtable protocol over sorted lists."""

    def __init__(self, rows: Iterable[EntryTuple]) -> None:
        self.by_key: dict[bytes, list[EntryTuple]] = {}
        for row in sorted(rows, key=lambda row: (row[0], -row[1])):
            self.by_key.setdefault(row[0], []).append(row)

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None:
        return next(iter(self.versions(key, max_seq)), None)

    def get_value(self, key: bytes, max_seq: int) -> EntryTuple | None:
        """Always the row: a memtable may leave all the thought to its reader."""
        return self.get(key, max_seq)

    def versions(self, key: bytes, max_seq: int) -> list[EntryTuple]:
        return [row for row in self.by_key.get(key, ()) if row[1] <= max_seq]

    def scan(self, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool) -> PlainCursor:
        keys = [key for key in sorted(self.by_key, reverse=reverse) if key in KeyRange(start, stop)]
        return PlainCursor([(key, self.versions(key, max_seq)) for key in keys], reverse)


class PlainCursor:
    def __init__(self, groups: list[tuple[bytes, list[EntryTuple]]], reverse: bool) -> None:
        self.groups = groups
        self.reverse = reverse

    def next_rows(self, limit: int) -> list[EntryTuple]:
        rows: list[EntryTuple] = []
        while self.groups and len(rows) < limit:
            for row in self.groups.pop(0)[1]:
                rows.append(row)
                if row[2] != MERGE:
                    break
        return rows

    def seek(self, key: bytes) -> None:
        self.groups = [
            group for group in self.groups if (group[0] <= key if self.reverse else group[0] >= key)
        ]


class Append:
    """Concatenates operands behind the base."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        return (existing or b"") + operand


@dataclass
class Rig:
    """One database on a memory store. Tables are added oldest first."""

    block_bytes: int = 1024
    codec: Codec = Codec.NONE
    min_filter_keys: int = 1
    capacity_bytes: int = 1 << 30
    threads: int = 0
    small_table_bytes: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    ssts: dict[Ulid, SsTable] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        self.store = CountingStore(MemoryStore(), component="test")
        self.tables = TableStore(
            self.store,
            DbPaths("db"),
            cache=TableCache(capacity_bytes=self.capacity_bytes, metrics=self.metrics),
            pool=IoPool(max_workers=self.threads),
            metrics=self.metrics,
            small_table_bytes=self.small_table_bytes,
        )
        self.builder = ViewBuilder(self.tables)

    def add(self, rows: Sequence[EntryTuple], *, visible: KeyRange | None = None) -> SstView:
        """A table of these rows, as another process would have made it: nothing of it is in memory."""
        self.made += 1
        sst_id = Ulid(self.made)
        builder = TableBuilder(
            TableOptions(block_bytes=self.block_bytes, codec=self.codec, min_filter_keys=self.min_filter_keys)
        )
        builder.add_rows(sorted(rows, key=lambda row: (row[0], -row[1])))
        encoded = builder.finish()
        self.store.put(DbPaths("db").table(sst_id), encoded.data)
        self.ssts[sst_id] = SsTable(sst_id, encoded.info)
        return SstView(sst_id, sst_id, None if visible is None else BytesRange.of(visible))

    def tree(self, *, l0: Sequence[SstView] = (), runs: Sequence[Sequence[SstView]] = ()) -> Tree:
        """L0 newest first, runs newest first."""
        sorted_runs = (
            SortedRun(RunId(len(runs) - number), tuple(views)) for number, views in enumerate(runs)
        )
        return Tree(tuple(l0), tuple(sorted_runs))

    def manifest(self, tree: Tree | None = None, *, segments: Sequence[Segment] = ()) -> Manifest:
        return Manifest(
            ssts=self.ssts,
            tree=tree or Tree(),
            segments=tuple(segments),
            segment_extractor_name="test" if segments else None,
        )

    def view(self, tree: Tree, memtables: Iterable[PlainMemtable] = ()) -> ReadView:
        return self.builder.build(self.manifest(tree), memtables)


def put(key: bytes | int, seq: int = 1, value: bytes | None = None) -> EntryTuple:
    key = key if isinstance(key, bytes) else b"%08d" % key
    return (key, seq, 0, b"value of " + key if value is None else value, seq * 10, None)


def oracle(
    rows: Iterable[EntryTuple], *, max_seq: int, include_expired: bool = False, now_ms: int = NOW_MS
) -> list[Row]:
    """Every visible row in key order, from all versions in any order."""
    groups: dict[bytes, list[EntryTuple]] = {}
    for row in sorted(rows, key=lambda row: (row[0], -row[1])):
        groups.setdefault(row[0], []).append(row)
    found = (
        visible_value(
            group,
            max_seq=max_seq,
            now_ms=now_ms,
            include_expired=include_expired,
            merge_operator=Append(),
        )
        for group in groups.values()
    )
    return [row for row in found if row is not None]
