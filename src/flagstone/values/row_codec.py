"""The format `row`: a version, a bitmap of nulls, then one column after the other. `docs/keys.md` has the layout.

Structs and lists have the same layout inside. Encoding and decoding therefore recurse over the types; each step is
one kernel call for all rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.kernels import value_rows
from flagstone.kernels.columns import NOTHING, bitmap, fixed, present, room, strings, view, zeros
from flagstone.values import ValueCodec, is_list
from flagstone.values.single_rows import SingleRows

UNVERSIONED: Final = 0x01
"""The first byte of a row that names no schema version: its reader must know the columns."""

VERSIONED: Final = 0x02
"""The first byte of a row that names a version of the schema that the database stores."""

_NO_BITMAPS: Final = NOTHING.cast("q")


class RowCodec(ValueCodec):
    """Compact binary rows. They contain no names and no types, so reading them needs the schema.

    With `version` each row names that version of the schema that the database stores; the columns are those of it.
    """

    format = "row"

    def __init__(self, schema: Any, version: int = 0) -> None:
        super().__init__(schema)
        self.version: int = version
        self._lead = bytes([VERSIONED]) + varint(version) if version else bytes([UNVERSIONED])
        self._single = SingleRows.of(self.schema, self._lead, _step)
        self._names = frozenset(self.schema.names)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.schema, self.version)

    def decode_columns(self, values: Any, names: Collection[str]) -> list[Any]:
        """The named columns of binary values, in the order of the schema. Raises `CorruptData` for another version."""
        wanted = [number for number, name in enumerate(self.schema.names) if name in names]
        return _Reader(values).fields(list(self.schema), self._lead, wanted)

    def encode(self, row: Mapping[str, Any]) -> bytes:
        """The value of one row. A missing column is null. Raises as `encode_arrow` does."""
        plain = self._single and row.keys() <= self._names and self._single.encode(row)
        return plain or super().encode(row)

    def decode(self, value: bytes) -> dict[str, Any]:
        """The columns of one value. The base class handles whatever `SingleRows` does not, and raises all errors."""
        plain = self._single.decode(value) if self._single and type(value) is bytes else None
        return super().decode(value) if plain is None else plain

    def _stores(self, kind: Any) -> bool:
        return _is_string(kind) or _widths(kind) is not None

    def _encode(self, columns: list[Any], rows: int) -> Any:
        run = _contents(columns, rows, self._lead)
        try:
            offsets = pa.Array.from_buffers(pa.int64(), rows + 1, [None, run.offset_buffer]).cast(pa.int32())
        except pa.ArrowInvalid:
            raise InvalidRequest(f"{rows} values are larger than 2 GiB: encode fewer at a time") from None
        return pa.Array.from_buffers(pa.binary(), rows, [None, offsets.buffers()[1], run.data_buffer])

    def _decode(self, values: Any) -> list[Any]:
        return _Reader(values).fields(list(self.schema), self._lead)


def read_versions(values: Any) -> tuple[int, memoryview]:
    """The schema version of each value, and the one that all have; see the kernel of this name."""
    bounds, data = strings(values)
    versions = zeros(len(values))
    same = value_rows.read_versions(data, bounds[: len(values)], bounds[1:], present(values), versions)
    return same, versions


def _is_string(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary_view(kind)
    )


def _widths(kind: Any) -> tuple[int, int] | None:
    """The bytes of one item in a row and in a column; None if the type has no fixed width."""
    if pa.types.is_boolean(kind):
        return 1, 1
    if pa.types.is_decimal(kind):
        stride = kind.bit_width // 8
        fits = next(
            size for size, digits in ((4, 9), (8, 18), (16, 38), (32, 76)) if kind.precision <= digits
        )
        return min(fits, stride), stride
    if pa.types.is_fixed_size_binary(kind):
        return (kind.byte_width, kind.byte_width) if kind.byte_width else None
    if pa.types.is_primitive(kind) or pa.types.is_interval(kind):
        return kind.bit_width // 8, kind.bit_width // 8
    return None


class _Run(NamedTuple):
    """Items one after the other: item `i` is `data[offsets[i] : offsets[i + 1]]`."""

    offset_buffer: Any
    data_buffer: Any

    @property
    def offsets(self) -> memoryview:
        return view(self.offset_buffer, "q")

    @property
    def data(self) -> memoryview:
        return view(self.data_buffer, "B")


class _Fixed(NamedTuple):
    width: int
    stride: int
    values: memoryview
    valid: memoryview

    def measure(self, sizes: memoryview) -> None:
        value_rows.measure_fixed(self.width, self.valid, sizes)

    def write(self, field: int, bitmaps: memoryview, cursors: memoryview, out: memoryview) -> None:
        value_rows.write_fixed(field, self.stride, self.width, self.values, self.valid, bitmaps, cursors, out)


class _Delimited(NamedTuple):
    offsets: memoryview
    data: memoryview
    valid: memoryview

    def measure(self, sizes: memoryview) -> None:
        value_rows.measure_delimited(self.offsets, self.valid, sizes)

    def write(self, field: int, bitmaps: memoryview, cursors: memoryview, out: memoryview) -> None:
        value_rows.write_delimited(field, self.offsets, self.data, self.valid, bitmaps, cursors, out)


def _contents(columns: list[Any], rows: int, lead: bytes) -> _Run:
    """Rows of these columns, each of which begins with `lead`."""
    items = [_item(column) for column in columns]
    lead += varint(len(items))
    nulls = bytes((len(items) + 7) // 8)
    cursors = zeros(rows)
    value_rows.measure_fixed(len(lead) + len(nulls), NOTHING, cursors)
    for item in items:
        item.measure(cursors)
    run = _lay_out(cursors, rows)
    out = run.data
    value_rows.write_headers(lead, cursors, out)
    bitmaps = _copied(cursors)
    value_rows.write_headers(nulls, cursors, out)
    for field, item in enumerate(items):
        item.write(field, bitmaps, cursors, out)
    return run


def _lay_out(cursors: memoryview, rows: int) -> _Run:
    offsets = room(8 * (rows + 1))
    value_rows.lay_out(cursors, view(offsets, "q"))
    return _Run(offsets, room(view(offsets, "q")[rows]))


def varint(number: int) -> bytes:
    """A number as LEB128."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _copied(numbers: memoryview) -> memoryview:
    return memoryview(bytearray(numbers)).cast("q") if len(numbers) else zeros(0)


