"""The part of FlatBuffers that the format needs: tables are declared once, read strictly and written canonically.

A `Shape` lists the fields of a table in slot order; `decode` turns a buffer into a value, and `encode` the value into a
buffer. The nesting of the shapes bounds the depth, the size of the buffer the work. Both run in kernels, because a
manifest may list a hundred thousand SSTs: `kernels/_flat_reader.py` and `kernels/_flat_writer.py`.

The bytes equal those that SlateDB writes. The rules of its writer:

* A buffer grows from its end to its front. *used* is the number of bytes written so far; padding to an
  alignment makes (used + size of the object) a multiple of it, and follows the object.
* A table's children are written before it, in the order of its shape (`order`), each with its own children
  first. A vector of tables: all elements in order, then the vector of u32 offsets.
* String: pad (length + 1) to 4, NUL, bytes, u32 length. Vector: pad (bytes of the elements) to 4, elements,
  u32 length. An offset is the distance from where it is stored to its target.
* Table: 8-byte fields, then those of 4 (offsets too), 2 and 1 bytes; within one size the highest slot first;
  each padded to its size. Then, padded to 4, the i32 distance to the vtable. Scalars equal to 0 are left out.
* Vtable, directly in front of its table: u16 own size (trailing absent slots cut off), u16 table size, u16
  offset per slot (0: absent). The table size includes the padding of the first field, so one shape may need
  several vtables. An equal vtable anywhere in the buffer is used again instead of being written.
* End: pad 4 to the largest alignment met (8 if any 8-byte field was written, else 4), u32 offset of the root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from enum import IntEnum
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from flagstone.errors import InternalError
from flagstone.kernels import flat_reader, flat_writer

T = TypeVar("T")


class Field:
    """One slot of a table that holds a number.

    `absent` is its value when it is not in the buffer. `unwritten` is left out of the buffer: 0, or None if every
    number is written.
    """

    def __init__(self, code: str, *, absent: int | None = 0, unwritten: int | None = 0) -> None:
        self.code = code
        self.absent = absent
        self.unwritten = unwritten
        self.required = False

    def target_in(self, _built: _Built) -> Any:
        """What the field refers to, for one kernel."""
        return None


BOOL: Final = Field("?", absent=False)
I8: Final = Field("b")
U8: Final = Field("B")
U16: Final = Field("H")
OPTIONAL_U16: Final = Field("H", absent=None, unwritten=None)
U32: Final = Field("I")
U64: Final = Field("Q")
I64: Final = Field("q")


class Choice(Field):
    """One slot that holds a member of an enumeration, as an i8; other numbers are damage."""

    def __init__(self, what: str, members: type[IntEnum]) -> None:
        super().__init__("i", absent=members(0))
        self._target = (what, {member.value: member for member in members})

    def target_in(self, _built: _Built) -> Any:
        return self._target


class Indirect(Field):
    """One slot that holds an offset to an object outside the table; None when absent."""

    def __init__(self, code: str, *, required: bool = False) -> None:
        super().__init__(code, absent=None, unwritten=None)
        self.required = required


class Bytes(Indirect):
    """A vector of bytes."""

    def __init__(self, *, required: bool = False) -> None:
        super().__init__("s", required=required)


class Text(Indirect):
    """A UTF-8 string, followed by a NUL terminator."""

    def __init__(self, *, required: bool = False) -> None:
        super().__init__("t", required=required)


class Numbers(Indirect):
    """A vector of u32."""

    def __init__(self, *, required: bool = False) -> None:
        super().__init__("u", required=required)


class Child(Indirect):
    """A table."""

    def __init__(self, shape: Shape[Any], *, required: bool = False, code: str = "v") -> None:
        super().__init__(code, required=required)
        self._shape = shape

    def target_in(self, built: _Built) -> Any:
        return built(self._shape)


class Children(Child):
    """A vector of tables."""

    def __init__(self, shape: Shape[Any], *, required: bool = False) -> None:
        super().__init__(shape, required=required, code="w")


class Union(Indirect):
    """One of several tables, chosen by the tag in the slot before; tag 0 means none."""

    def __init__(self, shapes: Mapping[int, Shape[Any]], *, required: bool = False) -> None:
        super().__init__("x", required=required)
        self._shapes = shapes

    def target_in(self, built: _Built) -> Any:
        return {tag: built(shape) for tag, shape in self._shapes.items()}


class Shape(Generic[T]):
    """A table: its fields in slot order, and how they become a value and are taken from one. One of three ways:

    * `record`: a dataclass with slots, without `__post_init__`. `members` names the one for each slot, all in their
      order by default. A field without a member (None) is checked when it is read, and not written.
    * `wide`: the table has two u64, the halves of a number of 128 bits.
    * `make` receives a list with one value per slot and may raise CorruptData; `take` returns such a sequence.

    `order` names the slots of the indirect fields in the order they are written; default is by slot.
    """

    def __init__(
        self,
        name: str,
        *fields: Field,
        record: type[T] | None = None,
        members: Sequence[str | None] | None = None,
        wide: bool = False,
        make: Callable[[list[Any]], T] | None = None,
        take: Callable[[T], Sequence[Any]] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self.fields = fields
        self.wide = wide
        self.make = make
        self.take = take
        indirect = [slot for slot, field in enumerate(fields) if isinstance(field, Indirect)]
        self.order: Sequence[int] = order or indirect
        if sorted(self.order) != indirect:
            raise InternalError(f"shape {name}: order must name every indirect slot")
        self.record: tuple[type[T], Sequence[str | None]] | None = None
        if record is not None:
            self.record = (record, members or [field.name for field in fields_of(record)])  # type: ignore[arg-type]
        self.tables: dict[ModuleType, Any] = {}


_Built = Callable[[Shape[Any]], Any]


def reading_table(shape: Shape[Any], kernel: ModuleType = flat_reader) -> Any:
    """The shape for one form of the kernel that reads."""
    if kernel not in shape.tables:
        fields = [
            (
                field.code,
                field.absent,
                field.required,
                field.target_in(lambda child: reading_table(child, kernel)),
            )
            for field in shape.fields
        ]
        shape.tables[kernel] = kernel.Table(
            shape.name, fields, make=shape.make, record=shape.record, wide=shape.wide
        )
    return shape.tables[kernel]


def writing_table(shape: Shape[Any], kernel: ModuleType = flat_writer) -> Any:
    """The shape for one form of the kernel that writes."""
    if kernel not in shape.tables:
        fields = [
            (
                field.code,
                field.unwritten,
                field.required,
                field.target_in(lambda child: writing_table(child, kernel)),
            )
            for field in shape.fields
        ]
        shape.tables[kernel] = kernel.Table(
            shape.name, fields, order=shape.order, take=shape.take, record=shape.record, wide=shape.wide
        )
    return shape.tables[kernel]


def decode(shape: Shape[T], buffer: bytes | memoryview, *, start: int = 0, strict: bool = False) -> T:
    """The value in a buffer from `start` to its end.

    Anything malformed raises CorruptData with its offset, counted from `start`.

    With `strict` no two objects may share or overlap bytes, and bytes of no object must be zero and no longer than
    padding. That finds offsets and vtables that damage has turned into other valid ones. Buffers with fields of a
    newer release are exempt.
    """
    return flat_reader.decode(reading_table(shape), buffer, start, strict)  # type: ignore[no-any-return]


def encode(shape: Shape[T], value: T, *, before: bytes = b"") -> bytes:
    """The bytes `before`, then the canonical buffer of the value.

    Numbers that do not fit their slot raise InternalError.
    """
    return flat_writer.encode(writing_table(shape), value, before)
