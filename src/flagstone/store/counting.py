"""Counts the requests, errors, seconds and bytes of a store.

A request here is a call of a method of `ObjectStore`. An adapter may need several network requests for one (a
long listing, many deletions). Wrap the adapter to count attempts; wrap the retrying store to count calls. What a
database costs includes the requests that the retrying store repeats or adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, TypedDict

from flagstone.errors import TransactionConflict
from flagstone.runtime import metric_names
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.metrics import Counter, Metrics
from flagstone.runtime.sync import Lock
from flagstone.store.cost import Component, component_of
from flagstone.store.port import (
    ObjectMeta,
    ObjectMissing,
    ObjectStore,
    ObjectVersion,
    Piece,
    Range,
    StoredObject,
    Upload,
    read_range_into,
)
from flagstone.store.retrying import RetryingStore

Direction = Literal["read", "write"]

OPERATIONS: Final = {
    "get": "get",
    "get_if_changed": "get",
    "get_range": "get",
    "get_ranges": "get",
    "get_tail": "get",
    "head": "head",
    "list": "list",
    "put": "put",
    "upload": "put",
    "put_if_absent": "put",
    "put_if_match": "put",
    "copy": "copy",
    "delete": "delete",
    "delete_many": "delete",
}
"""Method of `ObjectStore` -> kind of request, as services charge for it."""

_SLATEDB_LABELS: Final = {
    "get": ("get", "get"),
    "get_if_changed": ("get", "get"),
    "get_range": ("get", "get_range"),
    "get_ranges": ("get", "get_ranges"),
    "get_tail": ("get", "get_range"),
    "head": ("get", "head"),
    "list": ("get", "list"),
    "put": ("put", "put"),
    "upload": ("put", "put"),
    "put_if_absent": ("put", "put"),
    "put_if_match": ("put", "put"),
    "copy": ("put", "copy"),
    "delete": ("delete", "delete"),
    "delete_many": ("delete", "delete"),
}
"""Method of `ObjectStore` -> the labels `op` and `api` of SlateDB's metrics."""


class Totals(TypedDict):
    """The counts since the start or the last reset: requests and errors by method, bytes by direction."""

    requests: dict[str, int]
    errors: dict[str, int]
    bytes_read: int
    bytes_written: int


