"""One source of a merge: the interpreted form. `_merge_source.pxd` has the compiled form, see `_bytes`."""

from __future__ import annotations

from typing import Any, Final

from flagstone.kernels._rows import Entry

KEY_ROOM: Final = 65_536 + 192
"""Room for one key. Not a power of two, or the keys of all sources would compete for the same cache lines."""


class Source:
    """Where a source stands in its chunk, and the row it stands on.

    `begin` to `stop` are the entries of the block it reads, the `block`-th of `blocks`; `at` is the next entry. `entry`
    is its row, with the key `key[:key_size]`; the next key can share `shareable` bytes with it. `head` is eight bytes
    of the key as a number. A `key_size` of 0 means that the source stands on no row yet, -1 that it has ended. `loser`
    belongs to the tournament of all sources.

    Of a `sealed` source whole blocks may be offered; `first_row` says that it stands on the first row of a block. After
    an offer that was refused no block is offered for `pause` blocks, the next time for `next_pause`.
    """

    __slots__ = (
        "at", "begin", "block", "blocks", "bounds", "data", "entry", "first_row", "head", "high", "high_size", "key",
        "key_size", "loser", "low", "low_size", "next_pause", "number", "pause", "sealed", "seq", "shareable", "stop",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.data: bytes = b""
        self.bounds: Any = ()
        self.low: bytes | None = None
        self.high: bytes | None = None
        self.key = bytearray(KEY_ROOM)
        self.low_size = self.high_size = self.block = self.blocks = self.begin = self.at = self.stop = 0
        self.shareable = self.key_size = self.head = self.seq = self.pause = self.next_pause = 0
        self.sealed = self.first_row = False
        self.loser: Source | None = None
        self.entry = Entry()


def head_of(source: Source, skip: int) -> int:
    """Eight bytes of the key behind the first `skip`, filled up with zeros, as a number that sorts like them."""
    return int.from_bytes(source.key[skip : min(skip + 8, source.key_size)].ljust(8, b"\0"), "big")
