"""Writes FlatBuffers tables, to the byte as SlateDB does. `format/flat.py` has the rules, and declares the tables.

A `Table` describes one kind of table. Its fields are the members of a record (a class with slots), the halves of a
wide number, or for everything else the values that `take` returns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import copy, get_u16, piece, put_little
from cython.cimports.flagstone.kernels._records import (
    MAX_SLOTS,
    Slots,
    get_member,
    new_slots,
    wide_high,
    wide_low,
)

from flagstone.errors import InternalError

# The letter of each kind of field. Numbers have that of `struct` and come first: an enumeration is an i8.
_BOOL = cython.declare(cython.int, 63)  # ?
_U8 = cython.declare(cython.int, 66)  # B
_U16 = cython.declare(cython.int, 72)  # H
_U32 = cython.declare(cython.int, 73)  # I
_U64 = cython.declare(cython.int, 81)  # Q
_I8 = cython.declare(cython.int, 98)  # b
_CHOICE = cython.declare(cython.int, 105)  # i
_I64 = cython.declare(cython.int, 113)  # q
_LAST_NUMBER = cython.declare(cython.int, 113)
_BYTES = cython.declare(cython.int, 115)  # s
_TEXT = cython.declare(cython.int, 116)  # t
_NUMBERS = cython.declare(cython.int, 117)  # u
_CHILD = cython.declare(cython.int, 118)  # v
_CHILDREN = cython.declare(cython.int, 119)  # w
_UNION = cython.declare(cython.int, 120)  # x

_SMALLEST_BUFFER = cython.declare(cython.Py_ssize_t, 1024)
_STRUCT_CODES = {"i": "b", "s": "I", "t": "I", "u": "I", "v": "I", "w": "I", "x": "I"}
_tables_made: list[int] = [0]


@cython.cclass
class _Layout:
    """How a table with given fields is packed at a given end position.

    Per field, by address, its slot, letter and offset. The lists are kept as bytes, and used by their addresses.
    """

    size: cython.Py_ssize_t
    count: cython.Py_ssize_t
    slots: cython.p_const_uchar
    codes: cython.p_const_uchar
    ats: cython.p_const_uchar
    kept: tuple
    vtable: bytes
    alignment: cython.Py_ssize_t
    packer: Any


@cython.cclass
class _Found:
    """The layout for `key` (the fields present, and the end position), and where the buffer at hand has its vtable."""

    key: cython.ulonglong
    layout: _Layout
    vtable_place: cython.Py_ssize_t


@cython.cclass
class Table:
    """One kind of table.

    A field is (letter, value that is not written, whether it is required, target). `order` are the slots of the fields
    outside the table in the order they are written. A `record` is a class and the name of the member for each slot, or
    None where the record has none; such a field is not written.
    """

    name: str
    count: cython.Py_ssize_t
    codes: bytes
    sizes: bytes
    unwritten: list
    required: bytes
    targets: list
    order: bytes
    take: Any
    members: list
    wide: cython.bint
    layouts: dict
    number: cython.Py_ssize_t
    expected: cython.Py_ssize_t

    def __init__(
        self,
        name: str,
        fields: Sequence[tuple[str, Any, bool, Any]],
        *,
        order: Sequence[int],
        take: Callable[[Any], Sequence[Any]] | None = None,
        record: tuple[type, Sequence[str | None]] | None = None,
        wide: bool = False,
    ) -> None:
        if len(fields) > MAX_SLOTS:
            raise InternalError(f"table {name}: more than {MAX_SLOTS} fields")
        self.name = name
        self.count = len(fields)
        self.codes = "".join([field[0] for field in fields]).encode()
        self.sizes = bytes([struct.calcsize("<" + _STRUCT_CODES.get(field[0], field[0])) for field in fields])
        self.unwritten = [field[1] for field in fields]
        self.required = bytes([field[2] for field in fields])
        self.targets = [field[3] for field in fields]
        self.order = bytes(order)
        self.take = take
        self.members = []
        if record is not None:
            self.members = [None if member is None else getattr(record[0], member) for member in record[1]]
        self.wide = wide
        self.layouts = {}
        self.number = _tables_made[0]
        self.expected = 0
        _tables_made[0] += 1


def encode(table: Table, value: Any, before: bytes) -> bytes:
    """The bytes `before`, then the buffer of the value. Numbers that do not fit their slot raise InternalError."""
    builder: _Builder = _Builder(table.expected)
    root: cython.Py_ssize_t
    try:
        root = builder.table(table, value)
    except (OverflowError, struct.error) as error:
        raise InternalError(f"cannot write {table.name}: {error}") from error
    table.expected = builder.used + builder.used // 16
    return builder.finish(root, before)


@cython.cclass
class _Builder:
    """Fills one buffer from its end. Places count in bytes from there; `used` is the number of bytes so far."""

    buffer: bytearray
    out: cython.p_uchar
    capacity: cython.Py_ssize_t
    used: cython.Py_ssize_t
    recent: list
    vtables: dict
    alignment: cython.Py_ssize_t

    def __init__(self, capacity: cython.Py_ssize_t) -> None:
        self.capacity = max(capacity, _SMALLEST_BUFFER)
        self.buffer = bytearray(self.capacity)
        self.out = self.buffer
        self.used = 0
        self.recent = [None] * (2 * _tables_made[0])
        self.vtables = {}
        self.alignment = 4

    @cython.cfunc
    @cython.exceptval(-1)
    def reserve(self, more: cython.Py_ssize_t) -> cython.int:
        """Have room for `more` bytes, which are zero."""
        capacity: cython.Py_ssize_t
        if self.used + more > self.capacity:
            capacity = 2 * (self.used + more)
            larger: bytearray = bytearray(capacity)
            out: cython.p_uchar = larger
            copy(out, capacity - self.used, self.out, self.capacity - self.used, self.used)
            self.buffer = larger
            self.out = larger
            self.capacity = capacity
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def table(self, table: Table, value: object) -> cython.Py_ssize_t:
        """Write a table after its children; returns its place."""
        index: cython.Py_ssize_t
        slot: cython.Py_ssize_t
        present: cython.ulonglong = 0
        bit: cython.ulonglong = 1
        code: cython.int
        values: list
        numbers: Slots
        if not cython.compiled:  # a C structure on the stack; only the slots that are present are read
            numbers = new_slots()
        codes: cython.p_const_uchar = table.codes
        order: cython.p_const_uchar = table.order
        if table.wide:
            numbers.held[0] = wide_high(value)
            numbers.held[1] = wide_low(value)
            present = (numbers.held[0] != 0) + 2 * (numbers.held[1] != 0)
            return self.packed(table, present, cython.address(numbers))
        if table.take is not None:
            values = list(table.take(value))
        else:
            values = [None if member is None else get_member(value, member) for member in table.members]
        for index in range(len(table.order)):
            slot = order[index]
            if values[slot] is not None:
                numbers.held[slot] = self.child(table, slot, values)
                present |= bit << slot
            elif table.required[slot]:
                raise InternalError(f"{table.name}: required field {slot} is missing")
        for slot in range(table.count):
            code = codes[slot]
            if code <= _LAST_NUMBER and values[slot] is not None:
                numbers.held[slot] = _bits(values[slot], code) if cython.compiled else int(values[slot])
                if numbers.held[slot] != 0 or table.unwritten[slot] is None:
                    present |= bit << slot
        return self.packed(table, present, cython.address(numbers))

    @cython.cfunc
    @cython.exceptval(-1)
    def packed(
        self, table: Table, present: cython.ulonglong, numbers: cython.pointer(Slots)
    ) -> cython.Py_ssize_t:
        """Write the fields of a table; `numbers` has the place of each child."""
        found: _Found = self.find(table, present)
        layout: _Layout = found.layout
        place: cython.Py_ssize_t = self.used + layout.size
        base: cython.Py_ssize_t
        at: cython.Py_ssize_t
        index: cython.Py_ssize_t
        slot: cython.Py_ssize_t
        self.reserve(layout.size + len(layout.vtable))
        base = self.capacity - place
        self.used = place
        if found.vtable_place == 0:
            self.used += len(layout.vtable)
            copy(self.out, self.capacity - self.used, layout.vtable, 0, len(layout.vtable))
            found.vtable_place = self.vtables[layout.vtable] = self.used
        for index in range(layout.count):
            if layout.codes[index] > _LAST_NUMBER:
                slot = layout.slots[index]
                at = get_u16(layout.ats, 2 * index)
                numbers.held[slot] = place - at - cython.cast(cython.Py_ssize_t, numbers.held[slot])
        if cython.compiled:
            put_little(self.out, base, cython.cast(cython.ulonglong, found.vtable_place - place), 4)
            for index in range(layout.count):
                at = base + get_u16(layout.ats, 2 * index)
                _store(self.out, at, layout.codes[index], numbers.held[layout.slots[index]])
        else:
            held = [numbers.held[slot] for slot in layout.slots]
            layout.packer.pack_into(self.buffer, base, found.vtable_place - place, *held)
        self.alignment = max(self.alignment, layout.alignment)
        return place

    @cython.cfunc
    def find(self, table: Table, present: cython.ulonglong) -> _Found:
        """The layout of a table with these fields that ends here, and the place of its vtable: 0 if it has none."""
        key: cython.ulonglong = (present << 3) | (self.used & 7)
        # Most tables of a kind have the same fields, and end at one of two positions.
        at: cython.Py_ssize_t = 2 * table.number + ((self.used >> 2) & 1)
        found: _Found | None = self.recent[at]
        if found is None or found.key != key:
            layout: _Layout | None = table.layouts.get(key)
            if layout is None:
                layout = table.layouts[key] = _layout(table, present, self.used & 7)
            found = _Found()
            found.key = key
            found.layout = layout
            found.vtable_place = 0
            self.recent[at] = found
        if found.vtable_place == 0:
            found.vtable_place = self.vtables.get(found.layout.vtable, 0)
        return found

    @cython.cfunc
    @cython.exceptval(-1)
    def child(self, table: Table, slot: cython.Py_ssize_t, values: list) -> cython.Py_ssize_t:
        """Write what a field refers to; returns its place."""
        codes: cython.p_const_uchar = table.codes
        code: cython.int = codes[slot]
        value = values[slot]
        if code == _BYTES:
            return self.vector(value, len(value), 0)
        if code == _CHILD:
            return self.table(table.targets[slot], value)
        if code == _CHILDREN:
            return self.children(table.targets[slot], value)
        if code == _TEXT:
            data: bytes = value.encode()
            return self.vector(data, len(data), 1)
        if code == _NUMBERS:
            return self.vector(struct.pack(f"<{len(value)}I", *value), len(value), 0)
        return self.table(table.targets[slot][values[slot - 1]], value)

    @cython.cfunc
    @cython.exceptval(-1)
    def vector(
        self, data: bytes, count: cython.Py_ssize_t, terminator: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """Write a vector or string of `count` elements, and `terminator` zero bytes after it."""
        length: cython.Py_ssize_t = len(data)
        padding: cython.Py_ssize_t = -(self.used + length + terminator) & 3
        self.reserve(4 + length + terminator + padding)
        self.used += terminator + padding + length
        copy(self.out, self.capacity - self.used, data, 0, length)
        self.used += 4
        put_little(self.out, self.capacity - self.used, count, 4)
        return self.used

    @cython.cfunc
    @cython.exceptval(-1)
    def children(self, target: Table, values: Any) -> cython.Py_ssize_t:
        """Write tables in order, then the vector of the offsets to them."""
        places: list = [self.table(target, value) for value in values]
        count: cython.Py_ssize_t = len(places)
        index: cython.Py_ssize_t
        place: cython.Py_ssize_t
        self.reserve(8 + 4 * count)
        self.used += -self.used & 3
        for index in range(count - 1, -1, -1):
            place = places[index]
            self.used += 4
            put_little(self.out, self.capacity - self.used, self.used - place, 4)
        self.used += 4
        put_little(self.out, self.capacity - self.used, count, 4)
        return self.used

    @cython.cfunc
    def finish(self, root: cython.Py_ssize_t, before: bytes) -> bytes:
        padding: cython.Py_ssize_t = -(self.used + 4) & (self.alignment - 1)
        self.reserve(4 + padding + len(before))
        self.used += padding + 4
        put_little(self.out, self.capacity - self.used, self.used - root, 4)
        self.used += len(before)
        copy(self.out, self.capacity - self.used, before, 0, len(before))
        return piece(self.out, self.capacity - self.used, self.capacity)


@cython.cfunc
@cython.exceptval(1, check=True)
def _bits(value: object, code: cython.int) -> cython.ulonglong:
    """A number as it is stored; only when compiled. Raises OverflowError when it does not fit."""
    signed: cython.longlong
    number: cython.ulonglong
    if code == _BOOL:
        return 1 if value else 0
    if code in (_I8, _CHOICE, _I64):
        signed = value
        if code != _I64 and cython.cast("signed char", signed) != signed:
            raise OverflowError(f"{value} does not fit into an i8")
        return cython.cast(cython.ulonglong, signed)
    number = value
    if (
        (code == _U8 and number > 0xFF)
        or (code == _U16 and number > 0xFFFF)
        or (code == _U32 and cython.cast(cython.uint, number) != number)
    ):
        raise OverflowError(f"{value} does not fit into its field")
    return number


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _store(
    out: cython.p_uchar, at: cython.Py_ssize_t, code: cython.int, number: cython.ulonglong
) -> cython.void:
    """Write a number or an offset; only when compiled."""
    if code in (_U64, _I64):
        put_little(out, at, number, 8)
    elif code == _U32 or code > _LAST_NUMBER:
        put_little(out, at, number, 4)
    elif code == _U16:
        put_little(out, at, number, 2)
    else:
        out[at] = number & 0xFF


def _layout(table: Table, present: int, phase: int) -> _Layout:
    """The layout of a table with the slots of the bit mask that ends `phase` bytes past a multiple of 8."""
    layout: _Layout = _Layout()
    slots: list = [slot for slot in range(table.count) if present >> slot & 1]
    used: int = phase
    ends: dict = {}
    for slot in sorted(slots, key=lambda slot: (-table.sizes[slot], -slot)):
        size = table.sizes[slot]
        used += size + (-(used + size) % size)
        ends[slot] = used
    used += 4 + (-(used + 4) & 3)
    addresses = {slot: used - end for slot, end in ends.items()}
    length = used - phase
    code, at = "<i", 4
    by_address = sorted(slots, key=addresses.__getitem__)
    for slot in by_address:
        letter = chr(table.codes[slot])
        code += f"{addresses[slot] - at}x{_STRUCT_CODES.get(letter, letter)}"
        at = addresses[slot] + table.sizes[slot]
    vtable = [addresses.get(slot, 0) for slot in range(max(slots, default=-1) + 1)]
    layout.size = length
    layout.count = len(slots)
    stored_slots: bytes = bytes(by_address)
    stored_codes: bytes = bytes([table.codes[slot] for slot in by_address])
    stored_ats: bytes = b"".join([addresses[slot].to_bytes(2, "big") for slot in by_address])
    layout.kept = (stored_slots, stored_codes, stored_ats)
    layout.slots = stored_slots
    layout.codes = stored_codes
    layout.ats = stored_ats
    layout.vtable = struct.pack(f"<{2 + len(vtable)}H", 4 + 2 * len(vtable), length, *vtable)
    layout.alignment = max([table.sizes[slot] for slot in slots], default=4)
    layout.packer = struct.Struct(f"{code}{length - at}x")
    return layout
