"""Which keys a clone takes. Pure.

A projection shows one range, and a row written outside of it would vanish from the next projection or union. The
manifest cannot say so; `flagstone/origin` does, for all who write through us. SlateDB takes every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flagstone.types import KeyRange
from flagstone.views.marks import Origin

Writable = tuple[KeyRange, ...] | None
"""Ranges in ascending order that do not touch; None when every key may be written."""

_ALL: KeyRange = KeyRange()


def unite_writable(sources: Sequence[tuple[Origin | None, KeyRange | None]]) -> Writable:
    """The keys that may be written to a clone of these sources, each as far as it lies in the given range."""
    ranges = []
    for origin, keys in sources:
        own = (_ALL,) if origin is None or origin.writable is None else origin.writable
        ranges += [one.intersect(keys or _ALL) for one in own]
    merged = _merge(keys for keys in ranges if not keys.empty)
    return None if merged == (_ALL,) else merged


def _merge(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    merged: list[KeyRange] = []
    for keys in sorted(ranges, key=lambda one: one.start or b""):
        last = merged[-1] if merged else None
        if last is None or (last.stop is not None and (keys.start or b"") > last.stop):
            merged.append(keys)
        elif last.stop is not None:
            merged[-1] = KeyRange(last.start, None if keys.stop is None else max(last.stop, keys.stop))
    return tuple(merged)
