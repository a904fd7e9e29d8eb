"""What the folder store asks of the operating system: staging files, locks, syncs and walks.

A file gets its final name only when it is complete. Until then it is called `<name>#<n>`, the name that
SlateDB gives its own unfinished files, so that both engines leave each other's staging files out of listings.
A crash at any point leaves at most such a staging file behind.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

Fill = Callable[[BinaryIO], object]
"""Writes the contents of a new file."""

_STAGING: Final = re.compile(r"#[0-9]+\Z")


def is_staging(name: str) -> bool:
    """Whether a file of that name is, to us and to SlateDB, one still being written."""
    return _STAGING.search(name) is not None


def parent_of(file: str) -> str:
    """The folder of an absolute path."""
    return file.rpartition("/")[0] or "/"


def make_folder(folder: str, *, root: str, fsync: bool) -> None:
    """Create `folder` with all it lies in; with `fsync` they survive power loss once this returns.

    Folders below `root` are synced even when they were there: whoever made them may have died before it.
    """
    topmost = root
    while not Path(topmost).is_dir():
        topmost = parent_of(topmost)
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    while fsync and len(folder) > len(topmost):
        folder = parent_of(folder)
        sync_folder(folder)


def stage(file: str, fill: Fill, *, fsync: bool) -> str:
    """Write a complete staging file beside `file` and return its name; on any error nothing is left.

    With `fsync` its bytes survive power loss once this returns.
    """
    staging, descriptor = _create_staging(file)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            fill(stream)
            if fsync:
                stream.flush()
                os.fsync(descriptor)
    except BaseException:
        discard(staging)
        raise
    return staging


def discard(file: str) -> None:
    """Remove a file nobody will miss. One that cannot be removed is left to the sweep."""
    with suppress(OSError):
        Path(file).unlink()


def sync_folder(folder: str) -> None:
    """Make the names in `folder` survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: str, *, exclusive: bool) -> Iterator[None]:
    """Hold the folder's lock, which excludes all threads and processes of this machine.

    The lock is on the folder itself, so there is no lock file to hide, leak or delete, and two stores whose
    roots differ agree on it. The kernel releases it when the process dies.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def status_or_none(file: str) -> os.stat_result | None:
    """The file's status, or None when there is no such file."""
    try:
        return os.stat(file)  # noqa: PTH116 - this is the hot path, and a Path costs more than the call
    except (FileNotFoundError, NotADirectoryError):
        return None


def restamp(file: str, stamp_ns: int, *, later_than_ns: int) -> os.stat_result:
    """Set the modification time to `stamp_ns`, or to what the file system keeps of it, and return the status.

    Some file systems round times. The result is later than `later_than_ns` all the same: the stamp is raised
    by the next coarser unit until it is.
    """
    for step_ns in (0, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000):
        wanted_ns = stamp_ns + step_ns
        os.utime(file, ns=(wanted_ns, wanted_ns))
        status = os.stat(file)  # noqa: PTH116
        if status.st_mtime_ns > later_than_ns:
            break
    return status


def read_range(descriptor: int, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of an open file, as far as it goes."""
    if stop - start > 1 << 20:
        # A caller may ask for more than there is; do not set memory aside for it.
        stop = min(stop, os.fstat(descriptor).st_size)
    pieces = []
    while start < stop and (piece := os.pread(descriptor, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def walk(base: str, folder: str, after: str | None) -> Iterator[tuple[str, os.stat_result]]:
    """The paths of all files below `folder` that are greater than `after`, ascending, staging files included.

    `base` is the store's root and `folder` a path in it, each "" or with a closing slash. A folder sorts as
    its name with the slash, which is what makes "a-b/x" come before "a/x".
    """
    try:
        with os.scandir(base + folder) as entries:
            names = sorted(entry.name + "/" if entry.is_dir() else entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = folder + name
        if name.endswith("/"):
            if after is None or after < path or after.startswith(path):
                yield from walk(base, path, after)
        elif (after is None or path > after) and (status := status_or_none(base + path)) is not None:
            yield path, status


def _create_staging(file: str) -> tuple[str, int]:
    number = 1
    while True:
        staging = f"{file}#{number}"
        try:
            return staging, os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            number += 1
