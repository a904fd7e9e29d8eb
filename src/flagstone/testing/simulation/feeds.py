"""Consumers of changes: each receives every change exactly once, in the order of sequence numbers.

A consumer keeps what it received outside of its process, so that a crash does not lose it. One kind stores its position
together with the changes and continues there. The other kind commits batches and receives those again that were not
saved when it crashed: they must be the same as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from flagstone.changes.change import Change, ChangeBatch
from flagstone.changes.reader import WalReader
from flagstone.db.reader.feed import open_feed
from flagstone.errors import Closed, CorruptData, FlagstoneError, InvalidRequest, Unavailable
from flagstone.loads.edit import RECORD_LIFETIME_S
from flagstone.metadata.annotations import Position
from flagstone.testing.simulation.databases import MAIN_PATH, Concatenation
from flagstone.testing.simulation.history import Intent, Violation
from flagstone.testing.simulation.oracle import Oracle
from flagstone.testing.simulation.scheduler import Process, describe

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World

_Row = tuple[str, bytes, bytes, int]


@dataclass(slots=True, eq=False)
class Subscription:
    """What a consumer has received so far, over all lives of its process."""

    name: str
    copies: bool
    """Whether the consumer begins with a copy of the database, and lets the database store its position."""
    position: Position | None = None
    after_seq: int | None = None
    """Changes after this sequence number must come; None before the first one came."""
    received: dict[int, list[_Row]] = field(default_factory=dict)
    high: int = 0
    began_ns: int | None = None
    """When the first changes came; before that the database keeps nothing for this consumer."""
    is_over: bool = False
    """Whether a restore has ended it: the consumer has to start over with a copy."""

    def start_over(self) -> None:
        """Forget what was received, and begin with a copy."""
        self.position = self.after_seq = None
        self.received, self.high, self.began_ns = {}, 0, None
        self.copies, self.is_over = True, False

    def take(self, batch: ChangeBatch) -> None:
        """Store a batch. Raises `Violation` if it cannot be true after what came before."""
        if batch.wal_id is None:
            self._take_loaded(batch)
            return
        last = 0 if self.copies else self.high
        for seq, changes in groupby(batch.changes, key=lambda change: change.seq):
            rows = sorted(map(_row, changes))
            if seq <= last:
                raise Violation(f"consumer {self.name} received sequence number {seq} after {last}")
            if seq <= self.high and self.received.get(seq) != rows:
                raise Violation(
                    f"consumer {self.name} received other changes of {seq} than before: {rows}, "
                    f"it was {self.received.get(seq)}"
                )
            last = seq
            self.received[seq] = rows
            if self.after_seq is None:
                self.after_seq = seq - 1
        self.high = max(self.high, last)
        self.position = batch.position

    def _take_loaded(self, batch: ChangeBatch) -> None:
        """Store rows of a bulk load, which may come in several batches."""
        seq = batch.changes[0].seq
        if seq < self.high and seq not in self.received:
            raise Violation(f"consumer {self.name} received the bulk load {seq} after {self.high}")
        rows = self.received.setdefault(seq, [])
        for row in map(_row, batch.changes):
            if row not in rows:
                rows.append(row)
            elif not self.copies:
                raise Violation(f"consumer {self.name} received a row of the bulk load {seq} twice: {row}")
        rows.sort()
        if self.after_seq is None:
            self.after_seq = seq - 1
        self.high = max(self.high, seq)
        self.position = batch.position


def consume(world: World, process: Process) -> None:
    """The life of a consumer's process."""
    machine, subscription = process.machine, world.subscription(process.machine.name)
    while True:
        machine.sleep(world.random.expovariate(1 / 20))
        try:
            follow(world, process, subscription, timeout_s=world.random.choice((1.0, 60.0, 600.0)))
        except (Closed, Unavailable, InvalidRequest, CorruptData) as error:
            note_end(world, subscription, error)
            world.scheduler.note(f"consumer: {describe(error)}")


