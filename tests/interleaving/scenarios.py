"""Scenarios for the thread explorer: the real metadata, WAL and collector on a deterministic store."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from flagstone.config import Settings
from flagstone.db.recovery import Opened, open_for_writing
from flagstone.db.writer.environment import Environment
from flagstone.errors import Closed, Unavailable
from flagstone.format.codec import Codec
from flagstone.gc.collector import Collector
from flagstone.gc.plan import Kind, KindOptions
from flagstone.metadata.boundary import Boundary
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Manifest, new_manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.store.commit_log import CommitRecord, RecordState
from flagstone.store.intents import IntentBroken
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectVersion
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.types import MAX_SEQ, VALUE, WalId
from flagstone.wal.writer import Ownership, WalOptions, WalWriter
from flagstone.write.state import SealedWal
from interleaving.thread_explorer import Stage
from kit.databases import encode_wal

PATHS = DbPaths("db")
START_MS = 1_700_000_000_123
"""Not a whole second: the collector takes whole seconds for times that the store rounded."""


class RepeatingStore(MemoryStore):
    """A store whose object versions depend only on the path's own history, so that equal states compare equal."""

    def __init__(self) -> None:
        super().__init__(clock=VirtualClock(START_MS))
        self.writes: dict[str, int] = {}

    def _store(self, path: str, data: bytes, token: str | None) -> ObjectVersion:
        self.writes[path] = self._generation = self.writes.get(path, 0) + 1
        return super()._store(path, data, token)

    def contents(self) -> Hashable:
        return tuple(
            (path, entry.data, self.writes[path])
            for path, entry in sorted(self._entries.items())
            if path != "db/gc/clock"
        )


class MemoryCommitLog:
    """A commit log in a dictionary."""

    def __init__(self) -> None:
        self.records_by_path: dict[str, CommitRecord] = {}

    def find(self, destination: str) -> CommitRecord | None:
        return self.records_by_path.get(destination)

    def insert(self, record: CommitRecord) -> bool:
        return self.records_by_path.setdefault(record.destination, record) is record

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        found = self.records_by_path.get(old.destination)
        same = found is not None and _identity(found) == _identity(old)
        if same:
            self.records_by_path[old.destination] = new
        return same

    def remove(self, record: CommitRecord) -> bool:
        found = self.records_by_path.get(record.destination)
        same = found is not None and _identity(found) == _identity(record)
        if same:
            del self.records_by_path[record.destination]
        return same

    def pending(self, prefix: str) -> list[CommitRecord]:
        return [record for record in self.records(prefix) if record.state is RecordState.PENDING]

    def records(self, prefix: str) -> Iterator[CommitRecord]:
        return iter(
            [record for path, record in sorted(self.records_by_path.items()) if path.startswith(f"{prefix}/")]
        )

    def close(self) -> None:
        pass

    def contents(self) -> Hashable:
        return tuple(
            sorted((*_identity(record), record.replaced or "") for record in self.records_by_path.values())
        )


def _identity(record: CommitRecord) -> tuple[str, int, str, str]:
    return (record.destination, record.version, record.source, str(record.state))


def visible_rows(opened: Opened, seqs: Iterable[int]) -> set[int]:
    """Which of the rows `b"k<sequence number>"` an opened database replayed."""
    memtables = opened.recovered.memtables.newest_first()
    return {seq for seq in seqs if any(memtable.get(b"k%d" % seq, MAX_SEQ) for memtable in memtables)}


def row(seq: int) -> tuple[Any, ...]:
    return (b"k%d" % seq, seq, VALUE, b"v", 1, None)


def manifests_in(store: Any, ids: int) -> ManifestStore:
    return ManifestStore(store, PATHS, clock=VirtualClock(START_MS), ids=Ids(ids))


def open_inline(store: Any, ids: int) -> Opened:
    """Open the database for writing without threads of its own."""
    env = Environment(
        store=store,
        wal_store=store,
        disk_cache=None,
        paths=PATHS,
        settings=Settings(),
        clock=VirtualClock(START_MS),
        ids=Ids(ids),
        metrics=Metrics(),
        pool=IoPool(max_workers=0, name="inline"),
    )
    return open_for_writing(env, manifests_in(store, ids), create=True)


class RowWriter(WalWriter):
    """A WAL writer that takes rows instead of memtables."""

    def _encode(self, spans: Sequence[Any]) -> bytes:
        return encode_wal(list(spans))


