"""Retries, and the recognition of a conditional write that lost against its own first attempt.

A method that ends `Unavailable` is tried again, with growing pauses, until the policy's deadline. A full store is
retried for one second only, because waiting frees no room and garbage collection must not wait behind it.

A conditional write that is tried again can lose against itself: the first attempt was applied, only its answer
was lost, and the second finds the object there. So all attempts of one write carry the same token, and after
every lost race the store reads the winner's token:

    the winner's token is ours          success
    it is another writer's              lost: `ObjectExists` or `ObjectChanged`
    the store keeps none                a create whose bytes differ from the stored ones is lost
    anything else while in doubt        `Unavailable`: the outcome is unknown

A write is in doubt after an attempt ended `Unavailable` and the adapter did not exclude that it was applied.
Three cases stay unknown. Equal bytes prove nothing without a token: two writers that fence each other may write
the same bytes, and an empty fence is always the same. A swap that lost while in doubt may have been applied and
then replaced by a writer that built on it. A create whose object is gone again may have been applied and then
deleted.

An upload in parts repeats one part, or the commit, and both are harmless to repeat. When the store has lost the
parts, the upload ends `UploadLost` without another attempt: only the caller can make the bytes again.

An attempt that is given up may still arrive later. It carries its condition with it, so it can only do harm
where the condition has become true again: an object deleted since (the boundary protocol guards the metadata
against that), or, on S3, the same bytes restored under the same path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar

from flagstone.errors import InvalidRequest, Unavailable
from flagstone.runtime import metric_names
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Counter, Metrics
from flagstone.store.port import (
    NotWritten,
    ObjectChanged,
    ObjectExists,
    ObjectMeta,
    ObjectMissing,
    ObjectStore,
    ObjectVersion,
    Piece,
    Range,
    StoredObject,
    StoreFull,
    Upload,
    UploadLost,
    read_range_into,
)

_log = logging.getLogger("flagstone.store")
_T = TypeVar("_T")

_MAX_UNDECIDED: Final = 5
"""How often a refusal without a winner is repeated. A store that remembers deleted paths, as the two-phase store
does, refuses every time: that is its answer."""

_SILENT_S: Final = 0.5
"""A request that fails for so long is reported: a service that is busy answers after one or two pauses."""

_WARN_EVERY_S: Final = 10.0

_FULL_PATIENCE_S: Final = 1.0
"""How long to wait for room: another process may be deleting objects."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to retry. Pauses double from the initial to the longest one.

    `jitter` is the random fraction of each pause, so that many waiters do not retry together. `attempts` bounds
    the number of attempts; None leaves it to the deadline. The deadline bounds pauses, not the attempts
    themselves: those have the timeouts of the inner store.
    """

    deadline_s: float = 60.0
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    jitter: float = 0.5
    attempts: int | None = None

    def __post_init__(self) -> None:
        if self.deadline_s < 0 or self.initial_backoff_s < 0 or self.max_backoff_s < self.initial_backoff_s:
            raise InvalidRequest(f"{self} needs deadline_s >= 0 and 0 <= initial_backoff_s <= max_backoff_s")
        if not 0 <= self.jitter <= 1 or (self.attempts is not None and self.attempts < 1):
            raise InvalidRequest(f"{self} needs a jitter between 0 and 1 and attempts of at least 1")


@dataclass(slots=True)
class _Reported:
    """When the last warning was logged. Without a lock: two threads may both log one."""

    at: float | None = None


class RetryingStore:
    """A store that retries the requests of another one and recognises its own conditional writes.

    After a crash during a conditional write the next process learns the outcome by reading.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        policy: RetryPolicy | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        metrics: Metrics | None = None,
    ) -> None:
        self.inner = inner
        self.policy: RetryPolicy = policy or RetryPolicy()
        self.clock = clock
        self.ids = ids
        self.reported: _Reported = _Reported()
        self.retries: Counter = (metrics or Metrics()).counter(metric_names.OBJECT_STORE_RETRY_COUNT)
        self.count_repeat: Callable[[str, str], object] = _ignore

    def observed(self, count_repeat: Callable[[str, str], object]) -> RetryingStore:
        """The same store, which calls `count_repeat` with method and path before each request beyond the caller's own.

        These are attempts after the first one, and the reading of the object that won a lost race.
        """
        # Not `copy`, which would open the store again with another clock, as a pickle does.
        observed = object.__new__(RetryingStore)
        observed.__dict__.update(self.__dict__, count_repeat=count_repeat)
        return observed

    @property
    def url(self) -> str:
        return self.inner.url

    def __repr__(self) -> str:
        return f"RetryingStore({self.inner!r})"

    def __reduce__(self) -> tuple[object, tuple[ObjectStore, RetryPolicy]]:
        return (_reopen, (self.inner, self.policy))

    def get(self, path: str) -> StoredObject:
        return self._with_retries("get", path, lambda: self.inner.get(path))

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        return self._with_retries("get_if_changed", path, lambda: self.inner.get_if_changed(path, known))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._with_retries("get_range", path, lambda: self.inner.get_range(path, start, stop))

    def get_range_into(self, path: str, start: int, stop: int, memory: memoryview) -> bytes | memoryview:
        """See `port.read_range_into`."""
        return self._with_retries(
            "get_range", path, lambda: read_range_into(self.inner, path, start, stop, memory)
        )

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        return self._with_retries("get_ranges", path, lambda: self.inner.get_ranges(path, ranges))

    def get_tail(self, path: str, length: int) -> StoredObject:
        return self._with_retries("get_tail", path, lambda: self.inner.get_tail(path, length))

    def head(self, path: str) -> ObjectMeta:
        return self._with_retries("head", path, lambda: self.inner.head(path))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        """As the port says. A listing that breaks off continues after the last path it gave."""
        effort = _Effort(self, "list", prefix)
        while True:
            try:
                for meta in self.inner.list(prefix, after=after):
                    after = meta.path
                    # Each object is progress, so the deadline starts again; the consumer may be slow between objects.
                    effort = _Effort(self, "list", prefix)
                    yield meta
            except Unavailable as error:
                effort.pause(error)
            else:
                return

    def put(self, path: str, data: bytes) -> ObjectVersion:
        return self._with_retries("put", path, lambda: self.inner.put(path, data))

    def upload(self, path: str) -> Upload:
        return _RetryingUpload(self, path)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        token = token or self.ids.token()
        write = lambda: self.inner.put_if_absent(path, data, token=token)  # noqa: E731
        return self._settled(_Effort(self, "put_if_absent", path), write, data, token)

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        token = token or self.ids.token()
        write = lambda: self.inner.put_if_match(path, data, version, token=token)  # noqa: E731
        return self._settled(_Effort(self, "put_if_match", path), write, data, token, version)

    def copy(self, source: str, destination: str) -> None:
        self._with_retries("copy", source, lambda: self.inner.copy(source, destination))

    def delete(self, path: str) -> None:
        self._with_retries("delete", path, lambda: self.inner.delete(path))

    def delete_many(self, paths: Iterable[str]) -> None:
        wanted = list(paths)
        self._with_retries("delete_many", f"{len(wanted)} objects", lambda: self.inner.delete_many(wanted))

    def _with_retries(self, verb: str, path: str, request: Callable[[], _T]) -> _T:
        started = self.clock.monotonic()
        try:
            return request()
        except UploadLost:
            raise
        except Unavailable as error:
            effort = _Effort(self, verb, path, started)
            effort.pause(error)
        return effort.until_answered(request)

    def _settled(
        self,
        effort: _Effort,
        write: Callable[[], ObjectVersion],
        data: bytes,
        token: str,
        expected: ObjectVersion | None = None,
    ) -> ObjectVersion:
        while True:
            try:
                return write()
            except Unavailable as error:
                effort.in_doubt = effort.in_doubt or not isinstance(error, NotWritten)
                effort.pause(error)
                continue
            except (ObjectExists, ObjectChanged) as error:
                lost = error
            winner = effort.until_found("head", self._head_or_none)
            if winner is not None and winner.token == token:
                return winner.version
            if winner is None:
                undecided = isinstance(lost, ObjectExists) and not effort.in_doubt
            else:
                undecided = winner.version == expected
            if undecided and effort.undecided < _MAX_UNDECIDED:
                # No write won: services refuse like this while another request on the path is still undecided.
                effort.undecided += 1
                effort.pause(lost)
                continue
            if not effort.in_doubt:
                raise lost
            if isinstance(lost, ObjectExists) and winner is not None:
                if winner.token is not None:
                    raise lost
                there = effort.until_found("get", self._bytes_or_none)
                if there is not None and there != data:
                    raise lost
            effort.give_up("another write came after it or may equal it")

    def _head_or_none(self, path: str) -> ObjectMeta | None:
        try:
            return self.inner.head(path)
        except ObjectMissing:
            return None

    def _bytes_or_none(self, path: str) -> bytes | None:
        try:
            return self.inner.get(path).data
        except ObjectMissing:
            return None


