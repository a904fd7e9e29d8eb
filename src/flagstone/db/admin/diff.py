"""`Admin.diff`: what changed from one checkpoint to another, key by key.

Only the rows of SSTs that one of the two states lacks can differ. If a key is in no such SST, and in neither state's
WAL, all its versions are in SSTs that both states have; so it has the same value in both. It does not matter whether an
SST is in L0 or in a run: its rows are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from flagstone.clones import checkpoint as checkpoints
from flagstone.db.reader.follower import WalTail
from flagstone.db.reader.reader_checkpoint import check_readable
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.sst import FORMAT_V2, decode_rows
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.read import drivers
from flagstone.read.drivers import visible_row
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import Chunk, ScanCursor, ScanRequest
from flagstone.read.view import ReadView, ViewBuilder
from flagstone.runtime.pool import shared_pool
from flagstone.sst.cache import SstCache
from flagstone.sst.store import SstGone, SstStore
from flagstone.store.port import ObjectStore
from flagstone.types import EntryTuple, KeyRange, Row, Ulid

if TYPE_CHECKING:
    import pyarrow as pa

_CACHE_BYTES: Final = 64 * 1024 * 1024
_MEMTABLE_BYTES: Final = 64 * 1024 * 1024
_KEYS_AT_ONCE: Final = 1024
_ARROW_ROWS: Final = 16_384
_ROW_FIELDS: Final = ("value", "seq", "created_ms", "expires_ms")
_key_of = itemgetter(0)

_Shown = tuple[Ulid, KeyRange]
"""An SST and its visible keys."""


class Difference(NamedTuple):
    """A key whose row differs: `before` is None if it was added, `after` if it was removed."""

    key: bytes
    before: Row | None
    after: Row | None


class Diff:
    """The differences between two checkpoints, ordered by key. Each iteration computes them again.

    Memory is bounded by a cache of blocks and the WAL rows of both states, however much differs. SSTs that both states
    have are read only for the keys of other SSTs. Two rows are the same if value and expiry are; a key that was written
    again with both unchanged is no difference.
    """

    def __init__(
        self,
        manifests: ManifestStore,
        store: ObjectStore,
        wal_store: ObjectStore,
        before: UUID,
        after: UUID,
        *,
        keys: KeyRange,
        include_system: bool,
        merge_operator: MergeOperator | None,
    ) -> None:
        self._manifests = manifests
        self._ids = (before, after)
        self._keys = keys
        self._include_system = include_system
        self._merge_operator = merge_operator
        cache = SstCache(capacity_bytes=_CACHE_BYTES)
        self._ssts = SstStore(store, manifests.paths, cache=cache, pool=shared_pool())
        self._before = self._state(before, wal_store)
        self._after = self._state(after, wal_store)
        # The later clock for both: a row that had expired by then is in neither, whether or not a compaction has
        # removed it, and an SST that both states have shows the same rows in both.
        self._now_ms = max(self._before.clock_ms, self._after.clock_ms)
        self._plan = plan_diff(self._before.manifest, self._after.manifest, keys)

    def __iter__(self) -> Iterator[Difference]:
        pairs = self._by_lookup() if self._plan.sparse else self._by_scan()
        try:
            for key, before, after in pairs:
                if _content(before) != _content(after):
                    yield Difference(key, before, after)
        except SstGone as gone:
            latest = self._manifests.require_latest().value
            for checkpoint_id in self._ids:
                checkpoints.require_checkpoint(latest, checkpoint_id)
            raise CorruptData("missing, but a checkpoint refers to it", object=gone.path) from None

    def arrow(self, *, batch_rows: int = _ARROW_ROWS) -> pa.RecordBatchReader:
        """The same as record batches: `key`, then `before` and `after` as structs of value, seq and times."""
        # Imported here: importing Arrow takes half a second, and most callers do not use it.
        import pyarrow as pa  # noqa: PLC0415

        if batch_rows < 1:
            raise InvalidRequest(f"batch_rows is {batch_rows}; use 1 or more")
        row_type = pa.struct(
            [
                ("value", pa.binary()),
                ("seq", pa.uint64()),
                ("created_ms", pa.int64()),
                ("expires_ms", pa.int64()),
            ]
        )
        schema = pa.schema([("key", pa.binary()), ("before", row_type), ("after", row_type)])

        def batches() -> Iterator[pa.RecordBatch]:
            differences = iter(self)
            while chunk := list(islice(differences, batch_rows)):
                columns = [
                    pa.array([entry.key for entry in chunk], pa.binary()),
                    pa.array([_fields(entry.before) for entry in chunk], row_type),
                    pa.array([_fields(entry.after) for entry in chunk], row_type),
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

        return pa.RecordBatchReader.from_batches(schema, batches())

    def _by_lookup(self) -> Iterator[Difference]:
        """Every key of an SST or WAL row that only one state has, looked up in both."""
        states = ((self._before, self._plan.before), (self._after, self._plan.after))
        streams = [self._keys_of(state.view_of(reduced, self._ssts), state.seq) for state, reduced in states]
        candidates = _distinct(merge(*streams))
        while keys := list(islice(candidates, _KEYS_AT_ONCE)):
            both = zip(keys, self._rows(self._before, keys), self._rows(self._after, keys), strict=True)
            yield from map(Difference._make, both)

    def _by_scan(self) -> Iterator[Difference]:
        """Every key of either state: both are scanned from end to end."""
        befores, afters = self._scan(self._before), self._scan(self._after)
        before, after = next(befores, None), next(afters, None)
        while before is not None or after is not None:
            if after is None or (before is not None and before.key < after.key):
                assert before is not None, "one of the two is not None"
                yield Difference(before.key, before, None)
                before = next(befores, None)
            elif before is None or after.key < before.key:
                yield Difference(after.key, None, after)
                after = next(afters, None)
            else:
                yield Difference(after.key, before, after)
                before, after = next(befores, None), next(afters, None)

    def _keys_of(self, view: ReadView, seq: int) -> Iterator[bytes]:
        cursor = ScanCursor(view, self._request(seq), sink=_KeySink())
        while (chunk := drivers.next_chunk(self._ssts, cursor)) is not None:
            yield from chunk

    def _rows(self, state: _State, keys: list[bytes]) -> list[Row | None]:
        found = drivers.multi_get(self._ssts, state.view, keys, state.seq)
        return [
            visible_row(answer, max_seq=state.seq, now_ms=self._now_ms, merge_operator=self._merge_operator)
            for answer in found
        ]

    def _scan(self, state: _State) -> Iterator[Row]:
        return Scan(self._ssts, state.view, self._request(state.seq)).rows()

    def _request(self, seq: int) -> ScanRequest:
        return ScanRequest(
            keys=self._keys,
            max_seq=seq,
            now_ms=self._now_ms,
            include_system=self._include_system,
            merge_operator=self._merge_operator,
        )

    def _state(self, checkpoint_id: UUID, wal_store: ObjectStore) -> _State:
        manifests = self._manifests
        entry = checkpoints.require_checkpoint(manifests.require_latest().value, checkpoint_id)
        manifest = checkpoints.load_checkpointed(manifests, entry).value
        check_readable(manifest)
        tail = WalTail(wal_store, manifests.paths, max_memtable_bytes=_MEMTABLE_BYTES, pool=shared_pool())
        tail.follow(manifest, manifest.wal_id_last_seen)
        clock_ms = max(entry.created_s * 1000, manifest.last_l0_clock_tick)
        return _State(manifest, tail, clock_ms, self._ssts)


class _State:
    """The state of one checkpoint."""

    def __init__(self, manifest: Manifest, tail: WalTail, clock_ms: int, ssts: SstStore) -> None:
        self.manifest = manifest
        self.clock_ms = clock_ms
        self.seq = max(int(manifest.last_l0_seq), tail.last_seq)
        self._memtables = tail.memtables
        self.view = self.view_of(manifest, ssts)

    def view_of(self, manifest: Manifest, ssts: SstStore) -> ReadView:
        """The SSTs of `manifest`, which are all or some of this state's, below its WAL rows."""
        return ViewBuilder(ssts).build(manifest).with_memtables(self._memtables)


