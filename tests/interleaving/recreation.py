"""The world for the thread explorer in which a database is destroyed and another one is created at its path."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

from flagstone.db.opening import Opened, open_for_writing
from flagstone.errors import Closed, InvalidRequest
from flagstone.format.codec import Codec
from flagstone.metadata.destruction import incarnation, is_vacant
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import decode_manifest
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.store.port import ObjectExists, ObjectVersion
from flagstone.testing.interleaving_threads import Stage
from flagstone.testing.wal_files import encode_wal
from flagstone.types import MAX_SEQ, VALUE, WalId
from flagstone.views.destroy import Destroyer, Destruction
from flagstone.views.residue import DestroyedObjects
from flagstone.wal.writer import LogSource, WalWriter
from interleaving.scenarios import PATHS, START_MS, RepeatingStore

OLD_ROWS = (1, 2)


class WatchedStore(RepeatingStore):
    """Notes every WAL file and manifest that the first writer creates when its database is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.late: set[str] = set()

    def is_gone(self) -> bool:
        """Whether the first database is erased: there is no manifest, or the newest is of another incarnation."""
        names = sorted(path for path in self._entries if PATHS.parse_manifest(path))
        if not names:
            return True
        latest = decode_manifest(self._entries[names[-1]].data)
        return is_vacant(latest) or incarnation(latest) > 0


class OldStore:
    """The store as the first writer has it: what it creates too late is noted. Not a step of its own."""

    def __init__(self, inner: Any, watched: WatchedStore) -> None:
        self._inner = inner
        self._watched = watched

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        created: ObjectVersion = self._inner.put_if_absent(path, data, token=token)
        # No other actor takes a step between the answer and here.
        if self._watched.is_gone():
            self._watched.late.add(path)
        return created

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RowWriter(WalWriter):
    def _encode(self, spans: list[Any]) -> bytes:
        return encode_wal(spans)


class Written(NamedTuple):
    """What a writer acknowledged, and to which database."""

    incarnation: int
    rows: tuple[int, ...]


