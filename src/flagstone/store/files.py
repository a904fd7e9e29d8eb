"""Files in a folder: staging files, the folder's lock, versions by modification time, walking in path order.

A staging file is one that is still being written. It is called `<name>#<n>`, as SlateDB calls its own.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import BinaryIO, Final

from flagstone.store.port import Piece

Fill = Callable[[BinaryIO], object]
"""Writes the contents of a new file."""

_STAGING: Final = re.compile(r"#[0-9]+\Z")


def is_staging(name: str) -> bool:
    """Whether Flagstone and SlateDB take a file of that name for one that is still being written."""
    return "#" in name and _STAGING.search(name) is not None


def parent_of(file: str) -> str:
    """The folder of an absolute path."""
    return file.rpartition("/")[0] or "/"


def make_folder(folder: str, *, root: str, fsync: bool) -> None:
    """Create `folder` and its parents; with `fsync` they survive power loss once this returns.

    Folders below `root` are synced even when they exist: the process that made them may have died before that.
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
    staging, descriptor = create_staging(file)
    try:
        with BufferedWriter(FileIO(descriptor, "wb")) as stream:  # `os.fdopen` takes four times as long
            fill(stream)
            if fsync:
                stream.flush()
                os.fsync(descriptor)
    except BaseException:
        discard(staging)
        raise
    return staging


def write_all(descriptor: int, start: int, piece: Piece) -> None:
    """Write all bytes of `piece` at `start` of an open file."""
    with memoryview(piece) as rest:
        done = 0
        while done < len(rest):
            done += os.pwrite(descriptor, rest[done:], start + done)


def discard(file: str) -> None:
    """Remove a staging file. `sweep_staging` removes it later if this fails."""
    with suppress(OSError):
        os.unlink(file)  # noqa: PTH108 - a Path costs more than the call


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

    The lock is on the folder itself: there is no lock file, and two stores with different roots use the same
    lock. The operating system releases it when the process dies.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def status_or_none(file: str) -> os.stat_result | None:
    """The file's status; None when there is no such file."""
    try:
        return os.stat(file)  # noqa: PTH116 - this is the hot path, and a Path costs more than the call
    except (FileNotFoundError, NotADirectoryError):
        return None


def restamp(file: str, stamp_ns: int, *, later_than_ns: int) -> os.stat_result:
    """Set the modification time to `stamp_ns`, as precisely as the file system can, and return the status.

    Some file systems round times. The stamp is raised by the next coarser unit until the stored time is later
    than `later_than_ns`.
    """
    for step_ns in (0, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000):
        wanted_ns = stamp_ns + step_ns
        os.utime(file, ns=(wanted_ns, wanted_ns))
        status = os.stat(file)  # noqa: PTH116
        if status.st_mtime_ns > later_than_ns:
            break
    return status


def read_range(descriptor: int, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of an open file, fewer when the file ends before `stop`."""
    if stop - start > 1 << 20:
        # `pread` allocates as many bytes as it is asked for, even when the file is shorter.
        stop = min(stop, os.fstat(descriptor).st_size)
    pieces = []
    while start < stop and (piece := os.pread(descriptor, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_range_into(descriptor: int, start: int, memory: memoryview) -> int:
    """Fill `memory` with the bytes of an open file from `start` on; returns how many there are."""
    os.lseek(descriptor, start, os.SEEK_SET)  # not every system has `preadv`
    done = 0
    while done < len(memory) and (size := os.readv(descriptor, [memory[done:]])):
        done += size
    return done


def walk(base: str, folder: str, after: str | None) -> Iterator[tuple[str, os.stat_result]]:
    """The paths of all files below `folder` that are greater than `after`, ascending, staging files included.

    `base` is the store's root and `folder` a path in it, each "" or with a closing slash. A folder sorts as
    its name with the slash, so that "a-b/x" comes before "a/x".
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


def create_staging(file: str) -> tuple[str, int]:
    """The name and the descriptor of a new and empty staging file beside `file`."""
    number = 1
    while True:
        staging = f"{file}#{number}"
        try:
            return staging, os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            number += 1
