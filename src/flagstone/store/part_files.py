"""Pieces of objects in a folder on a fast disk, shared by any number of processes.

A part file is a header with one checksum per frame, then the bytes:

    magic, length of the bytes, checksum of the header     12 bytes, little endian
    checksum of each frame of 32 KiB                       4 bytes each
    the bytes

so that reading a few kilobytes verifies only the frames they lie in. The header's checksum starts from the
part's identity, so a file under a wrong name is as invalid as a torn one. Nothing is synced: power loss may leave
arbitrary bytes, and the checksums find them. A file gets its name when it is complete and never changes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

_HEADER: Final = struct.Struct("<4sII")
_MAGIC: Final = b"FSP1"
_FRAME_BYTES: Final = 32 * 1024
_UNFINISHED: Final = ".unfinished"

DESCRIPTION: Final = -1


class PartKey(NamedTuple):
    """Part `number` of the object at `path` in the store `url`, in parts of `part_bytes`.

    Part `DESCRIPTION` holds the metadata of the object instead of its bytes.
    """

    url: str
    path: str
    part_bytes: int
    number: int


class PartFile(NamedTuple):
    """A part file for eviction; `used_ns` is the time of the last read or write."""

    file: Path
    size: int
    used_ns: int


class Damaged(Exception):
    """The file is not the part that was written."""


def read_part(folder: Path, key: PartKey, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of the part, fewer when it ends before `stop`.

    Raises:
        FileNotFoundError: the part is not there.
        Damaged: the file does not match its checksums.

    """
    with open(_file(folder, key), "rb", buffering=0) as stream:  # noqa: PTH123 - hot path
        head = stream.read(_HEADER.size)
        if len(head) != _HEADER.size:
            raise Damaged
        magic, size, header_crc = _HEADER.unpack(head)
        frames = -(-size // _FRAME_BYTES)
        checksums = stream.read(4 * frames)
        if magic != _MAGIC or len(checksums) != 4 * frames or _header_crc(key, size, checksums) != header_crc:
            raise Damaged
        stop = min(stop, size)
        if start >= stop:
            return b""
        first, last = start // _FRAME_BYTES, (stop - 1) // _FRAME_BYTES
        base = _HEADER.size + 4 * frames
        wanted = min((last + 1) * _FRAME_BYTES, size) - first * _FRAME_BYTES
        content = os.pread(stream.fileno(), wanted, base + first * _FRAME_BYTES)
    if len(content) != wanted:
        raise Damaged
    view = memoryview(content)
    for number, frame in enumerate(range(first, last + 1)):
        piece = view[number * _FRAME_BYTES : (number + 1) * _FRAME_BYTES]
        if crc32(piece).to_bytes(4, "little") != checksums[4 * frame : 4 * frame + 4]:
            raise Damaged
    return content[start - first * _FRAME_BYTES : stop - first * _FRAME_BYTES]


class StagedPart(NamedTuple):
    """A part that is written but has no name yet; `publish` gives it one. A crash leaves it for `scan_parts`."""

    unfinished: Path
    file: Path
    size: int

    def publish(self) -> None:
        self.unfinished.replace(self.file)

    def discard(self) -> None:
        with suppress(OSError):
            self.unfinished.unlink()


def stage_part(folder: Path, key: PartKey, content: bytes, *, writer: str, now_ns: int) -> StagedPart:
    """Write the part to a file that no reader finds. `writer` must be unique among concurrent writers."""
    view = memoryview(content)
    checksums = b"".join(
        crc32(view[at : at + _FRAME_BYTES]).to_bytes(4, "little")
        for at in range(0, len(content), _FRAME_BYTES)
    )
    head = _HEADER.pack(_MAGIC, len(content), _header_crc(key, len(content), checksums))
    file = _file(folder, key)
    staged = StagedPart(
        file.with_name(f"{writer}{_UNFINISHED}"), file, len(head) + len(checksums) + len(content)
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with staged.unfinished.open("wb") as stream:
            stream.writelines((head, checksums, view))
        os.utime(staged.unfinished, ns=(now_ns, now_ns))
    except BaseException:
        staged.discard()
        raise
    return staged


def has_part(folder: Path, key: PartKey) -> bool:
    """Whether the part has a file, valid or not."""
    return _file(folder, key).exists()


def touch_part(folder: Path, key: PartKey, now_ns: int) -> None:
    """Record a use of the part. A missing part is not created."""
    with suppress(OSError):
        os.utime(_file(folder, key), ns=(now_ns, now_ns))


def drop_part(folder: Path, key: PartKey) -> None:
    """Remove one part; a missing part is no error."""
    with suppress(OSError):
        _file(folder, key).unlink()


def drop_object(folder: Path, url: str, path: str) -> None:
    """Remove all parts of an object, of any part size."""
    with suppress(OSError):
        for file in list(_object_folder(folder, url, path).iterdir()):
            if not file.name.endswith(_UNFINISHED):
                file.unlink(missing_ok=True)


def scan_parts(folder: Path, *, unfinished_before_ns: int) -> Iterator[PartFile]:
    """All parts, in no order. Removes unfinished files older than that, which crashed writers left."""
    for above, _, names in os.walk(folder):
        for name in names:
            file = Path(above, name)
            with suppress(OSError):
                status = file.stat()
                if not name.endswith(_UNFINISHED):
                    yield PartFile(file, status.st_size, status.st_mtime_ns)
                elif status.st_mtime_ns < unfinished_before_ns:
                    file.unlink()


def _header_crc(key: PartKey, size: int, checksums: bytes) -> int:
    return crc32(checksums, crc32(f"{key.url}\n{key.path}\n{key.part_bytes}\n{key.number}\n{size}".encode()))


def _object_folder(folder: Path, url: str, path: str) -> Path:
    name = blake2b(f"{url}\n{path}".encode(), digest_size=16).hexdigest()
    return folder / name[:2] / name[2:]


def _file(folder: Path, key: PartKey) -> Path:
    return _object_folder(folder, key.url, key.path) / f"{key.part_bytes}-{key.number}.part"
