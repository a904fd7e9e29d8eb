"""The bulk load methods of `Admin`: list loads, and cancel one whose driver will not finish it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from flagstone.clones.checkpoint import parse_checkpoint_id
from flagstone.errors import InvalidRequest
from flagstone.loads.lifetime import cancel_record, dead_loads, find_load_record
from flagstone.loads.request import delete_load, load_ssts
from flagstone.metadata.annotations import HeldLoad, LoadState, held_loads
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStatus:
    """A bulk load that the manifest records.

    `state` is "loading" while tasks run, "ready" while the load waits for a writer, then "done" or "refused", with the
    reason. `alive` is False for an open load whose record has expired: garbage collection deletes it. Times are Unix
    seconds. `ssts` and `bytes` are what the load has on the store.
    """

    id: UUID
    state: LoadState
    alive: bool
    began_s: int
    expires_s: int | None
    seq: int
    query: str
    reason: str
    ssts: int
    bytes: int


class AdminLoads:
    """Bulk loads: list, cancel. A base class of `Admin`, which opens the stores."""

    _store: ObjectStore
    _paths: DbPaths
    _clock: Clock
    _manifest_store: Callable[[], ManifestStore]

    def loads(self) -> list[LoadStatus]:
        """The bulk loads that the manifest records, in the order in which they began; loads that ended stay a while.

        Raises:
            InvalidRequest: there is no database at that path.

        """
        latest = self._manifest_store().require_latest().value
        dead = {held.checkpoint.id for held in dead_loads(latest, self._clock.now_ms() // 1000)}
        given = [held for held in held_loads(latest) if held.record.deleted is None]
        found = sorted(given, key=lambda held: (held.record.id_ms, held.checkpoint.id))
        return [self._status(held, alive=held.checkpoint.id not in dead) for held in found]

    def cancel_load(self, id: UUID | str) -> int:  # noqa: A002 - the name users know
        """Cancel a load that is not finished, and delete its SSTs; returns how many. Its driver gets `Closed`.

        A crash after the cancellation leaves SSTs that garbage collection deletes.

        Raises:
            InvalidRequest: there is no such load, or it is finished.

        """
        wanted, now_s = parse_checkpoint_id(id), self._clock.now_ms() // 1000
        cancelled: list[HeldLoad] = []

        def cancel(now: Versioned[Manifest]) -> Manifest:
            held, changed = find_load_record(now.value, wanted), cancel_record(now.value, wanted, now_s=now_s)
            if held is None:
                raise InvalidRequest(
                    f"there is no bulk load {wanted}; `flagstone loads` lists those there are"
                )
            if changed is None:
                raise InvalidRequest(f"the bulk load {wanted} is over: it is {held.record.state}")
            cancelled[:] = [held]
            return changed

        self._manifest_store().update(cancel)
        return sum(delete_load(self._store, self._paths, held) for held in cancelled)

    def _status(self, held: HeldLoad, *, alive: bool) -> LoadStatus:
        checkpoint, record = held
        ssts = load_ssts(self._store, self._paths, held)
        return LoadStatus(
            id=checkpoint.id,
            state=record.state,
            alive=alive and record.state != "refused",
            began_s=record.id_ms // 1000,
            expires_s=checkpoint.expires_s,
            seq=record.seq,
            query=record.owner,
            reason=record.reason,
            ssts=len(ssts),
            bytes=sum(size for _, size in ssts),
        )
