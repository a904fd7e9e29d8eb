"""The part of FlatBuffers that the format needs: tables are declared once, read strictly and written canonically.

A `Shape` lists the fields of a table in slot order; `decode` turns a buffer into the value that its `make` builds, and
`encode` turns the value into a buffer. The nesting of the shapes bounds the depth, the size of the buffer the work.

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

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from flagstone.errors import CorruptData, InternalError

T = TypeVar("T")

_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
# Objects may be shared, but the decoded objects stay within this multiple of the buffer's size.
_APPARENT_SIZE_FACTOR: Final = 4
_PLANS_KEPT: Final = 64
_ALIGNMENT: Final = 8


class Field:
    """One slot of a table that holds a number; the default is left out of the buffer."""

    def __init__(self, code: str, *, default: int | None = 0) -> None:
        self.code = code
        self.size: int = struct.calcsize("<" + code)
        self.default = default


class Indirect(Field):
    """One slot that holds an offset to an object outside the table; None when absent."""

    def __init__(self, *, required: bool = False) -> None:
        super().__init__("I", default=None)
        self.required = required

    def read(self, reader: _Reader, position: int) -> Any:
        """The value whose bytes are at `position`."""
        raise NotImplementedError

    def write(self, builder: _Builder, value: Any) -> int:
        """Write the value; returns its position, counted from the end of the buffer."""
        raise NotImplementedError


BOOL: Final = Field("?")
I8: Final = Field("b")
U8: Final = Field("B")
U16: Final = Field("H")
OPTIONAL_U16: Final = Field("H", default=None)
U32: Final = Field("I")
U64: Final = Field("Q")
I64: Final = Field("q")


class Bytes(Indirect):
    """A vector of bytes."""

    def read(self, reader: _Reader, position: int) -> bytes:
        return reader.payload(position, 1, 0)

    def write(self, builder: _Builder, value: bytes) -> int:
        return builder.payload(value, len(value), b"")


class Text(Indirect):
    """A UTF-8 string, followed by a NUL terminator."""

    def read(self, reader: _Reader, position: int) -> str:
        data = reader.payload(position, 1, 1)
        if data[-1]:
            raise CorruptData("string without NUL terminator", offset=position + 3 + len(data))
        try:
            return str(data[:-1], "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptData("string is not UTF-8", offset=position + 4 + error.start) from None

    def write(self, builder: _Builder, value: str) -> int:
        data = value.encode()
        return builder.payload(data, len(data), b"\0")


class Numbers(Indirect):
    """A vector of u32."""

    def read(self, reader: _Reader, position: int) -> tuple[int, ...]:
        data = reader.payload(position, 4, 0)
        return struct.unpack(f"<{len(data) // 4}I", data)

    def write(self, builder: _Builder, value: Sequence[int]) -> int:
        return builder.payload(struct.pack(f"<{len(value)}I", *value), len(value), b"")


class Child(Indirect):
    """A table."""

    def __init__(self, shape: Shape[Any], *, required: bool = False) -> None:
        super().__init__(required=required)
        self.shape = shape

    def read(self, reader: _Reader, position: int) -> Any:
        return reader.table(self.shape, position)

    def write(self, builder: _Builder, value: Any) -> int:
        return builder.table(self.shape, value)


class Children(Child):
    """A vector of tables."""

    def read(self, reader: _Reader, position: int) -> tuple[Any, ...]:
        data = reader.payload(position, 4, 0)
        table, shape = reader.table, self.shape
        offsets = struct.unpack(f"<{len(data) // 4}I", data)
        return tuple([table(shape, position + 4 + 4 * i + offset) for i, offset in enumerate(offsets)])

    def write(self, builder: _Builder, value: Sequence[Any]) -> int:
        table, shape = builder.table, self.shape
        return builder.offsets([table(shape, element) for element in value])


class Union(Indirect):
    """One of several tables, chosen by the tag in the slot before; tag 0 means none."""

    def __init__(self, shapes: Mapping[int, Shape[Any]], *, required: bool = False) -> None:
        super().__init__(required=required)
        self._choices = {tag: Child(shape) for tag, shape in shapes.items()}

    def chosen_by(self, tag: int) -> Child:
        """The field of the table that `tag` chooses."""
        choice = self._choices.get(tag)
        if choice is None:
            raise CorruptData(f"union of unknown kind {tag}")
        return choice


class _Layout(NamedTuple):
    """How a table with given fields is packed at a given end position."""

    packer: struct.Struct
    slots: tuple[int, ...]  # in the order of their addresses
    offsets: tuple[tuple[int, int], ...]  # (slot, address inside the table) of the indirect fields
    vtable: bytes
    alignment: int


class _Plan(NamedTuple):
    """How the tables of one vtable are unpacked."""

    size: int
    unpacker: struct.Struct
    slots: tuple[int, ...]
    children: tuple[tuple[int, int, Indirect], ...]
    phase: int
    """The value of (position % 8) that aligns the 8-byte fields; -1 if there are none."""
    padding: tuple[tuple[int, int], ...]
    """The bytes of the table that belong to no known field."""
    newer: bool
    """Whether there are fields that the shape does not declare."""


class Shape(Generic[T]):
    """A table: its fields in slot order, and how they become a value and are taken from one.

    `make` receives a list with one value per slot and may raise CorruptData; `take` returns such a sequence.
    `order` names the slots of the indirect fields in the order they are written; default is by slot.
    """

    def __init__(
        self,
        name: str,
        *fields: Field,
        make: Callable[[list[Any]], T],
        take: Callable[[T], Sequence[Any]],
        order: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self.fields = fields
        self.make = make
        self.take = take
        self.defaults: tuple[int | None, ...] = tuple(field.default for field in fields)
        indirect = {slot: field for slot, field in enumerate(fields) if isinstance(field, Indirect)}
        self.children: list[tuple[int, Indirect]] = [(at, indirect[at]) for at in order or indirect]
        self.required: list[int] = [slot for slot, field in indirect.items() if field.required]
        self.layouts: dict[tuple[int, int], _Layout] = {}
        self.plans: dict[bytes, _Plan] = {}
        if len(self.children) != len(indirect):
            raise InternalError(f"shape {name}: order must name every indirect slot")


def decode(shape: Shape[T], buffer: bytes | memoryview, *, strict: bool = False) -> T:
    """The value in a whole buffer. Anything malformed raises CorruptData with the offset inside `buffer`.

    With `strict` no two objects may share or overlap bytes, and bytes of no object must be zero and no longer than
    padding. That finds offsets and vtables that damage has turned into other valid ones. Buffers with fields of a
    newer release are exempt.
    """
    reader = _Reader(bytes(buffer), strict=strict)
    value = reader.table(shape, reader.root())
    reader.check_used()
    return value  # type: ignore[no-any-return]


def encode(shape: Shape[T], value: T) -> bytes:
    """The canonical buffer of the value. Numbers that do not fit their slot raise InternalError."""
    builder = _Builder()
    try:
        return builder.finish(builder.table(shape, value))
    except struct.error as error:
        raise InternalError(f"cannot write {shape.name}: {error}") from error


class _Reader:
    """Follows offsets in one buffer; every access is checked against its bounds and alignment."""

    def __init__(self, data: bytes, *, strict: bool = False) -> None:
        self._data = data
        self._size = len(data)
        self._used: set[tuple[int, int]] | None = {(0, 4)} if strict else None
        self._newer = False
        self._budget = _APPARENT_SIZE_FACTOR * len(data)
        self._plans: dict[tuple[Shape[Any], int], _Plan] = {}

    def root(self) -> int:
        if self._size < 8:
            raise CorruptData(f"a buffer of {self._size} bytes holds no table", offset=0)
        return int(_U32.unpack_from(self._data)[0])

    def table(self, shape: Shape[Any], position: int) -> Any:
        data = self._data
        if position & 3 or position + 4 > self._size:
            raise CorruptData(f"offset to {shape.name} is misaligned or out of bounds", offset=position)
        vtable = position - _I32.unpack_from(data, position)[0]
        plan = self._plans.get((shape, vtable)) or self._read_vtable(shape, vtable, position)
        size, unpacker, slots, children, phase, padding, newer = plan
        if position + size > self._size:
            raise CorruptData(f"{shape.name} of {size} bytes reaches past the end", offset=position)
        if phase != position & 7 and phase >= 0:
            raise CorruptData(f"{shape.name} has misaligned fields", offset=position)
        self._charge(size, position)
        if self._used is not None:
            self._newer = self._newer or newer
            self._use(self._used, position, position + size)
            length = struct.unpack_from("<H", data, vtable)[0]
            # Tables with the same fields share a vtable, so it counts once.
            self._used.add((vtable, vtable + length))
            for start, stop in padding:
                if any(data[position + start : position + stop]) and not self._newer:
                    raise CorruptData(f"{shape.name} has bytes of no field", offset=position + start)
        values: list[Any] = list(shape.defaults)
        for slot, value in zip(slots, unpacker.unpack_from(data, position), strict=True):
            values[slot] = value
        try:
            for slot, at, field in children:
                actual = field.chosen_by(values[slot - 1]) if isinstance(field, Union) else field
                values[slot] = actual.read(self, position + at + values[slot])
            return shape.make(values)
        except CorruptData as error:
            if error.offset is None:
                error.offset = position
            raise

    def payload(self, position: int, width: int, terminator: int) -> bytes:
        """The elements of a vector, `width` bytes each, and `terminator` bytes after them."""
        start = position + 4
        if position & 3 or start > self._size:
            raise CorruptData("offset to a vector is misaligned or out of bounds", offset=position)
        stop = start + _U32.unpack_from(self._data, position)[0] * width + terminator
        if stop > self._size:
            raise CorruptData(f"vector of {stop - start} bytes reaches past the end", offset=position)
        self._charge(stop - position, position)
        if self._used is not None:
            self._use(self._used, position, stop)
        return self._data[start:stop]

    def check_used(self) -> None:
        """With `strict`: raise unless the decoded objects cover the whole buffer, each byte once."""
        if self._used is None or self._newer:
            return
        end = 0
        for start, stop in [*sorted(self._used), (self._size, self._size)]:
            if start < end:
                raise CorruptData("objects overlap", offset=start)
            if start - end >= _ALIGNMENT or any(self._data[end:start]):
                raise CorruptData(f"{start - end} bytes belong to no object", offset=end)
            end = stop

    def _use(self, used: set[tuple[int, int]], start: int, stop: int) -> None:
        if (start, stop) in used:
            raise CorruptData("two references to one object", offset=start)
        used.add((start, stop))

    def _charge(self, size: int, position: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise CorruptData(
                "objects overlap: the decoded objects exceed the size of the buffer", offset=position
            )

    def _read_vtable(self, shape: Shape[Any], vtable: int, table: int) -> _Plan:
        data = self._data
        if vtable & 1 or vtable < 0 or vtable + 4 > self._size:
            raise CorruptData(f"{shape.name} has its vtable out of bounds", offset=table)
        length, size = struct.unpack_from("<HH", data, vtable)
        if length < 4 or length & 1 or vtable + length > self._size or size < 4:
            raise CorruptData(f"{shape.name} has a malformed vtable", offset=vtable)
        if known := shape.plans.get(data[vtable : vtable + length]):
            self._plans[shape, vtable] = known
            return known
        offsets = struct.unpack_from(f"<{length // 2 - 2}H", data, vtable + 4)
        present = sorted((at, slot) for slot, at in enumerate(offsets[: len(shape.fields)]) if at)
        for slot in shape.required:
            if slot >= len(offsets) or not offsets[slot]:
                raise CorruptData(f"{shape.name} lacks required field {slot}", offset=table)
        code, end, phases = "<", 0, set()
        for at, slot in present:
            field = shape.fields[slot]
            # Tables start at multiples of 4, so only 8-byte fields depend on where the table is.
            misaligned = at % min(field.size, 4)
            if at < max(end, 4) or at + field.size > size or misaligned:
                raise CorruptData(f"field {slot} of {shape.name} is misplaced", offset=vtable + 4 + 2 * slot)
            if field.size == 8:
                phases.add(-at & 7)
            code += f"{at - end}x{field.code}"
            end = at + field.size
        if len(phases) > 1:
            raise CorruptData(f"{shape.name} has misaligned fields", offset=vtable)
        indirect = dict(shape.children)
        slots = tuple(slot for _, slot in present)
        children = tuple((slot, at, indirect[slot]) for at, slot in present if slot in indirect)
        padding, end = [], 4
        for at, slot in present:
            padding.append((end, at))
            end = at + shape.fields[slot].size
        padding.append((end, size))
        newer = any(offsets[len(shape.fields) :])
        phase = phases.pop() if phases else -1
        gaps = tuple((start, stop) for start, stop in padding if start < stop)
        plan = _Plan(size, struct.Struct(code), slots, children, phase, gaps, newer)
        self._plans[shape, vtable] = plan
        if len(shape.plans) < _PLANS_KEPT:  # undamaged buffers have few different vtables
            shape.plans[data[vtable : vtable + length]] = plan
        return plan


class _Builder:
    """Collects the pieces of one buffer back to front. Positions count in bytes from its end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._used = 0
        self._vtables: dict[bytes, int] = {}
        self._alignment = 4

    def table(self, shape: Shape[Any], value: Any) -> int:
        values = list(shape.take(value))
        for slot, child in shape.children:
            if values[slot] is not None:
                actual = child.chosen_by(values[slot - 1]) if isinstance(child, Union) else child
                values[slot] = actual.write(self, values[slot])
            elif child.required:
                raise InternalError(f"{shape.name}: required field {slot} is missing")
        present = 0
        for default, held in zip(shape.defaults, values, strict=True):
            present = present << 1 | (held != default)
        key = (present, self._used & 7)
        layout = shape.layouts.get(key)
        if layout is None:
            layout = shape.layouts[key] = _plan_layout(shape, *key)
        packer, slots, offsets, vtable, alignment = layout
        place = self._used + packer.size
        for slot, at in offsets:
            values[slot] = place - at - values[slot]
        known = self._vtables.get(vtable)
        vtable_place = place + len(vtable) if known is None else known
        self._pieces.append(packer.pack(vtable_place - place, *[values[slot] for slot in slots]))
        self._used = place
        if known is None:
            self._pieces.append(vtable)
            self._used = self._vtables[vtable] = vtable_place
        self._alignment = max(self._alignment, alignment)
        return place

    def payload(self, data: bytes, count: int, terminator: bytes) -> int:
        """A vector or string of `count` elements."""
        length = len(data) + len(terminator)
        padding = -(self._used + length) & 3
        self._pieces.append(b"%b%b%b%b" % (_U32.pack(count), data, terminator, bytes(padding)))
        self._used += 4 + length + padding
        return self._used

    def offsets(self, places: Sequence[int]) -> int:
        """A vector of offsets to the objects at `places`."""
        count = len(places)
        first = self._used + (-self._used & 3) + 4 * count
        distances = [first - 4 * i - place for i, place in enumerate(places)]
        return self.payload(struct.pack(f"<{count}I", *distances), count, b"")

    def finish(self, root: int) -> bytes:
        padding = -(self._used + 4) & (self._alignment - 1)
        place = self._used + padding + 4
        self._pieces.append(_U32.pack(place - root) + bytes(padding))
        self._pieces.reverse()
        return b"".join(self._pieces)


