"""Reads as callers make them, the same for a database, a snapshot and a transaction.

Each knows a view and the sequence number it reads at; everything else is here. A table that garbage collection
removed under a view makes the read start over with a newer view. Snapshots and transactions stay at their number,
whose versions are kept for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from flagstone.errors import CorruptData, InvalidRequest, Unavailable
from flagstone.format.filter import PrefixExtractor
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.read import drivers
from flagstone.read.drivers import Found, visible_row
from flagstone.read.scan import Scan
from flagstone.read.scan_cursor import DEFAULT_READ_AHEAD_BYTES, ScanRequest
from flagstone.read.sources import PrefixProbe
from flagstone.read.view import ReadView
from flagstone.runtime.clock import Clock
from flagstone.sst.store import SstGone, SstStore
from flagstone.types import KeyRange, Row
from flagstone.write.batch import check_read_key
from flagstone.write.key_check import KeyRanges

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

_ATTEMPTS = 3


class ReadContext:
    """Where reads happen: tables, a clock, a merge operator, and a way to a newer view.

    `refresh` learns of newer manifests, `view` is what the database shows then, and `retained_seq` the smallest
    number at which that shows all there was. `key_ranges` are the keys a projection was cut out for, None for all.
    """

    __slots__ = (
        "__weakref__",  # all that read hold it: see `flagstone.db.exit`
        "clock",
        "gets",
        "key_ranges",
        "merge_operator",
        "prefix_extractor",
        "refresh",
        "retained_seq",
        "scans",
        "ssts",
        "view",
    )

    def __init__(
        self,
        ssts: SstStore,
        *,
        clock: Clock,
        merge_operator: MergeOperator | None,
        refresh: Callable[[], None],
        view: Callable[[], ReadView],
        retained_seq: Callable[[], int],
        prefix_extractor: PrefixExtractor | None = None,
        key_ranges: KeyRanges | None = None,
    ) -> None:
        self.ssts: SstStore = ssts
        self.clock: Clock = clock
        self.merge_operator: MergeOperator | None = merge_operator
        self.refresh: Callable[[], None] = refresh
        self.view: Callable[[], ReadView] = view
        self.retained_seq: Callable[[], int] = retained_seq
        self.prefix_extractor: PrefixExtractor | None = prefix_extractor
        self.key_ranges: KeyRanges | None = key_ranges
        # How often rows and ranges were asked for. Without a lock: threads may lose a count when they collide.
        self.gets: int = 0
        self.scans: int = 0

    def check_key(self, key: bytes) -> bytes:
        """The key, if it is one and can be in this database. Otherwise raises `InvalidRequest`."""
        checked = check_read_key(key)
        if self.key_ranges is not None:
            self.key_ranges.check_read(checked)
        return checked

    def check_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys, if each is one and can be in this database. Otherwise raises `InvalidRequest`."""
        checked = [check_read_key(key) for key in keys]
        if self.key_ranges is not None:
            self.key_ranges.check_read(*checked)
        return checked

    def check_range(self, start: bytes | None, stop: bytes | None, prefix: bytes | None) -> KeyRange:
        """The range these arguments mean, if some of its keys can be in this database, or it is empty.

        Raises `InvalidRequest` otherwise. A range that overlaps those of a projection in part is fine.
        """
        keys = check_range(start, stop, prefix)
        if self.key_ranges is not None:
            self.key_ranges.check_scan(keys)
        return keys

    def prefix_probe(self, prefix: bytes | None) -> PrefixProbe | None:
        """What a scan of `prefix` may ask the filters for, if its keys all have one extracted prefix."""
        if prefix is None or self.prefix_extractor is None:
            return None
        extracted = self.prefix_extractor.prefix(prefix)
        return (self.prefix_extractor, extracted) if extracted and prefix.startswith(extracted) else None


