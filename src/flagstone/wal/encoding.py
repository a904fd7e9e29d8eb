"""The bytes of one WAL file: an SST with rows in commit order, or nothing at all.

An empty file is a fence: it takes a number away from a writer that was replaced. Releases before 0.14 wrote an SST
without a block instead. A file that is cut short, to however few bytes, is damage.
"""

from __future__ import annotations

from flagstone.errors import CorruptData
from flagstone.format.sst import decode_sst
from flagstone.format.sst_info import SstType
from flagstone.types import EntryTuple


def decode_wal(stored: bytes, path: str) -> list[EntryTuple]:
    """The rows of a WAL file in commit order; none for a fence. Raises `CorruptData` naming object and offset."""
    if not stored:
        return []
    image = decode_sst(stored, path)
    if image.info.sst_type is not SstType.WAL:
        raise CorruptData("an SST of tables where a WAL file was expected", object=path, offset=0)
    return [row for block in image.rows() for row in block]
