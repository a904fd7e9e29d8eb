"""Bloom filters over SipHash-1-3 with an all-zero key, bit for bit as SlateDB builds them.

    bloom = k(u16 BE) bits        bit p is bit p % 8, least significant first, of byte p // 8

The 64-bit hash is cut into two halves that walk the bit array: position and stride, the stride growing by
one more each step.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import MASK32, get_u16
from cython.cimports.flagstone.kernels._siphash import siphash


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _wrap(value: cython.ulonglong, modulus: cython.ulonglong) -> cython.ulonglong:
    """`value % modulus` for values barely above it: a subtraction costs a tenth of a division."""
    while value >= modulus:
        value -= modulus
    return value


def siphash13(data: bytes) -> int:
    """The 64-bit hash of `data`."""
    return siphash(data, 0, len(data))


def hash_keys(keys: list[Any]) -> array[int]:
    """The hashes of many keys, as unsigned 64-bit integers."""
    total: cython.Py_ssize_t = len(keys)
    hashes = array("Q", bytes(8 * total))
    out: cython.ulonglong[::1] = hashes
    index: cython.Py_ssize_t
    key: bytes
    for index in range(total):
        key = keys[index]
        out[index] = siphash(key, 0, len(key))
    return hashes


def build(hashes: array[int], size: int, probes: int) -> bytes:
    """The bit array of `size` bytes in which every hash of the array has its `probes` bits set.

    Does not hold the interpreter's lock: a large SST has millions of hashes.
    """
    bits: bytearray = bytearray(size)
    out: cython.p_uchar = bits
    modulus: cython.ulonglong = size * 8
    hashed: cython.ulonglong[::1] = hashes
    total: cython.Py_ssize_t = len(hashes)
    index: cython.Py_ssize_t
    step: cython.uint
    turns: cython.uint = probes
    position: cython.ulonglong
    stride: cython.ulonglong
    if modulus == 0:
        return b""
    with cython.nogil:
        for index in range(total):
            position = (hashed[index] & MASK32) % modulus
            stride = (hashed[index] >> 32) % modulus
            for step in range(turns):
                stride = _wrap(stride + step, modulus)
                out[position >> 3] |= 1 << (position & 7)
                position += stride
                # Half of the time, so a branch would be guessed wrong as often; this compiles to none.
                position -= modulus if position >= modulus else 0
    return bytes(bits)


def may_contain(bloom: bytes, hashed: cython.ulonglong) -> bool:
    """Whether every probed bit is set. `bloom` begins with its u16 number of probes; no bits match nothing."""
    data: cython.p_uchar = bloom
    size: cython.Py_ssize_t = len(bloom)
    if size <= 2:
        return False
    turns: cython.uint = get_u16(data, 0)
    modulus: cython.ulonglong = (size - 2) * 8
    position: cython.ulonglong = (hashed & MASK32) % modulus
    stride: cython.ulonglong = (hashed >> 32) % modulus
    step: cython.uint
    for step in range(turns):
        stride = _wrap(stride + step, modulus)
        if not (data[2 + (position >> 3)] >> (position & 7)) & 1:
            return False
        position = _wrap(position + stride, modulus)
    return True


def may_contain_key(bloom: bytes, key: bytes) -> bool:
    """`may_contain` of the key's hash."""
    return may_contain(bloom, siphash(key, 0, len(key)))
