"""Ranges of tuples as ranges of keys, for `scan` and for pushed-down filters."""

from __future__ import annotations

from collections.abc import Sequence

from flagstone.keys.codes import BEHIND
from flagstone.keys.scalars import KeyPart, encode


def key_range(*parts: KeyPart | Sequence[KeyPart]) -> tuple[bytes, bytes]:
    """From where (inclusive) to where (exclusive) the tuples lie that begin with these parts; all, given none.

    Raises `InvalidRequest` as `encode` does.
    """
    start = encode(*parts)
    return start, start + BEHIND


def successor(*parts: KeyPart | Sequence[KeyPart]) -> bytes:
    """The place behind a tuple and behind all that continue it: where `<=` stops and `>` starts.

    It is no key itself. Raises `InvalidRequest` as `encode` does.
    """
    return encode(*parts) + BEHIND