class Recreation:
    """A writer that may stall anywhere, a request of it that lands late, a destroyer, and the next database's writer.

    With `in_turn` destroyer and next writer are one process, which halves the orders.
    """

    def __init__(self, stage: Stage, *, in_turn: bool = True, late_request: bool = True) -> None:
        self._stage = stage
        self._store = WatchedStore()
        self._pool = IoPool(max_workers=0, name="inline")
        self.acknowledged_late: set[str] = set()
        opened = self._open(self._store, 1)
        self._old = (opened.fence, opened.fence_id)
        actors: dict[str, Callable[[], Any]] = {"old": self._write_old}
        if in_turn:
            actors["destroyer"] = lambda: (self._destroy("destroyer"), self._create("destroyer"))[1]
        else:
            actors["destroyer"] = lambda: self._destroy("destroyer")
            actors["new"] = lambda: self._create("new")
        if late_request:
            actors["late"] = self._land_late
        self.actors: Mapping[str, Callable[[], Any]] = actors

    def state(self) -> Hashable:
        return (self._store.contents(), frozenset(self._store.late), frozenset(self.acknowledged_late))

    def judge(self, outcomes: Mapping[str, Any]) -> str | None:
        expected = (Closed, InvalidRequest, SequencedConflict)
        broken = [
            repr(value)
            for value in outcomes.values()
            if isinstance(value, BaseException) and not isinstance(value, expected)
        ]
        if broken:
            return "; ".join(broken)
        if self.acknowledged_late:
            return f"two owners: {sorted(self.acknowledged_late)} acknowledged after the database was erased"
        written = [value for value in outcomes.values() if isinstance(value, Written) and value.incarnation]
        try:
            found = self._open(self._store, 9)
        except InvalidRequest:
            return "the new database is lost" if any(entry.rows for entry in written) else None
        now = incarnation(found.manifest.value)
        for entry in written:
            lost = set(entry.rows) - self._visible(found, entry.rows)
            if entry.incarnation == now and lost:
                return f"rows {sorted(lost)} were acknowledged and are lost"
            if entry.incarnation != now and entry.rows:
                return "the new database is lost"
        mixed = self._visible(found, OLD_ROWS) if now else set()
        return f"the new database shows rows {sorted(mixed)} of the old one" if mixed else None

    # -- the actors ---------------------------------------------------------------------------------------

    def _write_old(self) -> Written:
        store = OldStore(self._wrapped("old"), self._store)
        fence, fence_id = self._old
        manifests = self._manifests(store, 2)
        durable = self._write(store, WalId(fence_id + 1), OLD_ROWS, check_late=True)
        if len(durable) == len(OLD_ROWS):
            last = WalId(fence_id + len(OLD_ROWS))

            def flush(now: Versioned[Manifest]) -> Manifest:
                return replace(now.value, replay_after_wal_id=last, wal_id_last_seen=last)

            with suppress(Closed, InvalidRequest):
                flushed = manifests.update(fence.guard(flush))
                path = PATHS.manifest(flushed.id)  # type: ignore[arg-type]
                if path in self._store.late:
                    self.acknowledged_late.add(path)
        return Written(0, durable)

    def _land_late(self) -> None:
        """The first WAL file of the old writer once more, as a request that was repeated."""
        _, fence_id = self._old
        with suppress(ObjectExists):
            self._wrapped("late").put_if_absent(
                PATHS.wal(WalId(fence_id + 1)), encode_wal([_row(OLD_ROWS[0])]), token="old-1"
            )

    def _destroy(self, actor: str) -> Destruction:
        store = self._wrapped(actor)
        destroyer = Destroyer(
            store, PATHS, wal_store=store, clock=VirtualClock(START_MS), ids=Ids(5), pool=self._pool
        )
        return destroyer.destroy()

    def _create(self, actor: str) -> Written:
        store = self._wrapped(actor)
        opened = self._open(store, 6)
        made = incarnation(opened.manifest.value)
        rows = (opened.last_seq + 1, opened.last_seq + 2)
        return Written(made, self._write(store, WalId(opened.fence_id + 1), rows))

    # -- inside -------------------------------------------------------------------------------------------

    def _open(self, store: Any, number: int) -> Opened:
        return open_for_writing(
            store,
            store,
            PATHS,
            self._manifests(store, number),
            create=True,
            extractor=None,
            freeze_bytes=1 << 20,
            pool=self._pool,
        )

    def _manifests(self, store: Any, number: int) -> ManifestStore:
        return ManifestStore(store, PATHS, clock=VirtualClock(START_MS), ids=Ids(number))

    def _wrapped(self, actor: str) -> Any:
        return self._stage.wrap(self._store, actor)

    def _write(
        self, store: Any, next_id: WalId, rows: tuple[int, ...], *, check_late: bool = False
    ) -> tuple[int, ...]:
        """The rows acknowledged before the writer ended or was fenced; it trusts that it is the owner."""
        durable: list[int] = []
        waiting = list(rows)

        def seal() -> tuple[list[Any], int]:
            seq = waiting.pop(0)
            return [_row(seq)], seq

        def logged(wal_id: WalId, seq: int) -> None:
            if check_late and PATHS.wal(wal_id) in self._store.late:
                self.acknowledged_late.add(PATHS.wal(wal_id))
            durable.append(seq)

        writer = RowWriter(
            store,
            PATHS,
            LogSource(seal, logged, lambda: Closed("fenced", reason="fenced"), lambda: None),
            next_id=next_id,
            codec=Codec.NONE,
            flush_interval_s=None,
            max_retries=0,
            clock=VirtualClock(START_MS),
            ids=Ids(2),
            metrics=Metrics(),
            wake=lambda: None,
        )
        with suppress(Closed):
            while waiting:
                writer.write_file()
        return tuple(durable)

    def _visible(self, opened: Opened, rows: tuple[int, ...]) -> set[int]:
        tables = opened.memtables.tables()
        return {seq for seq in rows if any(table.get(b"k%d" % seq, MAX_SEQ) for table in tables)}


def _row(seq: int) -> tuple[Any, ...]:
    return (b"k%d" % seq, seq, VALUE, b"v", 1, None)


@contextmanager
def without_the_residue() -> Iterator[None]:
    """A destroyer that deletes everything, so that the next database begins with the same ids."""
    destroy = Destroyer.destroy

    def destroy_all(self: Destroyer, **options: Any) -> Destruction:
        done = destroy(self, **options)
        self.purge(min_age=timedelta())
        return done

    with patch.object(Destroyer, "destroy", destroy_all):
        yield


@contextmanager
def without_the_fence() -> Iterator[None]:
    """A destroyer whose residue lacks the end of the WAL."""
    with patch.object(DestroyedObjects, "kept_wal", lambda _self, _manifest: {}):
        yield
