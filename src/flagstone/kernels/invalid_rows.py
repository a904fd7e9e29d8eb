"""The errors of rows that cannot be written, in the words that users read."""

from __future__ import annotations

from flagstone.errors import InvalidRequest
from flagstone.kernels._bytes import MASK32, MAX_KEY_BYTES
from flagstone.kernels._rows import KIND_MASK


def invalid_row(number: int, key_size: int, value_size: int, flags: int) -> InvalidRequest:
    """The error for the `number`-th row of an SST, an entry tuple that is no row."""
    if not 1 <= key_size <= MAX_KEY_BYTES:
        return InvalidRequest(f"row {number}: a key has 1 to {MAX_KEY_BYTES} bytes, this one has {key_size}")
    if value_size > MASK32:
        return InvalidRequest(f"row {number}: a value has at most {MASK32} bytes, not {value_size}")
    kind = flags & KIND_MASK
    return InvalidRequest(f"row {number}: kind {kind} with a value of {value_size} bytes is not a row")


def invalid_column_row(number: int, key_size: int, value_size: int, kind: int) -> InvalidRequest:
    """The error for the `number`-th row of an SST, which columns describe wrongly."""
    return InvalidRequest(
        f"row {number} of the SST has a key of {key_size} bytes, a value of {value_size}, and kind {kind}; a key has "
        f"1 to {MAX_KEY_BYTES} bytes, and a deletion no value"
    )
