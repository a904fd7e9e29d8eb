"""`Db`: a database open for writing. It checks arguments and calls the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar
from uuid import UUID

from flagstone.clones import checkpoint as checkpoints
from flagstone.db.collections import HasCollections
from flagstone.db.exit import UnclosedWriter, watch
from flagstone.db.mapping import typed_like
from flagstone.db.read_methods import ReadContext, Reads, check_range
from flagstone.db.reader.as_of import check_kept
from flagstone.db.reporting import EngineReport
from flagstone.db.status import WriterStatus
from flagstone.db.writer.engine import Engine
from flagstone.db.writer.few_rows import delete_keys
from flagstone.db.writer.mapping import StoredMapping
from flagstone.db.writer.run import DEFAULT_RETRIES, Attempts, refuse_coroutine
from flagstone.db.writer.transaction import Snapshot, Transaction
from flagstone.errors import InvalidRequest, TransactionConflict
from flagstone.kernels import probe as probe_kernel
from flagstone.lsm.merge_operator import check_operand
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.read.view import ReadView
from flagstone.runtime import prometheus
from flagstone.runtime.metrics import Metric
from flagstone.schema.evolution import Evolution, GivenColumns
from flagstone.types import MAX_SEQ, MERGE, TOMBSTONE, VALUE
from flagstone.write.batch import (
    BY_DEFAULT,
    Instant,
    Ttl,
    WriteBatch,
    check_any_key,
    check_expiry,
    check_key,
    check_value,
)
from flagstone.write.conflicts import Isolation, Timeout, deadline_ms
from flagstone.write.durability import WriteHandle
from flagstone.write.state import State

if TYPE_CHECKING:
    from flagstone.db.collections.index import IndexSet

_find: Final = probe_kernel.find

_T = TypeVar("_T")


class Db(Reads, StoredMapping, HasCollections):
    """A database open for writing. Safe to use from many threads; close it, or use it as a context manager.

    It is a `collections.abc.MutableMapping` from bytes to bytes, ordered by key: `db[key]`, `db[key] = value`,
    `key in db`, `for key in db`, `db.items()`, `db[b"a":b"b"]`, `pop`, `setdefault`, `update` and so on work as on a
    dictionary. Three things differ: `len(db)` is refused, `bool(db)` is always true, and `del db[key]` does not check
    that the key exists.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state = engine.state
        self._index_sets: dict[str, IndexSet] = {}
        self._report = EngineReport(engine)
        self._context = ReadContext(
            engine.manifest.views.ssts,
            engine.manifest,
            clock=engine.env.clock,
            merge_operator=engine.env.counted_operator("read"),
            prefix_extractor=engine.env.prefix_extractor,
            key_ranges=engine.key_ranges,
        )
        self._watch = watch(self._context, UnclosedWriter(engine))

    # -- writing ------------------------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl: Ttl | None = None,
        expire_at: Instant | None = None,
        await_durable: bool = False,
    ) -> WriteHandle:
        """Set `key` to `value`. Returns once it is in memory; with `await_durable` once it is on the store.

        A crash may lose a write that is not durable yet: wait on the handle, or `flush`, if that matters. `ttl` is a
        timedelta or text such as "30s", `expire_at` a moment.
        """
        # Reserved keys are below this one, and so is the empty key.
        if type(key) is not bytes or key < b"\x00flagstone0" or len(key) > 65_535:
            key = check_key(key)
        if type(value) is not bytes:
            value = check_value(value)
        expiry = BY_DEFAULT if ttl is None and expire_at is None else check_expiry(ttl, expire_at)
        handle = self._state.commit_one(key, VALUE, value, expiry, synchronous=await_durable)
        if await_durable:
            handle.wait()
        return handle

    def delete(self, key: bytes, *, await_durable: bool = False) -> WriteHandle:
        """Delete `key`, whether or not it exists."""
        key = check_any_key(key)
        never = check_expiry(timedelta.max, None)
        handle = self._state.commit_one(key, TOMBSTONE, b"", never, synchronous=await_durable)
        if await_durable:
            handle.wait()
        return handle

    def delete_range(self, start: bytes | None, stop: bytes | None) -> WriteHandle:
        """Delete every row with a key in [start, stop), whatever the range holds; None leaves that side open.

        Returns when the delete is durable. It is atomic: reads, crashes and other processes see all of it or nothing.
        Rows written by calls that returned before are deleted, rows written after this call survive. A transaction that
        is open and depends on the range conflicts; open snapshots keep seeing the rows.

        A large range disappears with one manifest, without reading or writing a row: writes wait while the memtables
        are flushed and the manifest is written. Up to a hundred rows become tombstones. `WalReader.follow` brings the
        first as one change with `op="delete_range"`, the second as deletes. It cannot be part of a batch or of a
        transaction. The handle has the sequence number of the delete; 0 if there was no row.

        System rows, which hold schemas and the progress of streams, are not deleted. If their keys are inside the
        range, both parts of it disappear with the same manifest, and `WalReader.follow` brings two changes.

        Raises:
            InvalidRequest: `start` is above `stop`, the range is outside the writable range of a clone, or it has only
                keys of system rows.
            Unavailable: the store did not say whether the range was deleted; or L0 has no room to flush.

        """
        keys = check_range(start, stop, None)
        self._state.check_open()
        if self._context.key_ranges is not None:
            self._context.key_ranges.check_delete(keys)
        return delete_keys(self, keys)

    def delete_prefix(self, prefix: bytes) -> WriteHandle:
        """Delete every row whose key begins with `prefix`; see `delete_range`."""
        keys = check_range(None, None, prefix)
        if not prefix:
            raise InvalidRequest(
                "an empty prefix is the whole database; delete_range(None, None) deletes that"
            )
        return self.delete_range(keys.start, keys.stop)

    def merge(
        self,
        key: bytes,
        operand: bytes,
        *,
        ttl: Ttl | None = None,
        expire_at: Instant | None = None,
        await_durable: bool = False,
    ) -> WriteHandle:
        """Merge `operand` into `key` with the database's merge operator, without reading it first."""
        key, operand = check_key(key), check_value(operand)
        check_operand(self._engine.env.merge_operator, key, operand)
        handle = self._state.commit_one(
            key, MERGE, operand, check_expiry(ttl, expire_at), synchronous=await_durable
        )
        if await_durable:
            handle.wait()
        return handle

    def write(self, batch: WriteBatch, *, await_durable: bool = False) -> WriteHandle:
        """Write a batch atomically, under one sequence number."""
        handle = self._state.commit_batch(batch, synchronous=await_durable)
        if await_durable:
            handle.wait()
        return handle

    @contextmanager
    def batch(self, *, await_durable: bool = False) -> Iterator[WriteBatch]:
        """A batch that is written when the block ends without an error."""
        collected = WriteBatch()
        yield collected
        if len(collected):
            self.write(collected, await_durable=await_durable)

    def write_arrow(
        self,
        rows: Any,
        *,
        key: str = "key",
        value: str = "value",
        op: str | None = None,
        ttl_ms: str | None = None,
        expires_ms: str | None = None,
        await_durable: bool = True,
    ) -> int:
        """Write the rows of Arrow columns in their order, without a Python object per row; returns how many.

        `rows` is anything that exports Arrow data (`__arrow_c_stream__` or `__arrow_c_array__`: PyArrow, Polars,
        DuckDB, pandas), or an iterable of such. `key` and `value` name columns of binaries or strings. `op` names a
        column of "put", "delete" and "merge", `ttl_ms` one of times to live, `expires_ms` one of times since the epoch;
        null there means a put, or a row that never expires. Other columns are ignored.

        The rows are written in groups of up to 4096 rows or about 1 MiB. A group becomes visible and durable as a
        whole. If a key occurs twice, the later row counts. An exception, or a crash, leaves a number of whole groups.

        Raises:
            InvalidRequest: a column is missing or has another type, or a row has a null or is too long. The message
                names column and row. The groups before that row are written.

        """
        # Imported here: importing Arrow takes half a second, and most callers do not use it.
        from flagstone.write.columns import ColumnNames, row_groups  # noqa: PLC0415

        written, handle = 0, None
        for group in row_groups(rows, ColumnNames(key, value, op, ttl_ms, expires_ms)):
            handle = self._state.commit_columns(group, synchronous=await_durable)
            written += len(group)
        if handle is not None and await_durable:
            handle.wait()
        return written

    # -- reading ------------------------------------------------------------------------------------------

    @typed_like(Reads.get)
    def get(
        self,
        key: bytes,
        default: Any = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> Any:
        """The value of `key`, or `default`; see `Reads.get`. A value in memory is returned without waiting."""
        if type(key) is bytes and key and not durable_only and not dirty:
            # The fast path: a committed plain value in memory. Everything else takes the slow path.
            state = self._state
            now = state.now
            view = now.view
            seq = state.committed_seq
            if now is state.now:
                simple = view.get_newest(key, seq)
                if type(simple) is bytes:
                    return simple
                if simple is None and not view.segmented:
                    found = _find(view.older_memtables, view.layers, key, seq, None, True)
                    if found is None:
                        return default
                    if type(found) is bytes:
                        return found
                    if type(found) is tuple and found[2] == VALUE and found[5] is None:
                        return found[3]
                self._context.gets -= 1  # the memtable counted this get, and the slow path counts it again
        return super().get(
            key, default, durable_only=durable_only, dirty=dirty, include_expired=include_expired
        )

    def snapshot(self, *, as_of: int | None = None, timeout: Timeout | None = None) -> Snapshot:
        """The database as it is now, or as it was at the sequence number `as_of`, while the snapshot is open.

        It expires after `timeout` (a timedelta or text such as "30s"; an hour by default, `timedelta.max` for never).

        An open database keeps former versions only of rows that are not flushed yet, and for open snapshots. For older
        sequence numbers, and for times, use `flagstone.open_reader(..., as_of=...)`.

        Raises:
            InvalidRequest: `as_of` is in the future, or versions of that age may have been dropped.

        """
        engine = self._engine
        self._state.check_open()
        deadline = deadline_ms(engine.env.clock, timeout)

        def choose_seq(committed_seq: int, now: State) -> int:
            if as_of is None:
                return committed_seq
            frozen = (memtable.last_seq for memtable in now.memtables.frozen)
            return check_kept(as_of, committed_seq, now.manifest.value, frozen)

        point, view = self._state.begin_snapshot(deadline, choose_seq)
        return Snapshot(engine, self._context, view, point)

    def transaction(
        self, isolation: Isolation = "snapshot", *, timeout: Timeout | None = None
    ) -> Transaction:
        """A transaction that begins now. `snapshot` isolation prevents lost updates; `serializable` also write skew.

        It expires after `timeout` (a timedelta or text such as "30s"; an hour by default, `timedelta.max` for never),
        and then every use of it raises `TransactionConflict`.
        """
        if isolation not in ("snapshot", "serializable"):
            raise InvalidRequest(f"isolation is 'snapshot' or 'serializable', not {isolation!r}")
        engine = self._engine
        self._state.check_open()
        deadline = deadline_ms(engine.env.clock, timeout)
        state, view = self._state.begin_transaction(isolation, deadline)
        return Transaction(engine, self._context, view, state)

    def run(
        self,
        fn: Callable[[Transaction], _T],
        *,
        isolation: Isolation = "snapshot",
        retries: int = DEFAULT_RETRIES,
        timeout: Timeout | None = None,
        await_durable: bool = False,
    ) -> _T:
        """Call `fn` with a transaction, commit it, and return what `fn` returned; again after a conflict.

        After a `TransactionConflict` the transaction is rolled back, and `fn` runs again with another one, up to
        `retries` times, after a short random pause. So `fn` should do nothing that cannot be repeated. Any other error
        rolls back and is raised. So is the `TransactionConflict` of a transaction that ran longer than `timeout`:
        another attempt would take as long.

        With `await_durable` it returns when the rows are on the store. If that wait raises an error, the transaction
        is committed and visible, and it is unknown whether it is durable: it is not run again.
        """
        return self._run(
            fn, isolation=isolation, retries=retries, timeout=timeout, await_durable=await_durable
        )[0]

    def _run(
        self,
        fn: Callable[[Transaction], _T],
        *,
        isolation: Isolation = "snapshot",
        retries: int = DEFAULT_RETRIES,
        timeout: Timeout | None = None,
        await_durable: bool = False,
    ) -> tuple[_T, WriteHandle | None]:
        """As `run`, and the handle of the commit; None if it wrote nothing."""
        env = self._engine.env
        attempts = Attempts(retries, env.ids)
        while True:
            transaction, handle = self.transaction(isolation, timeout=timeout), None
            try:
                with transaction:
                    result = fn(transaction)
                    refuse_coroutine(result)
                    if not transaction.done:
                        handle = transaction.commit(await_durable=await_durable)
            except TransactionConflict as conflict:
                if transaction.committed:
                    raise
                pause_s = attempts.pause_s(conflict)
            else:
                return result, handle
            env.clock.sleep(pause_s)

    def ensure_schema(self, given: GivenColumns, *, prefix: bytes = b"") -> Evolution:
        """Store the schema of rows with the given columns, unless the stored one fits them; see `Transaction`.

        Raises:
            InvalidRequest: the rows do not fit the stored schema; the message says what differs.
            TransactionConflict: other writers change the schema all the time.

        """
        return self.run(lambda transaction: transaction.ensure_schema(given, prefix=prefix))

    # -- operating ----------------------------------------------------------------------------------------

    def flush(self, kind: Literal["memtable", "wal"] = "memtable") -> None:
        """Wait until everything written so far is in the WAL ("wal"), or also in SSTs ("memtable").

        Raises:
            InvalidRequest: "wal", and the database is open with `wal_enabled=False`: nothing would be flushed.

        """
        self._state.check_open()
        self._report.flush_requested(kind)
        with self._report.flushes.measure():
            self._flush(kind)

    def _flush(self, kind: str) -> None:
        match kind:
            case "wal" if not self._engine.env.settings.wal_enabled:
                raise InvalidRequest("there is no WAL to flush: wal_enabled is False; use flush('memtable')")
            case "wal":
                self._engine.flush_wal()
            case "memtable":
                self._state.flush_memtables()
            case _:
                raise InvalidRequest(f"flush 'memtable' or 'wal', not {kind!r}")

    def checkpoint(
        self,
        *,
        scope: Literal["all", "durable"] = "all",
        name: str | None = None,
        lifetime: timedelta | str | None = None,
        source: UUID | None = None,
    ) -> Checkpoint:
        """Create a checkpoint of everything written so far (`all`), or of what is on the store already (`durable`).

        `all` flushes the memtables first; if L0 has no room, their rows are in the WAL. With `source` the checkpoint
        holds the same manifest as the checkpoint `source`, and `scope` has no effect. Without a lifetime it stays until
        it is deleted.
        """
        engine = self._engine
        self._state.check_open()
        if scope not in ("all", "durable"):
            raise InvalidRequest(f"the scope of a checkpoint is 'all' or 'durable', not {scope!r}")
        lifetime = checkpoints.check_lifetime(lifetime)
        self._report.checkpoint_requested()
        if scope == "all" and source is None:
            engine.flush_all()
        created, written = checkpoints.create_checkpoint(
            engine.manifest.store.guarded(engine.manifest.fence.check),
            clock=engine.env.clock,
            ids=engine.env.ids,
            lifetime=lifetime,
            name=name,
            source=source,
            last_wal_id=engine.state.last_wal_id,
        )
        engine.manifest.adopt(written)
        return created

    def status(self) -> WriterStatus:
        """The state of writes, flushes, SSTs and background services, as plain values."""
        cost = self._report.cost(gets=self._context.gets, scans=self._context.scans)
        return WriterStatus({**self._engine.status(), "cost": cost})

    def metrics(self) -> dict[str, Any]:
        """All metrics under SlateDB's names."""
        return {metric.key: metric.value for metric in self._measure()}

    def metrics_text(self, *, labels: Mapping[str, str] | None = None) -> str:
        """All metrics as Prometheus scrapes them; `labels` are added to every sample. Makes no request."""
        return prometheus.render(self._measure(), labels=labels)

    def _measure(self) -> list[Metric]:
        self._report.update(gets=self._context.gets, scans=self._context.scans)
        return self._engine.env.metrics.snapshot()

    def manifest(self) -> Manifest:
        """The newest manifest that this writer has read."""
        return self._engine.manifest.current.value

    @property
    def closed(self) -> bool:
        """Whether it was closed, by the caller or by a newer writer; every call then raises `Closed`."""
        return self._state.now.closed is not None

    def close(self) -> None:
        """Flush and close; see `Engine.close`. Closing twice is fine.

        If the database is dropped without closing it, it is flushed and closed in the background, with a
        `ResourceWarning`. If it is open when the interpreter exits, it is flushed then, for up to ten seconds. A killed
        process loses the rows that were not durable.
        """
        if not self.closed:
            self._report.flush_requested("memtable")
        try:
            self._engine.close()
        except Exception:
            self._watch.end()
            raise
        self._watch.end()  # not after an interrupt: the exit of the process then closes the database

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        env = self._engine.env
        state = "closed" if self.closed else "open"
        return f"Db({env.paths.root!r}, store={env.store.url!r}, {state})"

    def _facts(self) -> dict[str, Any]:
        return self.status()

    def _read_point(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:
        state = self._state
        if durable_only and dirty:
            raise InvalidRequest("durable_only and dirty exclude each other")
        while True:
            view: ReadView = state.now.view
            seq = state.durable_seq if durable_only else MAX_SEQ if dirty else state.committed_seq
            # Both must be of one moment: an older view lacks rows up to `seq`, a newer one may lack versions.
            if view is state.now.view:
                return view, seq


class ProjectedDb(Db):
    """A `Db` with a writable range. Only its `get` checks the range, so that the `get` of `Db` stays fast."""

    @typed_like(Reads.get)
    def get(
        self,
        key: bytes,
        default: Any = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> Any:
        """The value of `key`, or `default`; see `Reads.get`."""
        return Reads.get(
            self, key, default, durable_only=durable_only, dirty=dirty, include_expired=include_expired
        )
