"""The boundary of a metadata namespace: ids up to it may have been deleted and are never accepted again.

Creating an object only if it is absent protects no id once garbage collection has deleted the object: a writer that was
suspended meanwhile could create an old id a second time and believe that it committed. So the garbage collector raises
the boundary before it deletes, and a writer reads the boundary after it has created.

The boundary is one object with a decimal number. It only grows and is never deleted. SlateDB writes the digits alone
and strips white space when it reads. So the 32 bits of the CRC-32 of the digits stand around them as spaces (0) and
tabs (1), sixteen in front and sixteen behind: a cut at either end leaves blanks at the other and is detected. A number
with a few blanks around it, as an editor leaves them, has no checksum.
"""

from __future__ import annotations

import logging
import re
import zlib
from typing import Final, NamedTuple

from flagstone.errors import CorruptData, InternalError, Unavailable
from flagstone.runtime import metric_names as names
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock
from flagstone.store.caching import CachingStore
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing, ObjectStore, ObjectVersion

MAX_BOUNDARY: Final = 2**64 - 1
_PLAIN: Final = re.compile(rb"\s{0,4}([0-9]{1,20})\s{0,4}\Z")
_CHECKED: Final = re.compile(rb"([ \t]{16})([0-9]{1,20})([ \t]{16})\Z")


def encode_boundary(value: int) -> bytes:
    """The stored bytes of a boundary."""
    digits = b"%d" % value
    blanks = _blanks(digits)
    return blanks[:16] + digits + blanks[16:]


def decode_boundary(data: bytes, path: str) -> int:
    """The boundary in the object at `path`. Raises CorruptData when it is not a number or its checksum is wrong."""
    checked = _CHECKED.match(data)
    if checked is not None:
        front, digits, back = checked.groups()
        if front + back != _blanks(digits):
            raise CorruptData(
                f"the checksum of the boundary {digits.decode()} is wrong", object=path, offset=0
            )
    else:
        plain = _PLAIN.match(data)
        if plain is None:
            raise CorruptData(f"{data[:60]!r} is not a boundary", object=path, offset=0)
        digits = plain[1]
    value = int(digits)
    if value > MAX_BOUNDARY:
        raise CorruptData(f"the boundary {value} is not an id", object=path, offset=0)
    return value


def _blanks(digits: bytes) -> bytes:
    return f"{zlib.crc32(digits):032b}".encode().translate(bytes.maketrans(b"01", b" \t"))


_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 100


class _Seen(NamedTuple):
    value: int
    version: ObjectVersion


class Boundary:
    """The boundary stored at `path`; 0 while that object has never existed. Safe to share between threads."""

    def __init__(self, store: ObjectStore, path: str, *, metrics: Metrics | None = None) -> None:
        if isinstance(store, CachingStore):
            # The cache would refuse the first request anyway; here the error names the caller.
            raise InternalError(
                f"the boundary {path} must not be read through a cache; pass the store below it"
            )
        metrics = metrics or Metrics()
        self.path: Final = path
        self._store = store
        self._lock = Lock()
        self._seen: _Seen | None = None
        self._check_seconds = metrics.histogram(names.BOUNDARY_CHECK_SECONDS, boundary=path)
        self._advance_attempts = metrics.counter(names.BOUNDARY_ADVANCE_ATTEMPTS, boundary=path)
        self._rejected = metrics.counter(names.BOUNDARY_REJECTED_WRITES, boundary=path)

    def read(self) -> int:
        """The durable boundary now. One conditional request: unchanged, it costs no transfer.

        A boundary that was read before and is missing raises InternalError: it was deleted, and with it the only proof
        that old ids are used up. One that shrank or is not a number raises CorruptData.
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
        """Whether an object just created under that id counts. To be called after every create."""
        boundary = self.read()
        if created_id > boundary:
            return True
        self._rejected.add()
        _log.warning(
            "%s is %d: a stale write of id %d was rejected; its writer was suspended for too long",
            self.path,
            boundary,
            created_id,
        )
        return False

    def advance(self, desired: int) -> int:
        """Make the durable boundary at least `desired`; returns its value then.

        A lost race with another garbage collector is repeated until the boundary is high enough. Raises `Unavailable`
        when the store's responses contradict each other, for instance "it exists" and "it is missing" in turn. After
        that, or a crash, the boundary has its old or its new value, and advancing again is harmless.
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
            f"{self.path} could not be advanced to {desired} in {_ATTEMPTS} attempts; the store's responses "
            "contradict each other, or other collectors win every race: try again"
        )

    def _remember(self, value: int, version: ObjectVersion) -> None:
        with self._lock:
            # Responses may arrive out of order; the greatest is the newest, because boundaries only grow.
            if self._seen is None or value >= self._seen.value:
                self._seen = _Seen(value, version)