def _plan_layout(shape: Shape[Any], present: int, phase: int) -> _Layout:
    """The layout of a table with the slots of the bit mask that ends `phase` bytes past a multiple of 8."""
    count = len(shape.fields)
    slots = [slot for slot in range(count) if present >> (count - 1 - slot) & 1]
    used, ends = phase, {}
    for slot in sorted(slots, key=lambda slot: (-shape.fields[slot].size, -slot)):
        size = shape.fields[slot].size
        used += size + (-(used + size) % size)
        ends[slot] = used
    used += 4 + (-(used + 4) & 3)
    addresses = {slot: used - end for slot, end in ends.items()}
    length = used - phase
    code, at = "<i", 4
    by_address = sorted(slots, key=addresses.__getitem__)
    for slot in by_address:
        field = shape.fields[slot]
        code += f"{addresses[slot] - at}x{field.code}"
        at = addresses[slot] + field.size
    vtable = [addresses.get(slot, 0) for slot in range(max(slots, default=-1) + 1)]
    return _Layout(
        struct.Struct(f"{code}{length - at}x"),
        tuple(by_address),
        tuple((slot, addresses[slot]) for slot in by_address if isinstance(shape.fields[slot], Indirect)),
        struct.pack(f"<{2 + len(vtable)}H", 4 + 2 * len(vtable), length, *vtable),
        max((shape.fields[slot].size for slot in slots), default=4),
    )
