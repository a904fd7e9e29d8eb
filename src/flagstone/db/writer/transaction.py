"""Snapshots and transactions: reads at one sequence number, and writes that are committed together or not at all."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakSet

from flagstone.db.collections import HasCollections
from flagstone.db.read_methods import ReadContext, Reads
from flagstone.db.writer.mapping import PendingMapping
from flagstone.errors import Closed, InvalidRequest, Unavailable
from flagstone.lsm.merge_operator import check_operand
from flagstone.lsm.system_rows import visible_ranges
from flagstone.read.view import ReadView
from flagstone.schema.evolution import Evolution, GivenColumns, plan_evolution
from flagstone.schema.table_schema import schema_key
from flagstone.types import EntryTuple, KeyRange
from flagstone.write.batch import (
    Instant,
    Ttl,
    WriteBatch,
    check_any_key,
    check_key,
    check_value,
)
from flagstone.write.conflicts import ReadPoint, TransactionExpired, TransactionState
from flagstone.write.durability import WriteHandle
from flagstone.write.writer_state import MustWait

if TYPE_CHECKING:
    from flagstone.db.writer.engine import Engine


_FEW: Final = 16
"""If new keys are fewer than 1/16 of all, each is inserted in its place; otherwise all keys are sorted again."""


class Snapshot(Reads, HasCollections):
    """The database as it was when the snapshot was taken. Close it: while it is open, old versions are kept.

    After its timeout it expires, and every use of it raises `Closed`. A snapshot that is dropped is closed. It is a
    `collections.abc.Mapping` from keys to values.
    """

    def __init__(self, engine: Engine, context: ReadContext, view: ReadView, point: ReadPoint) -> None:
        self._engine = engine
        self._context = context
        self._view: ReadView | None = view
        self._point = point

    @property
    def seq(self) -> int:
        """The sequence number it reads at."""
        return self._point.seq

    def close(self) -> None:
        """Release the versions that the snapshot keeps. Closing twice is fine."""
        self._view = None  # a view that is referred to keeps its SSTs on the store
        self._engine.state.end_read(self._point)

    def __del__(self) -> None:
        point = getattr(self, "_point", None)  # missing if an interrupt cut off `__init__`
        if point is not None:
            point.dropped = (
                True  # without the lock, which this thread may hold; the manifest follower ends the point
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "expired" if self._point.expired else "closed" if self._view is None else "open"
        return f"Snapshot({self._engine.env.paths.root!r}, seq={self.seq}, {state})"

    def _facts(self) -> dict[str, Any]:
        env = self._engine.env
        return {"path": env.paths.root, "store": env.store.url, "seq": self.seq}

    def _read_point(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:
        if dirty:
            raise InvalidRequest("a snapshot shows one moment; dirty reads belong to the database")
        view = self._check_held()
        seq = self._point.seq
        return view, min(seq, self._engine.state.durable_seq) if durable_only else seq

    def _refresh_read_point(self, seq: int, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002
        self._context.source.refresh()
        self._check_held()
        # Later reads use the newer view from the start.
        self._view = _newest_view(seq, self._context)
        return self._view, seq

    def _renewed(self, seq: int, lost: ReadView) -> ReadView:  # noqa: ARG002 - a snapshot adds no memtable
        return self._refresh_read_point(seq, durable_only=False, dirty=False)[0]

    def _check_held(self) -> ReadView:
        """The view. Raises `Closed` if its versions are no longer kept."""
        if self._engine.state.has_expired(self._point):
            self._view = None
            raise Closed(
                "the snapshot was left open past its time to live; take another, with a longer timeout if it needs one"
            )
        if self._point.ended or self._view is None:
            raise Closed("the snapshot was closed; take another")
        self._engine.state.check_open()
        return self._view


class Transaction(Reads, PendingMapping):
    """Reads at one moment, with its own writes on top; commits all of them under one sequence number, or none.

    As a context manager it commits on a clean exit and rolls back on an error. `TransactionConflict` on commit means
    that another write changed what it depends on: run it again. After its timeout it expires: every use of it raises
    `TransactionConflict`, and nothing is written. If it is dropped without committing it, it is rolled back. Not for
    concurrent use by several threads.

    It is a `collections.abc.MutableMapping`, as `Db` is: `tx[key] = value`, `tx.pop(key)`, `tx.items()`.
    """

    _done = True
    """True until `__init__` has ended, because an interrupt may cut it off."""

    _committed = False

    def __init__(self, engine: Engine, context: ReadContext, view: ReadView, state: TransactionState) -> None:
        self._engine = engine
        self._context = context
        self._view: ReadView | None = view
        self._state = state
        self._batch = WriteBatch()
        self._own = OwnWrites()
        # Keys written since the last read, which are not in `_own` yet; and the views in use that contain `_own`.
        self._unseen: set[bytes] = set()
        self._lent: WeakSet[ReadView] = WeakSet()
        self._done = False

    @property
    def seq(self) -> int:
        """The sequence number it reads at."""
        return self._state.seq

    @property
    def done(self) -> bool:
        """Whether it was committed or rolled back, or has failed to commit."""
        return self._done

    @property
    def committed(self) -> bool:
        """Whether it was committed: all its writes are visible."""
        return self._committed

    def put(
        self, key: bytes, value: bytes, *, ttl: Ttl | None = None, expire_at: Instant | None = None
    ) -> None:
        """Set `key` when the transaction commits."""
        self._check_running()
        self._track_write(key)
        self._batch.put(key, value, ttl=ttl, expire_at=expire_at)

    def delete(self, key: bytes) -> None:
        """Delete `key` when the transaction commits."""
        self._check_running()
        self._track_write(key, system=True)
        self._batch.delete(key)

    def merge(
        self, key: bytes, operand: bytes, *, ttl: Ttl | None = None, expire_at: Instant | None = None
    ) -> None:
        """Merge `operand` into `key` when the transaction commits.

        An operand that the merge operator cannot fold is refused at once, as in `Db.merge`.
        """
        self._check_running()
        check_operand(self._engine.env.merge_operator, check_key(key), check_value(operand))
        self._track_write(key)
        self._batch.merge(key, operand, ttl=ttl, expire_at=expire_at)

    def mark_read(self, *keys: bytes) -> None:
        """Let the commit depend on these keys as if the transaction had read them."""
        self._check_running()
        self._state.mark_read(check_any_key(key) for key in keys)

    def unmark_write(self, *keys: bytes) -> None:
        """Exclude the writes of these keys from conflict detection."""
        self._check_running()
        self._state.unmark_write(check_key(key) for key in keys)

    def ensure_schema(self, given: GivenColumns, *, prefix: bytes = b"") -> Evolution:
        """Plan to write rows with the given columns under `prefix`, and store their schema if it is new or changes.

        Rows of the transaction must name the version that this returns. The commit depends on the stored schema, so a
        concurrent change of it is a conflict.

        Raises:
            InvalidRequest: the rows do not fit the stored schema; the message says what differs.

        """
        planned = plan_evolution(self._stored_schema(prefix), given)
        if planned.changed:
            self.put_system(schema_key(prefix), planned.schema.encode())
        return planned

    def commit(self, *, await_durable: bool = False) -> WriteHandle | None:
        """Write everything, or raise and write nothing. Returns None if there is nothing to write.

        Raises:
            TransactionConflict: since it began, another write changed what it read or wrote; or it has expired.

        """
        handle = self._commit(synchronous=await_durable)
        if await_durable and handle is not None:
            handle.wait()
        return handle

    def _commit(self, *, synchronous: bool, wait: bool = True) -> WriteHandle | None:
        """Commit without waiting until it is durable. Without `wait`, after `MustWait` it can be tried again."""
        self._check_running()
        self._done, over = True, True
        try:
            if not len(self._batch):
                # Nothing to write, but its reads must still be consistent now.
                self._engine.state.check_conflicts(self._state)
                self._committed = True
                return None
            handle = self._engine.state.commit_batch(
                self._batch, synchronous=synchronous, transaction=self._state, wait=wait
            )
            self._committed = True
        except MustWait:
            self._done = over = False
            raise
        finally:
            if over:
                self._end()
        return handle

    def rollback(self) -> None:
        """Drop all writes. Rolling back twice, or after a commit, does nothing."""
        self._done = True
        self._end()

    def __del__(self) -> None:
        # Without the lock, as in `Snapshot`.
        state = getattr(self, "_state", None)
        if state is not None:
            state.dropped = True
        if not self._done and state is not None and not state.expired and len(self._batch):
            warnings.warn(
                f"unclosed transaction whose operations are lost: {len(self._batch)}; commit it, or roll it back",
                ResourceWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._done:
            self.commit()
        else:
            self.rollback()

    def __repr__(self) -> str:
        state = "committed" if self._committed else "over" if self._done else "open"
        return (
            f"Transaction({self._engine.env.paths.root!r}, {self._state.isolation}, seq={self.seq}, "
            f"{len(self._batch)} writes, {state})"
        )

    def _facts(self) -> dict[str, Any]:
        env = self._engine.env
        return {
            "path": env.paths.root,
            "store": env.store.url,
            "isolation": self._state.isolation,
            "seq": self.seq,
            "writes": len(self._batch),
        }

    def _check_key(self, key: bytes) -> bytes:
        checked = super()._check_key(key)
        self._state.track_read(checked)
        return checked

    def _check_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        checked = super()._check_keys(keys)
        for key in checked:
            self._state.track_read(key)
        return checked

    def _check_range(
        self, start: bytes | None, stop: bytes | None, prefix: bytes | None, *, include_system: bool = False
    ) -> KeyRange:
        keys = super()._check_range(start, stop, prefix)
        # The whole range counts as read, also if the caller stops early: that is a decision based on what it read.
        for shown in (keys,) if include_system else visible_ranges(keys):
            self._state.track_range(shown)
        return keys

    def _schema_row(self, key: bytes) -> bytes | None:
        """The bytes of a schema row. The commit depends on it, under either isolation."""
        self._check_running()
        self._state.mark_read((key,))
        return super()._schema_row(key)

    def _read_point(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:
        if durable_only or dirty:
            raise InvalidRequest("a transaction reads at its own moment; durable_only and dirty do not apply")
        self._engine.state.check_open()
        return self._with_own_writes(self._check_running()), self._state.seq

    def _refresh_read_point(self, seq: int, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002
        self._context.source.refresh()
        self._check_running()
        self._view = _newest_view(seq, self._context)
        return self._with_own_writes(self._view), seq

    def _renewed(self, seq: int, lost: ReadView) -> ReadView:
        """A newer view with the own writes that `lost` showed, without those made since the scan began."""
        self._context.source.refresh()
        self._check_running()
        self._view = _newest_view(seq, self._context)
        own = [memtable for memtable in lost.memtables if isinstance(memtable, OwnWrites)]
        renewed = self._view.with_memtables((*own, *self._view.memtables))
        if self._own in own:
            self._lent.add(renewed)
        return renewed

    def put_system(self, key: bytes, value: bytes) -> None:
        """Set a system row when the transaction commits. For Flagstone's own layers; `put` refuses such keys."""
        self._check_running()
        self._track_write(key, system=True)
        self._batch.put_system(key, value)

    def _track_write(self, key: bytes, *, system: bool = False) -> None:
        """Call it before the batch: a key that is tracked but not written causes a needless conflict at most."""
        key = check_any_key(key) if system else check_key(key)
        self._state.track_write(key)
        self._unseen.add(key)

    def _with_own_writes(self, view: ReadView) -> ReadView:
        """The view with the own writes as the newest memtable.

        They have the sequence number that the transaction reads at, and no creation time before the commit.
        """
        if not len(self._batch):
            return view
        if self._unseen:
            if self._lent:
                self._own, self._lent = self._own.copy(), WeakSet()
            now_ms = self._context.clock.now_ms()
            env = self._engine.env
            for key in self._unseen:
                if key not in self._batch:
                    continue  # tracked, and then refused or cut off
                _, kind, value, expires_ms = self._batch.row_of(
                    key,
                    now_ms,
                    default_ttl_ms=env.settings.default_ttl_millis,
                    operator=env.merge_operator,
                )
                self._own.set((key, self._state.seq, kind, value, None, expires_ms))
            self._unseen.clear()
        lent = view.with_memtables((self._own, *view.memtables))
        self._lent.add(lent)
        return lent

    def _check_running(self) -> ReadView:
        if self._done or self._view is None:
            raise InvalidRequest("the transaction is over; begin another one")
        if self._engine.state.has_expired(self._state):
            raise TransactionExpired.of_time()
        return self._view

    def _end(self) -> None:
        self._view = None  # a view that is referred to keeps its SSTs on the store
        self._engine.state.end_read(self._state)


