"""Keys that no segment can take are refused when they are written.

Later is too late: once such a row is in the log, the memtable that holds it can never be flushed, and no
opening gets past it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from flagstone.lsm.segments import SegmentExtractor, add_prefix, route


class KeyGate(Protocol):
    """Decides which keys may be written."""

    def admit(self, keys: Iterable[bytes]) -> None:
        """Return if every key may be. Otherwise raise `InvalidRequest`, and none of them counts."""
        ...


class SegmentGate:
    """The segments there are and those that writes have begun. For one thread at a time."""

    def __init__(self, extractor: SegmentExtractor, prefixes: Iterable[bytes] = ()) -> None:
        self._extractor = extractor
        self._prefixes = tuple(prefixes)

    def admit(self, keys: Iterable[bytes]) -> None:
        """Return if every key has a segment. Otherwise raise `InvalidRequest`, and none of them counts."""
        prefixes = self._prefixes
        for key in keys:
            prefixes = add_prefix(prefixes, route(self._extractor, key))
        self._prefixes = prefixes
