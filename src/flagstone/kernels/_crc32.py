"""The CRC-32 of zlib, the checksum of blocks: the interpreted form. `_crc32.pxd` has the compiled form."""

from __future__ import annotations

import zlib
from typing import Any


def prepare_crc32() -> None:
    """Compute the tables. A kernel that uses `crc32` calls this once, when it is imported."""


def crc32(data: Any, at: int, size: int) -> int:
    """The checksum of `size` bytes from `at` on."""
    return zlib.crc32(data[at : at + size])