class _RetryingUpload:
    def __init__(self, store: RetryingStore, path: str) -> None:
        self._store = store
        self._path = path
        self._inner = store.inner.upload(path)

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    def write(self, start: int, part: Piece) -> None:
        _Effort(self._store, "upload", self._path).until_answered(lambda: self._inner.write(start, part))

    def commit(self) -> None:
        _Effort(self._store, "upload", self._path).until_answered(self._inner.commit)

    def abort(self) -> None:
        self._inner.abort()


class _Effort:
    """One logical request: its attempts, its pauses and its final error."""

    __slots__ = ("_attempts", "_backoff_s", "_started", "_store", "in_doubt", "path", "undecided", "verb")

    def __init__(self, store: RetryingStore, verb: str, path: str, started: float | None = None) -> None:
        self._store = store
        self._started = store.clock.monotonic() if started is None else started
        self._attempts = 0
        self._backoff_s = store.policy.initial_backoff_s
        self.verb = verb
        self.path = path
        self.in_doubt = False
        self.undecided = 0

    def until_answered(self, request: Callable[[], _T]) -> _T:
        while True:
            try:
                return request()
            except UploadLost:
                raise
            except Unavailable as error:
                self.pause(error)

    def until_found(self, verb: str, read: Callable[[str], _T]) -> _T:
        """What the object at the path is, read by a request with another method."""
        while True:
            self._store.count_repeat(verb, self.path)
            try:
                return read(self.path)
            except Unavailable as error:
                self._wait(error)

    def pause(self, error: Unavailable | ObjectExists | ObjectChanged) -> None:
        """Wait before the next attempt, or raise when none is left. A lost race is raised as such, unless in doubt."""
        self._wait(error)
        self._store.count_repeat(self.verb, self.path)

    def _wait(self, error: Unavailable | ObjectExists | ObjectChanged) -> None:
        policy, clock = self._store.policy, self._store.clock
        self._attempts += 1
        pause_s = self._backoff_s * (1 - self._store.ids.uniform(0, policy.jitter))
        self._backoff_s = min(self._backoff_s * 2, policy.max_backoff_s)
        full = isinstance(error, StoreFull)
        deadline_s = min(policy.deadline_s, _FULL_PATIENCE_S) if full else policy.deadline_s
        out_of_time = clock.monotonic() - self._started + pause_s > deadline_s
        if out_of_time or self._attempts == policy.attempts:
            if isinstance(error, Unavailable) or self.in_doubt:
                self.give_up(str(error), cause=error)
            raise error
        self._store.retries.add()
        self._warn(error, clock.monotonic() - self._started)
        clock.sleep(pause_s)

    def give_up(self, reason: str, *, cause: Exception | None = None) -> NoReturn:
        elapsed_s = self._store.clock.monotonic() - self._started
        doubt = "; whether it was written is unknown" if self.in_doubt else ""
        outcome = StoreFull if isinstance(cause, StoreFull) and not self.in_doubt else Unavailable
        raise outcome(
            f"{self._cause(reason)}: {self.verb} of {self.path} in {self._store.url} failed after "
            f"{max(self._attempts, 1)} attempts in {elapsed_s:.1f} s{doubt}"
        ) from cause

    def _cause(self, reason: str) -> str:
        """The reason of a store without the request, which is named after it."""
        failed = f"{self.verb} of {self.path} failed"
        return reason.removeprefix(f"{failed}: ").removesuffix(f": {failed}")

    def _warn(self, error: Exception, elapsed_s: float) -> None:
        """Report a request that has been tried for half a second; of all requests of the store one in ten seconds."""
        store = self._store
        now = store.clock.monotonic()
        last = store.reported.at
        if elapsed_s < _SILENT_S or (last is not None and now - last < _WARN_EVERY_S):
            return
        store.reported.at = now
        _log.warning(
            "a request to the store fails, trying again error=%s request=%s path=%s store=%s attempts=%d",
            self._cause(str(error)),
            self.verb,
            self.path,
            store.url,
            self._attempts,
        )


def with_retries(store: ObjectStore, *, clock: Clock = SYSTEM_CLOCK, ids: Ids = SYSTEM_IDS) -> ObjectStore:
    """The store with retries; the store itself when it has them already."""
    return store if isinstance(store, RetryingStore) else RetryingStore(store, clock=clock, ids=ids)


def _ignore(verb: str, path: str) -> None:
    """A store that is not observed counts no repeats."""


def _reopen(inner: ObjectStore, policy: RetryPolicy) -> RetryingStore:
    return RetryingStore(inner, policy=policy)
