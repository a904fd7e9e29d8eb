"""The interface of an object store: fourteen methods, three ordinary outcomes, and the plan of range reads.

Every network request of the engine passes through `ObjectStore`. Adapters (memory, local folder, obstore)
implement it. Wrappers (retrying, counting, caching, two-phase) add one concern each and are stores themselves.

Three outcomes are ordinary answers and have classes of their own: the object is missing, the object already
exists, the object changed. Every other failure is `Unavailable` when no answer came or the service refuses for
now, and `InvalidRequest` for credentials, buckets and names.

After `Unavailable` a write may or may not have happened; only `RetryingStore` decides which. An adapter raises
`NotWritten`, a kind of `Unavailable`, when it is certain that nothing was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from flagstone.errors import InvalidRequest, TransactionConflict, Unavailable

T = TypeVar("T")

NEARBY: Final = ("file:", "memory:")
"""How the URLs of stores begin that answer without a network."""


class AccessRefused(InvalidRequest):
    """The service refuses the caller: credentials are missing, wrong, or do not allow the request."""


class ObjectMissing(InvalidRequest):
    """There is no object under that path."""

    def __init__(self, path: str) -> None:
        super().__init__(f"no object at {path}")
        self.path = path

    def __reduce__(self) -> tuple[type[ObjectMissing], tuple[str]]:
        return (type(self), (self.path,))


class ObjectExists(TransactionConflict):
    """`put_if_absent` lost: another writer's object is already there."""

    def __init__(self, path: str) -> None:
        super().__init__(f"an object already exists at {path}")
        self.path = path

    def __reduce__(self) -> tuple[type[ObjectExists], tuple[str]]:
        return (type(self), (self.path,))


class ObjectChanged(TransactionConflict):
    """`put_if_match` lost: the object is missing, or it is not the version that the caller read."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the object at {path} is not the version that was read")
        self.path = path

    def __reduce__(self) -> tuple[type[ObjectChanged], tuple[str]]:
        return (type(self), (self.path,))


class NotWritten(Unavailable):
    """The store cannot write for now, and this write left nothing behind."""


class StoreFull(NotWritten):
    """The store has no room left. Waiting does not help: collect garbage, or make room."""


class UploadLost(Unavailable):
    """An upload in parts cannot go on: what the store had of it is gone. Upload the object again from its beginning."""


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Names one version of one object, for conditional requests. Opaque: compare only for equality.

    S3 and Azure compare entity tags, GCS compares generations; an adapter fills in what its service returns.
    """

    etag: str | None = None
    generation: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """The metadata of an object.

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


Piece = bytes | bytearray | memoryview
"""Bytes on their way to a store; a view has one dimension."""

Range = tuple[int, int]
"""Half-open byte range (start, stop) with 0 <= start < stop."""

MAX_GAP_BYTES: Final = 256 * 1024
"""Reading this many unwanted bytes takes about as long as another request (10 ms at 25 MB/s)."""

MAX_FETCH_BYTES: Final = 16 * 1024 * 1024
"""Neighbours stay separate beyond this size, so that they can be fetched at the same time."""


class Upload(Protocol):
    """An object that reaches the store in parts and appears as a whole. One thread at a time uses it.

    No request is made before the first part, and nothing is visible before `commit`. A crash leaves parts that no
    listing shows: a staging file in a folder, an unfinished multipart upload on a service.
    """

    @property
    def part_bytes(self) -> int:
        """The size of a part that costs the store one request. Only the last part of an object may be smaller."""
        ...

    def write(self, start: int, part: Piece) -> None:
        """Add the next part, which begins at byte `start`. The caller may use its memory again afterwards.

        A part that the store already has is ignored, so a part whose answer was lost can be written again.

        Raises:
            UploadLost: the object must be uploaded again from its beginning.
            Unavailable: the same part may be written again.

        """
        ...

    def commit(self) -> None:
        """Create or replace the object. Atomic: readers see the old bytes or the new ones.

        Repeating it is harmless: after `Unavailable` the next call finds out whether the object was written.
        Raises `UploadLost` if it was not and cannot be.
        """
        ...

    def abort(self) -> None:
        """Discard the parts. Does nothing after a commit or an abort. A failed abort leaves what a crash leaves."""
        ...


class ObjectStore(Protocol):
    """A flat namespace of byte strings. All methods may be called from many threads at once.

    Paths are `/`-separated, without leading or trailing slash, without empty, `.` or `..` segments.
    """

    @property
    def url(self) -> str:
        """The address of the store, without any secret, for logs and errors."""
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
        """Several ranges of one object, in the order given; near ranges share a request."""
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

    def upload(self, path: str) -> Upload:
        """Begin to create or replace an object in parts. Makes no request."""
        ...

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        """Create; raises `ObjectExists` when there is an object already. At most one of several callers wins.

        After a deletion the path may be free again. A store that remembers deleted paths raises `ObjectExists`.

        The store keeps `token` with the object where it can (`head` returns it), so that a writer whose answer
        was lost can recognise its own object. A store may answer success when a write with a known token is
        repeated.
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
        """Remove the object; a missing object is no error."""
        ...

    def delete_many(self, paths: Iterable[str]) -> None:
        """Remove many objects in as few requests as the service allows; missing objects are no error."""
        ...


