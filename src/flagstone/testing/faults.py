"""A store that fails at the calls a test names.

    FaultyStore(inner, [Fault(nth=7, effect="lost_reply")])              the seventh call of any kind
    FaultyStore(inner, [Fault(op="put_if_absent", path="*/manifest/*", nth=1, effect="error")])

The effects: `error` fails before the request is sent. `lost_reply` sends the request and then fails. `slow` waits
`delay_s` of the clock before the request. `crash` simulates the death of the process: that call and all later ones
raise `Crashed`, which no production code catches. `crash_after` sends the request of that one call first.

The calls of an upload are `upload_part`, `upload_commit` and `upload_abort`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Literal, TypeVar

from flagstone.errors import FlagstoneError, Unavailable
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.sync import Lock
from flagstone.store.port import ObjectMeta, ObjectStore, ObjectVersion, Piece, Range, StoredObject, Upload

Effect = Literal["error", "lost_reply", "slow", "crash", "crash_after"]
T = TypeVar("T")


class Crashed(BaseException):
    """The process has crashed. Not an `Exception`, so that only a test catches it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Applies `effect` to the `nth` call (from 1) that matches `op` and `path`; with `nth=None` to every one."""

    effect: Effect
    nth: int | None = 1
    op: str = "*"
    path: str = "*"
    delay_s: float = 0.0

    def matches(self, op: str, path: str) -> bool:
        return fnmatch(op, self.op) and fnmatch(path, self.path)


class FaultyStore:
    """A store with faults. `calls` lists every call as (op, path), so that a test can make each of them fail."""

    def __init__(
        self, inner: ObjectStore, faults: Iterable[Fault] = (), *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.inner = inner
        self.faults: list[Fault] = list(faults)
        self.calls: list[tuple[str, str]] = []
        self.dead: bool = False
        self._clock = clock
        self._lock = Lock()
        self._seen: dict[int, int] = {}

    @property
    def url(self) -> str:
        return self.inner.url

    def crash(self) -> None:
        """From now on every call raises `Crashed`."""
        self.dead = True

    def get(self, path: str) -> StoredObject:
        return self._call("get", path, lambda: self.inner.get(path))

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        return self._call("get_if_changed", path, lambda: self.inner.get_if_changed(path, known))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._call("get_range", path, lambda: self.inner.get_range(path, start, stop))

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        return self._call("get_ranges", path, lambda: self.inner.get_ranges(path, ranges))

    def get_tail(self, path: str, length: int) -> StoredObject:
        return self._call("get_tail", path, lambda: self.inner.get_tail(path, length))

    def head(self, path: str) -> ObjectMeta:
        return self._call("head", path, lambda: self.inner.head(path))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        return iter(self._call("list", prefix, lambda: [*self.inner.list(prefix, after=after)]))

    def put(self, path: str, data: bytes) -> ObjectVersion:
        return self._call("put", path, lambda: self.inner.put(path, data))

    def upload(self, path: str) -> Upload:
        return _FaultyUpload(self.inner.upload(path), partial(self._call, path=path))

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        return self._call("put_if_absent", path, lambda: self.inner.put_if_absent(path, data, token=token))

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        return self._call(
            "put_if_match", path, lambda: self.inner.put_if_match(path, data, version, token=token)
        )

    def copy(self, source: str, destination: str) -> None:
        self._call("copy", source, lambda: self.inner.copy(source, destination))

    def delete(self, path: str) -> None:
        self._call("delete", path, lambda: self.inner.delete(path))

    def delete_many(self, paths: Iterable[str]) -> None:
        doomed = [*paths]
        self._call("delete_many", ",".join(doomed), lambda: self.inner.delete_many(doomed))

    def _call(self, op: str, path: str, request: Callable[[], T]) -> T:
        fault = self._next_fault(op, path)
        if fault is None:
            return request()
        if fault.effect == "slow":
            self._clock.sleep(fault.delay_s)
            return request()
        if fault.effect in ("crash_after", "lost_reply"):
            # The caller does not learn the outcome, not even that the store refused the request.
            with suppress(FlagstoneError):
                request()
        if fault.effect in ("crash", "crash_after"):
            self.dead = True
            raise Crashed(f"{op} {path}")
        raise Unavailable(f"injected {fault.effect} at {op} {path}")

    def _next_fault(self, op: str, path: str) -> Fault | None:
        with self._lock:
            if self.dead:
                raise Crashed(f"{op} {path} after the crash")
            self.calls.append((op, path))
            for index, fault in enumerate(self.faults):
                if fault.matches(op, path):
                    self._seen[index] = self._seen.get(index, 0) + 1
                    if fault.nth is None or self._seen[index] == fault.nth:
                        return fault
        return None


class _FaultyUpload:
    def __init__(self, inner: Upload, call: Callable[..., None]) -> None:
        self._inner = inner
        self._call = call

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    def write(self, start: int, part: Piece) -> None:
        self._call("upload_part", request=lambda: self._inner.write(start, part))

    def commit(self) -> None:
        self._call("upload_commit", request=self._inner.commit)

    def abort(self) -> None:
        self._call("upload_abort", request=self._inner.abort)
