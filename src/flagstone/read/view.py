"""Read views: memtables and SSTs at one moment, newest first.

A view is immutable. The writer publishes a new one when it freezes a memtable, commits a flush or adopts a compaction;
a read takes the current view and keeps it to its end, so it never sees half a change. SSTs of a view may be deleted
from the store when no checkpoint holds them; see `sst.store.SstGone`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NoReturn, Protocol

from flagstone.errors import Closed
from flagstone.kernels import probe as probe_kernel
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import ExternalDb, Manifest
from flagstone.sst.reader import Sst
from flagstone.sst.store import SstStore
from flagstone.types import MAX_KEY_BYTES, MERGE, EntryTuple, RunId, Ulid

Layer = probe_kernel.Layer


class MemtableCursor(Protocol):
    """Rows of a memtable in key order; the versions of a key from new to old."""

    def next_rows(self, limit: int) -> list[EntryTuple]:
        """The rows of the next keys, at least `limit` of them unless the end is reached."""
        ...

    def seek(self, key: bytes) -> None:
        """Continue at `key`, unless the cursor is already beyond it."""
        ...


class Memtable(Protocol):
    """Recent rows in memory. Reads never block and may run beside writes."""

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None: ...

    def get_value(self, key: bytes, max_seq: int) -> bytes | EntryTuple | None:
        """The value, if it is one that never expires; any other row as a tuple; None if there is no row."""
        ...

    def versions(self, key: bytes, max_seq: int) -> list[EntryTuple]:
        """The rows of a key with seq <= `max_seq`, newest first."""
        ...

    def scan(self, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool) -> MemtableCursor:
        """The newest visible version of each key; if it is a merge operand, the older versions, too."""
        ...


def _nothing(_key: bytes, _max_seq: int) -> None:
    """`Memtable.get_value` of a view without memtables."""


class Forest:
    """The SSTs of a view: one tree, or one per segment. Layers are ordered newest first.

    All views of one manifest share one forest: while a reference to it exists, a read may still use its SSTs.
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

    def ssts_of(self, key: bytes) -> Iterator[Sst]:
        """The SSTs whose key ranges include `key`, newest first."""
        for layer in self.layers_of(key):
            starts, stops, ssts = layer.parts()
            # The last SST that starts below the key, and those that start with it.
            for at in range(max(bisect_left(starts, key) - 1, 0), bisect_right(starts, key)):
                if stops[at] is None or key < stops[at]:
                    yield ssts[at]

    @property
    def scan_layers(self) -> list[Layer]:
        """Layers over all keys. Segments cover separate key ranges, so their n-th layers form one layer."""
        if self.prefixes is None:
            return self.layers
        if self._merged is None:
            self._merged = [_chain(layers) for layers in zip_longest(*self.segments)]
        return self._merged


