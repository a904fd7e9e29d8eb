"""The bytes of one WAL file: an SST with rows in commit order, or nothing at all.

A file of ten bytes or fewer is empty. Nobody writes such a file except as a fence, to take a number away from
a writer that was replaced.
"""

from __future__ import annotations

from flagstone.errors import CorruptData
from flagstone.format.sst import FOOTER_BYTES, decode_sst
from flagstone.format.sst_info import SstType
from flagstone.types import EntryTuple


def decode_wal(stored: bytes, path: str) -> list[EntryTuple]:
    """The rows of a WAL file in commit order; none for a fence. Raises `CorruptData` naming object and offset."""
    if len(stored) <= FOOTER_BYTES:
        return []
    image = decode_sst(stored, path)
    if image.info.sst_type is not SstType.WAL:
        raise CorruptData("a table where a WAL file was expected", object=path, offset=0)
    return [row for block in image.rows() for row in block]
