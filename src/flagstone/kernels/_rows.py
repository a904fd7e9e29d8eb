"""Rows as blocks and streams store them: the interpreted form. `_rows.pxd` has the compiled form, see `_bytes`.

Blocks of format version 2:

    block  = entry* restart(u16 BE)* count(u16 BE)
    entry  = shared unshared value_len (LEB128 u32 each) key_suffix value tail
    tail   = seq(u64 BE) flags(u8) [expire_ms(i64 BE)] [create_ms(i64 BE)]

Every sixteenth entry is a restart point: it stores its key whole, so that a search can begin there. All other entries
share a prefix with the entry before.

Streams, which a merge or a memtable fills and `_block_writer` cuts into blocks:

    row    = key_size(u16 LE) value_size(u32 LE) key value tail
"""

from __future__ import annotations

from typing import Any, Final

from flagstone.kernels._bytes import MASK32, get_i64, get_length, get_u16, get_u64, piece
from flagstone.types import EntryTuple

TOMBSTONE_KIND: Final = 0x01
EXPIRE_FLAG: Final = 0x02
CREATE_FLAG: Final = 0x04
MERGE_KIND: Final = 0x08
KIND_MASK: Final = 0x09
ROW_CUT_OFF: Final = -3
FLAGS_UNKNOWN: Final = -4


class Entry:
    """The lengths, positions and flags of one entry of a block; `stop` is where the next entry begins."""

    __slots__ = ("flags", "shared", "stop", "suffix_at", "tail_at", "unshared", "value_at", "value_size")

    def __init__(self) -> None:
        self.shared = self.unshared = self.suffix_at = self.value_at = self.value_size = 0
        self.tail_at = self.stop = self.flags = 0


def new_entry() -> Entry:
    return Entry()


def known_flags(flags: int) -> bool:
    return flags & 0xF0 == 0 and flags & KIND_MASK != KIND_MASK


def times_size(flags: int) -> int:
    """How many bytes the times behind the flags take."""
    return 8 * (((flags & EXPIRE_FLAG) >> 1) + ((flags & CREATE_FLAG) >> 2))


def entries_end(data: Any, start: int, stop: int) -> int:
    """Where the entries of the block from `start` to `stop` end; -1 when its restart points do not fit."""
    if stop - start < 2:
        return -1
    end: int = stop - 2 - 2 * get_u16(data, stop - 2)
    return end if end > start else -1


def read_lengths(data: Any, at: int, end: int, entry: Entry) -> int:
    """Read the three lengths of the entry at `at`: 0, `LENGTH_CUT_OFF` or `LENGTH_TOO_LARGE`.

    Only the lengths are checked: key and value may still run past `end`.
    """
    lengths = []
    for _ in range(3):
        length = get_length(data, at, end)
        if length < 0:
            return length
        lengths.append(length & MASK32)
        at += length >> 32
    entry.shared, entry.unshared, entry.value_size = lengths
    entry.suffix_at = at
    entry.value_at = at + entry.unshared
    entry.tail_at = entry.value_at + entry.value_size
    return 0


def read_flags(data: Any, end: int, entry: Entry) -> int:
    """Read the flags of an entry after its lengths: 0, `ROW_CUT_OFF` or `FLAGS_UNKNOWN`."""
    if entry.tail_at + 8 >= end:
        return ROW_CUT_OFF
    entry.flags = data[entry.tail_at + 8]
    if not known_flags(entry.flags):
        return FLAGS_UNKNOWN
    entry.stop = entry.tail_at + 9 + times_size(entry.flags)
    return ROW_CUT_OFF if entry.stop > end else 0


def read_first(data: Any, start: int, stop: int, entry: Entry) -> bool:
    """Read where the key of the block from `start` to `stop` begins and ends; False if the block has none."""
    end = entries_end(data, start, stop)
    if end < 0 or read_lengths(data, start, end, entry):
        return False
    return entry.shared == 0 and entry.value_at <= end


def expires_at(data: Any, entry: Entry) -> int:
    """The time of expiry of an entry; 0 without one."""
    return get_i64(data, entry.tail_at + 9) if entry.flags & EXPIRE_FLAG else 0


def created_at(data: Any, entry: Entry) -> int:
    """The time of creation of an entry; 0 without one."""
    return get_i64(data, entry.stop - 8) if entry.flags & CREATE_FLAG else 0


def row_of(data: Any, entry: Entry, key: bytes) -> EntryTuple:
    """The entry as an entry tuple; the caller knows its whole key."""
    return (
        key,
        get_u64(data, entry.tail_at),
        entry.flags & KIND_MASK,
        piece(data, entry.value_at, entry.tail_at),
        created_at(data, entry) if entry.flags & CREATE_FLAG else None,
        expires_at(data, entry) if entry.flags & EXPIRE_FLAG else None,
    )