class _KeySink:
    """A sink that collects the keys of all rows, tombstones included."""

    def __init__(self) -> None:
        self._done = 0

    def add_blocks(self, blocks: list[bytes], start: bytes | None, stop: bytes | None, out: Chunk) -> None:
        self._done = 0
        for block in blocks:
            rows = decode_rows(block, FORMAT_V2)
            out.extend(
                row[0]
                for row in rows
                if (start is None or row[0] >= start) and (stop is None or row[0] < stop)
            )
            self._done += 1

    def blocks_done(self) -> int:
        return self._done

    def add_rows(self, rows: list[EntryTuple], out: Chunk) -> None:
        out.extend(map(_key_of, rows))

    def finish(self, out: Chunk) -> None:
        """Nothing is buffered."""

    def resume_at(self, head: bytes, out: Chunk) -> bytes:  # noqa: ARG002 - nothing is buffered
        return head


def _distinct(keys: Iterable[bytes]) -> Iterator[bytes]:
    last: bytes | None = None
    for key in keys:
        if key != last:
            last = key
            yield key


def _content(row: Row | None) -> tuple[bytes, int | None] | None:
    return None if row is None else (row.value, row.expires_ms)


def _fields(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {name: getattr(row, name) for name in _ROW_FIELDS}


# -- the plan -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiffPlan:
    """Both states reduced to the SSTs that the other one lacks.

    With `sparse` those are the smaller part: then it is cheaper to get their keys from both states than to scan both.
    """

    before: Manifest
    after: Manifest
    sparse: bool


def plan_diff(before: Manifest, after: Manifest, keys: KeyRange) -> DiffPlan:
    """The SSTs to compare, of those that have keys in `keys`. Pure."""
    shared = set(_shown(before)) & set(_shown(after))
    reduced = (_without(before, shared, keys), _without(after, shared, keys))
    different = sum(_bytes(manifest) for manifest in reduced)
    everything = sum(_bytes(_without(manifest, set(), keys)) for manifest in (before, after))
    return DiffPlan(*reduced, sparse=2 * different <= everything)


def _shown(manifest: Manifest) -> Iterator[_Shown]:
    for view in manifest.views:
        yield _what(manifest, view)


def _what(manifest: Manifest, view: SstView) -> _Shown:
    return view.sst_id, view.effective_range(manifest.sst(view).info)


def _without(manifest: Manifest, shared: set[_Shown], keys: KeyRange) -> Manifest:
    """The manifest without the shared SSTs and those outside the range. It must not be stored."""

    def differs(view: SstView) -> bool:
        shown = _what(manifest, view)
        return shown not in shared and not shown[1].intersect(keys).empty

    def reduced(tree: Tree) -> Tree:
        runs = (SortedRun(run.id, tuple(filter(differs, run.views))) for run in tree.runs)
        return Tree(tuple(filter(differs, tree.l0)), tuple(run for run in runs if run.views))

    return replace(
        manifest,
        tree=reduced(manifest.tree),
        segments=tuple(replace(segment, tree=reduced(segment.tree)) for segment in manifest.segments),
    )


def _bytes(manifest: Manifest) -> int:
    infos = (manifest.sst(view).info for view in manifest.views)
    return sum(info.index_offset + info.index_len for info in infos)
