"""How a block stands in a file: compressed, then followed by its CRC-32 (big endian).

The checksum is over the stored bytes, so damage is found before anything tries to decompress it. It is the
ordinary CRC-32 of zlib; the Castagnoli variant gives other values.
"""

from __future__ import annotations

import zlib
from typing import Final

from flagstone.errors import CorruptData
from flagstone.format.codec import Codec
from flagstone.format.compression import Declared, compress, decompress

CHECKSUM_BYTES: Final = 4


def seal(raw: bytes, codec: Codec = Codec.NONE) -> bytes:
    """The stored form of a block."""
    return b"".join(seal_parts(raw, codec))


def seal_parts(raw: bytes, codec: Codec = Codec.NONE) -> tuple[bytes, bytes]:
    """The stored form of a block in two parts: without a codec the first is `raw` itself, not a copy."""
    stored = compress(codec, raw)
    return stored, zlib.crc32(stored).to_bytes(CHECKSUM_BYTES, "big")


def unseal(stored: bytes, codec: Codec = Codec.NONE, declared: Declared | None = None) -> bytes:
    """The block inside its stored form; `declared` is that of `decompress`, for data blocks.

    Raises `CorruptData` on a wrong checksum, on undecodable bytes, and on bytes that unfold to more than they may.
    """
    if len(stored) < CHECKSUM_BYTES:
        raise CorruptData(f"{len(stored)} bytes where a block with its checksum was expected", offset=0)
    body = stored[:-4]
    expected = int.from_bytes(stored[-4:], "big")
    actual = zlib.crc32(body)
    if actual != expected:
        raise CorruptData(f"checksum of {len(body)} bytes is {actual:08x}, expected {expected:08x}", offset=0)
    return decompress(codec, body, declared)
