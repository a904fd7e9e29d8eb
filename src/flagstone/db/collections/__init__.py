"""Typed collections: a prefix of the database whose keys and values are Python objects. `docs/collections.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

if TYPE_CHECKING:
    from flagstone.db.collections.collection import Collection

_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_V = TypeVar("_V")


class HasCollections:
    """A handle that declares collections. Transactions and batches use those of the database: `Collection.within`."""

    __slots__ = ()

    @overload
    def collection(self, name: str, *, key: type[_A], value: type[_V]) -> Collection[_A, _V]: ...
    @overload
    def collection(
        self, name: str, *, key: tuple[type[_A], type[_B]], value: type[_V]
    ) -> Collection[tuple[_A, _B], _V]: ...
    @overload
    def collection(
        self, name: str, *, key: tuple[type[_A], type[_B], type[_C]], value: type[_V]
    ) -> Collection[tuple[_A, _B, _C], _V]: ...
    @overload
    def collection(
        self, name: str, *, key: type[_A], value: Literal["json"] = "json"
    ) -> Collection[_A, Any]: ...
    @overload
    def collection(self, name: str, *, key: Any, value: Any = "json") -> Collection[Any, Any]: ...
    def collection(self, name: str, *, key: Any, value: Any = "json") -> Collection[Any, Any]:
        """Typed rows under the prefix `flagstone.keys.encode(name)`: `db.collection("orders", key=str, value=Order)`.

        `key` is a type, or a tuple or a mapping of types: str, int, float, bool, bytes, datetime, date, UUID, numpy
        types, or names of column types such as "int32" or "decimal(10,2)". `value` is a dataclass, a model of pydantic
        or msgspec, a typed dictionary, an Arrow schema, a mapping of names to types, or a single type; their fields are
        columns, which Spark reads. It may also be `bytes`, or "json" for any JSON document, which have no columns.

        A database stores the schema of the columns. A type with other fields later is checked against it: new fields
        must be optional or have a default, and fields that a type lacks are written as nulls.

        Raises:
            InvalidRequest: a type has no columns, or does not fit the stored schema; the message says what differs.

        """
        # Imported here: most callers do not use it.
        from flagstone.db.collections.open import open_collection  # noqa: PLC0415

        return open_collection(self, name, key=key, value=value)  # type: ignore[arg-type] # a subclass of Reads
