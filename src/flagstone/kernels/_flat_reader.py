"""Reads FlatBuffers tables strictly. `format/flat.py` has the rules, and declares the tables.

A `Table` describes one kind of table. Its fields become a value in one of three ways: a record (a class with slots)
gets its members one by one, a wide number is made of two u64, and for everything else `make` is called with a list.

Everything read is bounds-checked first: damaged bytes end in `CorruptData` with an offset inside the buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import get_little, get_u16, get_u32, piece
from cython.cimports.flagstone.kernels._records import (
    finish_record,
    mark_bytes,
    new_record,
    set_member,
    wide_number,
)

from flagstone.errors import CorruptData

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

_SIGN_BIT = cython.declare(cython.longlong, 0x80000000)
# Objects may be shared, but the decoded objects stay within this multiple of the buffer's size.
_APPARENT_SIZE_FACTOR = cython.declare(cython.Py_ssize_t, 4)
_PLANS_KEPT = cython.declare(cython.Py_ssize_t, 64)
_ALIGNMENT = cython.declare(cython.Py_ssize_t, 8)
_STRUCT_CODES = {"i": "b", "s": "I", "t": "I", "u": "I", "v": "I", "w": "I", "x": "I"}
_tables_made: list[int] = [0]


@cython.cclass
class _Plan:
    """How the tables of one vtable are unpacked: per field present, by address, its slot, letter and offset.

    `absent` are the slots that are not present. The lists are kept as bytes, and used by their addresses.
    """

    size: cython.Py_ssize_t
    count: cython.Py_ssize_t
    absent_count: cython.Py_ssize_t
    slots: cython.p_const_uchar
    codes: cython.p_const_uchar
    ats: cython.p_const_uchar
    absent: cython.p_const_uchar
    kept: tuple
    phase: cython.Py_ssize_t
    """The value of (position % 8) that aligns the 8-byte fields; -1 if there are none."""
    gaps: bytes
    """The offsets of the bytes that belong to no known field."""
    newer: cython.bint
    """Whether there are fields that are not declared."""
    vtable_bytes: cython.Py_ssize_t
    unpacker: Any


@cython.cclass
class _Found:
    """A vtable of the buffer at hand, and its plan."""

    vtable: cython.Py_ssize_t
    plan: _Plan


@cython.cclass
class Table:
    """One kind of table.

    A field is (letter, value when absent, whether it is required, target). A `record` is a class and the name of the
    member for each slot, or None where the record has none; such a field is only checked.
    """

    name: str
    count: cython.Py_ssize_t
    codes: bytes
    sizes: bytes
    defaults: list
    required: bytes
    targets: list
    make: Any
    record: Any
    members: list
    wide: cython.bint
    plans: dict
    number: cython.Py_ssize_t

    def __init__(
        self,
        name: str,
        fields: Sequence[tuple[str, Any, bool, Any]],
        *,
        make: Callable[[list[Any]], Any] | None = None,
        record: tuple[type, Sequence[str | None]] | None = None,
        wide: bool = False,
    ) -> None:
        self.name = name
        self.count = len(fields)
        self.codes = "".join([field[0] for field in fields]).encode()
        self.sizes = bytes([struct.calcsize("<" + _STRUCT_CODES.get(field[0], field[0])) for field in fields])
        self.defaults = [field[1] for field in fields]
        self.required = bytes([field[2] for field in fields])
        self.targets = [field[3] for field in fields]
        self.make = make
        self.record = None
        self.members = []
        if record is not None:
            self.record = record[0]
            self.members = [None if member is None else getattr(record[0], member) for member in record[1]]
        self.wide = wide
        self.plans = {}
        self.number = _tables_made[0]
        _tables_made[0] += 1


def decode(table: Table, buffer: bytes | memoryview, start: int, strict: bool) -> Any:
    """The value in `buffer` from `start` to its end. Raises CorruptData with the offset counted from `start`."""
    reader: _Reader = _Reader(buffer, start, strict)
    if reader.size < 8:
        raise CorruptData(f"a buffer of {reader.size} bytes holds no table", offset=0)
    value = reader.table(table, get_u32(reader.data, 0))
    reader.check_used()
    return value


@cython.cclass
class _Reader:
    """Follows offsets in one buffer; every access is checked against its bounds and alignment.

    With `strict`, `marks` has a byte per byte of the buffer: 0 while no object has it, 2 where one begins.
    """

    buffer: Any
    data: cython.p_const_uchar
    size: cython.Py_ssize_t
    budget: cython.Py_ssize_t
    recent: list
    found: dict
    strict: cython.bint
    newer: cython.bint
    marks: bytearray
    marked: cython.p_uchar
    overlap: cython.Py_ssize_t
    wide: Any
    wide_high: cython.ulonglong
    wide_low: cython.ulonglong

    def __init__(self, buffer: Any, start: cython.Py_ssize_t, strict: cython.bint) -> None:
        view: cython.const[cython.uchar][::1] = buffer
        # A view keeps memory that can grow at its place.
        self.buffer = memoryview(buffer)
        self.size = max(len(view) - start, 0)
        if not cython.compiled:
            self.data = bytes(view[start:])
        elif self.size > 0:
            self.data = cython.address(view[start])
        self.budget = _APPARENT_SIZE_FACTOR * self.size
        self.recent = [None] * _tables_made[0]
        self.found = {}
        self.strict = strict
        self.newer = False
        self.overlap = -1
        self.wide = None
        self.wide_high = self.wide_low = 0
        self.marks = bytearray(self.size if strict else 0)
        self.marked = self.marks
        if strict and self.size >= 4:
            self.use(0, 4)

    @cython.cfunc
    def table(self, table: Table, position: cython.Py_ssize_t) -> object:
        """The value of the table at a position."""
        distance: cython.longlong
        vtable: cython.Py_ssize_t
        found: _Found
        plan: _Plan
        if position & 3 or position + 4 > self.size:
            raise CorruptData(f"offset to {table.name} is misaligned or out of bounds", offset=position)
        distance = get_u32(self.data, position)
        if distance >= _SIGN_BIT:
            distance -= 2 * _SIGN_BIT
        vtable = position - distance
        found = self.recent[table.number]
        if found is None or found.vtable != vtable:
            found = self.find(table, vtable, position)
        plan = found.plan
        if position + plan.size > self.size:
            raise CorruptData(f"{table.name} of {plan.size} bytes reaches past the end", offset=position)
        if plan.phase != position & 7 and plan.phase >= 0:
            raise CorruptData(f"{table.name} has misaligned fields", offset=position)
        self.charge(plan.size, position)
        if self.strict:
            self.use_table(table, plan, position)
        if table.wide:
            return self.wide_value(plan, position)
        if table.record is not None:
            return self.record(table, plan, position)
        return self.made_value(table, plan, position)

    @cython.cfunc
    def wide_value(self, plan: _Plan, position: cython.Py_ssize_t) -> object:
        high: cython.ulonglong = 0
        low: cython.ulonglong = 0
        index: cython.Py_ssize_t
        for index in range(plan.count):
            if plan.slots[index]:
                low = get_little(self.data, position + get_u16(plan.ats, 2 * index), 8)
            else:
                high = get_little(self.data, position + get_u16(plan.ats, 2 * index), 8)
        # Most views have the id of their SST.
        if self.wide is None or high != self.wide_high or low != self.wide_low:
            self.wide = wide_number(high, low)
            self.wide_high = high
            self.wide_low = low
        return self.wide

    @cython.cfunc
    def record(self, table: Table, plan: _Plan, position: cython.Py_ssize_t) -> object:
        index: cython.Py_ssize_t
        slot: cython.Py_ssize_t
        numbers: Any = () if cython.compiled else plan.unpacker.unpack_from(self.data, position)
        made = new_record(table.record)
        for index in range(plan.absent_count):
            slot = plan.absent[index]
            if table.members[slot] is not None:
                set_member(made, table.members[slot], table.defaults[slot])
        for index in range(plan.count):
            slot = plan.slots[index]
            # A record has no union, so that `field` needs no values.
            value = self.field(table, plan, index, position, numbers, table.defaults)
            if table.members[slot] is not None:
                set_member(made, table.members[slot], value)
        finish_record(made)
        return made

    @cython.cfunc
    def made_value(self, table: Table, plan: _Plan, position: cython.Py_ssize_t) -> object:
        index: cython.Py_ssize_t
        numbers: Any = () if cython.compiled else plan.unpacker.unpack_from(self.data, position)
        values: list = table.defaults.copy()
        for index in range(plan.count):
            values[plan.slots[index]] = self.field(table, plan, index, position, numbers, values)
        try:
            return table.make(values)
        except CorruptData as error:
            if error.offset is None:
                error.offset = position
            raise

    @cython.cfunc
    def field(
        self,
        table: Table,
        plan: _Plan,
        index: cython.Py_ssize_t,
        position: cython.Py_ssize_t,
        numbers: Any,
        values: list,
    ) -> object:
        """The value of a field. `values` are those before it; `numbers` those of the table, when interpreted."""
        code: cython.int = plan.codes[index]
        slot: cython.Py_ssize_t = plan.slots[index]
        at: cython.Py_ssize_t = position + get_u16(plan.ats, 2 * index)
        if code <= _LAST_NUMBER:
            value = _load(self.data, at, code) if cython.compiled else numbers[index]
            if code != _CHOICE:
                return value
            what, members = table.targets[slot]
            member = members.get(value)
            if member is None:
                raise CorruptData(f"unknown {what} {value}", offset=at)
            return member
        at += get_u32(self.data, at) if cython.compiled else numbers[index]
        if code == _BYTES:
            return piece(self.data, at + 4, self.vector_end(at, 1, 0))
        if code == _CHILD:
            return self.table(table.targets[slot], at)
        if code == _CHILDREN:
            return self.children(table.targets[slot], at)
        if code == _TEXT:
            return self.text(at)
        if code == _NUMBERS:
            data: bytes = piece(self.data, at + 4, self.vector_end(at, 4, 0))
            return struct.unpack(f"<{len(data) // 4}I", data)
        kind = values[slot - 1]
        if kind not in table.targets[slot]:
            raise CorruptData(f"union of unknown kind {kind}", offset=position)
        return self.table(table.targets[slot][kind], at)

    @cython.cfunc
    def children(self, target: Table, position: cython.Py_ssize_t) -> tuple:
        stop: cython.Py_ssize_t = self.vector_end(position, 4, 0)
        return tuple([self.table(target, at + get_u32(self.data, at)) for at in range(position + 4, stop, 4)])

    @cython.cfunc
    def text(self, position: cython.Py_ssize_t) -> str:
        stop: cython.Py_ssize_t = self.vector_end(position, 1, 1)
        data: bytes = piece(self.data, position + 4, stop - 1)
        if self.data[stop - 1]:
            raise CorruptData("string without NUL terminator", offset=stop - 1)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptData("string is not UTF-8", offset=position + 4 + error.start) from None

    @cython.cfunc
    @cython.exceptval(-1)
    def vector_end(
        self, position: cython.Py_ssize_t, width: cython.Py_ssize_t, terminator: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """Where a vector with elements of `width` bytes ends, and `terminator` bytes after them."""
        stop: cython.Py_ssize_t
        if position & 3 or position + 4 > self.size:
            raise CorruptData("offset to a vector is misaligned or out of bounds", offset=position)
        stop = position + 4 + terminator
        stop += cython.cast(cython.Py_ssize_t, get_u32(self.data, position)) * width
        if stop > self.size:
            raise CorruptData(f"vector of {stop - position - 4} bytes reaches past the end", offset=position)
        self.charge(stop - position, position)
        if self.strict:
            self.use(position, stop)
        return stop

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def charge(self, size: cython.Py_ssize_t, position: cython.Py_ssize_t) -> cython.int:
        self.budget -= size
        if self.budget < 0:
            raise CorruptData(
                "objects overlap: the decoded objects exceed the size of the buffer", offset=position
            )
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def use_table(self, table: Table, plan: _Plan, position: cython.Py_ssize_t) -> cython.int:
        index: cython.Py_ssize_t
        at: cython.Py_ssize_t
        gaps: cython.p_const_uchar = plan.gaps
        self.newer = self.newer or plan.newer
        self.use(position, position + plan.size)
        for index in range(len(plan.gaps) // 2):
            at = position + get_u16(gaps, 2 * index)
            if self.data[at] and not self.newer:
                raise CorruptData(f"{table.name} has bytes of no field", offset=at)
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def use(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.int:
        if self.marked[start] == 2:
            raise CorruptData("two references to one object", offset=start)
        if mark_bytes(self.marked, start, stop) and self.overlap < 0:
            self.overlap = start
        self.marked[start] = 2
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def check_used(self) -> cython.int:
        """With `strict`: raise unless the decoded objects cover the whole buffer, each byte once."""
        start: cython.Py_ssize_t
        stop: cython.Py_ssize_t
        zero: cython.bint
        if not self.strict or self.newer:
            return 0
        if self.overlap >= 0:
            raise CorruptData("objects overlap", offset=self.overlap)
        start = self.marks.find(0)
        while start >= 0:
            stop = start
            zero = True
            while stop < self.size and not self.marked[stop]:
                zero = zero and not self.data[stop]
                stop += 1
            if stop - start >= _ALIGNMENT or not zero:
                raise CorruptData(f"{stop - start} bytes belong to no object", offset=start)
            start = self.marks.find(0, stop)
        return 0

    @cython.cfunc
    def find(self, table: Table, vtable: cython.Py_ssize_t, position: cython.Py_ssize_t) -> _Found:
        """The plan of a vtable that is not the one of the table before."""
        key = (table.number, vtable)
        found: _Found | None = self.found.get(key)
        if found is None:
            found = _Found()
            found.vtable = vtable
            found.plan = self.read_vtable(table, vtable, position)
            # Tables with the same fields share a vtable, so it counts once.
            if self.strict and self.found.get(vtable) is None:
                self.found[vtable] = found
                if mark_bytes(self.marked, vtable, vtable + found.plan.vtable_bytes) and self.overlap < 0:
                    self.overlap = vtable
            self.found[key] = found
        self.recent[table.number] = found
        return found

    @cython.cfunc
    def read_vtable(self, table: Table, vtable: cython.Py_ssize_t, position: cython.Py_ssize_t) -> _Plan:
        length: cython.Py_ssize_t
        size: cython.Py_ssize_t
        plan: _Plan | None
        if vtable & 1 or vtable < 0 or vtable + 4 > self.size:
            raise CorruptData(f"{table.name} has its vtable out of bounds", offset=position)
        length = get_little(self.data, vtable, 2)
        size = get_little(self.data, vtable + 2, 2)
        if length < 4 or length & 1 or vtable + length > self.size or size < 4:
            raise CorruptData(f"{table.name} has a malformed vtable", offset=vtable)
        stored: bytes = piece(self.data, vtable, vtable + length)
        plan = table.plans.get(stored)
        if plan is None:
            plan = _plan(table, struct.unpack(f"<{length // 2}H", stored), vtable, position)
            if len(table.plans) < _PLANS_KEPT:  # undamaged buffers have few different vtables
                table.plans[stored] = plan
        return plan


def _plan(table: Table, stored: tuple, vtable: cython.Py_ssize_t, position: cython.Py_ssize_t) -> _Plan:
    """How to unpack tables with a vtable. Raises CorruptData where its fields are missing or misplaced."""
    plan: _Plan = _Plan()
    offsets: list = list(stored[2:])
    size: int = stored[1]
    present: list = sorted([(at, slot) for slot, at in enumerate(offsets[: table.count]) if at])
    for slot in range(table.count):
        if table.required[slot] and (slot >= len(offsets) or not offsets[slot]):
            raise CorruptData(f"{table.name} lacks required field {slot}", offset=position)
    code, end = "<", 0
    phases: set = set()
    gaps: list = []
    for at, slot in present:
        field_bytes = table.sizes[slot]
        # Tables start at multiples of 4, so only 8-byte fields depend on where the table is.
        if at < max(end, 4) or at + field_bytes > size or at % min(field_bytes, 4):
            raise CorruptData(f"field {slot} of {table.name} is misplaced", offset=vtable + 4 + 2 * slot)
        if field_bytes == 8:
            phases.add(-at & 7)
        letter = chr(table.codes[slot])
        code += f"{at - end}x{_STRUCT_CODES.get(letter, letter)}"
        gaps += range(max(end, 4), at)
        end = at + field_bytes
    if len(phases) > 1:
        raise CorruptData(f"{table.name} has misaligned fields", offset=vtable)
    gaps += range(max(end, 4), size)
    plan.size = size
    plan.count = len(present)
    slots: bytes = bytes([slot for _, slot in present])
    codes: bytes = bytes([table.codes[slot] for _, slot in present])
    ats: bytes = b"".join([at.to_bytes(2, "big") for at, _ in present])
    absent: bytes = bytes([slot for slot in range(table.count) if slot not in slots])
    plan.kept = (slots, codes, ats, absent)
    plan.slots = slots
    plan.codes = codes
    plan.ats = ats
    plan.absent = absent
    plan.absent_count = len(absent)
    plan.phase = phases.pop() if phases else -1
    plan.gaps = b"".join([at.to_bytes(2, "big") for at in gaps])
    plan.newer = any(offsets[table.count :])
    plan.vtable_bytes = stored[0]
    plan.unpacker = struct.Struct(code)
    return plan


@cython.cfunc
def _load(data: cython.p_const_uchar, at: cython.Py_ssize_t, code: cython.int) -> object:
    """The number at an address; only when compiled."""
    if code == _U64:
        return get_little(data, at, 8)
    if code in (_I8, _CHOICE):
        return cython.cast("signed char", data[at])
    if code == _U32:
        return get_u32(data, at)
    if code == _U16:
        return cython.cast(cython.int, get_little(data, at, 2))
    if code == _U8:
        return data[at]
    if code == _BOOL:
        return data[at] != 0
    return cython.cast(cython.longlong, get_little(data, at, 8))
