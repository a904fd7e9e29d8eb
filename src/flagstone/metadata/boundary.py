"""The boundary of a metadata namespace: ids up to it may have been deleted and are never accepted again.

Creating an object only if it is absent remembers nothing once garbage collection has deleted the object: a
writer that slept meanwhile could create an old id a second time and believe that it committed. So collection
raises the boundary before it deletes, and a writer looks at the boundary after it has created.

The boundary is one object with an ASCII number (`boundary_codec`). It only ever grows and is never deleted.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from flagstone.errors import CorruptData, InternalError, Unavailable
from flagstone.metadata.boundary_codec import MAX_BOUNDARY, decode_boundary, encode_boundary
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock
from flagstone.store.caching import CachingStore
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing, ObjectStore, ObjectVersion

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 100


class _Seen(NamedTuple):
    value: int
    version: ObjectVersion


class Boundary:
    """The boundary stored at `path`; 0 while that object has never existed. Safe to share between threads."""

    def __init__(self, store: ObjectStore, path: str, *, metrics: Metrics | None = None) -> None:
        if isinstance(store, CachingStore):
            # It would refuse the first request anyway; say it where the mistake was made.
            raise InternalError(
                f"the boundary {path} must not be read through a cache; pass the store below it"
            )
        metrics = metrics or Metrics()
        self.path: Final = path
        self._store = store
        self._lock = Lock()
        self._seen: _Seen | None = None
        self._check_seconds = metrics.histogram("flagstone.metadata.boundary_check_seconds", boundary=path)
        self._advance_attempts = metrics.counter(
            "flagstone.metadata.boundary_advance_attempts", boundary=path
        )
        self._rejected = metrics.counter("flagstone.metadata.boundary_rejected_writes", boundary=path)

    def read(self) -> int:
        """The durable boundary now. One conditional request: unchanged, it costs no transfer.

        A boundary that was seen and then is missing raises InternalError: somebody deleted it, and
        with it the only proof that old ids are used up. One that shrank or is no number raises CorruptData.
        """
        known = self._seen
        with self._check_seconds.timer():
            try:
                if known is None:
                    stored = self._store.get(self.path)
                else:
                    unless_same = self._store.get_if_changed(self.path, known.version)
                    if unless_same is None:
                        return known.value
                    stored = unless_same
            except ObjectMissing:
                if known is None:
                    return 0
                raise InternalError(
                    f"{self.path} was {known.value} and is gone; boundaries must never be deleted"
                ) from None
        value = decode_boundary(stored.data, self.path)
        if known is not None and value < known.value:
            raise CorruptData(f"boundary went back from {known.value} to {value}", object=self.path, offset=0)
        self._remember(value, stored.meta.version)
        return value

    def admits(self, created_id: int) -> bool:
        """Whether an object just created under that id counts. To be asked after every create."""
        boundary = self.read()
        if created_id > boundary:
            return True
        self._rejected.add()
        _log.warning(
            "%s is %d: a stale write of id %d was rejected; its writer had fallen asleep",
            self.path,
            boundary,
            created_id,
        )
        return False

    def advance(self, desired: int) -> int:
        """Make the durable boundary at least `desired`; returns what it is then.

        Races with other collectors are repeated until either side has won far enough, and given up with `Unavailable`
        when the store's answers lead nowhere, for instance "it exists" and "it is missing" in turn. After that, or a
        crash, the boundary is where it was or where it should be, and advancing again is harmless.
        """
        if not 0 <= desired <= MAX_BOUNDARY:
            raise InternalError(f"boundary {desired} is not an id")
        for _ in range(_ATTEMPTS):
            value = self.read()
            if value >= desired:
                return value
            self._advance_attempts.add()
            known = self._seen
            data = encode_boundary(desired)
            try:
                if known is None:
                    version = self._store.put_if_absent(self.path, data)
                else:
                    version = self._store.put_if_match(self.path, data, known.version)
            except (ObjectExists, ObjectChanged):
                continue
            except Unavailable as error:
                _log.warning("%s could not be advanced from %d to %d: %s", self.path, value, desired, error)
                raise
            self._remember(desired, version)
            return desired
        raise Unavailable(
            f"{self.path} could not be advanced to {desired} in {_ATTEMPTS} attempts; the store's answers contradict "
            "each other, or other collectors win every race: try again"
        )

    def _remember(self, value: int, version: ObjectVersion) -> None:
        with self._lock:
            # Answers may arrive out of order; the greatest is the newest, because boundaries only grow.
            if self._seen is None or value >= self._seen.value:
                self._seen = _Seen(value, version)