def read_range_into(
    store: ObjectStore, path: str, start: int, stop: int, memory: memoryview
) -> bytes | memoryview:
    """Bytes [start, stop) as `get_range` returns them, in `memory` if the store can put them there.

    Fresh memory for a large read costs as much as the read itself, because the system hands it out page by page. So a
    caller that reads much has memory of its own, of at least `stop - start` bytes. A store that has no method
    `get_range_into` returns new bytes, and so may any other one.
    """
    into = getattr(store, "get_range_into", None)
    if into is None:
        return store.get_range(path, start, stop)
    piece: bytes | memoryview = into(path, start, stop, memory)
    return piece


def find_inside(store: ObjectStore, kind: type[T]) -> T | None:
    """The store of that kind inside the wrappers of `store`, if there is one."""
    while not isinstance(store, kind):
        inner = getattr(store, "inner", None)
        if inner is None:
            return None
        store = inner
    return store


def check_path(path: str) -> str:
    """The path itself; raises `InvalidRequest` when no store can hold an object under it."""
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
    """The prefix with a closing slash ("" stays ""); raises `InvalidRequest` as `check_path` does."""
    return f"{check_path(prefix)}/" if prefix else ""


def check_range(path: str, start: int, stop: int) -> None:
    """Raise `InvalidRequest` unless 0 <= start <= stop."""
    if start < 0 or start > stop:
        raise InvalidRequest(f"byte range {start}..{stop} of {path} is not a range; need 0 <= start <= stop")


def _encodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def plan_fetches(ranges: Sequence[Range], *, max_gap_bytes: int = MAX_GAP_BYTES) -> list[Range]:
    """Few ranges, ascending and disjoint, that cover all non-empty `ranges`."""
    fetches: list[Range] = []
    for start, stop in sorted(wanted for wanted in ranges if wanted[0] < wanted[1]):
        if fetches:
            last_start, last_stop = fetches[-1]
            joined = max(stop, last_stop)
            near = start <= last_stop + max_gap_bytes and joined - last_start <= MAX_FETCH_BYTES
            if near or start < last_stop:
                fetches[-1] = (last_start, joined)
                continue
        fetches.append((start, stop))
    return fetches


def cut_pieces(ranges: Sequence[Range], fetches: Sequence[Range], fetched: Sequence[bytes]) -> list[bytes]:
    """The bytes of each of `ranges`, cut from the results of `plan_fetches`."""
    pieces = []
    for start, stop in ranges:
        piece = b""
        for (fetch_start, fetch_stop), content in zip(fetches, fetched, strict=True):
            if fetch_start <= start < fetch_stop:
                piece = content[start - fetch_start : stop - fetch_start]
                break
        pieces.append(piece if start < stop else b"")
    return pieces
