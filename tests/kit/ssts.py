"""Databases for read tests: rows in memtables, L0 and sorted runs, and the model of what a read must return."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from flagstone.format.codec import Codec
from flagstone.lsm.retention import visible_value
from flagstone.lsm.tree import BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest, Segment, SsTable
from flagstone.read.view import ReadView, ViewBuilder
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.sst.builder import EncodedSst, SstBuilder, SstOptions, encode_sst
from flagstone.sst.cache import SstCache
from flagstone.sst.store import SstGone, SstStore
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import MERGE, EntryTuple, KeyRange, Row, RunId, Ulid
from kit.databases import Append

NOW_MS = 1_000_000
SMALL_BLOCKS = SstOptions(block_bytes=1024)


def ordered(rows: Iterable[EntryTuple]) -> list[EntryTuple]:
    """The rows as an SST holds them: by key, then newest first."""
    return sorted(rows, key=lambda row: (row[0], -row[1]))


class MemoryBuilder(SstBuilder):
    """Builds SSTs in memory."""

    def __init__(self, options: SstOptions | None = None, **more: Any) -> None:
        super().__init__(options, open_sink=self._open, **more)
        self._memory = BytesIO()

    def _open(self) -> BytesIO:
        self._memory = BytesIO()
        return self._memory

    def encoded(self) -> EncodedSst:
        """The finished SST."""
        built = self.finish()
        return EncodedSst(self._memory.getvalue(), built.info, built.rows)


class PlainMemtable:
    """The memtable protocol over sorted lists."""

    def __init__(self, rows: Iterable[EntryTuple]) -> None:
        self.by_key: dict[bytes, list[EntryTuple]] = {}
        for row in ordered(rows):
            self.by_key.setdefault(row[0], []).append(row)

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None:
        return next(iter(self.versions(key, max_seq)), None)

    def get_value(self, key: bytes, max_seq: int) -> EntryTuple | None:
        """Always the whole row: a memtable may leave the evaluation to its reader."""
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


class VanishingSsts:
    """An `SstStore` that raises `SstGone` at the fetches with these numbers, counted from 1."""

    def __init__(self, ssts: SstStore, gone: Container[int]) -> None:
        self.pool = ssts.pool
        self.read_ahead = ssts.read_ahead
        self.reading = ssts.reading
        self.fetches = 0
        self._ssts = ssts
        self._gone = gone

    def fetch(self, needs: Any, *, admit: bool = True) -> Any:
        self._count(needs[0])
        return self._ssts.fetch(needs, admit=admit)

    def fetch_request(self, need: Any, *, admit: bool = True) -> Any:
        self._count(need)
        return self._ssts.fetch_request(need, admit=admit)

    def _count(self, need: Any) -> None:
        self.fetches += 1
        if self.fetches in self._gone:
            raise SstGone(need.sst.id, need.sst.path)


class RoundCounter:
    """An `SstStore` that counts rounds: calls of `fetch`, whose requests run at the same time."""

    def __init__(self, ssts: SstStore) -> None:
        self.pool = ssts.pool
        self.read_ahead = ssts.read_ahead
        self.reading = ssts.reading
        self.rounds = 0
        self._ssts = ssts

    def fetch(self, needs: Any, *, admit: bool = True) -> Any:
        self.rounds += 1
        return self._ssts.fetch(needs, admit=admit)


@dataclass
class Rig:
    """One database on a memory store. SSTs are added oldest first."""

    block_bytes: int = 1024
    codec: Codec = Codec.NONE
    min_filter_keys: int = 1
    capacity_bytes: int = 1 << 30
    threads: int = 0
    small_sst_bytes: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    ssts: dict[Ulid, SsTable] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        self.store = CountingStore(MemoryStore(), component="test")
        self.sst_store = SstStore(
            self.store,
            DbPaths("db"),
            cache=SstCache(capacity_bytes=self.capacity_bytes, metrics=self.metrics),
            pool=IoPool(max_workers=self.threads),
            metrics=self.metrics,
            small_sst_bytes=self.small_sst_bytes,
        )
        self.builder = ViewBuilder(self.sst_store)

    def add(self, rows: Sequence[EntryTuple], *, visible: KeyRange | None = None) -> SstView:
        """An SST of these rows, as another process would make it: no part of it is in a cache."""
        self.made += 1
        sst_id = Ulid(self.made)
        options = SstOptions(
            block_bytes=self.block_bytes, codec=self.codec, min_filter_keys=self.min_filter_keys
        )
        encoded = encode_sst(ordered(rows), options)
        self.store.put(DbPaths("db").sst(sst_id), encoded.data)
        self.ssts[sst_id] = SsTable(sst_id, encoded.info)
        return SstView(sst_id, sst_id, None if visible is None else BytesRange.of(visible))

    def tree(self, *, l0: Sequence[SstView] = (), runs: Sequence[Sequence[SstView]] = ()) -> Tree:
        """L0 newest first, sorted runs newest first."""
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
    """Every visible row in key order, computed from all rows in any order."""
    groups: dict[bytes, list[EntryTuple]] = {}
    for row in ordered(rows):
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
