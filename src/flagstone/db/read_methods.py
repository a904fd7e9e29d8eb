"""The read methods of `Db`, `DbReader`, `Snapshot` and `Transaction`, which are mappings of keys to values.

Each class provides a read view and a sequence number; everything else is here. If garbage collection has deleted an SST
of the view, the read starts over with a newer view. Snapshots and transactions keep their sequence number, because the
versions that it shows are kept for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, overload

from flagstone.db.mapping import NotSupported, RowMapping, RowRange, check_bounds, range_of
from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.format.filter import PrefixExtractor
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.read import drivers
from flagstone.read.drivers import Found, visible_row
from flagstone.read.explanation import Explanation, Trail
from flagstone.read.preview import brief, html_facts
from flagstone.read.read_ahead import PrefixProbe
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import DEFAULT_READ_AHEAD_BYTES, ScanRequest
from flagstone.read.view import ReadView
from flagstone.runtime.clock import Clock
from flagstone.schema.table_schema import TableSchema, schema_key
from flagstone.sst.store import SstGone, SstStore
from flagstone.types import KeyRange, Row
from flagstone.write.batch import check_read_key
from flagstone.write.key_check import KeyRanges

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

_ATTEMPTS = 3


class ViewSource(Protocol):
    """Where reads get their view: the manifest of a writer, or the follower of a reader."""

    @property
    def view(self) -> ReadView:
        """The current view."""
        ...

    @property
    def retained_seq(self) -> int:
        """The smallest sequence number that the current view shows completely. It never decreases."""
        ...

    def refresh(self) -> None:
        """Read the newest manifest, and show it."""
        ...


class ReadContext:
    """What all reads of one handle share. `key_ranges` is the writable range of a clone; None means all keys."""

    __slots__ = (
        "__weakref__",  # `flagstone.db.exit` watches it: all faces of a handle hold it
        "clock",
        "gets",
        "key_ranges",
        "merge_operator",
        "prefix_extractor",
        "scans",
        "source",
        "ssts",
    )

    def __init__(
        self,
        ssts: SstStore,
        source: ViewSource,
        *,
        clock: Clock,
        merge_operator: MergeOperator | None,
        prefix_extractor: PrefixExtractor | None = None,
        key_ranges: KeyRanges | None = None,
    ) -> None:
        self.ssts: SstStore = ssts
        self.source: ViewSource = source
        self.clock: Clock = clock
        self.merge_operator: MergeOperator | None = merge_operator
        self.prefix_extractor: PrefixExtractor | None = prefix_extractor
        self.key_ranges: KeyRanges | None = key_ranges
        # How many reads there were. Counted without a lock: two threads that count at once may lose a count.
        self.gets: int = 0
        self.scans: int = 0

    def prefix_probe(self, prefix: bytes | None) -> PrefixProbe | None:
        """What a scan of `prefix` can test with the filters; None if its keys have no common extracted prefix."""
        if prefix is None or self.prefix_extractor is None:
            return None
        extracted = self.prefix_extractor.prefix(prefix)
        return (self.prefix_extractor, extracted) if extracted and prefix.startswith(extracted) else None


class Reads(RowMapping):
    """The read methods. Subclasses define `_read_point`: the view and the sequence number to read at."""

    _context: ReadContext

    def _read_point(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:
        raise NotImplementedError

    def _check_key(self, key: bytes) -> bytes:
        """The key to read. Raises `InvalidRequest` if it is not a key, or outside the writable range."""
        checked = check_read_key(key)
        key_ranges = self._context.key_ranges
        if key_ranges is not None:
            key_ranges.check_read(checked)
        return checked

    def _check_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys to read. Raises `InvalidRequest` if one is not a key, or outside the writable range."""
        checked = [check_read_key(key) for key in keys]
        key_ranges = self._context.key_ranges
        if key_ranges is not None:
            key_ranges.check_read(*checked)
        return checked

    def _check_range(
        self,
        start: bytes | None,
        stop: bytes | None,
        prefix: bytes | None,
        *,
        include_system: bool = False,  # noqa: ARG002 - a transaction needs it
    ) -> KeyRange:
        """The key range to scan. Raises `InvalidRequest` if it is wholly outside the writable range.

        An empty range, and one that overlaps the writable range in part, is fine.
        """
        keys = check_range(start, stop, prefix)
        key_ranges = self._context.key_ranges
        if key_ranges is not None:
            key_ranges.check_scan(keys)
        return keys

    def _refresh_read_point(self, seq: int, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002
        """The view and sequence number for the next attempt, after an SST of the view was deleted.

        Not the former sequence number: only a snapshot or transaction keeps its versions.
        """
        self._context.source.refresh()
        return self._read_point(durable_only=durable_only, dirty=dirty)

    def _renewed(self, seq: int, lost: ReadView) -> ReadView:  # noqa: ARG002 - a transaction needs it
        """A newer view than `lost` for a scan at `seq`. Raises `Unavailable` if its versions are no longer kept."""
        source = self._context.source
        source.refresh()
        view = source.view
        # After the view: `retained_seq` never decreases, so it is not too small for this view.
        if seq < source.retained_seq:
            raise Unavailable(
                "this scan took so long that the SSTs it reads were replaced and collected; scan again, or scan a "
                "snapshot(), which keeps them"
            )
        return view

    @overload
    def get(
        self,
        key: bytes,
        default: None = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes | None: ...
    @overload
    def get(
        self,
        key: bytes,
        default: bytes,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes: ...
    @overload
    def get(
        self,
        key: bytes,
        default: T,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes | T: ...
    def get(
        self,
        key: bytes,
        default: Any = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> Any:
        """The value of `key`, or `default`.

        A read sees committed rows; with `durable_only` only rows on the store, with `dirty` also rows that are not
        committed yet. Expired rows are hidden unless `include_expired`. In a clone of a key range, all reads outside
        that range raise `InvalidRequest`.
        """
        row = self.get_row(key, durable_only=durable_only, dirty=dirty, include_expired=include_expired)
        return default if row is None else row.value

    def get_row(
        self, key: bytes, *, durable_only: bool = False, dirty: bool = False, include_expired: bool = False
    ) -> Row | None:
        """The row of `key` with its sequence number and times, or None."""
        checked = self._check_key(key)
        self._context.gets += 1
        found, seq = self._read(
            lambda view, seq: drivers.get(self._context.ssts, view, checked, seq),
            durable_only=durable_only,
            dirty=dirty,
        )
        return self._visible(found, seq, include_expired=include_expired)

    def explain(self, key: bytes) -> Explanation:
        """How `get(key)` finds its answer now: the memtables and SSTs it asks, filters, blocks, requests and bytes.

        It reads as `get` does, so what it fetches is in memory afterwards.
        """
        checked = self._check_key(key)

        def follow(view: ReadView, seq: int) -> tuple[Trail, Found]:
            trail = Trail(self._context.ssts, view, checked, seq)
            return trail, trail.get()

        (trail, found), seq = self._read(follow, durable_only=False, dirty=False)
        row = self._visible(found, seq, include_expired=False)
        return Explanation(checked, seq, row, tuple(trail.steps()), trail.rounds, trail.requests, trail.bytes)

    def _get_recent(self, key: bytes) -> bytes | None:
        """`get` for a key that was probably written not long ago: it asks no older SST than necessary."""
        checked = self._check_key(key)
        self._context.gets += 1
        found, seq = self._read(
            lambda view, seq: drivers.get_newest_first(self._context.ssts, view, checked, seq),
            durable_only=False,
            dirty=False,
        )
        row = self._visible(found, seq, include_expired=False)
        return None if row is None else row.value

    def multi_get(
        self,
        keys: Sequence[bytes],
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> list[bytes | None]:
        """The values of many keys in their order, all at one moment. Keys share blocks and requests."""
        checked = self._check_keys(keys)
        self._context.gets += len(checked)
        found, seq = self._read(
            lambda view, seq: drivers.multi_get(self._context.ssts, view, checked, seq),
            durable_only=durable_only,
            dirty=dirty,
        )
        rows = (self._visible(answer, seq, include_expired=include_expired) for answer in found)
        return [None if row is None else row.value for row in rows]

    def scan(
        self,
        start: bytes | None = None,
        stop: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
        include_system: bool = False,
        read_ahead_bytes: int = DEFAULT_READ_AHEAD_BYTES,
    ) -> Scan:
        """The rows with keys in [start, stop), or that begin with `prefix`, as they are now.

        Iterate for `(key, value)`, `.rows()` for whole rows, `.seek(key)` to skip. `reverse` goes from the last key to
        the first. The scan shows one moment, however long it takes. A long scan fetches up to `read_ahead_bytes` before
        it needs them, several requests at once. In a clone of a key range, a scan wholly outside that range raises
        `InvalidRequest`. System rows, which hold schemas and the progress of streams, are hidden unless
        `include_system`.
        """
        keys = self._check_range(start, stop, prefix, include_system=include_system)
        if limit is not None and limit < 0:
            raise InvalidRequest(f"limit is {limit}; a scan gives 0 rows or more")
        self._context.scans += 1
        view, seq = self._read_point(durable_only=durable_only, dirty=dirty)
        return Scan(
            self._context.ssts,
            view,
            ScanRequest(
                keys=keys,
                max_seq=seq,
                now_ms=self._context.clock.now_ms(),
                reverse=reverse,
                limit=limit,
                include_expired=include_expired,
                include_system=include_system,
                merge_operator=self._context.merge_operator,
                read_ahead_bytes=read_ahead_bytes,
                prefix_probe=self._context.prefix_probe(prefix),
                renew=partial(self._renewed, seq),
            ),
        )

    def scan_arrow(
        self,
        start: bytes | None = None,
        stop: bytes | None = None,
        *,
        prefix: bytes | None = None,
        batch_rows: int | None = 65_536,
        columns: Sequence[str] = ("key", "value"),
        include_expired: bool = False,
        include_system: bool = False,
    ) -> pa.RecordBatchReader:
        """The same rows as Arrow batches, by ascending key, without a Python object per row where possible.

        With `batch_rows` None each batch has the size in which it is decoded, which is fastest.
        """
        # Imported here: importing Arrow takes half a second, and most callers do not use it.
        from flagstone.read.arrow import scan_arrow  # noqa: PLC0415

        keys = self._check_range(start, stop, prefix, include_system=include_system)
        self._context.scans += 1
        view, seq = self._read_point(durable_only=False, dirty=False)
        request = ScanRequest(
            keys=keys,
            max_seq=seq,
            now_ms=self._context.clock.now_ms(),
            include_expired=include_expired,
            include_system=include_system,
            merge_operator=self._context.merge_operator,
            prefix_probe=self._context.prefix_probe(prefix),
            renew=partial(self._renewed, seq),
        )
        return scan_arrow(self._context.ssts, view, request, columns=columns, batch_rows=batch_rows)

    def count(
        self,
        start: bytes | None = None,
        stop: bytes | None = None,
        *,
        prefix: bytes | None = None,
        include_expired: bool = False,
    ) -> int:
        """The number of rows with keys in [start, stop), or that begin with `prefix`. Reads all of them."""
        with self.scan(start, stop, prefix=prefix, include_expired=include_expired) as scan:
            return scan.count_rest()

    def approximate_len(
        self, start: bytes | None = None, stop: bytes | None = None, *, prefix: bytes | None = None
    ) -> int:
        """The estimated number of rows in a range, without reading them.

        It takes the row counts of the SSTs, one small request for each (for up to 256 of them; the rest is estimated by
        size), and counts the rows of the memtables. Rows that were overwritten or have expired count until compaction
        drops them. At the ends of a range inside an SST, whole blocks count.
        """
        # Imported here: most callers do not use it.
        from flagstone.read.estimate import estimate_rows  # noqa: PLC0415

        keys = self._check_range(start, stop, prefix)
        return self._read(
            lambda view, seq: estimate_rows(self._context.ssts, view, keys, seq),
            durable_only=False,
            dirty=False,
        )[0]

    def schema(self, prefix: bytes = b"") -> TableSchema | None:
        """The schema of the structured rows under `prefix`, by default of the whole database; None if it stores none.

        Raises:
            CorruptData: the row with the schema is damaged.
            InvalidRequest: a newer release of Flagstone wrote it.

        """
        stored = self._stored_schema(prefix)
        return None if stored is None or stored.retired else stored

    def _stored_schema(self, prefix: bytes = b"") -> TableSchema | None:
        """`schema`, but also one that is retired: new schemas continue its numbers."""
        key = schema_key(prefix)
        stored = self._schema_row(key)
        return None if stored is None else TableSchema.decode(stored, key)

    def _schema_row(self, key: bytes) -> bytes | None:
        """The bytes of a schema row; None also in a clone whose key range does not contain it."""
        found, seq = self._read(
            lambda view, seq: drivers.get(self._context.ssts, view, key, seq), durable_only=False, dirty=False
        )
        row = self._visible(found, seq, include_expired=True)
        return None if row is None else row.value

    @overload
    def __getitem__(self, key: bytes) -> bytes: ...
    @overload
    def __getitem__(self, key: slice[bytes | None, bytes | None, None]) -> RowRange: ...
    def __getitem__(self, key: Any) -> Any:
        try:
            value = self.get(key)
        except InvalidRequest:
            # Only now: testing for a slice first would cost each lookup of a key in memory a tenth of its time.
            if isinstance(key, slice):
                return RowRange(self, range_of(key))
            raise
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[call-overload]

    def __bool__(self) -> bool:
        """True, as for other connections: testing a handle does no request. `bool(db.keys())` tells if it has rows."""
        return True

    def __eq__(self, other: object) -> bool:
        """A handle equals itself only; `dict(one.items()) == dict(other.items())` compares rows."""
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __reduce__(self) -> NoReturn:
        raise NotSupported(
            f"a {type(self).__name__} cannot be pickled or copied: it has threads and connections. Pass the address of "
            "the database on, and open it there; only one process may write"
        )

    def _facts(self) -> dict[str, Any]:
        """What a notebook shows of the handle."""
        return {}

    def _repr_html_(self) -> str:
        return html_facts(repr(self), brief(self._facts()))

    def _rows(self, *, reverse: bool = False, limit: int | None = None) -> Scan:
        return self.scan(reverse=reverse, limit=limit)

    def _visible(self, found: Found, seq: int, *, include_expired: bool) -> Row | None:
        return visible_row(
            found,
            max_seq=seq,
            now_ms=self._context.clock.now_ms(),
            include_expired=include_expired,
            merge_operator=self._context.merge_operator,
        )

    def _read(
        self, attempt: Callable[[ReadView, int], T], *, durable_only: bool, dirty: bool
    ) -> tuple[T, int]:
        """Read; if an SST is gone, again with a newer view. Returns the result and its sequence number."""
        view, seq = self._read_point(durable_only=durable_only, dirty=dirty)
        for _ in range(_ATTEMPTS):
            try:
                return attempt(view, seq), seq
            except SstGone as gone:
                lost = gone
                view, seq = self._refresh_read_point(seq, durable_only=durable_only, dirty=dirty)
        raise CorruptData("missing, but the newest manifest refers to it", object=lost.path)


def check_range(start: bytes | None, stop: bytes | None, prefix: bytes | None) -> KeyRange:
    """The key range of these arguments. Raises `InvalidRequest` if a bound is not bytes, or `start` is above `stop`."""
    if prefix is not None and not isinstance(prefix, bytes):
        advice = "; encode it first" if isinstance(prefix, str) else ""
        raise InvalidRequest(f"prefix is bytes, not {type(prefix).__name__}{advice}")
    keys = check_bounds(start, stop)
    return keys if prefix is None else keys.intersect(KeyRange.of_prefix(prefix))
