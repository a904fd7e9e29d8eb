"""The errors of damaged blocks, in the words that every kernel uses."""

from __future__ import annotations

from typing import Final

from flagstone.errors import CorruptData
from flagstone.kernels._bytes import LENGTH_CUT_OFF, LENGTH_TOO_LARGE
from flagstone.kernels._rows import FLAGS_UNKNOWN

MERGE_PROBLEMS: Final = (
    "",
    "a block is too short for its restart points",
    "a length runs past the entries of the block or does not fit into 32 bits",
    "a key is empty or shares more bytes with the key before than that has",
    "a row runs past the entries of the block",
    "row flags are not a known combination",
    "a tombstone carries a value",
    "a key of more than 65,535 bytes, which SlateDB writes and this engine only reads: let SlateDB compact it",
)
"""What a merge finds, by the number of the problem."""


def damaged_entry(problem: int, at: int, flags_at: int, flags: int) -> CorruptData:
    """The error for what `read_lengths` or `read_flags` found in the entry at `at`."""
    if problem == LENGTH_CUT_OFF:
        return CorruptData("a length runs past the entries of the block", offset=at)
    if problem == LENGTH_TOO_LARGE:
        return CorruptData("a length does not fit into 32 bits", offset=at)
    if problem == FLAGS_UNKNOWN:
        return CorruptData(f"row flags 0x{flags:02x} are not a known combination", offset=flags_at)
    return CorruptData("a row runs past the entries of the block", offset=at)