def note_end(world: World, subscription: Subscription, error: FlagstoneError) -> None:
    """A consumer got this error. If it must, it starts over; raises if the error was not to be expected.

    Nothing keeps the rows of a bulk load for a consumer that was paused before it had a retention checkpoint, or whose
    clock says that the quarter of an hour of a load record is over.
    """
    unkept = subscription.position is None or _began_before_an_old_load(world, subscription)
    wrong_clock = any(abs(machine.offset_ms) >= 1000 * RECORD_LIFETIME_S for machine in world.machines)
    must, text = bool(world.main.oracle.restores) or unkept or wrong_clock, str(error)
    if must and ("start over with a copy" in text or "copy the database once more" in text):
        subscription.is_over = True
    elif world.is_unexpected(error):
        raise error


def _began_before_an_old_load(world: World, subscription: Subscription) -> bool:
    """Whether the next load was too old when the consumer began: it began with an older WAL file that was still there.

    Without a consumer the rows of a load are found for a quarter of an hour only.
    """
    begun = [ns for seq, ns in world.main.loads_begun_ns.items() if seq > subscription.high]
    first_ns = subscription.began_ns
    return first_ns is not None and any(first_ns - ns > RECORD_LIFETIME_S * 10**9 for ns in begun)


def to_the_end(world: World, process: Process, subscription: Subscription) -> None:
    """Receive all changes that there are; after a restore, begin with a copy."""
    try:
        follow(world, process, subscription, timeout_s=40.0)
    except InvalidRequest as error:
        note_end(world, subscription, error)
        if not subscription.is_over:
            raise
        follow(world, process, subscription, timeout_s=40.0)


def follow(world: World, process: Process, subscription: Subscription, *, timeout_s: float) -> None:
    """Receive changes until none came for `timeout_s`."""
    clock, ids, stores = process.machine, world.ids(process), world.stores(process)
    if subscription.is_over:
        WalReader(MAIN_PATH, pin=subscription.name, clock=clock, ids=ids, **stores).release()
        subscription.start_over()
    if not subscription.copies:
        with WalReader(MAIN_PATH, pin=subscription.name, clock=clock, ids=ids, **stores) as reader:
            for batch in reader.follow(subscription.position, timeout_s=timeout_s):
                if subscription.began_ns is None:
                    subscription.began_ns = world.scheduler.now_ns
                subscription.take(batch)
                reader.commit(batch)
                world.done["changes"] += 1
        return
    with open_feed(
        MAIN_PATH,
        subscription.name,
        merge_operator=Concatenation(),
        segment_extractor=world.extractor,
        clock=clock,
        ids=ids,
        **stores,
    ) as feed:
        if feed.snapshot is not None:
            before_ms = clock.now_ms()
            rows, seq = dict(feed.snapshot.scan()), feed.seq
            branch = world.main.oracle.latest
            if branch is not None:
                world.main.oracle.expect_all(branch, rows, (seq, seq), world.window(before_ms, clock))
            feed.copied()
            subscription.after_seq = seq
            world.done["copied"] += 1
        for batch in feed.follow(timeout_s=timeout_s):
            subscription.take(batch)
            if world.random.random() < 0.9:
                feed.commit(batch)
            world.done["changes"] += 1


def require_complete(subscription: Subscription, history: Oracle, last_seq: int) -> None:
    """The consumer received every write up to `last_seq`, whole, and nothing else."""
    after_seq = subscription.after_seq
    if after_seq is None:
        raise Violation(f"consumer {subscription.name} received nothing")
    expected = {seq: _rows(write) for seq, write in history.writes().items() if after_seq < seq <= last_seq}
    doubtful = [_rows(write) for write in history.doubtful()]
    for seq in sorted({*expected, *subscription.received}):
        found, wanted = subscription.received.get(seq), expected.get(seq)
        if seq <= after_seq or seq > last_seq or found == wanted:
            continue
        if found is None:
            raise Violation(f"consumer {subscription.name} did not receive write {seq}: {wanted}")
        if wanted is not None or found not in doubtful:
            raise Violation(f"consumer {subscription.name} received {found} as write {seq}, not {wanted}")
    if max(subscription.high, after_seq) < last_seq:
        raise Violation(f"consumer {subscription.name} stopped at {subscription.high}, not at {last_seq}")


def _row(change: Change) -> _Row:
    return (change.op, change.key, change.value or b"", change.expires_ms or 0)


def _rows(write: Intent) -> list[_Row]:
    if write.deleted is not None:
        return [("delete_range", *write.deleted, 0)]
    return sorted((kind, key, value, expires_ms or 0) for kind, key, value, expires_ms in write.changes)
