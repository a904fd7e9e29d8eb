"""Rows as a memtable stores them: the interpreted form. `_entries.pxd` has the compiled form, see `_bytes`.

    entry = link(5) key_len(2) flags(1) seq(5) value_len(3) create_ms(6) [wide] [expire_ms(8)] key value   integers LE
    wide  = seq(8) create_ms(8) value_len(4)

An entry with `WIDE_FLAG` has a number that is too large for its field, or a time before 1970. All three are then in
`wide`. `EXPIRE_FLAG` says that there is an expiry.

Entries lie in chunks of memory that never move. The address of an entry is the number of its chunk, from 1 on, and an
offset: every entry begins in the first `CHUNK_BYTES` of its chunk. `chunks` is an array of the chunks' memory addresses
when compiled, because asking a list costs more than reading the row, and the list of chunks here.

The first entry of a key is its anchor. It links to the key's newest entry, every newer entry to the next older one:

    anchor.link -> newest -> … -> second -> anchor          (0: the anchor is the only version)
"""

from __future__ import annotations

from typing import Any, Final

from flagstone.kernels._bytes import compare, get_little, piece, put_little
from flagstone.kernels._rows import CREATE_FLAG, EXPIRE_FLAG, KIND_MASK
from flagstone.types import EntryTuple

HEADER: Final = 22
WIDE_BYTES: Final = 20
EXPIRE_BYTES: Final = 8
CHUNK_BYTES: Final = 1 << 18
OFFSET_BITS: Final = 18
OFFSET_MASK: Final = (1 << 18) - 1
ANCHOR_FLAG: Final = 0x80
WIDE_FLAG: Final = 0x40
LINK_MASK: Final = (1 << 40) - 1
WIDE_FROM_SEQ: Final = 1 << 40
WIDE_FROM_SIZE: Final = 1 << 24
WIDE_FROM_MS: Final = 1 << 48


def address_of(chunk: int, at: int) -> int:
    """The address of the entry at offset `at` of the `chunk`-th chunk, counted from 0."""
    return ((chunk + 1) << OFFSET_BITS) | at


def chunk_of(chunks: Any, address: int) -> Any:
    """The memory of the chunk that an entry lies in."""
    return chunks[(address >> OFFSET_BITS) - 1]


def offset_of(address: int) -> int:
    return address & OFFSET_MASK


def header_size(flags: int) -> int:
    """How many bytes lie between the beginning of an entry and its key."""
    return HEADER + (flags & EXPIRE_FLAG) * (EXPIRE_BYTES // 2) + (WIDE_BYTES if flags & WIDE_FLAG else 0)


def flags_for(flags: int, seq: int, created: int, value_bytes: int) -> int:
    """The flags, with `WIDE_FLAG` if a number needs it."""
    fits = seq < WIDE_FROM_SEQ and 0 <= created < WIDE_FROM_MS and value_bytes < WIDE_FROM_SIZE
    return flags if fits else flags | WIDE_FLAG


def put_header(
    out: Any,
    at: int,
    link: int,
    key_bytes: int,
    flags: int,
    seq: int,
    value_bytes: int,
    created: int,
    expires: int,
) -> None:
    """Write all that lies before the key; `flags` are those of `flags_for`."""
    wide = flags & WIDE_FLAG
    put_little(out, at, link | key_bytes << 40 | flags << 56, 8)
    put_little(out, at + 8, 0 if wide else seq | value_bytes << 40, 8)
    put_little(out, at + 16, 0 if wide else created, 6)
    if wide:
        put_little(out, at + 22, seq, 8)
        put_little(out, at + 30, created, 8)
        put_little(out, at + 38, value_bytes, 4)
    if flags & EXPIRE_FLAG:
        put_little(out, at + header_size(flags) - EXPIRE_BYTES, expires, 8)


def put_link(out: Any, at: int, link: int) -> None:
    """Replace the link, in one step."""
    put_little(out, at, get_little(out, at, 8) & ~LINK_MASK | link, 8)


def entry_link(data: Any, at: int) -> int:
    return get_little(data, at, 5)


def key_size(data: Any, at: int) -> int:
    return get_little(data, at + 5, 2)


def entry_flags(data: Any, at: int) -> int:
    flags: int = data[at + 7]
    return flags


def entry_seq(data: Any, at: int) -> int:
    return get_little(data, at + 22, 8) if entry_flags(data, at) & WIDE_FLAG else get_little(data, at + 8, 5)


def value_size(data: Any, at: int) -> int:
    return get_little(data, at + 38, 4) if entry_flags(data, at) & WIDE_FLAG else get_little(data, at + 13, 3)


def entry_created(data: Any, at: int) -> int:
    if entry_flags(data, at) & WIDE_FLAG:
        return int.from_bytes(data[at + 30 : at + 38], "little", signed=True)
    return get_little(data, at + 16, 6)


def entry_expires(data: Any, at: int) -> int:
    """The expiry of an entry with `EXPIRE_FLAG`."""
    end = key_start(data, at)
    return int.from_bytes(data[end - EXPIRE_BYTES : end], "little", signed=True)


def key_start(data: Any, at: int) -> int:
    """Where the key of an entry begins; its value follows."""
    return at + header_size(entry_flags(data, at))


def entry_size(data: Any, at: int) -> int:
    """The bytes of a whole entry."""
    return header_size(entry_flags(data, at)) + key_size(data, at) + value_size(data, at)


def entry_key(data: Any, at: int) -> bytes:
    begin = key_start(data, at)
    return piece(data, begin, begin + key_size(data, at))


def entry_row(data: Any, at: int, key: bytes) -> EntryTuple:
    """The entry as an entry tuple; the caller knows its key."""
    flags = entry_flags(data, at)
    value_at = key_start(data, at) + len(key)
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
        key_start(one_data, one_at),
        key_size(one_data, one_at),
        two_data,
        key_start(two_data, two_at),
        key_size(two_data, two_at),
    )
