"""An open database in use: what a client does with it, and what the oracle checks on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Transaction
from flagstone.errors import Closed, CorruptData, InvalidRequest, TransactionConflict, Unavailable
from flagstone.testing.simulation.databases import TrackedDatabase
from flagstone.testing.simulation.history import Branch, Change, Commit, Intent, Violation
from flagstone.testing.simulation.readers import rows_of, values_of
from flagstone.testing.simulation.scheduler import Process, describe
from flagstone.types import KeyRange
from flagstone.write.batch import WriteBatch

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World


class Session:
    """One opening of the database for writing. Several clients use it at the same time.

    `holds` returns whether a projection has a key. Writes of other keys must be refused.
    """

    def __init__(
        self,
        world: World,
        database: TrackedDatabase,
        process: Process,
        db: Db,
        *,
        holds: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.db = db
        self._holds = holds
        self._world = world
        self._random = world.random
        self._database = database
        self._oracle = database.oracle
        self._process = process
        self._machine = process.machine
        status = db.status()
        newest = self._oracle.latest
        known = 0 if newest is None else newest.epoch
        if world.writer_epoch(database.path) > status["writer_epoch"] >= known:
            # The oracle does not see the openings of such drivers, and would take this writer for the newest one.
            raise Closed("the driver of a load replaced this writer while it opened", reason="fenced")
        self.branch: Branch = self._oracle.opened(status["writer_epoch"], status["last_seq"])
        world.scheduler.note(f"opened epoch={self.branch.epoch} last_seq={self.branch.base_seq}")
        self._audit()

    def serve(self) -> None:
        """One client: random operations for a while, or until the database is closed."""
        machine, random = self._machine, self._random
        end_s = machine.monotonic() + random.expovariate(1 / self._world.plan.busy_s)
        actions: tuple[Callable[[], None], ...] = (
            *(self.put, self.put, self.delete, self.merge, self.batch, self.transact, self.transact),
            *(self.get, self.get, self.scan, self.snapshot),
            *(self.flush, self.checkpoint, self.make_durable),
            *((self.delete_range,) * 2 if "range_deletes" in self._world.plan.cast else ()),
        )
        while machine.monotonic() < end_s and not self.db.closed:
            action = random.choice(actions)
            try:
                action()
            except (Closed, Unavailable, CorruptData) as error:
                self._world.scheduler.note(f"{action.__name__}: {describe(error)}")
                if isinstance(error, CorruptData) and self._world.is_unexpected(error):
                    raise
                if isinstance(error, Closed):
                    self._check_fenced(error)
                    return
            except InvalidRequest:
                if not self._database.destroyed:
                    raise
                return
            self._world.done[action.__name__] += 1
            machine.sleep(random.expovariate(2.0))

    def _check_fenced(self, error: Closed) -> None:
        if "two_phase" in self._world.plan.cast:
            return  # there the commit log decides which manifest is the newest, not the store
        if error.reason == "fenced" and self._world.writer_epoch(self._database.path) <= self.branch.epoch:
            raise Violation(
                f"epoch {self.branch.epoch} was fenced, but no newer writer has claimed the database"
            )

    # -- writes -------------------------------------------------------------------------------------------

    def put(self) -> None:
        key, value = self._new_key(), self._world.new_value()
        if key.startswith(b"k") and self._random.random() < 0.2:
            expires_ms = self._machine.now_ms() + self._random.choice((2_000, 40_000, 4_000_000))
            change = Change("put", key, value, expires_ms)
            self._commit([change], lambda: self.db.put(key, value, expire_at=expires_ms))
        else:
            self._commit([Change("put", key, value)], lambda: self.db.put(key, value))

    def put_durably(self, key: bytes) -> None:
        """Write one row and wait until it is durable."""
        value = self._world.new_value()
        self._commit([Change("put", key, value)], lambda: self.db.put(key, value), durable=True)

    def delete(self) -> None:
        key = self._new_key()
        self._commit([Change("delete", key)], lambda: self.db.delete(key))

    def merge(self) -> None:
        key, value = b"m" + self._new_key()[1:], self._world.new_value()
        if self._holds is None or self._holds(key):
            self._commit([Change("merge", key, value)], lambda: self.db.merge(key, value))
        else:
            self._require_refusal(lambda: self.db.merge(key, value))

    def _new_key(self) -> bytes:
        key = self._world.new_key()
        if self._holds is None or self._holds(key):
            return key
        self._require_refusal(lambda: self.db.put(key, b"outside"))
        self._require_refusal(lambda: self.db.get(key))
        keys = (b"%s%03d" % (first, at) for first in (b"k", b"m") for at in range(self._world.plan.keys))
        return self._random.choice([each for each in keys if self._holds(each)])

    def _require_refusal(self, call: Callable[[], Any]) -> None:
        """The call concerns a key outside of the projection."""
        try:
            call()
        except InvalidRequest:
            self._world.done["refusal"] += 1
        else:
            raise Violation("a projection accepted a key outside of its range")

    def batch(self) -> None:
        changes: dict[bytes, Change] = {}
        batch = WriteBatch()
        for _ in range(self._random.randrange(2, 6)):
            key = self._new_key()
            if key in changes:
                continue
            if self._random.random() < 0.3:
                changes[key] = Change("delete", key)
                batch.delete(key)
            else:
                changes[key] = Change("put", key, self._world.new_value())
                batch.put(key, changes[key].value)
        self._commit(list(changes.values()), lambda: self.db.write(batch))

    def delete_range(self) -> None:
        """Delete a range by manifest."""
        first, last = sorted((self._new_key(), self._new_key()))
        keys = KeyRange(first, last + b"\0")
        every = (b"%s%03d" % (kind, at) for kind in (b"k", b"m") for at in range(self._world.plan.keys))
        changes = [Change("delete", key) for key in every if key in keys]
        intent = self._oracle.begin(self.branch, changes)
        assert keys.stop is not None
        intent.deleted = first, keys.stop
        self._database.loads_begun_ns[self._world.next_delete()] = self._world.scheduler.now_ns
        # As for a range with many rows: so few would become tombstones, in a transaction like others.
        handle = self.db._engine.services.range_deletes.delete(keys)  # noqa: SLF001
        if handle is None:
            self._oracle.drop(self.branch, intent)
            return
        self._oracle.settle_claimed_load(self.branch, intent, handle.seq)
        self._world.scheduler.note(f"deleted a range {handle.seq}: {first!r} to {last!r}")

    def flush(self) -> None:
        self.db.flush()

    def make_durable(self) -> None:
        seq = self.db.status()["last_seq"]
        self.db.flush("wal" if self._world.plan.settings.wal_enabled else "memtable")
        self._oracle.acknowledge(self.branch, seq)

    def _commit(
        self, changes: list[Change], write: Callable[[], Any], *, durable: bool | None = None
    ) -> None:
        intent = self._oracle.begin(self.branch, changes)
        self._settle(intent, write(), durable=self._random.random() < 0.3 if durable is None else durable)

    def _settle(self, intent: Intent, handle: Any, *, durable: bool) -> None:
        self._oracle.settle(self.branch, intent, handle.seq)
        self._world.scheduler.note(f"wrote {handle.seq}: {len(intent.changes)} rows")
        if durable:
            handle.wait()
            self._oracle.acknowledge(self.branch, handle.seq)

    # -- reads --------------------------------------------------------------------------------------------

    def get(self) -> None:
        key = self._new_key()
        low, before_ms = self.db.status()["committed_seq"], self._machine.now_ms()
        value = self.db.get(key)
        high = self.db.status()["last_seq"]
        self._oracle.expect(self.branch, key, value, (low, high), self._window(before_ms))

    def scan(self) -> None:
        with self.db.snapshot() as snapshot:
            before_ms = self._machine.now_ms()
            rows = dict(snapshot.scan(reverse=self._random.random() < 0.3))
            self._oracle.expect_all(self.branch, rows, (snapshot.seq, snapshot.seq), self._window(before_ms))

    def snapshot(self) -> None:
        """A snapshot shows the same for as long as it lives."""
        with self.db.snapshot() as snapshot:
            for _ in range(self._random.randrange(2, 5)):
                self._get_at(snapshot, snapshot.seq, self._new_key())
                self._machine.sleep(self._random.choice((0.01, 1.0, 100.0)))

    def _get_at(self, source: Any, seq: int, key: bytes) -> None:
        before_ms = self._machine.now_ms()
        value = source.get(key)
        self._oracle.expect(self.branch, key, value, (seq, seq), self._window(before_ms))

    def _audit(self) -> None:
        before_ms = self._machine.now_ms()
        try:
            with self.db.snapshot() as snapshot, snapshot.scan(include_expired=True) as rows:
                found = list(rows.rows())
        except (Closed, Unavailable, CorruptData) as error:
            if self._world.is_unexpected(error):
                raise
            return
        self._oracle.audit(self.branch, found, self._window(before_ms))

    def _window(self, before_ms: int) -> tuple[int, int]:
        return self._world.window(before_ms, self._machine)

    # -- transactions -------------------------------------------------------------------------------------

    def transact(self) -> None:
        serializable = self._random.random() < 0.5
        transaction = self.db.transaction("serializable" if serializable else "snapshot")
        read: set[bytes] = set()
        scanned: tuple[bytes, bytes] | None = None
        changes: dict[bytes, Change] = {}
        intent: Intent | None = None
        try:
            if "range_reads" in self._world.plan.cast and self._random.random() < 0.5:
                scanned = self._scan_in(transaction)
            for _ in range(self._random.randrange(1, 5)):
                key = self._new_key()
                if self._random.random() < 0.5:
                    changes[key] = Change("put", key, self._world.new_value())
                    transaction.put(key, changes[key].value)
                elif key not in changes:
                    read.add(key)
                    self._get_at(transaction, transaction.seq, key)
                elif transaction.get(key) != changes[key].value:
                    raise Violation(f"a transaction does not see its own write of {key!r}")
                self._machine.sleep(self._random.choice((0.001, 0.1, 2.0)))
            if not changes:
                transaction.rollback()
                return
            intent = self._oracle.begin(self.branch, changes.values())
            handle = transaction.commit()
        except TransactionConflict:
            if intent is not None:
                self._oracle.drop(self.branch, intent)
            self._world.done["conflict"] += 1
            return
        assert handle is not None
        self._settle(intent, handle, durable=self._random.random() < 0.3)
        depends = {*changes, *read} if serializable else {*changes}
        self._oracle.check_isolation(
            self.branch,
            Commit(transaction.seq, handle.seq, frozenset(depends), scanned if serializable else None),
        )

    def _scan_in(self, transaction: Transaction) -> tuple[bytes, bytes]:
        """Read a range of keys in a transaction that has not written yet."""
        keys = sorted((self._new_key(), self._new_key()))
        start, stop = keys[0], keys[1] + b"\0"
        before_ms = self._machine.now_ms()
        rows = dict(transaction.scan(start, stop))
        seqs, window = (transaction.seq, transaction.seq), self._window(before_ms)
        written = self._oracle.keys()
        for key in sorted({*rows, *(key for key in written if start <= key < stop)}):
            self._oracle.expect(self.branch, key, rows.get(key), seqs, window)
        self._world.done["range read"] += 1
        return start, stop

    # -- checkpoints --------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        kept = self._database.checkpoints
        if len(kept) > 5 or self._random.random() < 0.5:
            return
        created = self.db.checkpoint(scope=self._random.choice(("all", "durable")))
        rows, _ = rows_of(self._world, self._process, self._database.path, created.id)
        kept[created.id] = values_of(rows)
