"""A store with the latency of a real one: every request waits for its first byte and then for its bytes.

The wait is drawn from a log-normal distribution given by its median and 99th percentile, with a fixed seed; bytes are
sent at the speed of one connection. A write takes effect in the middle of its request. Requests are counted as the service
would bill them: each fetched range, each thousand of listed or deleted objects. The parameters are assumptions that fit
published figures of the services, not measurements of them.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bench.prices import S3_EXPRESS, S3_STANDARD, Prices
from flagstone.runtime.pool import shared_pool
from flagstone.store.port import (
    ObjectMeta,
    ObjectMissing,
    ObjectStore,
    ObjectVersion,
    Piece,
    Range,
    StoredObject,
    Upload,
    check_range,
    cut_pieces,
    plan_fetches,
)

PAGE: Final = 1000
"""Objects in one page of a listing, and in one request to delete."""


@dataclass(frozen=True)
class Wait:
    """Seconds until the first byte of a response: half of the requests wait less than `median`, 1 % more than `p99`."""

    median: float
    p99: float

    def draw(self, source: random.Random) -> float:
        """How long one request waits."""
        return source.lognormvariate(math.log(self.median), math.log(self.p99 / self.median) / 2.326)


@dataclass(frozen=True)
class Profile:
    """The latency of a service, and its prices."""

    name: str
    get: Wait
    put: Wait
    list: Wait
    head: Wait
    delete: Wait
    bytes_per_second: float
    """Of one connection."""
    prices: Prices
    nearer: float = 1.0
    """Every wait is divided by this."""


STANDARD: Final = Profile(
    "S3 Standard",
    get=Wait(0.020, 0.120),
    put=Wait(0.035, 0.200),
    list=Wait(0.040, 0.200),
    head=Wait(0.015, 0.080),
    delete=Wait(0.020, 0.100),
    bytes_per_second=90e6,
    prices=S3_STANDARD,
)
EXPRESS: Final = Profile(
    "S3 Express One Zone",
    get=Wait(0.004, 0.010),
    put=Wait(0.006, 0.015),
    list=Wait(0.006, 0.020),
    head=Wait(0.003, 0.008),
    delete=Wait(0.005, 0.020),
    bytes_per_second=300e6,
    prices=S3_EXPRESS,
)


class LatencyStore:
    """A store with the latency of `profile` in front of `inner`, which should be quick: one in memory."""

    def __init__(self, inner: ObjectStore, profile: Profile, *, seed: int = 0) -> None:
        self._inner = inner
        self._profile = profile
        self._source = random.Random(seed)
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        """Requests since the start, by kind."""
        self.moved: Counter[str] = Counter()
        """Bytes sent and received since the start."""
        self.longest_s = 0.0
        """How long the longest request takes since a caller set this to 0."""

    @property
    def url(self) -> str:
        # Not that of the inner store, which is near.
        return f"simulated://{self._profile.name}"

    def get(self, path: str) -> StoredObject:
        return self._received(self._inner.get, path)

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        try:
            found = self._inner.get_if_changed(path, known)
        except ObjectMissing:
            self._wait("get")
            raise
        self._wait("get", received=0 if found is None else len(found.data))
        return found

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        try:
            piece = self._inner.get_range(path, start, stop)
        except ObjectMissing:
            self._wait("get")
            raise
        self._wait("get", received=len(piece))
        return piece

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        for start, stop in ranges:
            check_range(path, start, stop)
        # As in the remote store: adjacent ranges in one request, the requests at the same time.
        fetches = plan_fetches(ranges)
        if not fetches and ranges:
            self.head(path)
        fetched = shared_pool().map_ordered(lambda fetch: self.get_range(path, *fetch), fetches)
        return cut_pieces(ranges, fetches, fetched)

    def get_tail(self, path: str, length: int) -> StoredObject:
        return self._received(lambda one: self._inner.get_tail(one, length), path)

    def head(self, path: str) -> ObjectMeta:
        self._wait("head")
        return self._inner.head(path)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        self._wait("list")
        for number, found in enumerate(self._inner.list(prefix, after=after), start=1):
            if number > PAGE and number % PAGE == 1:
                self._wait("list")
            yield found

    def put(self, path: str, data: bytes) -> ObjectVersion:
        second_half = self._wait_half("put", sent=len(data))
        try:
            return self._inner.put(path, data)
        finally:
            time.sleep(second_half)

    def upload(self, path: str) -> Upload:
        return _LatentUpload(self, self._inner.upload(path))

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        second_half = self._wait_half("put", sent=len(data))
        try:
            return self._inner.put_if_absent(path, data, token=token)
        finally:
            time.sleep(second_half)

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        second_half = self._wait_half("put", sent=len(data))
        try:
            return self._inner.put_if_match(path, data, version, token=token)
        finally:
            time.sleep(second_half)

    def copy(self, source: str, destination: str) -> None:
        self._wait("copy")
        self._inner.copy(source, destination)

    def delete(self, path: str) -> None:
        self._wait("delete")
        self._inner.delete(path)

    def delete_many(self, paths: Iterable[str]) -> None:
        doomed = [*paths]
        for start in range(0, len(doomed), PAGE):
            self._wait("delete")
            self._inner.delete_many(doomed[start : start + PAGE])

    def sending(self, size: int, request: Callable[[], None]) -> None:
        """Make a request of an upload, which sends that many bytes."""
        second_half = self._wait_half("put", sent=size)
        try:
            request()
        finally:
            time.sleep(second_half)

    def _received(self, fetch: Callable[[str], StoredObject], path: str) -> StoredObject:
        try:
            found = fetch(path)
        except ObjectMissing:
            self._wait("get")
            raise
        self._wait("get", received=len(found.data))
        return found

    def _wait(self, kind: str, *, received: int = 0) -> None:
        time.sleep(self._count(kind, "received", received))

    def _wait_half(self, kind: str, *, sent: int) -> float:
        """Wait for the first half of a request; returns how long the other half is."""
        half = self._count(kind, "sent", sent) / 2
        time.sleep(half)
        return half

    def _count(self, kind: str, direction: str, size: int) -> float:
        """Count a request; returns the seconds it takes."""
        # A copy is a put of one of the service's own objects.
        wait: Wait = getattr(self._profile, "put" if kind == "copy" else kind)
        with self._lock:
            self.requests[kind] += 1
            self.moved[direction] += size
            seconds = wait.draw(self._source) + size / self._profile.bytes_per_second
            seconds /= self._profile.nearer
            self.longest_s = max(self.longest_s, seconds)
        return seconds


class _LatentUpload:
    """An upload whose parts are sent one after the other."""

    def __init__(self, store: LatencyStore, inner: Upload) -> None:
        self._store = store
        self._inner = inner

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    def write(self, start: int, part: Piece) -> None:
        self._store.sending(len(part), lambda: self._inner.write(start, part))

    def commit(self) -> None:
        self._store.sending(0, self._inner.commit)

    def abort(self) -> None:
        self._inner.abort()
