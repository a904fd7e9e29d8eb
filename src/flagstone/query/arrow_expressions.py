"""PyArrow expressions as conditions.

An expression has no public structure, but it pickles, as an Arrow file with one row: the literals are columns, and the
metadata of the schema is the expression in prefix notation. `pyarrow` gives metadata as a dict, which loses repeated
names, so they are read from the FlatBuffers of the file here. If a release of Arrow changes this, `read_expression`
raises, and the caller reads all keys and columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa

from flagstone.query.conditions import (
    Chosen,
    Compare,
    Comparison,
    Condition,
    Constant,
    Either,
    Every,
    Not,
    OneOf,
    StartsWith,
    Unknown,
)

_COMPARISONS: Final[dict[str, Comparison]] = {
    "equal": "=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_SWAPPED: Final[dict[Comparison, Comparison]] = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SPECIAL: Final = "%_\\"
_MAX_DEPTH: Final = 200


class NotReadable(Exception):
    """The expression cannot be taken apart."""


class Filter(NamedTuple):
    """What an expression says, and the top-level columns that it refers to."""

    condition: Condition
    columns: frozenset[str]


def read_expression(expression: Any) -> Filter:
    """Take an expression apart. Parts that say nothing about columns and literals become `Unknown`.

    Raises:
        NotReadable: the expression does not pickle, or Arrow has changed its form.

    """
    try:
        file = expression.__reduce__()[1][0]
        literals = pa.ipc.open_file(file).get_batch(0)
        reader = _Reader(_metadata(memoryview(file)), literals)
        condition = _condition(reader.node(0))
        return Filter(condition, frozenset(reader.columns))
    except (
        ArithmeticError,
        AttributeError,
        IndexError,
        LookupError,
        TypeError,
        ValueError,
        StopIteration,
    ) as error:
        raise NotReadable(str(error)) from error
    except (struct.error, pa.ArrowException) as error:
        raise NotReadable(str(error)) from error


class _Field(NamedTuple):
    name: str


class _Literal(NamedTuple):
    value: Any


class _Call(NamedTuple):
    function: str
    arguments: list[Any]
    options: dict[str, Any]


class _Nested(NamedTuple):
    """A field inside a struct."""


class _Reader:
    def __init__(self, steps: Iterator[tuple[str, str]], literals: pa.RecordBatch) -> None:
        self._steps = steps
        self._literals = literals
        self.columns: set[str] = set()

    def node(self, depth: int) -> Any:
        kind, text = next(self._steps)
        return self._node(kind, text, depth)

    def _node(self, kind: str, text: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("the expression is nested too deeply")
        match kind:
            case "literal":
                return _Literal(self._value(int(text)))
            case "field_ref":
                self.columns.add(text)
                return _Field(text)
            case "nested_field_ref":
                names = [next(self._steps)[1] for _ in range(int(text))]
                self.columns.add(names[0])
                return _Nested()
            case "call":
                return self._call(text, depth)
        raise ValueError(f"unknown part {kind!r}")

    def _call(self, function: str, depth: int) -> _Call:
        arguments: list[Any] = []
        options: dict[str, Any] = {}
        while True:
            kind, text = next(self._steps)
            if kind == "end":
                return _Call(function, arguments, options)
            if kind == "options":
                options = self._value(int(text))
            else:
                arguments.append(self._node(kind, text, depth + 1))

    def _value(self, column: int) -> Any:
        return self._literals.column(column)[0].as_py()


def _condition(node: Any) -> Condition:
    if isinstance(node, _Literal) and (node.value is None or isinstance(node.value, bool)):
        return Constant(node.value)
    if not isinstance(node, _Call):
        return Unknown()
    arguments, options = node.arguments, node.options
    match node.function:
        case "and" | "and_kleene":
            return Every(tuple(map(_condition, arguments)))
        case "or" | "or_kleene":
            return Either(tuple(map(_condition, arguments)))
        case "invert":
            return Not(_condition(arguments[0]))
        case "if_else":
            return Chosen((_condition(arguments[1]), _condition(arguments[2])))
        case "is_in" if isinstance(arguments[0], _Field):
            return OneOf(arguments[0].name, tuple(options["value_set"]))
        case "starts_with" if isinstance(arguments[0], _Field) and not options["ignore_case"]:
            return StartsWith(arguments[0].name, options["pattern"])
        case "match_like" if isinstance(arguments[0], _Field) and not options["ignore_case"]:
            return StartsWith(arguments[0].name, _before_wildcards(options["pattern"]))
        case function if function in _COMPARISONS:
            return _comparison(_COMPARISONS[function], *arguments)
    return Unknown()


def _comparison(comparison: Comparison, left: Any, right: Any) -> Condition:
    if isinstance(left, _Literal):
        comparison, left, right = _SWAPPED[comparison], right, left
    if not isinstance(left, _Field) or not isinstance(right, _Literal):
        return Unknown()
    return Constant(None) if right.value is None else Compare(left.name, comparison, right.value)


def _before_wildcards(pattern: str) -> str:
    return pattern[: next((at for at, letter in enumerate(pattern) if letter in _SPECIAL), len(pattern))]


_MESSAGE_AT: Final = 16
"""Behind the magic bytes, the mark of a message and its length."""

_HEADER: Final = 2
_CUSTOM_METADATA: Final = 2
_KEY, _VALUE = 0, 1


def _metadata(file: memoryview) -> Iterator[tuple[str, str]]:
    """The metadata of the schema of an Arrow file, in order, with repeated names."""
    message = _Table.at_offset(file, _MESSAGE_AT)
    schema = message.child(_HEADER)
    for pair in schema.children(_CUSTOM_METADATA):
        yield pair.text(_KEY), pair.text(_VALUE)


class _Table(NamedTuple):
    """A table of a FlatBuffer."""

    data: memoryview
    at: int

    @classmethod
    def at_offset(cls, data: memoryview, at: int) -> _Table:
        return cls(data, at + _number("<I", data, at))

    def child(self, slot: int) -> _Table:
        return self.at_offset(self.data, self._field(slot))

    def children(self, slot: int) -> Iterator[_Table]:
        vector = self._target(slot)
        for index in range(_number("<I", self.data, vector)):
            yield self.at_offset(self.data, vector + 4 + 4 * index)

    def text(self, slot: int) -> str:
        start = self._target(slot)
        return bytes(self.data[start + 4 : start + 4 + _number("<I", self.data, start)]).decode()

    def _target(self, slot: int) -> int:
        field = self._field(slot)
        return field + _number("<I", self.data, field)

    def _field(self, slot: int) -> int:
        vtable = self.at - _number("<i", self.data, self.at)
        place = 4 + 2 * slot
        offset = _number("<H", self.data, vtable + place) if place < _number("<H", self.data, vtable) else 0
        if not offset:
            raise ValueError(f"the table has no field {slot}")
        return self.at + offset


def _number(form: str, data: memoryview, at: int) -> int:
    number: int = struct.unpack_from(form, data, at)[0]
    return number
