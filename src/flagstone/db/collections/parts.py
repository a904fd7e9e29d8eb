"""Keys of a collection: Python objects as parts of a structured key. The bytes are those of `flagstone.keys`. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from itertools import zip_longest
from typing import Any, Final, NamedTuple, get_args, get_origin
from uuid import UUID

from flagstone import keys
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.keys.schema import KeySchema
from flagstone.schema.table_schema import Column

_TYPES: Final[dict[type, str]] = {
    str: "string",
    bool: "bool",
    int: "int64",
    float: "float64",
    bytes: "binary",
    datetime: "timestamp",
    date: "date",
    UUID: "string",
}
_NUMPY: Final = {
    **{f"int{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "float32": "float32",
    "float64": "float64",
    "bool": "bool",
    "bool_": "bool",
    "str_": "string",
    "bytes_": "binary",
    "datetime64": "timestamp_ntz",
}
_KINDS: Final = (
    "str, int, float, bool, bytes, datetime, date, UUID, a numpy type, or the name of a column type: 'int32'"
)


class PartType(NamedTuple):
    """One part of a key: the name and type of its column, and what decoding makes of it."""

    name: str
    type: str
    restore: Callable[[Any], Any] | None


_UNKNOWN: Final = PartType("", "", None)
"""Stands for a part too many, which encoding refuses."""


class KeyParts:
    """The parts of the keys of a collection, after its prefix.

    A key with one part is that part; one with several is a tuple.
    """

    def __init__(self, key: Any, prefix: bytes, stored: Sequence[Column] = ()) -> None:
        self.prefix: bytes = prefix
        self.parts: tuple[PartType, ...] = tuple(part_types(key, stored))
        self.schema: KeySchema = KeySchema([(part.name, part.type) for part in self.parts])
        self.single: bool = len(self.parts) == 1
        self._restores = any(part.restore for part in self.parts)

    def encode(self, key: Any) -> bytes:
        """The bytes of a key. Raises `InvalidRequest` if it has other parts."""
        parts = self._tuple(key)
        if len(parts) != len(self.parts):
            raise InvalidRequest(
                f"a key of this collection is {self.described}, and {key!r} has {_count(parts)}"
            )
        return self.prefix + self.schema.encode(self._checked(parts))

    def encode_leading(self, parts: Iterable[Any]) -> bytes:
        """The common prefix of the bytes of all keys that begin with these parts."""
        return self.prefix + self.schema.encode(self._checked(tuple(map(plain, parts))))

    def decode(self, encoded: bytes) -> Any:
        """The key of these bytes. Raises `CorruptData` or `InvalidRequest` if they are not a key of the collection."""
        if not encoded.startswith(self.prefix):
            raise CorruptData(f"the key {encoded[:40]!r} does not belong to the collection")
        parts = self.schema.decode(encoded[len(self.prefix) :])
        if self._restores:
            parts = tuple(
                part if each.restore is None or part is None else each.restore(part)
                for each, part in zip(self.parts, parts, strict=True)
            )
        return parts[0] if self.single else parts

    @property
    def described(self) -> str:
        """The parts in words, for messages."""
        return ", ".join(f"{part.name}: {part.type}" for part in self.parts)

    def _checked(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """The parts; those that are UUIDs in the one spelling they are stored with."""
        if not self._restores:
            return parts
        return tuple(
            part if each.restore is not UUID or not isinstance(part, str) else _uuid(part, each.name)
            for each, part in zip_longest(self.parts[: len(parts)], parts, fillvalue=_UNKNOWN)
        )

    def _tuple(self, key: Any) -> tuple[Any, ...]:
        if isinstance(key, slice):
            raise InvalidRequest(
                "a collection has no slices: use scan(), with parts of the key, start and stop"
            )
        if self.single and not isinstance(key, tuple):
            return (plain(key),)
        if not isinstance(key, tuple | list):
            raise InvalidRequest(
                f"a key of this collection is a tuple ({self.described}), not {type(key).__name__}"
            )
        return tuple(map(plain, key))


def part_types(key: Any, stored: Sequence[Column] = ()) -> Iterator[PartType]:
    """The parts of `str`, of `(str, int)`, of `tuple[str, int]`, or of `{"region": str, "id": int}`.

    Parts without names have those of the `stored` columns, and numbers without a width have theirs.
    """
    if get_origin(key) is tuple:
        key = get_args(key)
    named: list[tuple[str | None, Any]]
    if isinstance(key, Mapping):
        named = [(str(name), kind) for name, kind in key.items()]
    else:
        named = [(None, kind) for kind in (key if isinstance(key, tuple | list) else (key,))]
    if not named:
        raise InvalidRequest("a key needs at least one part")
    known = stored if len(stored) == len(named) else ()
    for at, (name, given) in enumerate(named):
        kind = plain_type(given)
        column = known[at] if known else None
        text = _type_name(kind)
        if column is not None and kind in {int, float} and _family(str(column.type)) == _family(text):
            text = str(column.type)
        unnamed = "key" if len(named) == 1 else f"key{at + 1}"
        yield PartType(
            name or (unnamed if column is None else column.name), text, UUID if kind is UUID else None
        )


def _family(text: str) -> str:
    return text.removeprefix("u").rstrip("0123456789")


def _uuid(text: str, name: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise InvalidRequest(f"column {name!r}: {text!r} is not a UUID") from None


def plain_type(kind: Any) -> Any:
    """The type behind a `typing.NewType`."""
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    return kind


def _type_name(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    known = _TYPES.get(kind) if isinstance(kind, type) else None
    if known is None and getattr(kind, "__module__", "") == "numpy":
        known = _NUMPY.get(kind.__name__)
    if known is None:
        advice = "; name its digits, as 'decimal(10,2)'" if kind is Decimal else ""
        raise InvalidRequest(f"a part of a key cannot be {kind!r}{advice}; it is {_KINDS}")
    return known


def plain(part: Any) -> Any:
    """The part as `flagstone.keys` takes it: a UUID as text, a numpy scalar as the Python object."""
    if type(part) in _PLAIN:
        return part
    if isinstance(part, UUID):
        return str(part)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(part, numpy.generic):
        return part.item()
    return part


_PLAIN: Final = frozenset([str, int, bytes, float, bool, datetime, date, type(None)])


def collection_prefix(name: str) -> bytes:
    """The first part of all keys of a collection."""
    return keys.encode(check_name(name, "collection"))


def index_prefix(collection: str, index: str) -> bytes:
    """The first parts of all keys of an index. They begin with a null, and those of collections do not."""
    return keys.encode(None, collection, index)


def indexes_key(collection: str) -> bytes:
    """The key of the row that lists the indexes of a collection."""
    return keys.encode(None, collection)


def check_name(name: object, what: str) -> str:
    """The name. Raises `InvalidRequest` unless it is a text of 1 to 200 characters."""
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise InvalidRequest(
            f"the name of a{'n' if what[0] in 'aeiou' else ''} {what} is a text of 1 to 200 characters"
        )
    return name


def _count(parts: tuple[Any, ...]) -> str:
    return f"{len(parts)} part{'' if len(parts) == 1 else 's'}"
