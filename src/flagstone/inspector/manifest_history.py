"""The manifests that are still stored, to look back through: listed once, and read only where they are shown.

A listing of ten thousand manifests takes ten requests; reading them would take ten thousand. Manifests never change, so
what was read of one stays true.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from flagstone.errors import InvalidRequest
from flagstone.inspector.documents import counts
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.pool import shared_pool
from flagstone.runtime.sync import Lock
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import ManifestId

MAX_SAMPLES: Final = 48
"""The manifests that are read for the picture of a history of any length."""

_POINTS: Final = 240
_KEPT: Final = 32
_LIST_ALL_AFTER_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored manifest as the listing shows it."""

    id: int
    ms: int
    bytes: int


class ManifestHistory:
    """Lists and reads former manifests. Any thread may use it; it keeps the manifests that were shown last."""

    def __init__(self, store: ObjectStore, root: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store = store
        self._paths = DbPaths(root)
        self._manifests = ManifestStore(store, self._paths)
        self._clock = clock
        self._lock = Lock()
        self._listed: tuple[Stored, ...] = ()
        self._listed_all_at: float | None = None
        self._kept: OrderedDict[int, Manifest] = OrderedDict()
        self._counted: dict[int, dict[str, Any]] = {}

    def list(self) -> tuple[Stored, ...]:
        """All stored manifests, ascending. Lists only those after the last known one, and all every five minutes."""
        now, known = self._clock.monotonic(), self._listed
        at = self._listed_all_at
        whole = not known or at is None or now - at > _LIST_ALL_AFTER_S
        after = None if whole else self._paths.manifest(ManifestId(known[-1].id))
        new = sorted(
            (
                Stored(found, meta.last_modified_ms, meta.size)
                for meta in self._store.list(self._paths.manifest_folder, after=after)
                if (found := self._paths.parse_manifest(meta.path)) is not None
            ),
            key=lambda each: each.id,
        )
        if whole:
            self._listed, self._listed_all_at = tuple(new), now
            return self._listed
        merged = (*known, *(each for each in new if each.id > known[-1].id))
        self._listed = merged
        return merged

    def load(self, manifest_id: int) -> tuple[Stored, Manifest]:
        """The newest stored manifest up to `manifest_id`, or the oldest if there is none.

        Raises:
            InvalidRequest: none is stored, or garbage collection has deleted it since it was listed.

        """
        listed = self._listed or self.list()
        if not listed or manifest_id > listed[-1].id:
            listed = self.list()
        if not listed:
            raise InvalidRequest(f"no manifest is stored in {self._paths.manifest_folder}")
        at = bisect_right(listed, manifest_id, key=lambda each: each.id) - 1
        stored = listed[max(at, 0)]
        return stored, self._load(stored.id)

    def document(self) -> dict[str, Any]:
        """The history as a whole: its ends, when manifests were written, and the levels in some of them."""
        listed = self.list()
        shown = _spread(listed, _POINTS)
        sampled = _spread(listed, MAX_SAMPLES)
        found = shared_pool().map_ordered(self._count, sampled)
        return {
            "first": listed[0].id if listed else 0,
            "last": listed[-1].id if listed else 0,
            "count": len(listed),
            "bytes": sum(each.bytes for each in listed),
            "points": [[each.id, each.ms, each.bytes] for each in shown],
            "samples": [each for each in found if each is not None],
            "rate": _rate(listed),
        }

    def _count(self, stored: Stored) -> dict[str, Any] | None:
        known = self._counted.get(stored.id)
        if known is None:
            try:
                manifest = self._manifests.load(stored.id)
            except ObjectMissing:
                return None  # garbage collection has just deleted it
            known = {"id": stored.id, "ms": stored.ms, "seq": manifest.last_l0_seq, **counts(manifest)}
            if len(self._counted) > 40 * MAX_SAMPLES:
                self._counted = {}
            self._counted[stored.id] = known
        return known

    def _load(self, manifest_id: int) -> Manifest:
        with self._lock:
            found = self._kept.get(manifest_id)
        if found is None:
            try:
                found = self._manifests.load(manifest_id)
            except ObjectMissing:
                self._listed_all_at = None
                raise InvalidRequest(
                    f"manifest {manifest_id} is gone: garbage collection has deleted it; choose a newer one"
                ) from None
            with self._lock:
                self._kept[manifest_id] = found
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return found


def _spread(listed: tuple[Stored, ...], wanted: int) -> list[Stored]:
    """`wanted` of the manifests, evenly over their ids, with the first and the last one.

    Chosen by multiples of a power of two, so that a growing history asks again for manifests that were read before.
    """
    if len(listed) <= wanted:
        return list(listed)
    step = 1 << ((len(listed) - 2) // (wanted - 2)).bit_length()
    first = listed[0].id
    chosen = {0, len(listed) - 1}
    at = -(-first // step) * step
    while at < listed[-1].id:
        chosen.add(bisect_left(listed, at, key=lambda each: each.id))
        at += step
    return [listed[each] for each in sorted(chosen)[-wanted:]]


def _rate(listed: tuple[Stored, ...]) -> float:
    """Manifests per hour over the last hundred of them."""
    recent = listed[-100:]
    if len(recent) < 2 or recent[-1].ms <= recent[0].ms:
        return 0.0
    return (len(recent) - 1) / ((recent[-1].ms - recent[0].ms) / 3_600_000)
