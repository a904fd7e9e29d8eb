"""SipHash-1-3 with an all-zero key: the interpreted form. `_siphash.pxd` has the compiled form, see `_bytes`."""

from __future__ import annotations

from typing import Any

from flagstone.kernels._bytes import MASK64, get_little

_SEEDS = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & MASK64


def mix(state: list[int], word: int) -> None:
    """One round: change the four numbers of the state by the next word."""
    v0, v1, v2, v3 = state
    v3 ^= word
    v0 = (v0 + v1) & MASK64
    v2 = (v2 + v3) & MASK64
    v1 = rotate(v1, 13) ^ v0
    v3 = rotate(v3, 16) ^ v2
    v0 = rotate(v0, 32)
    v2 = (v2 + v1) & MASK64
    v0 = (v0 + v3) & MASK64
    v1 = rotate(v1, 17) ^ v2
    v3 = rotate(v3, 21) ^ v0
    v2 = rotate(v2, 32)
    state[:] = v0 ^ word, v1, v2, v3


def siphash(data: Any, at: int, size: int) -> int:
    """The 64-bit hash of `size` bytes: one compression round per word and three to finish."""
    state = list(_SEEDS)
    words = size // 8
    for turn in range(words):
        mix(state, get_little(data, at + 8 * turn, 8))
    # The last partial word, with the length on top.
    mix(state, get_little(data, at + 8 * words, size & 7) | ((size & 0xFF) << 56))
    state[2] ^= 0xFF
    for _ in range(3):
        mix(state, 0)
    return state[0] ^ state[1] ^ state[2] ^ state[3]
