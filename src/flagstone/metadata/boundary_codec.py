"""A boundary <-> bytes: a decimal number, with its checksum as blanks around it.

SlateDB writes the digits alone and strips white space when it reads. So the 32 bits of the CRC-32 of the digits stand
around them as spaces (0) and tabs (1), sixteen in front and sixteen behind: a cut at either end leaves blanks at the
other and is noticed. A number with a few blanks around it, as an editor leaves them, has no checksum.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

from flagstone.errors import CorruptData

MAX_BOUNDARY: Final = 2**64 - 1
_PLAIN: Final = re.compile(rb"\s{0,4}([0-9]{1,20})\s{0,4}\Z")
_CHECKED: Final = re.compile(rb"([ \t]{16})([0-9]{1,20})([ \t]{16})\Z")


def encode_boundary(value: int) -> bytes:
    """The stored bytes of a boundary."""
    digits = b"%d" % value
    blanks = _blanks(digits)
    return blanks[:16] + digits + blanks[16:]


def decode_boundary(data: bytes, path: str) -> int:
    """The boundary in the object at `path`. Raises CorruptData when it is no number or not the one that was written."""
    checked = _CHECKED.match(data)
    if checked is not None:
        front, digits, back = checked.groups()
        if front + back != _blanks(digits):
            raise CorruptData(
                f"the checksum of the boundary {digits.decode()} is wrong", object=path, offset=0
            )
    else:
        plain = _PLAIN.match(data)
        if plain is None:
            raise CorruptData(f"{data[:60]!r} is not a boundary", object=path, offset=0)
        digits = plain[1]
    value = int(digits)
    if value > MAX_BOUNDARY:
        raise CorruptData(f"the boundary {value} is not an id", object=path, offset=0)
    return value


def _blanks(digits: bytes) -> bytes:
    return f"{zlib.crc32(digits):032b}".encode().translate(bytes.maketrans(b"01", b" \t"))
