r"""The first byte of each part says what it is. These numbers are stored: none may ever change its meaning.

No code is 0x00 or 0xFF. So a tuple sorts before every longer one it begins, and `bytes + b"\xff"` sorts behind all
of those. The gaps are for kinds to come.
"""

from __future__ import annotations

from typing import Final

NULL: Final = 0x05
FALSE: Final = 0x10
TRUE: Final = 0x11
NEGATIVE: Final = 0x28
"""Integers below 0: minus the number of bytes that follow, down to 0x20."""
POSITIVE: Final = 0x29
"""Integers from 0 on: plus the number of bytes that follow, up to 0x31."""
FLOAT: Final = 0x38
DECIMAL_NEGATIVE: Final = 0x40
DECIMAL_ZERO: Final = 0x41
DECIMAL_POSITIVE: Final = 0x42
DATE: Final = 0x48
LOCAL_TIME: Final = 0x50
INSTANT: Final = 0x51
TEXT: Final = 0x58
BINARY: Final = 0x59

END: Final = 0x00
"""Ends a string. Inside, 0x00 is written 0x01 0x01, and 0x01 is written 0x01 0x02."""
BEHIND: Final = b"\xff"

MAX_INT_BYTES: Final = 8
MIN_INT: Final = -(2**63)
MAX_INT: Final = 2**64 - 1
MAX_DIGITS: Final = 38
EXPONENT_BIAS: Final = 0x8000