class OwnWrites:
    """The writes of a transaction as a memtable for its own reads, with one row per key.

    It changes only while no read uses it (see `Transaction`), so a scan shows the writes from before it began. All rows
    are visible, whatever the sequence number of the read.
    """

    __slots__ = ("_keys", "_rows", "_unsorted")

    def __init__(self) -> None:
        self._rows: dict[bytes, EntryTuple] = {}
        self._keys: list[bytes] = []
        self._unsorted: list[bytes] = []

    def copy(self) -> OwnWrites:
        """An independent copy."""
        twin = OwnWrites()
        twin._rows = self._rows.copy()
        twin._keys = self._keys.copy()
        twin._unsorted = self._unsorted.copy()
        return twin

    def __len__(self) -> int:
        return len(self._rows)

    def set(self, row: EntryTuple) -> None:
        """Set the row of a key."""
        if row[0] not in self._rows:
            self._unsorted.append(row[0])
        self._rows[row[0]] = row

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None:  # noqa: ARG002 - own writes are always visible
        return self._rows.get(key)

    get_value = get
    """Always the row, never the plain value: the row may be an operand, or may expire."""

    def versions(self, key: bytes, max_seq: int) -> list[EntryTuple]:  # noqa: ARG002
        row = self._rows.get(key)
        return [] if row is None else [row]

    def scan(
        self,
        start: bytes | None,
        stop: bytes | None,
        max_seq: int,  # noqa: ARG002
        reverse: bool,
    ) -> OwnWritesScan:
        keys = self._sorted()
        low = 0 if start is None else bisect_left(keys, start)
        high = len(keys) if stop is None else bisect_left(keys, stop)
        return OwnWritesScan(self._rows, keys, low, max(low, high), reverse=reverse)

    def _sorted(self) -> list[bytes]:
        if self._unsorted:
            if len(self._unsorted) * _FEW < len(self._keys):
                for key in self._unsorted:
                    at = bisect_left(self._keys, key)
                    # The key is already there if an exception has cut off this loop before.
                    if self._keys[at : at + 1] != [key]:
                        self._keys.insert(at, key)
            else:
                self._keys = sorted({*self._keys, *self._unsorted})
            self._unsorted.clear()
        return self._keys


