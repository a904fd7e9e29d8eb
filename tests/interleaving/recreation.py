"""A scenario for the thread explorer: one database is destroyed and another is created at its path."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

from flagstone.clones.destroy import Destroyer, Destruction
from flagstone.clones.residue import DestroyedObjects
from flagstone.errors import Closed, InvalidRequest
from flagstone.metadata.destruction import incarnation, is_vacant
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import decode_manifest
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.runtime.pool import IoPool
from flagstone.store.port import ObjectExists, ObjectVersion
from flagstone.types import WalId
from interleaving.scenarios import (
    PATHS,
    START_MS,
    RepeatingStore,
    manifests_in,
    open_inline,
    row,
    unexpected_errors,
    visible_rows,
    write_rows,
)
from interleaving.thread_explorer import Stage
from kit.databases import encode_wal

OLD_ROWS = (1, 2)


class WatchedStore(RepeatingStore):
    """Knows whether the first database is erased, and lists what its writer created after that."""

    def __init__(self) -> None:
        super().__init__()
        self.late: set[str] = set()

    def is_gone(self) -> bool:
        """Whether the first database is erased: no manifest is left, or the newest one has another incarnation."""
        names = sorted(path for path in self._entries if PATHS.parse_manifest(path))
        if not names:
            return True
        latest = decode_manifest(self._entries[names[-1]].data)
        return is_vacant(latest) or incarnation(latest) > 0


class OldStore:
    """The store of the first writer, which notes what that writer creates too late. Noting is not a step."""

    def __init__(self, inner: Any, watched: WatchedStore) -> None:
        self._inner = inner
        self._watched = watched

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        created: ObjectVersion = self._inner.put_if_absent(path, data, token=token)
        # No other actor takes a step between the reply and this line.
        if self._watched.is_gone():
            self._watched.late.add(path)
        return created

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Written(NamedTuple):
    """The rows that a writer acknowledged, and in which incarnation of the database."""

    incarnation: int
    rows: tuple[int, ...]


class Recreation:
    """A writer that may stall anywhere, a late repetition of its request, a destroyer, and the next database's writer.

    With `in_turn` one process destroys the database and creates the next one, which halves the orders.
    """

    def __init__(self, stage: Stage, *, in_turn: bool = True, late_request: bool = True) -> None:
        self._stage = stage
        self._store = WatchedStore()
        self.acknowledged_late: set[str] = set()
        opened = open_inline(self._store, 1)
        self._old = (opened.fence, opened.recovered.last_wal_id)
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
        if errors := unexpected_errors(outcomes, (Closed, InvalidRequest, SequencedConflict)):
            return errors
        if self.acknowledged_late:
            return f"two owners: {sorted(self.acknowledged_late)} acknowledged after the database was erased"
        written = [value for value in outcomes.values() if isinstance(value, Written) and value.incarnation]
        try:
            found = open_inline(self._store, 9)
        except InvalidRequest:
            return "the new database is lost" if any(entry.rows for entry in written) else None
        now = incarnation(found.recovered.manifest.value)
        for entry in written:
            lost = set(entry.rows) - visible_rows(found, entry.rows)
            if entry.incarnation == now and lost:
                return f"rows {sorted(lost)} were acknowledged and are lost"
            if entry.incarnation != now and entry.rows:
                return "the new database is lost"
        mixed = visible_rows(found, OLD_ROWS) if now else set()
        return f"the new database shows rows {sorted(mixed)} of the old one" if mixed else None

    # -- the actors ---------------------------------------------------------------------------------------

    def _write_old(self) -> Written:
        store = OldStore(self._wrapped("old"), self._store)
        fence, fence_id = self._old
        manifests = manifests_in(store, 2)
        durable = write_rows(store, fence_id + 1, OLD_ROWS, on_durable=self._note_if_late)
        if len(durable) == len(OLD_ROWS):
            last = WalId(fence_id + len(OLD_ROWS))

            def flush(now: Versioned[Manifest]) -> Manifest:
                return replace(now.value, replay_after_wal_id=last, wal_id_last_seen=last)

            with suppress(Closed, InvalidRequest):
                flushed = manifests.update(fence.guard(flush))
                path = PATHS.manifest(flushed.id)  # type: ignore[arg-type]
                if path in self._store.late:
                    self.acknowledged_late.add(path)
        return Written(0, tuple(durable))

    def _land_late(self) -> None:
        """Repeat the request that created the first WAL file of the old writer."""
        _, fence_id = self._old
        with suppress(ObjectExists):
            self._wrapped("late").put_if_absent(
                PATHS.wal(WalId(fence_id + 1)), encode_wal([row(OLD_ROWS[0])]), token="old-1"
            )

    def _destroy(self, actor: str) -> Destruction:
        store, pool = self._wrapped(actor), IoPool(max_workers=0, name="inline")
        destroyer = Destroyer(
            store,
            PATHS,
            wal_store=store,
            clock=VirtualClock(START_MS),
            ids=Ids(5),
            pool=pool,
        )
        return destroyer.destroy()

    def _create(self, actor: str) -> Written:
        store = self._wrapped(actor)
        opened = open_inline(store, 6)
        made = incarnation(opened.recovered.manifest.value)
        rows = (opened.recovered.last_seq + 1, opened.recovered.last_seq + 2)
        return Written(made, tuple(write_rows(store, opened.recovered.last_wal_id + 1, rows)))

    # -- inside -------------------------------------------------------------------------------------------

    def _wrapped(self, actor: str) -> Any:
        return self._stage.wrap(self._store, actor)

    def _note_if_late(self, wal_id: WalId) -> None:
        if PATHS.wal(wal_id) in self._store.late:
            self.acknowledged_late.add(PATHS.wal(wal_id))


@contextmanager
def without_the_residue() -> Iterator[None]:
    """A destroyer that deletes everything, so that the next database starts with the same ids."""
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
