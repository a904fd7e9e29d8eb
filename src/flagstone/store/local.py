"""Objects as files in a folder, sharing the folder with SlateDB's own local store.

Unlike SlateDB's store it makes acknowledged writes survive power loss (`fsync`) and supports compare-and-swap.

A file gets its final name only when it is complete. Until then it is a staging file called `<name>#<n>`, the
name that SlateDB gives its own unfinished files, so that each engine leaves the other's staging files out of
listings. A crash of the process at any point leaves each object whole, old or new, and at most a staging file,
which `sweep_staging` removes. With `fsync=False` power loss may lose or truncate acknowledged objects.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from flagstone.errors import FlagstoneError, InvalidRequest, Unavailable
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.sync import Lock
from flagstone.store.files import (
    Fill,
    create_staging,
    discard,
    is_staging,
    locked_folder,
    make_folder,
    parent_of,
    read_range,
    read_range_into,
    restamp,
    stage,
    status_or_none,
    sync_folder,
    walk,
    write_all,
)
from flagstone.store.port import (
    NotWritten,
    ObjectChanged,
    ObjectExists,
    ObjectMeta,
    ObjectMissing,
    ObjectVersion,
    Piece,
    Range,
    StoredObject,
    StoreFull,
    Upload,
    UploadLost,
    check_path,
    check_prefix,
    check_range,
)

_T = TypeVar("_T")

_MISSING: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_CALLERS_FAULT: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EBADF,  # a network file system that will not lock a folder
}
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}
_TOKENS_KEPT: Final = 4096
_WHOLE: Final = 1 << 62
"""A length that no file has."""
_PART_BYTES: Final = 128 * 1024
"""Larger parts make writing a file no faster."""


class LocalStore:
    """A folder as an object store, for any number of threads and processes of one machine.

    Versions never repeat: each write gets a modification time later than that of the object it replaces, and a random
    part below the millisecond where it replaces nothing. Only the store object that made a conditional write remembers
    its token. A write is in doubt only if its folder could not be synced, and then the same object tries again.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fsync: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        self._folder = str(Path(folder).absolute())
        self._base = self._folder.rstrip("/") + "/"
        self._fsync = fsync
        self._clock = clock
        self._ids = ids
        self._lock = Lock()
        self._tokens: dict[tuple[str, ObjectVersion], str] = {}
        self._last_stamp_ns = 0
        self._synced_folders: set[str] = set()

    @property
    def url(self) -> str:
        return Path(self._folder).as_uri()

    def __repr__(self) -> str:
        return f"LocalStore({self._folder!r}, fsync={self._fsync})"

    def __reduce__(self) -> tuple[object, tuple[str, bool]]:
        return (_reopen, (self._folder, self._fsync))

    def get(self, path: str) -> StoredObject:
        return self.get_tail(path, _WHOLE)

    def get_if_changed(self, path: str, known: ObjectVersion) -> StoredObject | None:
        return None if self.head(path).version == known else self.get(path)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self.get_ranges(path, ((start, stop),))[0]

    def get_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        for start, stop in ranges:
            check_range(path, start, stop)
        file = self._file(path)
        try:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                return [read_range(descriptor, start, stop) for start, stop in ranges]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _read_outcome(error, path) from error

    def get_range_into(self, path: str, start: int, stop: int, memory: memoryview) -> memoryview:
        """See `port.read_range_into`."""
        check_range(path, start, stop)
        file = self._file(path)
        try:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                return memory[: read_range_into(descriptor, start, memory[: stop - start])]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _read_outcome(error, path) from error

    def get_tail(self, path: str, length: int) -> StoredObject:
        file = self._file(path)
        try:
            descriptor = os.open(file, os.O_RDONLY)  # a file object costs more than the read
            try:
                status = os.fstat(descriptor)
                start = max(status.st_size - max(length, 0), 0)
                # At least one byte is read: some file systems report folders of size 0, and only reading fails.
                content = read_range(descriptor, start, max(status.st_size, 1))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _read_outcome(error, path) from error
        return StoredObject(content, self._describe(path, status))

    def head(self, path: str) -> ObjectMeta:
        status = self._status(path)
        if status is None:
            raise ObjectMissing(path)
        return self._describe(path, status)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        folder = check_prefix(prefix)
        try:
            for path, status in walk(self._base, folder, after):
                if not is_staging(path):
                    yield ObjectMeta(path, status.st_size, status.st_mtime_ns // 1_000_000, _version(status))
        except OSError as error:
            raise _read_outcome(error, prefix) from error

    def put(self, path: str, data: bytes) -> ObjectVersion:
        return self._replace(path, lambda stream: stream.write(data))

    def upload(self, path: str) -> Upload:
        return _LocalUpload(self, path, self._file(path))

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        file = self._file(path)
        staging = self._stage(path, file, lambda stream: stream.write(data))
        try:
            version = self._stamp(path, staging, None, token)
            os.link(staging, file)
        except FileExistsError as error:
            if Path(file).is_dir():
                raise InvalidRequest(
                    f"{path} in {self.url} is a folder; an object needs another name"
                ) from error
            return self._own_or(ObjectExists(path), path, token)
        except OSError as error:
            raise _write_outcome(error, path) from error
        finally:
            discard(staging)
        self._sync(path, file)
        return version

    def put_if_match(
        self, path: str, data: bytes, version: ObjectVersion, *, token: str | None = None
    ) -> ObjectVersion:
        return self._replace(path, lambda stream: stream.write(data), expected=version, token=token)

    def copy(self, source: str, destination: str) -> None:
        try:
            with open(self._file(source), "rb") as original:  # noqa: PTH123
                self._replace(destination, lambda stream: shutil.copyfileobj(original, stream, 1 << 20))
        except OSError as error:
            raise _read_outcome(error, source) from error

    def delete(self, path: str) -> None:
        """Remove the file; its folder stays.

        The folder is not synced: a file that comes back after power loss is garbage and is collected again.
        """
        file = self._file(path)
        try:
            with locked_folder(parent_of(file), exclusive=False):
                Path(file).unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in _MISSING:
                raise _write_outcome(error, path) from error

    def delete_many(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.delete(path)

    def now_ms(self) -> int:
        """The time that this store stamps objects with: this machine's."""
        return self._clock.now_ms()

    def free_bytes(self) -> int:
        """The free space on the disk; 2**62 when the system does not report it."""
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return 1 << 62

    def sweep_staging(
        self, older_than_ms: int, *, folder: str = "", dry_run: bool = False
    ) -> tuple[str, ...]:
        """Remove the staging files in `folder` that were not written to for that long; returns their paths.

        Crashed writers leave them. A writer whose file is swept while it still writes gets `NotWritten`.
        """
        horizon_ms = self._clock.now_ms() - older_than_ms
        try:
            left = tuple(
                path
                for path, status in walk(self._base, f"{folder}/" if folder else "", None)
                if is_staging(path) and status.st_mtime_ns // 1_000_000 <= horizon_ms
            )
            for path in () if dry_run else left:
                discard(self._base + path)
        except OSError as error:
            raise _read_outcome(error, self.url) from error
        return left

    def _replace(
        self, path: str, fill: Fill, *, expected: ObjectVersion | None = None, token: str | None = None
    ) -> ObjectVersion:
        file = self._file(path)
        staging = self._stage(path, file, fill)
        try:
            version = self._rename(path, staging, expected, token)
        except OSError as error:
            discard(staging)
            raise _write_outcome(error, path) from error
        if version is None:
            discard(staging)
            return self._own_or(ObjectChanged(path), path, token)
        self._sync(path, file)
        return version

    def _rename(
        self, path: str, staging: str, expected: ObjectVersion | None = None, token: str | None = None
    ) -> ObjectVersion | None:
        """Give a staging file the name of its object; None if the object is not the `expected` version."""
        file = self._file(path)
        # Unconditional writers share the lock: they must only not run between the comparison and the rename of a swap.
        with locked_folder(parent_of(file), exclusive=expected is not None):
            current = status_or_none(file)
            if expected is not None and (current is None or _version(current) != expected):
                return None
            version = self._stamp(path, staging, current, token)
            os.rename(staging, file)  # noqa: PTH104
            return version

    def _stage(self, path: str, file: str, fill: Fill) -> str:
        return self._in_folder(path, file, lambda: stage(file, fill, fsync=self._fsync))

    def _in_folder(self, path: str, file: str, create: Callable[[], _T]) -> _T:
        """What `create` returns, which makes a staging file; the folder of the file exists by then."""
        folder = parent_of(file)
        try:
            if self._fsync and folder not in self._synced_folders:
                self._make_folder(folder)
            try:
                return create()
            except FileNotFoundError:
                self._make_folder(folder)
                return create()
        except OSError as error:
            raise self._staging_outcome(error, path) from error

    def _staging_outcome(self, error: OSError, path: str) -> FlagstoneError:
        problem = f"cannot write {path} in {self.url}: {error.strerror}"
        if error.errno in _CALLERS_FAULT | _MISSING | {errno.EEXIST}:
            return InvalidRequest(problem)
        return StoreFull(problem) if error.errno in _NO_ROOM else NotWritten(problem)

    def _make_folder(self, folder: str) -> None:
        make_folder(folder, root=self._folder, fsync=self._fsync)
        with self._lock:
            self._synced_folders.add(folder)

    def _stamp(
        self, path: str, staging: str, replaced: os.stat_result | None, token: str | None
    ) -> ObjectVersion:
        """Give the staged file a version that no other file of that name ever had, and remember its token."""
        replaced_ns = -1 if replaced is None else replaced.st_mtime_ns
        with self._lock:
            now_ns = self._clock.now_ms() * 1_000_000 + int(self._ids.uniform(0, 1_000_000))
            stamp_ns = self._last_stamp_ns = max(now_ns, self._last_stamp_ns + 1, replaced_ns + 1)
        version = _version(restamp(staging, stamp_ns, later_than_ns=replaced_ns))
        if token is not None:
            # Before the rename: after a failure between the two the store would not recognise its own write.
            with self._lock:
                self._tokens[path, version] = token
                if len(self._tokens) > _TOKENS_KEPT:
                    del self._tokens[next(iter(self._tokens))]
        return version

    def _own_or(self, lost: ObjectExists | ObjectChanged, path: str, token: str | None) -> ObjectVersion:
        """The version of the object if this write made it, synced now; otherwise raises `lost`.

        A write loses against itself only when the folder could not be synced at its first attempt.
        """
        status = self._status(path)
        if status is None or token is None or self._tokens.get((path, _version(status))) != token:
            raise lost
        self._sync(path, self._file(path))
        return _version(status)

    def _sync(self, path: str, file: str) -> None:
        if self._fsync:
            try:
                sync_folder(parent_of(file))
            except OSError as error:
                raise Unavailable(
                    f"{path} in {self.url} may not survive power loss: {error.strerror}"
                ) from error

    def _status(self, path: str) -> os.stat_result | None:
        file = self._file(path)
        try:
            status = status_or_none(file)
        except OSError as error:
            raise _read_outcome(error, path) from error
        # Folders are not objects.
        return None if status is None or status.st_mode & 0o170000 == 0o040000 else status

    def _describe(self, path: str, status: os.stat_result) -> ObjectMeta:
        version = _version(status)
        token = self._tokens.get((path, version)) if self._tokens else None
        return ObjectMeta(path, status.st_size, status.st_mtime_ns // 1_000_000, version, token)

    def _file(self, path: str) -> str:
        if is_staging(check_path(path)):
            raise InvalidRequest(
                f"object path {path!r} ends in '#' and digits, which is the name of an unfinished file"
            )
        return self._base + path


class _LocalUpload:
    """A staging file that grows, and gets the name of its object when it is complete.

    The descriptor is open from the first part to the end. If the upload is dropped without an end, as an interrupt may
    do, the staging file is removed with it.
    """

    part_bytes = _PART_BYTES
    # The deletion of an object whose `__init__` was interrupted reads them.
    _staging: tuple[str, int] | None = None
    _renamed = False
    _ended = False

    def __init__(self, store: LocalStore, path: str, file: str) -> None:
        self._store = store
        self._path = path
        self._file = file

    def write(self, start: int, part: Piece) -> None:
        staging = self._staging
        if staging is None:
            self._check_open()
            staging = self._staging = self._store._in_folder(  # noqa: SLF001
                self._path, self._file, lambda: create_staging(self._file)
            )
        try:
            write_all(staging[1], start, part)
        except OSError as error:
            raise self._store._staging_outcome(error, self._path) from error  # noqa: SLF001

    def commit(self) -> None:
        if not self._renamed:
            self._check_open()
            if self._staging is None:
                self.write(0, b"")
            self._rename()
        self._store._sync(self._path, self._file)  # noqa: SLF001
        self.abort()

    def abort(self) -> None:
        self._ended = True
        staging, self._staging = self._staging, None
        if staging is not None:
            os.close(staging[1])
            if not self._renamed:
                discard(staging[0])

    def __del__(self) -> None:
        if self._staging is not None:
            name, descriptor = self._staging
            os.close(descriptor)
            if not self._renamed:
                with suppress(OSError):
                    os.unlink(name)  # noqa: PTH108

    def _rename(self) -> None:
        assert self._staging is not None
        name, descriptor = self._staging
        try:
            if self._store._fsync:  # noqa: SLF001
                os.fsync(descriptor)
            self._store._rename(self._path, name)  # noqa: SLF001
        except FileNotFoundError:
            # A rename that failed, as far as its caller could see, may have been done. The descriptor knows the file.
            status = status_or_none(self._file)
            if status is None or not os.path.samestat(status, os.fstat(descriptor)):
                raise UploadLost(
                    f"the staging file of {self._path} was swept before it was complete"
                ) from None
        except OSError as error:
            raise _write_outcome(error, self._path) from error
        self._renamed = True

    def _check_open(self) -> None:
        if self._ended:
            raise UploadLost(f"the upload of {self._path} has ended")


def _reopen(folder: str, fsync: bool) -> LocalStore:
    return LocalStore(folder, fsync=fsync)


def _version(status: os.stat_result) -> ObjectVersion:
    return ObjectVersion(etag=f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"')


def _read_outcome(error: OSError, path: str) -> FlagstoneError:
    if error.errno in _MISSING:
        return ObjectMissing(path)
    if error.errno in _CALLERS_FAULT:
        return InvalidRequest(f"cannot read {path}: {error.strerror}")
    return Unavailable(f"cannot read {path}: {error.strerror}")


def _write_outcome(error: OSError, path: str) -> FlagstoneError:
    """The error for a failed link, rename or unlink, which may have happened unless the errno excludes it."""
    if error.errno == errno.ENOENT:
        return NotWritten(f"the staging file of {path} was swept before it was complete")
    if error.errno in _NO_ROOM:
        # A new name needs room in its folder, so the file was not linked.
        return StoreFull(f"cannot write {path}: {error.strerror}")
    if error.errno in _CALLERS_FAULT | _MISSING:
        return InvalidRequest(f"cannot write {path}: {error.strerror}")
    return Unavailable(f"cannot write {path}: {error.strerror}")
