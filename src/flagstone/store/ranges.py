"""Deciding which bytes to fetch when several ranges of one object are wanted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flagstone.store.port import Range

MAX_GAP_BYTES: Final = 256 * 1024
"""Reading past this many unwanted bytes takes about as long as another request (10 ms at 25 MB/s)."""

MAX_FETCH_BYTES: Final = 16 * 1024 * 1024
"""Beyond this, neighbours stay separate so that they can be fetched at the same time."""


def plan_fetches(ranges: Sequence[Range], *, max_gap_bytes: int = MAX_GAP_BYTES) -> list[Range]:
    """Few ranges, ascending and disjoint, that together cover all non-empty `ranges`."""
    fetches: list[Range] = []
    for start, stop in sorted(wanted for wanted in ranges if wanted[0] < wanted[1]):
        if fetches:
            last_start, last_stop = fetches[-1]
            joined = max(stop, last_stop)
            near = start <= last_stop + max_gap_bytes and joined - last_start <= MAX_FETCH_BYTES
            if near or start < last_stop:
                fetches[-1] = (last_start, joined)
                continue
        fetches.append((start, stop))
    return fetches


def cut_pieces(ranges: Sequence[Range], fetches: Sequence[Range], fetched: Sequence[bytes]) -> list[bytes]:
    """The bytes of each of `ranges`, cut from what was fetched for the plan."""
    pieces = []
    for start, stop in ranges:
        piece = b""
        for (fetch_start, fetch_stop), content in zip(fetches, fetched, strict=True):
            if fetch_start <= start < fetch_stop:
                piece = content[start - fetch_start : stop - fetch_start]
                break
        pieces.append(piece if start < stop else b"")
    return pieces
