"""Data blocks: the choice of decoder by format version, and the columnar form of rows.

Version 2 is what everyone writes; its encoder and decoder are kernels. Version 1 is read only, and rare.
"""

from __future__ import annotations

from typing import Final

from flagstone.errors import CorruptData
from flagstone.kernels import block_reader
from flagstone.types import EntryTuple

FORMAT_V1: Final = 1
FORMAT_V2: Final = 2
DEFAULT_BLOCK_BYTES: Final = 4096
BLOCK_SIZES: Final = tuple(1024 << power for power in range(7))
"""Sizes the official builder offers. Restart points are 16-bit, so nothing larger can work."""

_TIMED_TAIL_BYTES: Final = 8 + 1 + 8 + 8
"""Sequence number, flags and both times of a row."""


def decode_rows(raw: bytes, version: int) -> list[EntryTuple]:
    """All rows of a block in stored order. Raises `CorruptData` with an offset inside the block."""
    return block_reader.decode_rows(raw) if version == FORMAT_V2 else _decode_rows_v1(raw)


def declared_bytes(head: bytes, version: int) -> int:
    """The size of a block that a single row fills, as the first bytes of it declare: the row, an offset, a count.

    Only such a block is larger than 64 KiB, so what begins with a small row declares a small size.
    """
    at = 0

    def length() -> int:
        nonlocal at
        value = shift = 0
        while at < len(head) and shift < 35:
            byte = head[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        return 0

    if version == FORMAT_V2:
        length()  # The first key of a block shares nothing.
        sizes = length() + length()
        return at + sizes + _TIMED_TAIL_BYTES + 4
    suffix_size = int.from_bytes(head[2:4], "big")
    flags_at = 4 + suffix_size + 8
    flags = head[flags_at] if flags_at < len(head) else 0
    value_at = flags_at + 1 + 8 * ((flags >> 1 & 1) + (flags >> 2 & 1))
    return value_at + 4 + int.from_bytes(head[value_at : value_at + 4], "big") + 4


def lookup(raw: bytes, key: bytes, max_seq: int, version: int) -> EntryTuple | None:
    """The newest row of `key` with seq <= `max_seq` in this block, or None."""
    if version == FORMAT_V2:
        return block_reader.lookup(raw, key, max_seq)
    return next((row for row in _decode_rows_v1(raw) if row[0] == key and row[1] <= max_seq), None)


def _decode_rows_v1(raw: bytes) -> list[EntryTuple]:
    """Rows of the first format: `prefix_len suffix_len suffix seq flags [expire] [create] [value_len value]`.

    Prefixes refer to the first key of the block, and an offset per entry stands at its end.
    """
    count = int.from_bytes(raw[-2:], "big") if len(raw) >= 2 else -1
    end = len(raw) - 2 - 2 * count
    if count < 0 or end < 0:
        raise CorruptData(f"block of {len(raw)} bytes cannot hold its {count} entry offsets", offset=0)
    if count == 0:
        raise CorruptData("block without a row", offset=0)
    rows: list[EntryTuple] = []
    first = b""
    at = 0
    for number in range(count):
        entry_at = at
        # Offsets are 16-bit; those behind a very large entry wrap around.
        if int.from_bytes(raw[end + 2 * number : end + 2 * number + 2], "big") != at & 0xFFFF:
            raise CorruptData(f"entry {number} begins at {at}, not where its offset says", offset=entry_at)

        def take(size: int, limit: int = end, entry_at: int = entry_at) -> bytes:
            nonlocal at
            if at + size > limit:
                raise CorruptData("a row runs past the entries of the block", offset=entry_at)
            at += size
            return raw[at - size : at]

        prefix_size = int.from_bytes(take(2), "big")
        suffix = take(int.from_bytes(take(2), "big"))
        if prefix_size > len(first):
            raise CorruptData(f"a key shares {prefix_size} bytes with one of {len(first)}", offset=entry_at)
        key = first[:prefix_size] + suffix
        seq = int.from_bytes(take(8), "big")
        flags = take(1)[0]
        if flags & 0xF0 or flags & 0x09 == 0x09:
            raise CorruptData(f"row flags 0x{flags:02x} are not a known combination", offset=at - 1)
        expires = int.from_bytes(take(8), "big", signed=True) if flags & 0x02 else None
        created = int.from_bytes(take(8), "big", signed=True) if flags & 0x04 else None
        value = b"" if flags & 0x01 else take(int.from_bytes(take(4), "big"))
        rows.append((key, seq, flags & 0x09, value, created, expires))
        if number == 0:
            first = key
    if at != end:
        raise CorruptData(f"{end - at} bytes behind the last entry", offset=at)
    return rows
