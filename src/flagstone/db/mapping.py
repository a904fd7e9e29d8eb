"""The manners of a Python mapping: iteration over keys, views, slices, counting. Databases, snapshots,
transactions and readers have them, and so has a slice of one.

Views and slices are lazy: each iteration is a new scan, of the rows at its beginning. `len()` is refused, because
counting the rows means to read all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sized,
    ValuesView,
)
from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Protocol, TypeVar, cast, overload

from flagstone.errors import InvalidRequest
from flagstone.read.preview import html_preview, shown
from flagstone.types import KeyRange
from flagstone.write.batch import check_read_key

if TYPE_CHECKING:
    from flagstone.db.read_methods import Reads
    from flagstone.read.scan import Scan

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])

_KEY_OF: Final = itemgetter(0)
_VALUE_OF: Final = itemgetter(1)


class NotSupported(InvalidRequest, TypeError):
    """A handle cannot do this. Also a `TypeError`, which Python's own functions expect in such cases."""


def typed_like(_model: _Method) -> Callable[[Callable[..., Any]], _Method]:
    """Give a method the type of the method it overrides, with all its overloads."""

    def decorated(method: Callable[..., Any]) -> _Method:
        return cast("_Method", method)

    return decorated


class RowMapping(Mapping[bytes, bytes]):
    """A `collections.abc.Mapping` from keys to values, ordered by key, without a length."""

    __slots__ = ()

    @abstractmethod
    def _rows(self, *, reverse: bool = False, limit: int | None = None) -> Scan:
        """A scan of all rows of the mapping, as they are now."""

    def keys(self) -> RowKeys:
        """The keys in ascending order: lazy, with `in` and `reversed`."""
        return RowKeys(self)

    def values(self) -> RowValues:
        """The values in the order of their keys: lazy, with `reversed`. `in` reads all of them."""
        return RowValues(self)

    def items(self) -> RowItems:
        """Pairs of key and value in ascending order: lazy, with `in` and `reversed`."""
        return RowItems(self)

    def __iter__(self) -> Iterator[bytes]:
        return map(_KEY_OF, self._rows())

    def __reversed__(self) -> Iterator[bytes]:
        return map(_KEY_OF, self._rows(reverse=True))

    def __len__(self) -> NoReturn:
        raise NotSupported(
            "the number of rows is not stored; count() reads them all, and approximate_len() estimates it from the "
            "statistics of the SSTs"
        )


class RowRange(RowMapping):
    """The rows of a database, snapshot, transaction or reader whose keys are in a range: `db[b"a":b"b"]`.

    It holds no rows: each use reads them as they are at that moment. It is true if it has a row.
    """

    __slots__ = ("_keys", "_source")

    def __init__(self, source: Reads, keys: KeyRange) -> None:
        self._source = source
        # The empty overlap of two ranges has inverted bounds, which scans refuse.
        self._keys = KeyRange(keys.start, keys.start) if keys.empty else keys

    @property
    def range(self) -> KeyRange:
        """The range of its keys."""
        return self._keys

    @overload
    def get(self, key: bytes, default: None = None) -> bytes | None: ...
    @overload
    def get(self, key: bytes, default: bytes) -> bytes: ...
    @overload
    def get(self, key: bytes, default: _T) -> bytes | _T: ...
    def get(self, key: bytes, default: object = None) -> object:
        """The value of `key` if the key is in the range, or `default`."""
        return self._source.get(key, default) if check_read_key(key) in self._keys else default

    @overload
    def __getitem__(self, key: bytes) -> bytes: ...
    @overload
    def __getitem__(self, key: slice[bytes | None, bytes | None, None]) -> RowRange: ...
    def __getitem__(self, key: bytes | slice) -> bytes | RowRange:
        if isinstance(key, slice):
            return RowRange(self._source, self._keys.intersect(range_of(key)))
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return self.get(cast("bytes", key)) is not None

    def __bool__(self) -> bool:
        return next(self._rows(limit=1), None) is not None

    def __repr__(self) -> str:
        start, stop = ("" if bound is None else shown(bound) for bound in (self._keys.start, self._keys.stop))
        return f"{self._source!r}[{start}:{stop}]"

    def _repr_html_(self) -> str:
        return html_preview(repr(self), lambda limit: self._rows(limit=limit))

    def count(self) -> int:
        """The number of rows. Reads all of them."""
        return self._source.count(self._keys.start, self._keys.stop)

    def approximate_len(self) -> int:
        """The estimated number of rows; see `Db.approximate_len`."""
        return self._source.approximate_len(self._keys.start, self._keys.stop)

    def _rows(self, *, reverse: bool = False, limit: int | None = None) -> Scan:
        return self._source.scan(self._keys.start, self._keys.stop, reverse=reverse, limit=limit)


def range_of(wanted: slice) -> KeyRange:
    """The key range of a slice. Raises `InvalidRequest` if a bound is not bytes, or if it has a step."""
    if wanted.step is not None:
        raise NotSupported(f"a slice of keys has no step, and this one has {wanted.step!r}; use [start:stop]")
    return check_bounds(wanted.start, wanted.stop)


