"""The keys, values and items of a collection: lazy, as those of a database are."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, TypeVar

from flagstone.db.mapping import UncountedSet

if TYPE_CHECKING:
    from flagstone.db.collections.collection import Collection

K = TypeVar("K")
V = TypeVar("V")


class CollectionKeys(UncountedSet, KeysView[K]):
    """The keys of a collection; a loop is one scan."""

    __slots__ = ()
    _mapping: Collection[K, Any]

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._mapping)

    def __bool__(self) -> bool:
        return _has_rows(self._mapping)


class CollectionValues(ValuesView[V]):
    """The values of a collection; a loop is one scan."""

    __slots__ = ()
    _mapping: Collection[Any, V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.scan())

    def __reversed__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.scan(reverse=True))

    def __contains__(self, value: object) -> bool:
        return any(value == each for each in self)

    def __bool__(self) -> bool:
        return _has_rows(self._mapping)


class CollectionItems(UncountedSet, ItemsView[K, V]):
    """Pairs of key and value of a collection; a loop is one scan."""

    __slots__ = ()
    _mapping: Collection[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._mapping.scan()

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        return self._mapping.scan(reverse=True)

    def __bool__(self) -> bool:
        return _has_rows(self._mapping)


def _has_rows(rows: Collection[Any, Any]) -> bool:
    return next(rows.scan(limit=1), None) is not None
