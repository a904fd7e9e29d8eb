"""Compress and decompress one block, framed as SlateDB frames it.

| codec  | framing                                              |
|--------|------------------------------------------------------|
| Snappy | raw block, not the stream format                     |
| Zlib   | RFC 1950 stream, default level                       |
| Lz4    | u32 little-endian uncompressed size, then a raw block |
| Zstd   | one frame, level 3, with its content size            |

What a block may unfold to is bounded before memory is taken for it. A data block has at most 64 KiB unless one row
fills it alone, and that row declares its size in its first bytes. Other parts have no declared size; they may unfold
as far as zlib could unfold them, which is the furthest of the three codecs that have a natural limit.
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
FREE_BYTES: Final = 1024 * 1024
"""Up to this size nothing has to be declared: sixteen times the largest block that holds several rows."""

_LONGEST_EXPANSION: Final = 1032
"""What one byte of a zlib stream can become."""

_LONGEST_PART: Final = 64 * 1024 * 1024
_STEP_BYTES: Final = 1024 * 1024

Declared = Callable[[bytes], int]
"""From the first bytes of what a block unfolds to, at least `FREE_BYTES` of them, to the size that it declares."""

# Zstandard contexts are costly to make and serve one thread at a time. `list.pop` and `append` are atomic, so
# two plain lists are all the pooling that takes.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


def compress(codec: Codec, raw: bytes) -> bytes:
    """The stored form of `raw`, without checksum."""
    return raw if codec is Codec.NONE else _COMPRESS[codec](raw)


def decompress(codec: Codec, stored: bytes, declared: Declared | None = None) -> bytes:
    """What `compress` was given.

    With `declared` more than `FREE_BYTES` are unfolded only up to the size that the first bytes declare. Raises
    `CorruptData` when the bytes are not a block of that codec, or unfold to more than they may.
    """
    if codec is Codec.NONE:
        return stored
    try:
        return _DECOMPRESS[codec](stored, declared or (lambda _: part_limit(len(stored))))
    except (
        zlib.error,
        cramjam.DecompressionError,
        lz4.block.LZ4BlockError,
        zstandard.ZstdError,
        ValueError,
        OverflowError,
    ) as error:
        reason = str(error).partition("\n")[0]
    except MemoryError:
        reason = "there is no memory for what it claims to hold"
    raise CorruptData(f"{codec.title} block of {len(stored)} bytes does not decompress: {reason}", offset=0)


def part_limit(stored_bytes: int) -> int:
    """How far an index, a filter or statistics of that stored size may unfold."""
    return max(_LONGEST_PART, _LONGEST_EXPANSION * stored_bytes)


def _unfold(read: Callable[[int], bytes], declared: Declared) -> bytes:
    """All that `read` gives, a step at a time, or `ValueError` as soon as it is more than it may be."""
    pieces: list[bytes] = []
    total, limit = 0, FREE_BYTES
    known = False
    while piece := read(_STEP_BYTES):
        pieces.append(piece)
        total += len(piece)
        if total > limit and not known:
            head = b"".join(pieces)
            pieces = [head]
            limit, known = max(declared(head), FREE_BYTES), True
        if total > limit:
            raise ValueError(f"unfolds to more than the {limit} bytes that it declares or may have")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _compress_zstd(raw: bytes) -> bytes:
    try:
        context = _compressors.pop()
    except IndexError:
        context = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
    stored = context.compress(raw)
    _compressors.append(context)
    return stored


def _decompress_zstd(stored: bytes, declared: Declared) -> bytes:
    claimed = zstandard.frame_content_size(stored)
    try:
        context = _decompressors.pop()
    except IndexError:
        context = zstandard.ZstdDecompressor()
    try:
        if 0 <= claimed <= FREE_BYTES:
            return context.decompress(stored, allow_extra_data=False)
        # Large, or a frame without its size, which neither engine writes: the claim is not trusted.
        with context.stream_reader(stored, read_across_frames=False) as reader:
            raw = _unfold(reader.read, declared)
        if 0 <= claimed != len(raw):
            raise ValueError(f"holds {len(raw)} bytes and claims {claimed}")
        return raw
    finally:
        _decompressors.append(context)


def _decompress_zlib(stored: bytes, declared: Declared) -> bytes:
    stream = zlib.decompressobj()
    given = [stored]

    def read(size: int) -> bytes:
        piece = stream.decompress(given[0], size)
        given[0] = stream.unconsumed_tail
        return piece

    raw = _unfold(read, declared)
    if not stream.eof or stream.unused_data:
        raise ValueError("the stream is cut short or followed by other bytes")
    return raw


def _decompress_lz4(stored: bytes, _declared: Declared) -> bytes:
    claimed = int.from_bytes(stored[:4], "little")
    # One byte of LZ4 expands to at most 255.
    if len(stored) < 5 or claimed > 255 * len(stored):
        raise ValueError(f"claims to hold {claimed} bytes")
    raw: bytes = lz4.block.decompress(stored[4:], uncompressed_size=claimed)
    if len(raw) != claimed:
        raise ValueError(f"holds {len(raw)} bytes and claims {claimed}")
    return raw


def _decompress_snappy(stored: bytes, _declared: Declared) -> bytes:
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
_DECOMPRESS: Final[dict[Codec, Callable[[bytes, Declared], bytes]]] = {
    Codec.SNAPPY: _decompress_snappy,
    Codec.ZLIB: _decompress_zlib,
    Codec.LZ4: _decompress_lz4,
    Codec.ZSTD: _decompress_zstd,
}
