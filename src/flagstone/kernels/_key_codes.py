"""The codes of order-preserving keys: the interpreted form. `_key_codes.pxd` has the compiled form, see `_bytes`."""

from __future__ import annotations

from typing import Final

SIGN32: Final = 0x80000000
SIGN64: Final = 0x8000000000000000
INFINITY_BITS: Final = 0x7FF0000000000000
NAN_BITS: Final = 0x7FF8000000000000

# The type codes, as in `keys/codes`.
NULL_CODE: Final = 0x05
FALSE: Final = 0x10
NEGATIVE: Final = 0x28
POSITIVE: Final = 0x29
FLOAT: Final = 0x38
DECIMAL_NEGATIVE: Final = 0x40
DECIMAL_ZERO: Final = 0x41
DECIMAL_POSITIVE: Final = 0x42
DATE: Final = 0x48
# By these the caller names the kinds of numbers that have more than one code.
BOOLEAN: Final = 0x10
SIGNED: Final = 0x28
UNSIGNED: Final = 0x29

BIAS: Final = 0x8000
"""The exponent 0 of a decimal."""

MAX_COLUMN_BYTES: Final = 0x7FFFFFFF


def number_width(value: int) -> int:
    """How many bytes the number needs; none for 0."""
    return (value.bit_length() + 7) // 8