class CountingStore:
    """A store that counts the requests to another one.

    A missing object, a lost create and a lost swap are answers; only other exceptions count as errors. Counts
    live in memory. Pickles with the inner store and counts of zero.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        component: str,
        store_type: str = "main",
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._inner: ObjectStore = self._observed(inner)
        self._component = component
        self._store_type = store_type
        self.clock = clock
        self._lock = Lock()
        self._totals = _nothing()
        self._purpose: str | None = None
        self._attributed: dict[str, CountingStore] = {}
        self._registry = registry = metrics or Metrics()
        # A lookup in the registry takes as long as ten counts. Two threads that add the same counter get the same one.
        self._costs: dict[tuple[str, str, str], Counter] = {}
        labels = {"component": component, "store_type": store_type}
        self._instruments = {
            verb: (
                registry.counter(metric_names.OBJECT_STORE_REQUEST_COUNT, **labels, op=op, api=api),
                registry.counter(metric_names.OBJECT_STORE_ERROR_COUNT, **labels, op=op, api=api),
                registry.histogram(
                    metric_names.OBJECT_STORE_REQUEST_DURATION_SECONDS, **labels, op=op, api=api
                ),
            )
            for verb, (op, api) in _SLATEDB_LABELS.items()
        }
        self._bytes = {
            (op, direction): registry.counter(
                metric_names.OBJECT_STORE_BYTES, component=component, op=op, direction=direction
            )
            for op, direction in (("get", "read"), ("put", "write"))
        }

    @property
    def url(self) -> str:
        return self._inner.url

    def __repr__(self) -> str:
        return f"CountingStore({self._inner!r}, component={self._component!r})"

    def __reduce__(self) -> tuple[object, tuple[ObjectStore, str, str]]:
        return (_reopen, (self._inner, self._component, self._store_type))

    def attributed(self, purpose: Component) -> CountingStore:
        """The same store with the same counts, whose requests are for one purpose, whatever object they concern.

        Always the same object for a purpose: garbage collection compares the main store and that of the WAL.
        """
        found = self._attributed.get(purpose)
        if found is None:
            # Not `copy`, which counts from zero, as a pickle does.
            fresh = object.__new__(CountingStore)
            fresh.__dict__.update(self.__dict__, _purpose=purpose)
            fresh._inner = fresh._observed(self._inner)
            found = self._attributed.setdefault(purpose, fresh)
        return found

    def _observed(self, inner: ObjectStore) -> ObjectStore:
        return inner.observed(self._count_repeat) if isinstance(inner, RetryingStore) else inner

    @property
    def inner(self) -> ObjectStore:
        """The store that is counted."""
        return self._inner

    def by_kind(self) -> dict[str, int]:
        """The requests so far by the kinds of `OPERATIONS`."""
        found: dict[str, int] = {}
        for verb, count in self.totals()["requests"].items():
            found[OPERATIONS[verb]] = found.get(OPERATIONS[verb], 0) + count
        return found

    def totals(self) -> Totals:
        """The counts so far, as a plain dictionary; methods that were never called are left out."""
        with self._lock:
            counted = self._totals
            return Totals(
                requests=dict(counted["requests"]),
                errors=dict(counted["errors"]),
                bytes_read=counted["bytes_read"],
                bytes_written=counted["bytes_written"],
            )

    def reset(self) -> None:
        """Set the totals to zero. The metrics go on: a monitoring system expects counters to grow."""
        with self._lock:
            # In place, because `attributed` stores share it.
            self._totals.update(_nothing())

    def get(self, path: str) -> StoredObject:
        with self.counted("get", path):
            return self._received(self._inner.get(path), path)

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        with self.counted("get_if_changed", path):
            found = self._inner.get_if_changed(path, known)
            return None if found is None else self._received(found, path)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        with self.counted("get_range", path):
            piece = self._inner.get_range(path, start, stop)
            self._moved("read", len(piece), path)
            return piece

    def get_range_into(self, path: str, start: int, stop: int, memory: memoryview) -> bytes | memoryview:
        """See `port.read_range_into`."""
        with self.counted("get_range", path):
            piece = read_range_into(self._inner, path, start, stop, memory)
            self._moved("read", len(piece), path)
            return piece

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        with self.counted("get_ranges", path):
            pieces = self._inner.get_ranges(path, ranges)
            self._moved("read", sum(map(len, pieces)), path)
            return pieces

    def get_tail(self, path: str, length: int) -> StoredObject:
        with self.counted("get_tail", path):
            return self._received(self._inner.get_tail(path, length), path)

    def head(self, path: str) -> ObjectMeta:
        with self.counted("head", path):
            return self._inner.head(path)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        # The time until the first object: the pauses of the consumer between objects do not count.
        found = iter(self._inner.list(prefix, after=after))
        with self.counted("list", prefix):
            first = next(found, None)
        if first is not None:
            yield first
            yield from found

    def put(self, path: str, data: bytes) -> ObjectVersion:
        with self.counted("put", path):
            self.count_written(len(data), path)
            return self._inner.put(path, data)

    def upload(self, path: str) -> Upload:
        return _CountingUpload(self, self._inner.upload(path), path)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        with self.counted("put_if_absent", path):
            self.count_written(len(data), path)
            return self._inner.put_if_absent(path, data, token=token)

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        with self.counted("put_if_match", path):
            self.count_written(len(data), path)
            return self._inner.put_if_match(path, data, version, token=token)

    def copy(self, source: str, destination: str) -> None:
        with self.counted("copy", source):
            self._inner.copy(source, destination)

    def delete(self, path: str) -> None:
        with self.counted("delete", path):
            self._inner.delete(path)

    def delete_many(self, paths: Iterable[str]) -> None:
        given = list(paths)
        with self.counted("delete_many", given[0] if given else ""):
            self._inner.delete_many(given)

    def counted(self, api: str, path: str) -> _Request:
        """Count the request that the `with` block makes, its time, and its error if it has one."""
        return _Request(self, api, path)

    def count_request(self, api: str, path: str) -> None:
        """Count a request before it is made."""
        self._instruments[api][0].add()
        self._spent("requests", OPERATIONS[api], path).add()
        self._tally("requests", api)

    def _count_repeat(self, api: str, path: str) -> None:
        """Count a request that the retrying store makes by itself: the service charges for it."""
        self._spent("requests", OPERATIONS[api], path).add()

    def count_outcome(self, api: str, elapsed_s: float, *, failed: bool) -> None:
        """Count the time of a request, and the request as an error if it failed."""
        _, errors, durations = self._instruments[api]
        durations.record(elapsed_s)
        if failed:
            errors.add()
            self._tally("errors", api)

    def _tally(self, what: Literal["requests", "errors"], api: str) -> None:
        with self._lock:
            by_api = self._totals[what]
            by_api[api] = by_api.get(api, 0) + 1

    def _received(self, found: StoredObject, path: str) -> StoredObject:
        self._moved("read", len(found.data), path)
        return found

    def count_written(self, size: int, path: str) -> None:
        """Count bytes before the request that sends them: a failed request may have sent them, too."""
        self._moved("write", size, path)

    def _spent(self, what: Literal["requests", "bytes"], kind: str, path: str) -> Counter:
        """The counter of what a request costs; `kind` is one of `OPERATIONS`, or a direction."""
        component = self._purpose or component_of(path, reads=kind in ("get", "head", "read"))
        key = (what, component, kind)
        counter = self._costs.get(key)
        if counter is None:
            counter = self._costs[key] = (
                self._registry.counter(metric_names.COST_REQUESTS, component=component, kind=kind)
                if what == "requests"
                else self._registry.counter(metric_names.COST_BYTES, component=component, direction=kind)
            )
        return counter

    def _moved(self, direction: Direction, size: int, path: str) -> None:
        self._spent("bytes", direction, path).add(size)
        with self._lock:
            self._totals["bytes_read" if direction == "read" else "bytes_written"] += size
        self._bytes["get" if direction == "read" else "put", direction].add(size)


class _Request:
    """One request. Not a generator with `contextmanager`, which takes longer than all that it counts."""

    __slots__ = ("_api", "_path", "_started", "_store")

    def __init__(self, store: CountingStore, api: str, path: str) -> None:
        self._store = store
        self._api = api
        self._path = path

    def __enter__(self) -> None:
        self._store.count_request(self._api, self._path)
        self._started = self._store.clock.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        elapsed_s = self._store.clock.monotonic() - self._started
        failed = kind is not None and not issubclass(kind, (ObjectMissing, TransactionConflict))
        self._store.count_outcome(self._api, elapsed_s, failed=failed)


class _CountingUpload:
    """Counts each part and the commit as one request, as a service bills them."""

    def __init__(self, store: CountingStore, inner: Upload, path: str) -> None:
        self._store = store
        self._inner = inner
        self._path = path

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    def write(self, start: int, part: Piece) -> None:
        with self._store.counted("upload", self._path):
            self._store.count_written(len(part), self._path)
            self._inner.write(start, part)

    def commit(self) -> None:
        with self._store.counted("upload", self._path):
            self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()


def attributed(store: ObjectStore, purpose: Component) -> ObjectStore:
    """The store, whose requests are counted for one purpose if it counts them at all."""
    return store.attributed(purpose) if isinstance(store, CountingStore) else store


def _nothing() -> Totals:
    return Totals(requests={}, errors={}, bytes_read=0, bytes_written=0)


def _reopen(inner: ObjectStore, component: str, store_type: str) -> CountingStore:
    return CountingStore(inner, component=component, store_type=store_type)
