"""Compress and decompress one block, framed as SlateDB frames it.

| codec  | framing                                              |
|--------|------------------------------------------------------|
| Snappy | raw block, not the stream format                     |
| Zlib   | RFC 1950 stream, default level                       |
| Lz4    | u32 little-endian uncompressed size, then a raw block |
| Zstd   | one frame, level 3, with its content size            |

Decompression never trusts a claimed size further than the codec could really expand the bytes at hand.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import cramjam
import lz4.block
import zstandard

from flagstone.errors import CorruptData
from flagstone.format.codec import Codec

_ZSTD_LEVEL: Final = 3
_MAX_BLOCK_BYTES: Final = 2**32 + 2**20
"""The largest value with room for its key: nothing the format can hold decompresses to more."""

# Zstandard contexts are costly to make and serve one thread at a time. `list.pop` and `append` are atomic, so
# two plain lists are all the pooling that takes.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


def compress(codec: Codec, raw: bytes) -> bytes:
    """The stored form of `raw`, without checksum."""
    return raw if codec is Codec.NONE else _COMPRESS[codec](raw)


def decompress(codec: Codec, stored: bytes) -> bytes:
    """What `compress` was given. Raises `CorruptData` when the bytes are not a block of that codec."""
    if codec is Codec.NONE:
        return stored
    try:
        return _DECOMPRESS[codec](stored)
    except (
        zlib.error,
        cramjam.DecompressionError,
        lz4.block.LZ4BlockError,
        zstandard.ZstdError,
        ValueError,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise CorruptData(
            f"{codec.title} block of {len(stored)} bytes does not decompress: {reason}", offset=0
        ) from None


def _compress_zstd(raw: bytes) -> bytes:
    try:
        context = _compressors.pop()
    except IndexError:
        context = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
    stored = context.compress(raw)
    _compressors.append(context)
    return stored


def _decompress_zstd(stored: bytes) -> bytes:
    claimed = zstandard.frame_content_size(stored)
    if claimed > _MAX_BLOCK_BYTES:
        raise ValueError(f"claims to hold {claimed} bytes")
    try:
        context = _decompressors.pop()
    except IndexError:
        context = zstandard.ZstdDecompressor()
    try:
        if claimed >= 0:
            return context.decompress(stored)
        # A frame without its size: legal, though neither engine writes it. Read it in bounded steps.
        pieces = []
        total = 0
        with context.stream_reader(stored) as reader:
            while piece := reader.read(1 << 20):
                total += len(piece)
                if total > _MAX_BLOCK_BYTES:
                    raise ValueError(f"holds more than {_MAX_BLOCK_BYTES} bytes")
                pieces.append(piece)
        return b"".join(pieces)
    finally:
        _decompressors.append(context)


def _decompress_zlib(stored: bytes) -> bytes:
    stream = zlib.decompressobj()
    raw = stream.decompress(stored, _MAX_BLOCK_BYTES)
    if not stream.eof or stream.unused_data:
        raise ValueError("the stream is cut short or followed by other bytes")
    return raw


def _decompress_lz4(stored: bytes) -> bytes:
    claimed = int.from_bytes(stored[:4], "little")
    # One byte of LZ4 expands to at most 255.
    if len(stored) < 5 or claimed > 255 * len(stored):
        raise ValueError(f"claims to hold {claimed} bytes")
    raw: bytes = lz4.block.decompress(stored[4:], uncompressed_size=claimed)
    if len(raw) != claimed:
        raise ValueError(f"holds {len(raw)} bytes and claims {claimed}")
    return raw


def _decompress_snappy(stored: bytes) -> bytes:
    # The size is a varint in front; three bytes of Snappy expand to at most 64.
    claimed = cramjam.snappy.decompress_raw_len(stored)
    if claimed > 64 * len(stored):
        raise ValueError(f"claims to hold {claimed} bytes")
    return bytes(cramjam.snappy.decompress_raw(stored))


_COMPRESS: Final[dict[Codec, Callable[[bytes], bytes]]] = {
    Codec.SNAPPY: lambda raw: bytes(cramjam.snappy.compress_raw(raw)),
    Codec.ZLIB: zlib.compress,
    Codec.LZ4: lambda raw: lz4.block.compress(raw, store_size=True),
    Codec.ZSTD: _compress_zstd,
}
_DECOMPRESS: Final[dict[Codec, Callable[[bytes], bytes]]] = {
    Codec.SNAPPY: _decompress_snappy,
    Codec.ZLIB: _decompress_zlib,
    Codec.LZ4: _decompress_lz4,
    Codec.ZSTD: _decompress_zstd,
}
