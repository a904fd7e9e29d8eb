"""What a read looks at: memtables and tables, newest first, frozen at one moment.

A view is a value. Writers publish a new one when a memtable is frozen, a flush is committed or a compaction
lands; a read takes the current one and keeps it to its end, so it never sees half a change. Tables of a view may
be deleted from the store when no checkpoint holds them; see `table.table_store.TableGone`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

from flagstone.kernels import probe as probe_kernel
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest
from flagstone.table.reader import Table
from flagstone.table.table_store import TableStore
from flagstone.types import EntryTuple, RunId, Ulid

Layer = probe_kernel.Layer


class MemtableCursor(Protocol):
    """Rows of a memtable in key order; the versions of a key from new to old."""

    def next_rows(self, limit: int) -> list[EntryTuple]:
        """The rows of the next keys, at least `limit` of them unless the end is reached."""
        ...

    def seek(self, key: bytes) -> None:
        """Go on at `key`, or where the cursor already is beyond it."""
        ...


class Memtable(Protocol):
    """Recent rows in memory. Reads never block and may run beside writes."""

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None: ...

    def get_value(self, key: bytes, max_seq: int) -> bytes | EntryTuple | None:
        """The value where it is plain; the row where it needs thought; None when there is none."""
        ...

    def versions(self, key: bytes, max_seq: int) -> list[EntryTuple]:
        """The rows of a key with seq <= `max_seq`, newest first."""
        ...

    def scan(self, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool) -> MemtableCursor:
        """Of each key the newest version a reader may see; behind a merge operand the older ones, too."""
        ...


def _nothing(_key: bytes, _max_seq: int) -> None:
    """What a view without memtables has in them."""


class Forest:
    """The tables of a view: one tree, or one per segment. Layers are ordered newest first.

    Views of one manifest share it: while it is referred to, somebody may still read these tables.
    """

    __slots__ = ("__weakref__", "_merged", "layers", "prefixes", "segments")

    def __init__(
        self,
        layers: list[Layer],
        *,
        prefixes: Sequence[bytes] | None = None,
        segments: Sequence[list[Layer]] = (),
    ) -> None:
        self.layers: list[Layer] = layers
        self.prefixes: Sequence[bytes] | None = prefixes
        self.segments: Sequence[list[Layer]] = segments
        self._merged: list[Layer] | None = None

    def layers_of(self, key: bytes) -> list[Layer]:
        """The layers that may hold `key`."""
        if self.prefixes is None:
            return self.layers
        at = bisect_right(self.prefixes, key) - 1
        return self.segments[at] if at >= 0 and key.startswith(self.prefixes[at]) else []

    @property
    def scan_layers(self) -> list[Layer]:
        """Layers over all keys. Segments cover separate key ranges, so their n-th layers form one layer."""
        if self.prefixes is None:
            return self.layers
        if self._merged is None:
            self._merged = [_chain(layers) for layers in zip_longest(*self.segments)]
        return self._merged


class ReadView:
    """Memtables newest first, above a forest of tables. Immutable.

    `get_newest` asks the newest memtable for a plain value (`Memtable.get_value`), `older_memtables` are the others:
    what the shortest way of a point read needs, looked up once per view and not once per read.
    """

    __slots__ = (
        "__weakref__", "forest", "get_newest", "layers", "memtables", "older_memtables", "segmented",
    )  # fmt: skip

    def __init__(self, memtables: Iterable[Memtable], forest: Forest) -> None:
        self.memtables: tuple[Memtable, ...] = tuple(memtables)
        self.get_newest: Callable[[bytes, int], bytes | EntryTuple | None] = (
            self.memtables[0].get_value if self.memtables else _nothing
        )
        self.older_memtables: tuple[Memtable, ...] = self.memtables[1:]
        self.forest: Forest = forest
        self.layers: list[Layer] = forest.layers
        self.segmented: bool = forest.prefixes is not None

    def with_memtables(self, memtables: Iterable[Memtable]) -> ReadView:
        """The same tables below other memtables."""
        return ReadView(memtables, self.forest)


class ViewBuilder:
    """Makes views of successive manifests. What did not change from one to the next is used again.

    One thread at a time. Tables that left the manifest are dropped from the table store.
    """

    def __init__(self, tables: TableStore) -> None:
        self._tables = tables
        self._l0: dict[Ulid, tuple[SstView, Layer]] = {}
        self._runs: dict[RunId, tuple[SortedRun, Layer]] = {}
        self._ids: set[Ulid] = set()

    def build(self, manifest: Manifest, memtables: Iterable[Memtable] = ()) -> ReadView:
        """The view of a manifest. Asks the store nothing."""
        owners = {sst_id: db.path for db in manifest.external_dbs for sst_id in db.sst_ids}
        step = _Step(self._tables, manifest, owners, self._l0, self._runs)
        root = step.layers(manifest.tree)
        if manifest.segments or manifest.segment_extractor_name is not None:
            prefixes = [segment.prefix for segment in manifest.segments]
            segments = [step.layers(segment.tree) for segment in manifest.segments]
            forest = Forest(root, prefixes=prefixes, segments=segments)
        else:
            forest = Forest(root)
        self._l0, self._runs = step.new_l0, step.new_runs
        self._tables.drop(self._ids - manifest.ssts.keys())
        self._ids = set(manifest.ssts)
        return ReadView(memtables, forest)


class _Step:
    """One build: layers found in the last one, or made anew."""

    def __init__(
        self,
        tables: TableStore,
        manifest: Manifest,
        owners: dict[Ulid, str],
        old_l0: dict[Ulid, tuple[SstView, Layer]],
        old_runs: dict[RunId, tuple[SortedRun, Layer]],
    ) -> None:
        self._tables = tables
        self._manifest = manifest
        self._owners = owners
        self._old_l0 = old_l0
        self._old_runs = old_runs
        self.new_l0: dict[Ulid, tuple[SstView, Layer]] = {}
        self.new_runs: dict[RunId, tuple[SortedRun, Layer]] = {}

    def layers(self, tree: Tree) -> list[Layer]:
        """The layers of a tree, newest first, without those in which nothing is visible."""
        found = [self._l0_layer(view) for view in tree.l0]
        found += [self._run_layer(run) for run in tree.runs]
        return [layer for layer in found if layer.parts()[0]]

    def _l0_layer(self, view: SstView) -> Layer:
        known = self._old_l0.get(view.id)
        layer = known[1] if known is not None and known[0] == view else self._layer((view,))
        self.new_l0[view.id] = (view, layer)
        return layer

    def _run_layer(self, run: SortedRun) -> Layer:
        known = self._old_runs.get(run.id)
        layer = known[1] if known is not None and known[0] == run else self._layer(run.views)
        self.new_runs[run.id] = (run, layer)
        return layer

    def _layer(self, views: Iterable[SstView]) -> Layer:
        starts: list[bytes] = []
        stops: list[bytes | None] = []
        tables: list[Table] = []
        for view in views:
            sst = self._manifest.table(view)
            visible = view.effective_range(sst.info)
            if visible.empty:
                continue
            starts.append(visible.start or b"")
            stops.append(visible.stop)
            owner = self._owners.get(sst.id)
            tables.append(self._tables.open(sst.id, sst.info, format_version=sst.format_version, owner=owner))
        return Layer(starts, stops, tables)


def _chain(layers: Iterable[Layer | None]) -> Layer:
    """Layers of ascending, separate key ranges as one."""
    starts: list[bytes] = []
    stops: list[bytes | None] = []
    tables: list[Table] = []
    for layer in layers:
        if layer is not None:
            more_starts, more_stops, more_tables = layer.parts()
            starts += more_starts
            stops += more_stops
            tables += more_tables
    return Layer(starts, stops, tables)