class ReadView:
    """Memtables newest first, above a forest of SSTs. Immutable.

    `get_newest` is `Memtable.get_value` of the newest memtable, `older_memtables` are the others. The fast path of a
    point read needs both; the view looks them up once, not once per read.
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
        """The same SSTs below other memtables."""
        return ReadView(memtables, self.forest)


class ClosedView:
    """Replaces the view of a database that was closed: every read through it raises `Closed`."""

    def __init__(self, reason: Closed) -> None:
        self._reason = reason

    def __getattr__(self, _name: str) -> NoReturn:
        raise Closed(str(self._reason), reason=self._reason.reason)


class ViewBuilder:
    """Builds views of successive manifests, and reuses the layers that did not change.

    One thread at a time. SSTs that left the manifest are dropped from the `SstStore`.
    """

    def __init__(self, ssts: SstStore) -> None:
        self.ssts = ssts
        self._l0: dict[Ulid, tuple[SstView, Layer]] = {}
        self._runs: dict[RunId, tuple[SortedRun, Layer]] = {}
        self._lenders: tuple[ExternalDb, ...] = ()
        self._owners: dict[Ulid, str] = {}

    def build(self, manifest: Manifest, memtables: Iterable[Memtable] = ()) -> ReadView:
        """The view of a manifest. Makes no request."""
        if manifest.external_dbs != self._lenders:
            self._owners = {sst_id: db.path for db in manifest.external_dbs for sst_id in db.sst_ids}
            self._lenders = manifest.external_dbs
        step = _Step(self.ssts, manifest, self._owners, self._l0, self._runs)
        root = step.layers(manifest.tree)
        if manifest.segments or manifest.segment_extractor_name is not None:
            prefixes = [segment.prefix for segment in manifest.segments]
            segments = [step.layers(segment.tree) for segment in manifest.segments]
            forest = Forest(root, prefixes=prefixes, segments=segments)
        else:
            forest = Forest(root)
        self._l0, self._runs = step.new_l0, step.new_runs
        self.ssts.drop(sst_id for sst_id in step.replaced() if sst_id not in manifest.ssts)
        return ReadView(memtables, forest)


class _Step:
    """One build: layers of the former build are reused, others are created."""

    def __init__(
        self,
        ssts: SstStore,
        manifest: Manifest,
        owners: dict[Ulid, str],
        old_l0: dict[Ulid, tuple[SstView, Layer]],
        old_runs: dict[RunId, tuple[SortedRun, Layer]],
    ) -> None:
        self._ssts = ssts
        self._manifest = manifest
        self._owners = owners
        self._old_l0 = old_l0
        self._old_runs = old_runs
        self.new_l0: dict[Ulid, tuple[SstView, Layer]] = {}
        self.new_runs: dict[RunId, tuple[SortedRun, Layer]] = {}

    def layers(self, tree: Tree) -> list[Layer]:
        """The layers of a tree, newest first, without those that have no visible key."""
        found = [self._l0_layer(view) for view in tree.l0]
        found += [self._run_layer(run) for run in tree.runs]
        return [layer for layer in found if layer.parts()[0]]

    def replaced(self) -> set[Ulid]:
        """The SSTs of the layers that were not reused. Another view may still have one."""
        kept = {id(layer) for _, layer in (*self.new_l0.values(), *self.new_runs.values())}
        views = [view for view, layer in self._old_l0.values() if id(layer) not in kept]
        views += [
            view for run, layer in self._old_runs.values() if id(layer) not in kept for view in run.views
        ]
        return {view.sst_id for view in views}

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
        ssts: list[Sst] = []
        described, owners, checked = self._manifest.ssts, self._owners, self._manifest.checked
        for view in views:
            sst = described[view.sst_id]
            info = sst.info
            if view.visible_range is None:  # as below, in a third of the time
                start, last = info.first_entry, info.last_entry
                stop = None if last is None else last + b"\0"
                if start is not None and stop is not None and start >= stop:
                    continue
            else:
                visible = view.effective_range(info)
                if visible.empty:
                    continue
                start, stop = visible.start, visible.stop
            starts.append(start or b"")
            stops.append(stop)
            owner = owners.get(sst.id)
            ssts.append(self._ssts.open(sst.id, info, sst.format_version, owner, record_checked=checked))
        return Layer(starts, stops, ssts)


def _chain(layers: Iterable[Layer | None]) -> Layer:
    """One layer out of layers with ascending, separate key ranges."""
    starts: list[bytes] = []
    stops: list[bytes | None] = []
    ssts: list[Sst] = []
    for layer in layers:
        if layer is not None:
            more_starts, more_stops, more_ssts = layer.parts()
            starts += more_starts
            stops += more_stops
            ssts += more_ssts
    return Layer(starts, stops, ssts)


def is_long(row: EntryTuple) -> bool:
    """Whether the key of a row is too long for a memtable."""
    return len(row[0]) > MAX_KEY_BYTES


class LongKeyMemtable:
    """An immutable `Memtable` of WAL rows whose keys are too long for the kernel's memtable.

    SlateDB writes such rows, so reads must show them. They are rare: sorted lists are fast enough.
    """

    def __init__(self, rows: Iterable[EntryTuple] = ()) -> None:
        self.rows: tuple[EntryTuple, ...] = tuple(rows)
        self._by_key: dict[bytes, list[EntryTuple]] = {}
        for row in sorted(self.rows, key=lambda row: (row[0], -row[1])):
            self._by_key.setdefault(row[0], []).append(row)
        self._keys = list(self._by_key)

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None:
        """The newest version up to `max_seq`."""
        return next(iter(self.versions(key, max_seq)), None)

    def get_value(self, key: bytes, max_seq: int) -> EntryTuple | None:
        """The row itself, never the plain value."""
        return self.get(key, max_seq)

    def versions(self, key: bytes, max_seq: int) -> list[EntryTuple]:
        """All versions up to `max_seq`, newest first."""
        return [row for row in self._by_key.get(key, ()) if row[1] <= max_seq]

    def scan(self, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool) -> LongKeyCursor:
        """The rows with keys in [start, stop); each key down to its first version that is no merge operand."""
        first = 0 if start is None else bisect_left(self._keys, start)
        end = len(self._keys) if stop is None else bisect_left(self._keys, stop)
        keys = self._keys[first:end]
        return LongKeyCursor(
            [self.versions(key, max_seq) for key in (reversed(keys) if reverse else keys)], reverse=reverse
        )


class LongKeyCursor:
    """The rows of a scan, whole keys at a time."""

    def __init__(self, groups: list[list[EntryTuple]], *, reverse: bool) -> None:
        self._groups = [group for group in groups if group]
        self._reverse = reverse

    def next_rows(self, limit: int) -> list[EntryTuple]:
        """At least one key's rows, about `limit` of them; none at the end."""
        rows: list[EntryTuple] = []
        while self._groups and len(rows) < limit:
            for row in self._groups.pop(0):
                rows.append(row)
                if row[2] != MERGE:
                    break
        return rows

    def seek(self, key: bytes) -> None:
        """Continue at `key`, or at the next one in the direction of the scan."""
        self._groups = [
            group for group in self._groups if (group[0][0] <= key if self._reverse else group[0][0] >= key)
        ]
