"""Values of a collection: which columns a Python type has, and its objects as plain rows. Pure.

A plain row is a mapping of column names to what Arrow makes of a value. `Shape` converts between it and an object:
dataclasses, models of msgspec and pydantic, typed dictionaries, Arrow schemas, and single values, which have one column
`value`. The libraries of models are recognised by what their classes have, so none of them is imported here.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import pyarrow as pa

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
        record = _record(
            {str(name): field_of(each, str(name)) for name, each in kind.items()}, dict.get, dict
        )
        return Shape(_columns(record), _checked(Mapping, record.store), record.restore)
    fields = _fields_of_class(kind)
    if fields is not None:
        record = _record(fields, _reader_of(kind), _maker_of(kind))
        wanted = dict if typing.is_typeddict(kind) else kind
        return Shape(_columns(record), _checked(wanted, record.store), record.restore)
    field = field_of(kind, ONLY)

    def store(value: Any) -> dict[str, Any]:
        if value is None and not field.nullable:
            raise InvalidRequest("the value is None; delete the key, or declare the type as optional")
        return {ONLY: value if field.store is None or value is None else field.store(value)}

    def restore(row: Mapping[str, Any]) -> Any:
        value = row[ONLY]
        return value if field.restore is None or value is None else field.restore(value)

    return Shape(pa.schema([pa.field(ONLY, field.type, field.nullable)]), store, restore)


def field_of(kind: Any, name: str) -> Field:
    """The Arrow type of a Python type, with its conversions. Raises `InvalidRequest` with the name of the field."""
    if isinstance(kind, pa.DataType):
        return Field(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        arrow = next((each for each in arguments[1:] if isinstance(each, pa.DataType)), None)
        inner = field_of(arguments[0], name) if arrow is None else None
        return inner if inner is not None else Field(arrow)
    if origin in {Union, types.UnionType}:
        others = [each for each in arguments if each is not type(None)]
        if len(others) == 1 and len(arguments) == 2:
            return field_of(others[0], name)._replace(nullable=True)
    elif origin is typing.Literal and len({type(each) for each in arguments}) == 1:
        return field_of(type(arguments[0]), name)
    elif origin in {list, set, frozenset} or (origin is tuple and arguments[1:] == (...,)):
        return _list_field(origin, field_of(arguments[0], f"{name}[]"))
    elif origin is dict:
        return _map_field(field_of(arguments[0], f"{name}.key"), field_of(arguments[1], f"{name}.value"))
    elif isinstance(kind, type):
        known = _class_field(kind, name)
        if known is not None:
            return known
    advice = (
        "; give its digits, as Annotated[Decimal, pyarrow.decimal128(10, 2)]"
        if kind is Decimal
        else "; use another type, or value='json'"
    )
    raise InvalidRequest(f"field {name!r} has the type {kind!r}, which has no column type{advice}")


def _class_field(kind: type, name: str) -> Field | None:
    if kind in _PLAIN:
        return Field(_PLAIN[kind])
    if kind is UUID:
        return Field(pa.string(), store=str, restore=UUID)
    if issubclass(kind, enum.Enum):
        members = {type(member.value) for member in kind}
        if len(members) == 1:
            return field_of(members.pop(), name)._replace(store=lambda each: kind(each).value, restore=kind)
        return None
    fields = _fields_of_class(kind)
    if fields is not None:
        record = _record(fields, _reader_of(kind), _maker_of(kind))
        return Field(pa.struct(list(_columns(record))), False, record.store, record.restore)
    if kind.__module__ == "numpy":
        try:
            return Field(
                pa.from_numpy_dtype(kind), store=lambda each: each.item() if hasattr(each, "item") else each
            )
        except (pa.ArrowException, TypeError):
            return None
    return None


def _list_field(kind: Any, element: Field) -> Field:
    store, restore = element.store, element.restore
    return Field(
        pa.list_(pa.field("element", element.type, element.nullable)),
        False,
        list if store is None else lambda each: [item if item is None else store(item) for item in each],
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

    return Field(
        pa.map_(key.type, pa.field("value", value.type, value.nullable)),
        False,
        lambda each: through(each.items(), key.store, value.store),
        lambda each: dict(through(each, key.restore, value.restore)),
    )


class _Record(NamedTuple):
    fields: dict[str, Field]
    store: Callable[[Any], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], Any]


def _record(fields: dict[str, Field], read: Callable[[Any, str], Any], make: Callable[..., Any]) -> _Record:
    if not fields:
        raise InvalidRequest("a value needs at least one field")
    stores = [(name, field.store, field.nullable) for name, field in fields.items()]
    restores = [
        (name, field.restore, None if field.nullable else field.default) for name, field in fields.items()
    ]

    def store(each: Any) -> dict[str, Any]:
        row = {}
        for name, convert, nullable in stores:
            value = read(each, name)
            if value is None:
                if not nullable:
                    raise InvalidRequest(f"field {name!r} is None, and its type is not optional")
            elif convert is not None:
                value = convert(value)
            row[name] = value
        return row

    def restore(row: Mapping[str, Any]) -> Any:
        values = {}
        for name, convert, default in restores:
            value = row[name]
            if value is not None:
                values[name] = value if convert is None else convert(value)
            else:
                values[name] = None if default is None else default()
        return make(values)

    return _Record(fields, store, restore)


def _columns(record: _Record) -> Any:
    return pa.schema(
        [
            pa.field(name, each.type, each.nullable or each.default is not None)
            for name, each in record.fields.items()
        ]
    )


def _checked(kind: Any, store: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    def stored(value: Any) -> dict[str, Any]:
        if not isinstance(value, kind):
            raise InvalidRequest(
                f"a value of this collection is a {kind.__name__}, not {type(value).__name__}"
            )
        return store(value)

    return stored


def _fields_of_class(kind: Any) -> dict[str, Field] | None:
    """The fields of a dataclass, a model or a typed dictionary; None for any other type."""
    if not isinstance(kind, type) and not typing.is_typeddict(kind):
        return None
    defaults: dict[str, Callable[[], Any]] = {}
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind)]
        for each in dataclasses.fields(kind):
            if each.default_factory is not dataclasses.MISSING:
                defaults[each.name] = each.default_factory
            elif each.default is not dataclasses.MISSING:
                defaults[each.name] = partial(_same, each.default)
    elif hasattr(kind, "__struct_fields__"):  # msgspec
        names = list(kind.__struct_fields__)
    elif hasattr(kind, "model_fields") and hasattr(kind, "model_validate"):  # pydantic
        names = list(kind.model_fields)
        defaults = {
            name: partial(each.get_default, call_default_factory=True)
            for name, each in kind.model_fields.items()
            if not each.is_required()
        }
    elif typing.is_typeddict(kind):
        names = list(kind.__annotations__)
    else:
        return None
    hints = get_type_hints(kind, include_extras=True)
    title = getattr(kind, "__name__", str(kind))
    return {
        name: field_of(hints[name], f"{title}.{name}")._replace(default=defaults.get(name)) for name in names
    }


def _same(value: Any) -> Any:
    return value


def _reader_of(kind: Any) -> Callable[[Any, str], Any]:
    return dict.get if typing.is_typeddict(kind) else getattr


def _maker_of(kind: Any) -> Callable[[dict[str, Any]], Any]:
    if typing.is_typeddict(kind):
        return dict
    if hasattr(kind, "model_validate"):
        validate: Callable[[dict[str, Any]], Any] = kind.model_validate
        return validate
    if dataclasses.is_dataclass(kind) and not all(each.init for each in dataclasses.fields(kind)):
        raise InvalidRequest(f"{kind!r} has fields that its constructor does not take; remove init=False")
    return lambda values: kind(**values)