def check_bounds(start: bytes | None, stop: bytes | None) -> KeyRange:
    """The key range from `start` up to `stop`. Raises `InvalidRequest` unless they are bytes and in order."""
    for name, bound in (("start", start), ("stop", stop)):
        if bound is not None and not isinstance(bound, bytes):
            advice = "; encode it first" if isinstance(bound, str) else ""
            raise InvalidRequest(f"{name} is bytes, not {type(bound).__name__}{advice}")
    if start is not None and stop is not None and start > stop:
        raise InvalidRequest(
            f"the range from {start!r} to {stop!r} is inverted; start must not be above stop"
        )
    return KeyRange(start or None, stop)


class UncountedSet:
    """Comparisons of a view as a set, which those of `collections.abc` begin with the length. They hold both sets."""

    __slots__ = ()
    __hash__: ClassVar[None] = None  # type: ignore[assignment] # as the views of a dictionary

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]: ...

    def __eq__(self, other: object) -> bool:
        return self._compared(other, lambda inside, covers: inside and covers)

    def __le__(self, other: object) -> bool:
        return self._compared(other, lambda inside, _: inside)

    def __lt__(self, other: object) -> bool:
        return self._compared(other, lambda inside, covers: inside and not covers)

    def __ge__(self, other: object) -> bool:
        return self._compared(other, lambda _, covers: covers)

    def __gt__(self, other: object) -> bool:
        return self._compared(other, lambda inside, covers: covers and not inside)

    def _compared(self, other: object, verdict: Callable[[bool, bool], bool]) -> bool:
        """The verdict on whether the view is inside of the other set, and whether it covers the other set."""
        if not isinstance(other, AbstractSet):
            return cast("bool", NotImplemented)
        mine, others = list(self), list(other)
        try:
            common = len(set(mine).intersection(others))
        except TypeError:  # values without a hash
            common = sum(each in others for each in mine)
        return verdict(common == len(mine), common == len(others))


class RowKeys(UncountedSet, KeysView[bytes]):
    """The keys of a mapping of rows, ascending."""

    __slots__ = ()
    _mapping: RowMapping

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._mapping)

    def __reversed__(self) -> Iterator[bytes]:
        return reversed(self._mapping)

    def __contains__(self, key: object) -> bool:
        return key in self._mapping

    def __bool__(self) -> bool:
        return _has_rows(self._mapping)


class RowValues(ValuesView[bytes]):
    """The values of a mapping of rows, in the order of their keys."""

    __slots__ = ()
    _mapping: RowMapping

    def __iter__(self) -> Iterator[bytes]:
        return map(_VALUE_OF, self._mapping._rows())  # noqa: SLF001 - of one file

    def __reversed__(self) -> Iterator[bytes]:
        return map(_VALUE_OF, self._mapping._rows(reverse=True))  # noqa: SLF001

    def __contains__(self, value: object) -> bool:
        return any(value == each for each in self)

    def __bool__(self) -> bool:
        return _has_rows(self._mapping)


class RowItems(UncountedSet, ItemsView[bytes, bytes]):
    """Pairs of key and value of a mapping of rows, ascending."""

    __slots__ = ()
    _mapping: RowMapping

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._mapping._rows())  # noqa: SLF001

    def __reversed__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._mapping._rows(reverse=True))  # noqa: SLF001

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, tuple) or len(item) != 2:
            return False
        value = self._mapping.get(item[0])
        return value is not None and value == item[1]

    def __bool__(self) -> bool:
        return _has_rows(self._mapping)


def _has_rows(mapping: RowMapping) -> bool:
    return next(mapping._rows(limit=1), None) is not None  # noqa: SLF001


# -- changing it -------------------------------------------------------------------------------------------


class ReadsAndWrites(Protocol):
    """A transaction, as the functions below use it."""

    def get(self, key: bytes) -> bytes | None: ...
    def put(self, key: bytes, value: bytes) -> object: ...
    def delete(self, key: bytes) -> object: ...
    def scan(self, *, reverse: bool = ..., limit: int | None = ...) -> Iterable[tuple[bytes, bytes]]: ...


def take_value(tx: ReadsAndWrites, key: bytes) -> bytes | None:
    """Delete `key` and return its value; None if it does not exist."""
    value = tx.get(key)
    if value is not None:
        tx.delete(key)
    return value


def value_or_put(tx: ReadsAndWrites, key: bytes, value: bytes) -> bytes:
    """The value of `key`, which becomes `value` if it does not exist."""
    found = tx.get(key)
    if found is None:
        tx.put(key, value)
        return value
    return found


def take_item(tx: ReadsAndWrites, *, last: bool) -> tuple[bytes, bytes]:
    """Delete the row with the largest key, or the smallest; return it. Raises `KeyError` if there is none."""
    found = next(iter(tx.scan(reverse=last, limit=1)), None)
    if found is None:
        raise KeyError("there is no row")
    tx.delete(found[0])
    return found


Pairs = Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]]
"""What `update` takes: a mapping, or pairs of key and value."""


def pairs_of(rows: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs of what `update` was given, as `dict.update` finds them."""
    if isinstance(rows, Mapping):
        yield from rows.items()
    elif hasattr(rows, "keys"):
        for key in rows.keys():  # noqa: SIM118 - it has no other way to iterate
            yield key, rows[key]
    else:
        for pair in rows:
            if isinstance(pair, Sized) and len(pair) != 2:
                raise InvalidRequest(f"update takes pairs of key and value; this one has {len(pair)} parts")
            key, value = pair
            yield key, value