class OwnWritesScan:
    """A cursor over the keys from `low` up to `high`, in ascending or descending order."""

    __slots__ = ("_high", "_keys", "_low", "_reverse", "_rows")

    def __init__(
        self, rows: dict[bytes, EntryTuple], keys: list[bytes], low: int, high: int, *, reverse: bool
    ) -> None:
        self._rows = rows
        self._keys = keys
        self._low = low
        self._high = high
        self._reverse = reverse

    def next_rows(self, limit: int) -> list[EntryTuple]:
        """The rows of the next keys: `limit` of them, fewer at the end."""
        rows = self._rows
        if self._reverse:
            first = max(self._low, self._high - limit)
            taken = self._keys[first : self._high]
            taken.reverse()
            self._high = first
        else:
            end = min(self._high, self._low + limit)
            taken = self._keys[self._low : end]
            self._low = end
        return [rows[key] for key in taken]

    def seek(self, key: bytes) -> None:
        """Continue at `key`, unless the cursor is already beyond it."""
        if self._reverse:
            self._high = max(self._low, min(self._high, bisect_left(self._keys, key + b"\0")))
        else:
            self._low = min(self._high, max(self._low, bisect_left(self._keys, key)))


def _newest_view(seq: int, context: ReadContext) -> ReadView:
    """The newest view. Raises `Unavailable` if it cannot show `seq`, because a range was deleted since."""
    view = context.source.view
    # After the view: `retained_seq` never decreases, so it is not too small for this view.
    if seq < context.source.retained_seq:
        raise Unavailable(
            "a range was deleted after this snapshot or transaction began, and the SSTs that it reads were collected; "
            "begin another one"
        )
    return view