def _item(column: Any) -> _Fixed | _Delimited:
    """A column prepared for the kernel. Nested columns are already encoded."""
    kind, valid = column.type, present(column)
    if pa.types.is_struct(kind):
        run = _contents(column.flatten(), len(column), b"")
        return _Delimited(run.offsets, run.data, valid)
    if is_list(kind) or pa.types.is_map(kind):
        run = _lists(column)
        return _Delimited(run.offsets, run.data, valid)
    if _is_string(kind):
        return _Delimited(*strings(column), valid)
    if pa.types.is_null(kind):
        column = column.cast(pa.bool_())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    width, stride = _widths(column.type) or (0, 0)
    return _Fixed(width, stride, fixed(column, stride), valid)


def _lists(column: Any) -> _Run:
    """The encoded lists: encodes all elements first, then copies the elements of each list."""
    rows = len(column)
    ends = column.offsets.cast(pa.int64())
    first, last = (ends[0].as_py(), ends[rows].as_py()) if rows else (0, 0)
    elements = _item(column.values.slice(first, last - first))
    places = zeros(last - first)
    elements.measure(places)
    run = _lay_out(places, last - first)
    elements.write(0, _NO_BITMAPS, places, run.data)
    bounds = pc.subtract(ends, first) if rows else pa.array([0], pa.int64())
    lists = view(bounds.buffers()[1], "q")[bounds.offset : bounds.offset + rows + 1]
    cursors = zeros(rows)
    value_rows.measure_lists(lists, run.offsets, cursors)
    whole = _lay_out(cursors, rows)
    value_rows.write_lists(lists, run.offsets, run.data, elements.valid, cursors, whole.data)
    return whole


