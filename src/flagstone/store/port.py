"""The object store as the engine sees it: twelve verbs, four outcomes.

Everything that reaches the network passes through this port. Adapters (memory, local folder, obstore) give
it a body; wrappers (retrying, counting, caching, two-phase) add one concern each and are stores themselves.

Three outcomes are ordinary answers, not failures, and have classes of their own: the object is missing, the
object already exists, the object changed. Everything else is one of the six public kinds: `Unavailable` when
the answer is missing or the service refuses for now, `InvalidRequest` for credentials, buckets and names.

After `Unavailable` a write may or may not have happened. `RetryingStore` settles that question; nobody
else should guess. `NotWritten` is the `Unavailable` of an adapter that knows nothing was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flagstone.errors import InvalidRequest, TransactionConflict, Unavailable

T = TypeVar("T")


class AccessRefused(InvalidRequest):
    """The service does not take who asks: credentials are missing, wrong, or do not allow this."""


class ObjectMissing(InvalidRequest):
    """There is no object under that path."""

    def __init__(self, path: str) -> None:
        super().__init__(f"no object at {path}")
        self.path = path

    def __reduce__(self) -> tuple[type[ObjectMissing], tuple[str]]:
        return (type(self), (self.path,))


class ObjectExists(TransactionConflict):
    """`put_if_absent` lost: somebody else's object is already there."""

    def __init__(self, path: str) -> None:
        super().__init__(f"an object already exists at {path}")
        self.path = path

    def __reduce__(self) -> tuple[type[ObjectExists], tuple[str]]:
        return (type(self), (self.path,))


class ObjectChanged(TransactionConflict):
    """`put_if_match` lost: the object is missing or no longer the version that was read."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the object at {path} is not the version that was read")
        self.path = path

    def __reduce__(self) -> tuple[type[ObjectChanged], tuple[str]]:
        return (type(self), (self.path,))


class NotWritten(Unavailable):
    """The store cannot write for now, and this write certainly left nothing behind."""


class StoreFull(NotWritten):
    """The store has no room left. Waiting does not help, only deleting does: collect garbage, or make room."""


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Names one version of one object, for conditional requests. Opaque: compare only for equality.

    S3 and Azure compare entity tags, GCS compares generations; an adapter fills in what its service knows.
    """

    etag: str | None = None
    generation: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What a store tells of an object without its bytes.

    `token` is the write token its writer attached (see `put_if_absent`), or None where the store
    keeps none or the call did not fetch it (`list` never does).
    """

    path: str
    size: int
    last_modified_ms: int
    version: ObjectVersion
    token: str | None = None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Bytes of an object (all of them, or the requested tail) with its description."""

    data: bytes
    meta: ObjectMeta


Range = tuple[int, int]
"""Half-open byte range (start, stop) with 0 <= start < stop."""


class ObjectStore(Protocol):
    """A flat namespace of immutable byte strings. All methods may be called from many threads at once.

    Paths are `/`-separated, without leading or trailing slash, without empty, `.` or `..` segments.
    """

    @property
    def url(self) -> str:
        """Where the store is, without any secret: fit for logs and errors."""
        ...

    def get(self, path: str) -> StoredObject:
        """The whole object. Raises `ObjectMissing`."""
        ...

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        """The whole object, or None when it still is the `known` version. Raises `ObjectMissing`."""
        ...

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop), shorter when the object ends before; empty when `start` is at or past its end.

        Raises `ObjectMissing`, and `InvalidRequest` for a negative start or start > stop.
        """
        ...

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        """Several ranges of one object, in the order asked, neighbours coalesced into few requests."""
        ...

    def get_tail(self, path: str, length: int) -> StoredObject:
        """The last `length` bytes (all of a shorter object) with the metadata of the whole.

        Raises `ObjectMissing`.
        """
        ...

    def head(self, path: str) -> ObjectMeta:
        """Metadata with the write token, where the store keeps one. Raises `ObjectMissing`."""
        ...

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects below the folder `prefix` ("" is the whole store), ascending by path.

        `prefix` matches whole segments: "a/b" finds "a/b/c", not "a/bc". `after` is a full path; only
        greater ones are returned. Objects still being written are never listed.
        """
        ...

    def put(self, path: str, data: bytes) -> ObjectVersion:
        """Create or replace. Atomic: readers see the old bytes or the new ones."""
        ...

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        """Create; raises `ObjectExists` when there is an object already. Of several callers at most one wins.

        After a deletion the path may be free again or, on stores that remember, spent for good: `ObjectExists`.

        `token` is kept with the object where the store can (`head` returns it), so that a writer whose
        answer was lost can recognise its own work. A store may answer the repetition of a write that it
        knows by its token with success.
        """
        ...

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        """Replace exactly the version that was read; raises `ObjectChanged` otherwise, also when missing."""
        ...

    def copy(self, source: str, destination: str) -> None:
        """Copy inside the store, replacing the destination. Raises `ObjectMissing` for the source."""
        ...

    def delete(self, path: str) -> None:
        """Remove the object; a missing one is fine."""
        ...

    def delete_many(self, paths: Iterable[str]) -> None:
        """Remove many objects in as few requests as the service allows; missing ones are fine."""
        ...


def find_inside(store: ObjectStore, kind: type[T]) -> T | None:
    """The store of that kind inside the wrappers of `store`, if there is one."""
    while not isinstance(store, kind):
        inner = getattr(store, "inner", None)
        if inner is None:
            return None
        store = inner
    return store


def check_path(path: str) -> str:
    """The path itself, or `InvalidRequest` telling what is wrong with it."""
    if not path:
        raise InvalidRequest("an object path must not be empty")
    if "\0" in path or not (path.isascii() or _encodable(path)):
        raise InvalidRequest(f"object path {path!r} has a character that no store can keep in a name")
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidRequest(
                f"object path {path!r} has an empty, '.' or '..' segment; use names joined by single slashes"
            )
    return path


def check_prefix(prefix: str) -> str:
    """The prefix itself with its closing slash ("" stays ""), or `InvalidRequest` telling what is wrong."""
    return f"{check_path(prefix)}/" if prefix else ""


def check_range(path: str, start: int, stop: int) -> None:
    """Refuse ranges no store could serve."""
    if start < 0 or start > stop:
        raise InvalidRequest(f"byte range {start}..{stop} of {path} is not a range; need 0 <= start <= stop")


def _encodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
