"""Values of a collection: which columns a Python type has, and its objects as plain rows. Pure.

A plain row is a mapping of column names to what Arrow makes of a value. `Shape` converts between it and an object:
dataclasses, models of msgspec and pydantic, typed dictionaries, Arrow schemas, and single values, which have one column
`value`.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import pyarrow as pa

from flagstone.db.collections.classes import (
    defaults_of_class,
    is_typeddict,
    maker_of_class,
    names_of_class,
    optional_names,
)
from flagstone.db.collections.parts import plain_type
from flagstone.errors import InvalidRequest

Convert = Callable[[Any], Any]

_PLAIN: Final = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    bytes: pa.binary(),
    datetime: pa.timestamp("us", "UTC"),
    date: pa.date32(),
    timedelta: pa.duration("us"),
}
_QUALIFIERS: Final = frozenset(["Required", "NotRequired", "ReadOnly"])
"""What a typed dictionary may say of a field besides its type: forms of `typing` or of `typing_extensions`."""

_REFUSALS: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
"""What conversions and the classes of a caller raise for values that they do not take."""

ONLY: Final = "value"
"""The column of a collection whose values are single values."""


class Field(NamedTuple):
    """A type as an Arrow type, with the conversions of its objects; None where nothing is converted.

    `default` makes the object of a row that has no such column, because it is older than the field.
    """

    type: Any
    nullable: bool = False
    store: Convert | None = None
    restore: Convert | None = None
    default: Callable[[], Any] | None = None


class Shape(NamedTuple):
    """The columns of the values of a collection, and the conversion of objects to plain rows and back."""

    columns: Any
    store: Callable[[Any], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], Any]


def shape_of(kind: Any) -> Shape:
    """The shape of a type that a collection was given for its values.

    Raises:
        InvalidRequest: no columns can be derived from the type; the message names it, and what to use instead.

    """
    if isinstance(kind, pa.Schema):
        return Shape(kind, dict, dict)
    if isinstance(kind, Mapping):
        record = _record({str(name): field_of(each, str(name)) for name, each in kind.items()}, _item, dict)
        return Shape(_columns(record), _checked(Mapping, record, "mapping"), record.restore)
    of_class = _record_of_class(kind)
    if of_class is not None:
        return Shape(_columns(of_class), _checked_class(kind, of_class), of_class.restore)
    only = _record({ONLY: field_of(kind, ONLY)}, lambda value, _: value, lambda values: values[ONLY])

    def store(value: Any) -> dict[str, Any]:
        if value is None and not only.fields[ONLY].nullable:
            raise InvalidRequest("the value is None; delete the key, or declare the type as optional")
        return only.store(value)

    return Shape(_columns(only), store, only.restore)


def field_of(kind: Any, name: str, above: tuple[Any, ...] = ()) -> Field:
    """The Arrow type of a Python type, with its conversions. Raises `InvalidRequest` with the name of the field.

    `above` are the classes whose fields lead to it.
    """
    kind = plain_type(kind)
    if isinstance(kind, pa.DataType):
        return Field(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        arrow = next((each for each in arguments[1:] if isinstance(each, pa.DataType)), None)
        inner = field_of(arguments[0], name, above) if arrow is None else None
        return inner if inner is not None else Field(arrow)
    if origin in {Union, types.UnionType}:
        others = [each for each in arguments if each is not type(None)]
        if len(others) == 1 and len(arguments) == 2:
            return field_of(others[0], name, above)._replace(nullable=True)
    elif getattr(origin, "_name", None) in _QUALIFIERS:
        return field_of(arguments[0], name, above)
    elif origin is typing.Literal and len({type(each) for each in arguments}) == 1:
        return field_of(type(arguments[0]), name, above)
    elif origin in {list, set, frozenset} or (origin is tuple and arguments[1:] == (...,)):
        return _list_field(origin, field_of(arguments[0], f"{name}[]", above))
    elif origin is dict:
        return _map_field(
            field_of(arguments[0], f"{name}.key", above), field_of(arguments[1], f"{name}.value", above)
        )
    elif isinstance(kind, type):
        known = _class_field(kind, name, above)
        if known is not None:
            return known
    advice = (
        "; give its digits, as Annotated[Decimal, pyarrow.decimal128(10, 2)]"
        if kind is Decimal
        else "; use another type, or value='json'"
    )
    raise InvalidRequest(f"field {name!r} has the type {kind!r}, which has no column type{advice}")


def _class_field(kind: type, name: str, above: tuple[Any, ...]) -> Field | None:
    if kind in _PLAIN:
        return Field(_PLAIN[kind])
    if kind is UUID:
        return Field(pa.string(), store=uuid_text, restore=UUID)
    if issubclass(kind, enum.Enum):
        members = {type(member.value) for member in kind}
        if len(members) == 1:
            return field_of(members.pop(), name)._replace(store=lambda each: kind(each).value, restore=kind)
        return None
    record = _record_of_class(kind, name, above)
    if record is not None:
        return Field(pa.struct(list(_columns(record))), False, _checked_class(kind, record), record.restore)
    if kind.__module__ == "numpy":
        try:
            return Field(
                pa.from_numpy_dtype(kind), store=lambda each: each.item() if hasattr(each, "item") else each
            )
        except (pa.ArrowException, TypeError):
            return None
    return None


def uuid_text(value: Any) -> str:
    """The text of a UUID, which may be given as text. Raises `ValueError` for anything else."""
    if isinstance(value, UUID):
        return str(value)
    if not isinstance(value, str):
        raise TypeError(f"it is a UUID, not a {type(value).__name__}")
    return str(UUID(value))


def _list_field(kind: Any, element: Field) -> Field:
    store, restore = element.store, element.restore

    def stored(each: Any) -> list[Any]:
        if isinstance(each, str | bytes | Mapping) or not isinstance(each, Iterable):
            raise TypeError(f"it is a {kind.__name__}, not a {type(each).__name__}")
        items: list[Any] = each.tolist() if hasattr(each, "tolist") else list(each)
        if not element.nullable and any(item is None for item in items):
            raise ValueError("an element is None, and the type of the elements is not optional")
        return items if store is None else [item if item is None else store(item) for item in items]

    return Field(
        pa.list_(pa.field("element", element.type, element.nullable)),
        False,
        stored,
        kind
        if restore is None
        else lambda each: kind(item if item is None else restore(item) for item in each),
    )


def _map_field(key: Field, value: Field) -> Field:
    def through(pairs: Iterable[tuple[Any, Any]], key_as: Convert | None, value_as: Convert | None) -> Any:
        return [
            (
                one if key_as is None else key_as(one),
                other if value_as is None or other is None else value_as(other),
            )
            for one, other in pairs
        ]

    def stored(each: Any) -> Any:
        if not isinstance(each, Mapping):
            raise TypeError(f"it is a dict, not a {type(each).__name__}")
        if not value.nullable and any(other is None for other in each.values()):
            raise ValueError("a value is None, and the type of the values is not optional")
        return through(each.items(), key.store, value.store)

    return Field(
        pa.map_(key.type, pa.field("value", value.type, value.nullable)),
        False,
        stored,
        lambda each: dict(through(each, key.restore, value.restore)),
    )


class _Record(NamedTuple):
    fields: dict[str, Field]
    store: Callable[[Any], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], Any]


def _record(fields: dict[str, Field], read: Callable[[Any, str], Any], make: Callable[..., Any]) -> _Record:
    """Objects with these fields. What a conversion or the class refuses becomes an `InvalidRequest`."""
    if not fields:
        raise InvalidRequest("a value needs at least one field")
    stores = [(name, field.store, field.nullable) for name, field in fields.items()]
    restores = [(name, field.restore, field.nullable, field.default) for name, field in fields.items()]

    def store(each: Any) -> dict[str, Any]:
        row = {}
        for name, convert, nullable in stores:
            value = read(each, name)
            if value is None:
                if not nullable:
                    raise InvalidRequest(f"field {name!r} is None, and its type is not optional")
            elif convert is not None:
                try:
                    value = convert(value)
                except _REFUSALS as problem:
                    raise InvalidRequest(f"field {name!r}: {problem}") from None
            row[name] = value
        return row

    def restore(row: Mapping[str, Any]) -> Any:
        values = {}
        for name, convert, nullable, default in restores:
            value = row[name]
            if value is not None:
                try:
                    values[name] = value if convert is None else convert(value)
                except _REFUSALS as problem:
                    raise InvalidRequest(
                        f"the stored field {name!r} does not fit its type: {problem}"
                    ) from None
            elif nullable:
                values[name] = None
            elif default is not None:
                values[name] = default()
            else:
                raise InvalidRequest(f"the stored field {name!r} is null, and its type is not optional")
        try:
            return make(values)
        except _REFUSALS as problem:
            raise InvalidRequest(f"the type of the values refuses a stored row: {problem}") from problem

    return _Record(fields, store, restore)


def _columns(record: _Record) -> Any:
    return pa.schema(
        [
            pa.field(name, each.type, each.nullable or each.default is not None)
            for name, each in record.fields.items()
        ]
    )


def _checked(wanted: Any, record: _Record, title: str) -> Callable[[Any], dict[str, Any]]:
    """`record.store` for mappings: an item without a field would be lost."""

    def stored(value: Any) -> dict[str, Any]:
        if not isinstance(value, wanted):
            raise InvalidRequest(f"a value of this collection is a {title}, not {type(value).__name__}")
        if not value.keys() <= record.fields.keys():
            raise _no_field(sorted(map(str, value.keys() - record.fields.keys())), record)
        return record.store(value)

    return stored


def _checked_class(kind: Any, record: _Record) -> Callable[[Any], dict[str, Any]]:
    """`record.store` for objects of a class: the fields of a subclass would be lost."""
    if is_typeddict(kind):
        return _checked(dict, record, kind.__name__)

    def stored(value: Any) -> dict[str, Any]:
        if type(value) is not kind:
            if not isinstance(value, kind):
                raise InvalidRequest(
                    f"a value of this collection is a {kind.__name__}, not {type(value).__name__}"
                )
            more = [name for name in names_of_class(type(value)) or () if name not in record.fields]
            if more:
                raise _no_field(more, record)
        if getattr(value, "model_extra", None):  # of pydantic
            raise _no_field(sorted(value.model_extra), record)
        return record.store(value)

    return stored


def _no_field(names: Sequence[str], record: _Record) -> InvalidRequest:
    return InvalidRequest(f"there is no field {names[0]!r}; there are {', '.join(record.fields)}")


def _record_of_class(kind: Any, name: str = "", above: tuple[Any, ...] = ()) -> _Record | None:
    """The fields of a dataclass, a model or a typed dictionary; None for any other type."""
    names = names_of_class(kind)
    if names is None:
        return None
    title = getattr(kind, "__name__", str(kind))
    if kind in above:
        raise InvalidRequest(f"field {name!r} has the type {title}, which contains itself; use value='json'")
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as problem:
        raise InvalidRequest(
            f"the types of the fields of {title} are not known: {problem}; define them at the top of a module"
        ) from None
    defaults = defaults_of_class(kind)
    optional = optional_names(kind, hints)
    fields = {}
    for each in names:
        field = field_of(hints[each], f"{title}.{each}", (*above, kind))
        fields[each] = field._replace(default=defaults.get(each), nullable=field.nullable or each in optional)
    return _record(fields, _item if is_typeddict(kind) else getattr, maker_of_class(kind, optional))


def _item(value: Any, name: str) -> Any:
    return value.get(name)