class _Located(NamedTuple):
    """The positions of the items of one column in the values. An item is null if its `valid` is 0."""

    starts: memoryview
    stops: memoryview
    valid: memoryview

    @classmethod
    def room_for(cls, rows: int) -> _Located:
        return cls(zeros(rows), zeros(rows), memoryview(bytearray(rows)))


class _Reader:
    """Reads columns from values. Nested items are read in place, without a copy."""

    def __init__(self, values: Any) -> None:
        self._bounds, self._data = strings(values)
        rows = len(values)
        self._values = _Located(self._bounds[:rows], self._bounds[1 : rows + 1], present(values))

    def fields(self, fields: list[Any], lead: bytes, wanted: Sequence[int] | None = None) -> list[Any]:
        """The columns of the values themselves; with `wanted` only those numbers, in ascending order."""
        return self._fields(fields, self._values, lead=lead, wanted=wanted)

    def _fields(
        self,
        fields: list[Any],
        whole: _Located,
        *,
        lead: bytes = b"",
        path: str = "",
        wanted: Sequence[int] | None = None,
    ) -> list[Any]:
        counts, bitmaps, cursors = self._headers(whole, lead=lead, path=path)
        columns = []
        # Items have no index: those before a wanted one are stepped over, those after the last one are not looked at.
        last = len(fields) if wanted is None else max(wanted, default=-1) + 1
        for number, field in enumerate(fields[:last]):
            field_path = f"{path}.{field.name}" if path else field.name
            found = _Located.room_for(len(cursors))
            bad = value_rows.locate_items(
                number, _step(field.type), self._data, whole.stops, counts, bitmaps, cursors, *found
            )
            self._check(bad, cursors, f"column {field_path!r} is cut off")
            if wanted is None or number in wanted:
                columns.append(self._column(field.type, found, field_path))
        if last == len(fields) and bytes(cursors) != bytes(whole.stops):
            # A row of a newer schema has more columns than this one; the bytes of those are not an error.
            ends = enumerate(zip(cursors, whole.stops, counts, strict=True))
            bad = next((row for row, (at, end, count) in ends if at != end and count <= len(fields)), -1)
            self._check(bad, cursors, f"there are bytes after the last column of {path or 'the row'}")
        return columns

    def _headers(
        self, whole: _Located, *, lead: bytes = b"", path: str
    ) -> tuple[memoryview, memoryview, memoryview]:
        rows = len(whole.starts)
        counts, bitmaps, cursors = zeros(rows), zeros(rows), zeros(rows)
        bad = value_rows.read_headers(lead, self._data, *whole, counts, bitmaps, cursors)
        if bad >= 0 and not path:
            kind = f"schema version {lead[1:].hex()}" if lead[0] == VERSIONED else "version 1"
            problem = f"it is not a row of {kind}: it has another format, or is damaged"
            raise CorruptData(f"value {bad}: {problem}", offset=0)
        self._check(bad, whole.starts, f"column {path!r} has no room for its nulls")
        return counts, bitmaps, cursors

    def _column(self, kind: Any, found: _Located, path: str) -> Any:
        rows = len(found.starts)
        nulls = bitmap(pa.py_buffer(found.valid), rows)
        if pa.types.is_null(kind):
            self._check(found.valid.tobytes().find(1), found.starts, f"column {path!r} is not null")
            return pa.nulls(rows)
        if pa.types.is_struct(kind):
            fields = [kind.field(index) for index in range(kind.num_fields)]
            children = self._fields(fields, found, path=path)
            return pa.Array.from_buffers(kind, rows, [nulls], children=children)
        if is_list(kind) or pa.types.is_map(kind):
            return self._lists(kind, found, nulls, path)
        if _is_string(kind):
            return self._strings(kind, found, nulls, path)
        width, stride = _widths(kind) or (0, 0)
        data = room(stride * rows)
        value_rows.gather_fixed(width, stride, self._data, found.starts, found.valid, view(data, "B"))
        if pa.types.is_boolean(kind):
            return pa.Array.from_buffers(pa.uint8(), rows, [nulls, data]).cast(pa.bool_())
        return _validated(pa.Array.from_buffers(kind, rows, [nulls, data]), path)

    def _strings(self, kind: Any, found: _Located, nulls: Any, path: str) -> Any:
        rows = len(found.starts)
        offsets = room(4 * (rows + 1))
        size = value_rows.measure_items(found.starts, found.stops, view(offsets, "i"))
        if size < 0:
            raise InvalidRequest(f"column {path!r} is larger than 2 GiB: decode fewer values at a time")
        data = room(size)
        value_rows.gather_bytes(self._data, found.starts, found.stops, view(offsets, "i"), view(data, "B"))
        column = pa.Array.from_buffers(pa.binary(), rows, [nulls, offsets, data])
        try:
            return column.cast(kind)
        except pa.ArrowInvalid:
            bad = next(row for row in range(rows) if not _is_text(column[row].as_py()))
            self._check(bad, found.starts, f"column {path!r} is not UTF-8")
            raise

    def _lists(self, kind: Any, found: _Located, nulls: Any, path: str) -> Any:
        rows = len(found.starts)
        counts, bitmaps, cursors = self._headers(found, path=path)
        offsets = room(8 * (rows + 1))
        value_rows.lay_out(_copied(counts), view(offsets, "q"))
        element = pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type
        elements = _Located.room_for(view(offsets, "q")[rows])
        bad = value_rows.locate_elements(
            _step(element), self._data, found.stops, counts, bitmaps, cursors, *elements
        )
        self._check(bad, cursors, f"column {path!r} is cut off")
        if bytes(cursors) != bytes(found.stops):
            bad = next(row for row in range(rows) if cursors[row] != found.stops[row])
            self._check(bad, cursors, f"there are bytes after the last element of {path}")
        children = [self._column(element, elements, f"{path}[]")]
        if pa.types.is_map(kind) and (children[0].null_count or children[0].field(0).null_count):
            # Arrow would abort the process.
            raise CorruptData(f"column {path!r} is a map in which an entry or its key is null")
        if not pa.types.is_large_list(kind):
            offsets = (
                pa.Array.from_buffers(pa.int64(), rows + 1, [None, offsets]).cast(pa.int32()).buffers()[1]
            )
        return pa.Array.from_buffers(kind, rows, [nulls, offsets], children=children)

    def _check(self, bad: int, positions: memoryview, problem: str) -> None:
        """Raise `CorruptData` for item `bad`, if it is not negative.

        `positions` are the starts of the items. A count or length precedes an item, so the byte before its start is in
        the same value.
        """
        if bad < 0:
            return
        row = bisect_right(self._bounds, positions[bad] - 1) - 1
        raise CorruptData(f"value {row}: {problem}", offset=positions[bad] - self._bounds[row])


def _validated(column: Any, path: str) -> Any:
    """The column; raises `CorruptData` if damaged bytes are not valid for its type, such as a time past 24 hours."""
    kind = column.type
    if pa.types.is_decimal(kind) or pa.types.is_time(kind) or pa.types.is_date64(kind):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as problem:
            raise CorruptData(f"column {path!r} is not a {kind}: {problem}") from None
    return column


def _step(kind: Any) -> int:
    """The size of an item, by which the kernel skips it; 0 if the item begins with its length."""
    if pa.types.is_null(kind):
        return 1
    widths = _widths(kind)
    return widths[0] if widths else 0


def _is_text(raw: bytes | None) -> bool:
    try:
        return raw is None or raw.decode() is not None
    except UnicodeDecodeError:
        return False