class RowSource:
    """Rows for `RowWriter`, one for each WAL file; `durable` has the rows that were reported as durable."""

    def __init__(self, next_id: int, seqs: Iterable[int], on_durable: Callable[[WalId], None]) -> None:
        self.waiting = list(seqs)
        self._next_id = next_id
        self.durable: list[int] = []
        self._on_durable = on_durable

    @property
    def last_seq(self) -> int:
        return self.waiting[0]

    def unfinished_wal(self) -> None:
        return None

    def seal_wal(self, new_token: Callable[[], str]) -> SealedWal:
        seq = self.waiting.pop(0)
        spans: Any = (row(seq),)
        file = SealedWal(WalId(self._next_id), spans, seq, new_token())
        self._next_id += 1
        return file

    def note_logged(self, file: SealedWal) -> None:
        self._on_durable(file.wal_id)
        self.durable.append(file.last_seq)


class EpochCheck:
    """A manifest for `Ownership`: `refresh` raises `Closed` when a newer writer owns the database."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self.refresh = refresh


def write_rows(
    store: Any,
    next_id: int,
    seqs: Iterable[int],
    *,
    on_durable: Callable[[WalId], None] = lambda _: None,
    check_epoch: Callable[[], None] = lambda: None,
) -> list[int]:
    """Write one WAL file per row; the rows reported as durable before the writer ended or was fenced."""
    rows = RowSource(next_id, seqs, on_durable)
    never_woken: Any = None
    writer = RowWriter(
        store,
        PATHS,
        rows,
        Ownership(EpochCheck(check_epoch), clock=VirtualClock(START_MS), limit_s=0),
        WalOptions(codec=Codec.NONE, flush_interval_s=None, max_retries=0),
        clock=VirtualClock(START_MS),
        ids=Ids(2),
        metrics=Metrics(),
        supervisor=never_woken,
    )
    with suppress(Closed):
        while rows.waiting:
            writer.write_file(writer._with_retries)
    return rows.durable


def unexpected_errors(outcomes: Mapping[str, Any], expected: tuple[type[BaseException], ...]) -> str | None:
    """The errors that actors ended with and that are not of the expected kinds; None if there are none."""
    errors = [value for value in outcomes.values() if isinstance(value, BaseException)]
    return "; ".join(repr(error) for error in errors if not isinstance(error, expected)) or None


class Claims:
    """Writers that raise an epoch, one step each, beside a collector. No reported claim may be lost."""

    def __init__(
        self, stage: Stage, kind: Kind, *, claims: tuple[int, ...], rounds: int = 1, two_phase: bool = False
    ) -> None:
        self._base = RepeatingStore()
        self._log = MemoryCommitLog()
        self._kind: Kind = kind
        self._two_phase = two_phase
        ManifestStore(self._plain(0, None), PATHS, clock=VirtualClock(START_MS)).create_next(
            new_manifest(), None
        )
        if kind == "compactions":
            self._versions(self._plain(0, None), 0).create_next(Compactions(), None)
        self.actors: Mapping[str, Callable[[], Any]] = {
            **{
                f"writer {number}": lambda number=number, count=count: self._claim(stage, number, count)
                for number, count in enumerate(claims, 1)
            },
            "collector": lambda: self._collect(stage, rounds),
        }

    def state(self) -> Hashable:
        return (self._base.contents(), self._log.contents())

    def judge(self, outcomes: Mapping[str, Any]) -> str | None:
        # `IntentBroken`: the collector deletes a temporary object while its writer, stalled for a day, is about to
        # decide on it. A process that reads the decision before that writer replaces it ends with this error.
        # `Unavailable`: the collector gave the create up, or forgot it, before the writer could finish it. The writer
        # then reports no claim.
        if errors := unexpected_errors(outcomes, (IntentBroken, Unavailable) if self._two_phase else ()):
            return errors
        epochs = [epoch for claimed in outcomes.values() if isinstance(claimed, list) for epoch in claimed]
        latest = self._versions(self._plain(9, None), 9).require_latest().value
        if len(set(epochs)) < len(epochs):
            return f"two writers were given the same epoch: {epochs}"
        if epochs and max(epochs) > latest.compactor_epoch:
            return f"epoch {max(epochs)} was given out, the latest manifest has {latest.compactor_epoch}"
        return None

    def _claim(self, stage: Stage, number: int, count: int) -> list[int]:
        versions = self._versions(self._plain(number, stage), number)
        claimed = []
        for _ in range(count):
            epoch = versions.update(_next_epoch).value.compactor_epoch
            claimed.append(epoch)
        return claimed

    def _collect(self, stage: Stage, rounds: int) -> None:
        store = self._plain(8, stage)
        kinds: list[Kind] = [self._kind, "two_phase"] if self._two_phase else [self._kind]
        collector = Collector(
            store, PATHS, {kind: KindOptions(0) for kind in kinds}, clock=VirtualClock(START_MS)
        )
        for _ in range(rounds):
            report = collector.collect()
            broken = [error for error in report.errors if "its source" in error or "its temporary" in error]
            assert report.errors == broken, report.errors

    def _plain(self, number: int, stage: Stage | None) -> Any:
        actor = "collector" if number == 8 else f"writer {number}"
        base: Any = self._base if stage is None else stage.wrap(self._base, actor, private=_is_clock)
        if not self._two_phase:
            return base
        log: Any = self._log if stage is None else stage.wrap(self._log, actor, private=_is_clock)
        return TwoPhaseStore(base, log, ids=Ids(number), clock=VirtualClock(START_MS))

    def _versions(self, store: Any, number: int) -> Any:
        kind = ManifestStore if self._kind == "manifest" else CompactionsStore
        return kind(store, PATHS, clock=VirtualClock(START_MS), ids=Ids(number))


def _is_clock(path: str) -> bool:
    return path == "db/gc/clock"


def _next_epoch(now: Versioned[Any]) -> Any:
    return replace(now.value, compactor_epoch=now.value.compactor_epoch + 1)


class Duel:
    """A writer, a second writer that replaces it and flushes, and a collector that deletes WAL files and fences.

    With `checks_epoch` a writer reads its epoch after every WAL file, as it does where fences are collected.
    """

    def __init__(self, stage: Stage, *, checks_epoch: bool, fences_too: bool = True, files: int = 2) -> None:
        self._stage = stage
        self._store = RepeatingStore()
        self._checks_epoch = checks_epoch
        self._files = files
        self._fences_too = fences_too
        self.in_l0: set[int] = set()
        first = open_inline(self._store, 1)
        self.actors: Mapping[str, Callable[[], Any]] = {
            "first": lambda: self._write(
                self._wrapped("first"), first.fence, first.recovered.last_wal_id, 1, self._files
            ),
            "second": self._replace,
            "collector": self._collect,
        }

    def state(self) -> Hashable:
        return (self._store.contents(), frozenset(self.in_l0))

    def judge(self, outcomes: Mapping[str, Any]) -> str | None:
        if errors := unexpected_errors(outcomes, (Closed,)):
            return errors
        durable = {seq for value in outcomes.values() if isinstance(value, list) for seq in value}
        found = open_inline(self._store, 1)
        lost = durable - self.in_l0 - visible_rows(found, durable)
        return f"rows {sorted(lost)} were reported as durable and are lost" if lost else None

    def _wrapped(self, actor: str) -> Any:
        return self._stage.wrap(self._store, actor, private=_is_clock)

    def _write(self, store: Any, fence: Fence, fence_id: WalId, first_seq: int, files: int) -> list[int]:
        manifests = manifests_in(store, 1)
        seqs = range(first_seq, first_seq + files)

        def check_epoch() -> None:
            if self._checks_epoch:
                fence.check(manifests.require_latest().value)

        return write_rows(store, fence_id + 1, seqs, check_epoch=check_epoch)

    def _replace(self) -> list[int]:
        store = self._wrapped("second")
        opened = open_inline(store, 1)
        rows = visible_rows(opened, range(1, 1 + self._files))
        durable = self._write(store, opened.fence, opened.recovered.last_wal_id, 101, 1)
        if not durable:
            return []
        last = WalId(opened.recovered.last_wal_id + 1)

        def flush(now: Versioned[Manifest]) -> Manifest:
            return replace(now.value, replay_after_wal_id=last, wal_id_last_seen=last)

        manifests_in(store, 1).update(opened.fence.guard(flush))
        self.in_l0 |= rows | set(durable)
        return durable

    def _collect(self) -> None:
        kinds: list[Kind] = ["wal", "wal_fence"] if self._fences_too else ["wal"]
        options = {kind: KindOptions(0) for kind in kinds}
        report = Collector(self._wrapped("collector"), PATHS, options, clock=VirtualClock(START_MS)).collect()
        assert report.ok, report.errors


@contextmanager
def without_the_boundary() -> Iterator[None]:
    """Writers that do not read the boundary after they create a manifest or compactions file."""
    with patch.object(Boundary, "admits", lambda _self, _created_id: True):
        yield
