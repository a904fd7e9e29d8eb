"""Integers and byte ranges for every kernel: the interpreted form. `_bytes.pxd` has the compiled form.

A kernel gets these functions by `from cython.cimports.flagstone.kernels._bytes import …`. The Cython compiler finds the
`.pxd` file, and copies the inline functions into the kernel. Interpreted, `cython_stub` answers that import with this
module. Both files define the same names; a test compares them.

`data`, `source`, `one` and `two` are C pointers when compiled, and bytes-like objects here.
"""

from __future__ import annotations

from typing import Any, Final

MASK32: Final = 0xFFFFFFFF
MASK64: Final = 0xFFFFFFFFFFFFFFFF
MAX_KEY_BYTES: Final = 65_535
LENGTH_CUT_OFF: Final = -1
LENGTH_TOO_LARGE: Final = -2


def get_u64(data: Any, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "big")


def get_i64(data: Any, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "big", signed=True)


def put_u64(out: Any, at: int, value: int) -> None:
    out[at : at + 8] = (value & MASK64).to_bytes(8, "big")


def get_u16(data: Any, at: int) -> int:
    return (data[at] << 8) | data[at + 1]


def put_u16(out: Any, at: int, value: int) -> None:
    out[at] = (value >> 8) & 0xFF
    out[at + 1] = value & 0xFF


def get_u32(data: Any, at: int) -> int:
    """An unsigned integer of 4 bytes, the low byte first."""
    return int.from_bytes(data[at : at + 4], "little")


def get_big(data: Any, at: int, size: int) -> int:
    """An unsigned integer of up to 8 bytes, the high byte first."""
    return int.from_bytes(data[at : at + size], "big")


def put_big(out: Any, at: int, value: int, size: int) -> None:
    """Write the low `size` bytes of a number, the high one first."""
    out[at : at + size] = (value & MASK64).to_bytes(8, "big")[8 - size :]


def get_little(data: Any, at: int, size: int) -> int:
    """An unsigned integer of up to 8 bytes, the low byte first."""
    return int.from_bytes(data[at : at + size], "little")


def put_little(out: Any, at: int, value: int, size: int) -> None:
    """Write the low `size` bytes of a number, the low one first, in one step: a reader never finds half of it."""
    out[at : at + size] = (value & MASK64).to_bytes(8, "little")[:size]


def varint_size(value: int) -> int:
    """How many bytes the shortest LEB128 form of a number has."""
    size = 1
    while value >= 0x80:
        value >>= 7
        size += 1
    return size


def put_varint(out: Any, at: int, value: int) -> int:
    """Write a number as LEB128; returns where it ends."""
    while value >= 0x80:
        out[at] = (value & 0x7F) | 0x80
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


def get_length(data: Any, at: int, end: int) -> int:
    """A LEB128 u32 at `at`: its size in bytes, shifted left by 32, plus its value.

    `LENGTH_CUT_OFF` when it runs past `end`, `LENGTH_TOO_LARGE` when it does not fit into 32 bits.
    """
    value = size = 0
    while size < 5:
        if at >= end:
            return LENGTH_CUT_OFF
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * size)
        size += 1
        if byte < 0x80:
            return LENGTH_TOO_LARGE if value > MASK32 else (size << 32) | value
    return LENGTH_TOO_LARGE


def copy(out: Any, at: int, source: Any, start: int, size: int) -> None:
    """Copy `size` bytes; the two ranges do not overlap."""
    out[at : at + size] = source[start : start + size]


def prefetch(data: Any, at: int, size: int) -> None:
    """Let the processor bring `size` bytes near, without waiting for them. They may lie past the end of the memory."""


def piece(data: Any, start: int, stop: int) -> bytes:
    """A part of the memory as bytes."""
    return bytes(data[start:stop])


def differ(one: Any, one_at: int, two: Any, two_at: int, size: int) -> int:
    """Below, at or above 0, as the first `size` bytes are below, equal to or above the second."""
    left, right = bytes(one[one_at : one_at + size]), bytes(two[two_at : two_at + size])
    return (left > right) - (left < right)


def common_prefix(one: Any, one_at: int, two: Any, two_at: int, size: int) -> int:
    """How many leading bytes are equal, of at most `size`."""
    at = 0
    while at < size and one[one_at + at] == two[two_at + at]:
        at += 1
    return at


def compare(one: Any, one_at: int, one_size: int, two: Any, two_at: int, two_size: int) -> int:
    """Below, at or above 0, as the first key is below, equal to or above the second."""
    left, right = bytes(one[one_at : one_at + one_size]), bytes(two[two_at : two_at + two_size])
    return (left > right) - (left < right)
