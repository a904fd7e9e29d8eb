"""The checksum of a manifest or a compactions file, after the bytes that SlateDB reads.

The format has none. Bytes after a FlatBuffers buffer are not part of it, so a file of ours ends with

    magic (8 bytes) | BLAKE2b of the file's name and of all bytes before the magic (16 bytes)

and SlateDB ignores the trailer. The name is in the checksum, the folder is not: a file under the name of another file
is damage, a copied database is not. Files that SlateDB wrote have no trailer and are decoded strictly instead
(`flat.decode`): a damaged trailer is then found as bytes that belong to nothing.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from flagstone.errors import CorruptData

_MAGIC: Final = b"\xf1agsum1\n"
_DIGEST_BYTES: Final = 16
TRAILER_BYTES: Final = len(_MAGIC) + _DIGEST_BYTES


def seal_metadata(data: bytes, path: str) -> bytes:
    """The bytes to store at `path`: those of the format, then their checksum."""
    return b"".join((data, _MAGIC, _digest(data, path)))


def unseal_metadata(stored: bytes, path: str) -> tuple[memoryview, bool]:
    """The bytes of the format in the object at `path`, and whether they have a checksum.

    They are a view, because a copy of a large manifest takes long. Raises `CorruptData` naming the object when the
    checksum is wrong.
    """
    if stored[-TRAILER_BYTES:-_DIGEST_BYTES] != _MAGIC:
        return memoryview(stored), False
    data = memoryview(stored)[:-TRAILER_BYTES]
    if _digest(data, path) != stored[-_DIGEST_BYTES:]:
        raise CorruptData(
            f"the checksum of {len(data)} bytes and the name does not match: the object is damaged, or it is another "
            "object under this name",
            object=path,
            offset=0,
        )
    return data, True


def _digest(data: bytes | memoryview, path: str) -> bytes:
    digest = blake2b(path.rpartition("/")[2].encode(), digest_size=_DIGEST_BYTES)
    digest.update(b"\n")
    digest.update(data)
    return digest.digest()
