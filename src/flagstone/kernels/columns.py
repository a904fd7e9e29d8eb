"""Arrow arrays as the runs of memory that kernels take, and back. Imports PyArrow: only columnar code may need it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

NOTHING: Final = memoryview(b"")


def room(size: int) -> Any:
    """A buffer for a kernel to fill."""
    return pa.allocate_buffer(size)


def view(buffer: Any, code: str) -> memoryview:
    """The whole buffer as numbers of one kind; nothing when there is no buffer."""
    return memoryview(NOTHING if buffer is None else buffer).cast("B").cast(code)  # type: ignore[call-overload]


def zeros(count: int) -> memoryview:
    """That many 64-bit numbers to count in."""
    return memoryview(bytearray(8 * count)).cast("q")


def words(column: pa.Array) -> memoryview:
    """A column of 64-bit numbers, or of two such words per row, as bit patterns."""
    per_row = column.type.bit_width // 64
    if not len(column):
        return NOTHING.cast("Q")
    return view(column.buffers()[1], "Q")[per_row * column.offset : per_row * (column.offset + len(column))]


def fixed(column: pa.Array, width: int) -> memoryview:
    """The bytes of a column in which every row takes `width` of them."""
    return view(column.buffers()[1], "B")[width * column.offset : width * (column.offset + len(column))]


def strings(column: pa.Array) -> tuple[memoryview, memoryview]:
    """Offsets and bytes of a column of strings or binaries: row `i` is `data[offsets[i] : offsets[i + 1]]`."""
    if not len(column):
        return zeros(1), NOTHING
    large = column.cast(pa.large_binary())
    _, offsets, data = large.buffers()
    return view(offsets, "q")[large.offset : large.offset + len(large) + 1], view(data, "B")


def present(column: pa.Array) -> memoryview:
    """One byte per row, 1 where it is not null; no byte at all when no row is."""
    if not column.null_count:
        return NOTHING
    flags = pc.is_valid(column).cast(pa.uint8())
    return fixed(flags, 1)


def bitmap(flags: Any, rows: int) -> Any:
    """One bit per row from a buffer of one byte per row; None when every row is valid."""
    valid = pa.Array.from_buffers(pa.uint8(), rows, [None, flags]).cast(pa.bool_())
    return None if valid.true_count == rows else valid.buffers()[1]


def constant(value: int | bytes, kind: Any) -> Any:
    """A scalar of a type of whole numbers, booleans or binaries. `pa.scalar` would import pandas if it is installed."""
    if isinstance(value, bytes):
        return binaries([value], kind)[0]
    data = value.to_bytes(max(1, kind.bit_width // 8), "little", signed=value < 0)
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(data)])[0]


def binaries(rows: Sequence[bytes], kind: Any) -> pa.Array:
    """A column of binaries or strings with 32-bit offsets. `pa.array` would import pandas if it is installed."""
    offsets = array("i", [0])
    offsets.extend(accumulate(map(len, rows)))
    return pa.Array.from_buffers(
        kind, len(rows), [None, pa.py_buffer(memoryview(offsets)), pa.py_buffer(b"".join(rows))]
    )


def numbers(rows: Sequence[int | None], kind: Any) -> pa.Array:
    """A column of 64-bit integers. `pa.array` would import pandas if it is installed."""
    code = "Q" if pa.types.is_uint64(kind) else "q"
    if None not in rows:
        return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(memoryview(array(code, rows)))])  # type: ignore[type-var]
    filled = array(code, [0 if row is None else row for row in rows])
    valid = bitmap(pa.py_buffer(bytes([row is not None for row in rows])), len(rows))
    return pa.Array.from_buffers(kind, len(rows), [valid, pa.py_buffer(memoryview(filled))])