class Reads:
    """The read methods. Subclasses say what is read: `_read_point` gives the view and the number to read at."""

    _context: ReadContext

    def _read_point(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:
        raise NotImplementedError

    def _refresh_read_point(self, seq: int, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002
        """What to go on with when a view has lost a table: a newer view, read at what is visible now.

        Not at the old number: nothing keeps its versions, unless a snapshot or transaction does.
        """
        self._context.refresh()
        return self._read_point(durable_only=durable_only, dirty=dirty)

    def _renewed(self, seq: int, lost: ReadView) -> ReadView:  # noqa: ARG002 - a transaction needs it
        """A newer view than `lost` for a scan that goes on at `seq`. Raises `Unavailable` when none shows it all."""
        self._context.refresh()
        view = self._context.view()
        # Asked after the view was taken: it may have changed since, but then only to a greater number.
        if seq < self._context.retained_seq():
            raise Unavailable(
                "this scan took so long that the tables it reads were replaced and collected; scan again, and where it "
                "must see one moment for longer, scan a snapshot()"
            )
        return view

    def get(
        self,
        key: bytes,
        default: bytes | None = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes | None:
        """The value of `key`, or `default`.

        Ordinary reads see what is committed; `durable_only` only what is on the store, `dirty` also what still
        waits for it. Expired rows are hidden unless `include_expired`. A key outside of the range that a clone was cut
        out for is an `InvalidRequest`, as in all reads.
        """
        row = self.get_row(key, durable_only=durable_only, dirty=dirty, include_expired=include_expired)
        return default if row is None else row.value

    def get_row(
        self, key: bytes, *, durable_only: bool = False, dirty: bool = False, include_expired: bool = False
    ) -> Row | None:
        """The row of `key` with its sequence number and times, or None."""
        checked = self._context.check_key(key)
        self._context.gets += 1
        found, seq = self._read(
            lambda view, seq: drivers.get(self._context.ssts, view, checked, seq),
            durable_only=durable_only,
            dirty=dirty,
        )
        return self._visible(found, seq, include_expired=include_expired)

    def multi_get(
        self,
        keys: Sequence[bytes],
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> list[bytes | None]:
        """The values of many keys in their order, at one moment. Keys share blocks and requests."""
        checked = self._context.check_keys(keys)
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
        read_ahead_bytes: int = DEFAULT_READ_AHEAD_BYTES,
    ) -> Scan:
        """The rows with keys in [start, stop), or that begin with `prefix`, as they are now.

        Iterate for `(key, value)`, `.rows()` for whole rows, `.seek(key)` to skip. `reverse` goes from the last
        key to the first. The scan shows one moment, however long it takes. A range wholly outside of what a clone was
        cut out for is an `InvalidRequest`; one that overlaps it shows what the clone holds.
        """
        keys = self._context.check_range(start, stop, prefix)
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
    ) -> pa.RecordBatchReader:
        """The same rows as Arrow batches, by ascending key, without a Python object per row where possible.

        With `batch_rows` None batches come in the size in which they are decoded, which is quickest.
        """
        # Imported late: only those who want Arrow pay for importing it.
        from flagstone.read.arrow import scan_arrow  # noqa: PLC0415

        keys = self._context.check_range(start, stop, prefix)
        self._context.scans += 1
        view, seq = self._read_point(durable_only=False, dirty=False)
        request = ScanRequest(
            keys=keys,
            max_seq=seq,
            now_ms=self._context.clock.now_ms(),
            include_expired=include_expired,
            merge_operator=self._context.merge_operator,
            prefix_probe=self._context.prefix_probe(prefix),
            renew=partial(self._renewed, seq),
        )
        return scan_arrow(self._context.ssts, view, request, columns=columns, batch_rows=batch_rows)

    def __getitem__(self, key: bytes) -> bytes:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

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
        """Read; when a table is gone, again with a newer view. Returns the answer and the number it is of."""
        view, seq = self._read_point(durable_only=durable_only, dirty=dirty)
        for _ in range(_ATTEMPTS):
            try:
                return attempt(view, seq), seq
            except SstGone as gone:
                lost = gone
                view, seq = self._refresh_read_point(seq, durable_only=durable_only, dirty=dirty)
        raise CorruptData("missing, but the newest manifest refers to it", object=lost.path)


def check_range(start: bytes | None, stop: bytes | None, prefix: bytes | None) -> KeyRange:
    """The range these arguments mean. Raises `InvalidRequest` for one that is none."""
    for name, bound in (("start", start), ("stop", stop), ("prefix", prefix)):
        if bound is not None and not isinstance(bound, bytes):
            raise InvalidRequest(f"{name} is bytes, not {type(bound).__name__}")
    if start is not None and stop is not None and start > stop:
        raise InvalidRequest(
            f"the range from {start!r} to {stop!r} is inverted; start must not be above stop"
        )
    keys = KeyRange(start or None, stop)
    return keys if prefix is None else keys.intersect(KeyRange.of_prefix(prefix))
