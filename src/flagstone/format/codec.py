"""The stored form of one block: compressed as SlateDB does it, then followed by its CRC-32 (big endian).

| codec  | framing                                              |
|--------|------------------------------------------------------|
| Snappy | raw block, not the stream format                     |
| Zlib   | RFC 1950 stream, default level                       |
| Lz4    | u32 little-endian uncompressed size, then a raw block |
| Zstd   | one frame, level 3, with its content size            |

The checksum is over the stored bytes, so damage is found before decompression. It is the ordinary CRC-32 of zlib,
not the Castagnoli variant.

The size of a decompressed block is bounded before memory is allocated for it. A data block has at most 64 KiB,
unless a single row fills it; that row declares its size in its first bytes. An index, a filter or statistics have
no declared size. They may expand as far as a zlib stream can, the most of the three codecs with a natural limit.

The library of a codec is imported when its first block comes: together they take five megabytes, and most databases
use one of them, or none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from flagstone.errors import CorruptData
from flagstone.kernels import sealing

if TYPE_CHECKING:
    import zstandard

CHECKSUM_BYTES: Final = 4
_ZSTD_LEVEL: Final = 3
FREE_BYTES: Final = 1024 * 1024
"""A block up to this size needs no declared size: sixteen times the largest block of several rows."""

_LONGEST_EXPANSION: Final = 1032
"""How many bytes one byte of a zlib stream expands to at most."""

_LONGEST_PART: Final = 64 * 1024 * 1024
_STEP_BYTES: Final = 1024 * 1024

Declared = Callable[[bytes], int]
"""From the first bytes of a decompressed block, at least `FREE_BYTES`, to the size that they declare."""

# Zstandard contexts are slow to create and serve one thread at a time. `list.pop` and `append` are atomic, so
# plain lists are enough as pools.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


class Codec(IntEnum):
    """How the blocks of one SST are compressed. The values are stored: never renumber them."""

    NONE = 0
    SNAPPY = 1
    ZLIB = 2
    LZ4 = 3
    ZSTD = 4

    @property
    def title(self) -> str:
        """The spelling used in settings: "Snappy", "Zlib", "Lz4", "Zstd"; "None" for no compression."""
        return self.name.capitalize()


def compress(codec: Codec, raw: bytes) -> bytes:
    """The stored form of `raw`, without checksum."""
    return raw if codec is Codec.NONE else _COMPRESS[codec](raw)


def decompress(codec: Codec, stored: bytes, declared: Declared | None = None) -> bytes:
    """The bytes that `compress` was given.

    With `declared`, a block beyond `FREE_BYTES` may have at most the size that its first bytes declare. Raises
    `CorruptData` when the bytes are not a block of that codec, or expand beyond their limit.
    """
    if codec is Codec.NONE:
        return stored
    try:
        return _DECOMPRESS[codec](stored, declared or (lambda _: part_limit(len(stored))))
    except (_Undecodable, zlib.error, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
    except MemoryError:
        reason = "there is not enough memory for the size that it claims"
    raise CorruptData(f"{codec.title} block of {len(stored)} bytes does not decompress: {reason}", offset=0)


class _Undecodable(Exception):
    """The library of a codec refused a block."""


def part_limit(stored_bytes: int) -> int:
    """The largest decompressed size of an index, a filter or statistics of that stored size."""
    return max(_LONGEST_PART, _LONGEST_EXPANSION * stored_bytes)


def _read_bounded(read: Callable[[int], bytes], declared: Declared) -> bytes:
    """All bytes that `read` returns, in steps; raises `ValueError` as soon as they exceed the limit."""
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
            raise ValueError(f"expands to more than the {limit} bytes that it declares or may have")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _compress_zstd(raw: bytes) -> bytes:
    import zstandard  # noqa: PLC0415

    try:
        context = _compressors.pop()
    except IndexError:
        context = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
    stored = context.compress(raw)
    _compressors.append(context)
    return stored


def _decompress_zstd(stored: bytes, declared: Declared) -> bytes:
    import zstandard  # noqa: PLC0415

    try:
        context = _decompressors.pop()
    except IndexError:
        context = zstandard.ZstdDecompressor()
    try:
        claimed = zstandard.frame_content_size(stored)
        if 0 <= claimed <= FREE_BYTES:
            return context.decompress(stored, allow_extra_data=False)
        # The frame claims a large size, or none, which neither engine writes: do not trust it.
        with context.stream_reader(stored, read_across_frames=False) as reader:
            raw = _read_bounded(reader.read, declared)
    except zstandard.ZstdError as error:
        raise _Undecodable(error) from error
    finally:
        _decompressors.append(context)
    if 0 <= claimed != len(raw):
        raise ValueError(f"holds {len(raw)} bytes and claims {claimed}")
    return raw


def _decompress_zlib(stored: bytes, declared: Declared) -> bytes:
    stream = zlib.decompressobj()
    given = [stored]

    def read(size: int) -> bytes:
        piece = stream.decompress(given[0], size)
        given[0] = stream.unconsumed_tail
        return piece

    raw = _read_bounded(read, declared)
    if not stream.eof or stream.unused_data:
        raise ValueError("the stream is cut short or followed by other bytes")
    return raw


def _compress_lz4(raw: bytes) -> bytes:
    import lz4.block  # noqa: PLC0415

    stored: bytes = lz4.block.compress(raw, store_size=True)
    return stored


def _decompress_lz4(stored: bytes, _declared: Declared) -> bytes:
    import lz4.block  # noqa: PLC0415

    claimed = int.from_bytes(stored[:4], "little")
    # One byte of LZ4 expands to at most 255.
    if len(stored) < 5 or claimed > 255 * len(stored):
        raise ValueError(f"claims to hold {claimed} bytes")
    try:
        raw: bytes = lz4.block.decompress(stored[4:], uncompressed_size=claimed)
    except lz4.block.LZ4BlockError as error:
        raise _Undecodable(error) from error
    if len(raw) != claimed:
        raise ValueError(f"holds {len(raw)} bytes and claims {claimed}")
    return raw


def _compress_snappy(raw: bytes) -> bytes:
    import cramjam  # noqa: PLC0415

    return bytes(cramjam.snappy.compress_raw(raw))


def _decompress_snappy(stored: bytes, _declared: Declared) -> bytes:
    import cramjam  # noqa: PLC0415

    try:
        # The size is a varint in front; three bytes of Snappy expand to at most 64.
        claimed = cramjam.snappy.decompress_raw_len(stored)
        if claimed > 64 * len(stored):
            raise ValueError(f"claims to hold {claimed} bytes")
        return bytes(cramjam.snappy.decompress_raw(stored))
    except cramjam.DecompressionError as error:
        raise _Undecodable(error) from error


_COMPRESS: Final[dict[Codec, Callable[[bytes], bytes]]] = {
    Codec.SNAPPY: _compress_snappy,
    Codec.ZLIB: zlib.compress,
    Codec.LZ4: _compress_lz4,
    Codec.ZSTD: _compress_zstd,
}
_DECOMPRESS: Final[dict[Codec, Callable[[bytes, Declared], bytes]]] = {
    Codec.SNAPPY: _decompress_snappy,
    Codec.ZLIB: _decompress_zlib,
    Codec.LZ4: _decompress_lz4,
    Codec.ZSTD: _decompress_zstd,
}


def seal(raw: bytes, codec: Codec = Codec.NONE) -> bytes:
    """The stored form of a block."""
    return b"".join(seal_parts(raw, codec))


def seal_parts(raw: bytes, codec: Codec = Codec.NONE) -> tuple[bytes, bytes]:
    """The stored form of a block as body and checksum; without a codec the body is `raw` itself, not a copy."""
    stored = compress(codec, raw)
    return stored, sealing.checksum(stored).to_bytes(CHECKSUM_BYTES, "big")


def unseal(stored: bytes, codec: Codec = Codec.NONE, declared: Declared | None = None) -> bytes:
    """The block in its stored form; `declared` is that of `decompress`, for data blocks.

    Raises `CorruptData` for a wrong checksum, for bytes that do not decompress, and for those beyond their limit.
    """
    if len(stored) < CHECKSUM_BYTES:
        raise CorruptData(f"{len(stored)} bytes where a block with its checksum was expected", offset=0)
    body = stored[:-4]
    expected = int.from_bytes(stored[-4:], "big")
    actual = sealing.checksum(body)
    if actual != expected:
        raise CorruptData(f"checksum of {len(body)} bytes is {actual:08x}, expected {expected:08x}", offset=0)
    return decompress(codec, body, declared)
