"""Rows as a memtable stores them: the interpreted form. `_entries.pxd` has the compiled form, see `_bytes`.

    entry = link(8) seq(8) expire_ms(8) create_ms(8) value_len(4) key_len(2) flags(1) key value      integers LE

Entries lie in chunks of memory that never move. The address of an entry is the number of its chunk, from 1 on, and an
offset: every entry begins in the first `CHUNK_BYTES` of its chunk. `chunks` is an array of the chunks' memory addresses
when compiled, because asking a list costs more than reading the row, and the list of chunks here.

The first entry of a key is its anchor. It links to the key's newest entry, every newer entry to the next older one:

    anchor.link -> newest -> … -> second -> anchor          (0: the anchor is the only version)
"""

from __future__ import annotations

from typing import Any, Final

from flagstone.kernels._bytes import compare, get_little, piece
from flagstone.kernels._rows import CREATE_FLAG, EXPIRE_FLAG, KIND_MASK
from flagstone.types import EntryTuple

HEADER: Final = 39
CHUNK_BYTES: Final = 1 << 18
OFFSET_BITS: Final = 18
OFFSET_MASK: Final = (1 << 18) - 1
ANCHOR_FLAG: Final = 0x80


def address_of(chunk: int, at: int) -> int:
    """The address of the entry at offset `at` of the `chunk`-th chunk, counted from 0."""
    return ((chunk + 1) << OFFSET_BITS) | at


def chunk_of(chunks: Any, address: int) -> Any:
    """The memory of the chunk that an entry lies in."""
    return chunks[(address >> OFFSET_BITS) - 1]


def offset_of(address: int) -> int:
    return address & OFFSET_MASK


def entry_link(data: Any, at: int) -> int:
    return get_little(data, at, 8)


def entry_seq(data: Any, at: int) -> int:
    return get_little(data, at + 8, 8)


def entry_expires(data: Any, at: int) -> int:
    return int.from_bytes(data[at + 16 : at + 24], "little", signed=True)


def entry_created(data: Any, at: int) -> int:
    return int.from_bytes(data[at + 24 : at + 32], "little", signed=True)


def value_size(data: Any, at: int) -> int:
    return get_little(data, at + 32, 4)


def key_size(data: Any, at: int) -> int:
    return get_little(data, at + 36, 2)


def entry_flags(data: Any, at: int) -> int:
    flags: int = data[at + 38]
    return flags


def entry_size(data: Any, at: int) -> int:
    """The bytes of a whole entry."""
    return HEADER + key_size(data, at) + value_size(data, at)


def entry_key(data: Any, at: int) -> bytes:
    return piece(data, at + HEADER, at + HEADER + key_size(data, at))


def entry_row(data: Any, at: int, key: bytes) -> EntryTuple:
    """The entry as an entry tuple; the caller knows its key."""
    flags = entry_flags(data, at)
    value_at = at + HEADER + len(key)
    return (
        key,
        entry_seq(data, at),
        flags & KIND_MASK,
        piece(data, value_at, value_at + value_size(data, at)),
        entry_created(data, at) if flags & CREATE_FLAG else None,
        entry_expires(data, at) if flags & EXPIRE_FLAG else None,
    )


def newest(chunks: Any, anchor: int, max_seq: int) -> int:
    """The address of the newest version with seq <= `max_seq` of the anchor's key, or 0."""
    if anchor == 0:
        return 0
    address = entry_link(chunk_of(chunks, anchor), offset_of(anchor)) or anchor
    while True:
        data, at = chunk_of(chunks, address), offset_of(address)
        if entry_seq(data, at) <= max_seq:
            return address
        if address == anchor:
            return 0
        address = entry_link(data, at)


def compare_keys(chunks: Any, one: int, two: int) -> int:
    """Below, at or above 0, as the key of the first entry is below, equal to or above that of the second."""
    one_data, two_data = chunk_of(chunks, one), chunk_of(chunks, two)
    one_at, two_at = offset_of(one), offset_of(two)
    return compare(
        one_data,
        one_at + HEADER,
        key_size(one_data, one_at),
        two_data,
        two_at + HEADER,
        key_size(two_data, two_at),
    )
