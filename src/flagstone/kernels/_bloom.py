"""Bloom filters over SipHash-1-3 with an all-zero key, bit for bit as SlateDB builds them.

    bloom = k(u16 BE) bits        bit p is bit p % 8, least significant first, of byte p // 8

The 64-bit hash is cut into two halves that walk the bit array: position and stride, the stride growing by
one more each step. Written in Cython's pure-Python mode; see `_block` for how that works.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython

# Python integers grow where C ones wrap; the mask makes both agree, and costs nothing when compiled.
MASK64 = cython.declare(cython.ulonglong, 0xFFFFFFFFFFFFFFFF)
# Constants of more than 31 bits are declared, or compiled code would compute with them as Python integers.
MASK32 = cython.declare(cython.ulonglong, 0xFFFFFFFF)
SEED0 = cython.declare(cython.ulonglong, 0x736F6D6570736575)
SEED1 = cython.declare(cython.ulonglong, 0x646F72616E646F6D)
SEED2 = cython.declare(cython.ulonglong, 0x6C7967656E657261)
SEED3 = cython.declare(cython.ulonglong, 0x7465646279746573)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _rotate(value: cython.ulonglong, bits: cython.int) -> cython.ulonglong:
    return ((value << bits) | (value >> (64 - bits))) & MASK64


@cython.cfunc
@cython.exceptval(check=False)
def _siphash(data: cython.p_const_uchar, size: cython.Py_ssize_t) -> cython.ulonglong:
    """SipHash with one compression round per word and three to finish."""
    v0: cython.ulonglong = SEED0
    v1: cython.ulonglong = SEED1
    v2: cython.ulonglong = SEED2
    v3: cython.ulonglong = SEED3
    word: cython.ulonglong
    at: cython.Py_ssize_t = 0
    index: cython.Py_ssize_t
    words: cython.Py_ssize_t = size // 8
    turn: cython.Py_ssize_t
    # words of data, then the last partial word with the length on top, then three rounds without a word
    for turn in range(words + 4):
        word = 0
        if turn < words:
            for index in range(8):
                word |= cython.cast(cython.ulonglong, data[at + index]) << (8 * index)
            at += 8
        elif turn == words:
            for index in range(size - at):
                word |= cython.cast(cython.ulonglong, data[at + index]) << (8 * index)
            word |= cython.cast(cython.ulonglong, size & 0xFF) << 56
        elif turn == words + 1:
            v2 ^= 0xFF
        v3 ^= word
        v0 = (v0 + v1) & MASK64
        v2 = (v2 + v3) & MASK64
        v1 = _rotate(v1, 13) ^ v0
        v3 = _rotate(v3, 16) ^ v2
        v0 = _rotate(v0, 32)
        v2 = (v2 + v1) & MASK64
        v0 = (v0 + v3) & MASK64
        v1 = _rotate(v1, 17) ^ v2
        v3 = _rotate(v3, 21) ^ v0
        v2 = _rotate(v2, 32)
        v0 ^= word
    return v0 ^ v1 ^ v2 ^ v3


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
    return _siphash(data, len(data))


def hash_keys(keys: list[Any]) -> array[int]:
    """The hashes of many keys, as unsigned 64-bit integers."""
    total: cython.Py_ssize_t = len(keys)
    hashes = array("Q", bytes(8 * total))
    out: cython.ulonglong[::1] = hashes
    index: cython.Py_ssize_t
    key: bytes
    for index in range(total):
        key = keys[index]
        out[index] = _siphash(key, len(key))
    return hashes


def build(hashes: array[int], size: int, probes: int) -> bytes:
    """The bit array of `size` bytes in which every hash of the array has its `probes` bits set.

    Does not hold the interpreter's lock: a large table has millions of hashes.
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
                position = _wrap(position + stride, modulus)
    return bytes(bits)


def may_contain(bloom: bytes, hashed: cython.ulonglong) -> bool:
    """Whether every probed bit is set. `bloom` begins with its u16 number of probes; no bits match nothing."""
    data: cython.p_uchar = bloom
    size: cython.Py_ssize_t = len(bloom)
    if size <= 2:
        return False
    turns: cython.uint = (data[0] << 8) | data[1]
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
    return may_contain(bloom, _siphash(key, len(key)))
