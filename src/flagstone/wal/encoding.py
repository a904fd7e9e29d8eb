"""The bytes of one WAL file: an SST with rows in commit order, or nothing at all.

A file of ten bytes or fewer is empty. Nobody writes such a file except as a fence, to take a number away from
a writer that was replaced.
"""

from __future__ import annotations

from typing import Final

from flagstone.errors import CorruptData
from flagstone.format.codec import Codec
from flagstone.format.sst import FOOTER_BYTES, decode_sst
from flagstone.format.sst_info import SstType
from flagstone.table.builder import TableBuilder, TableOptions
from flagstone.types import EntryTuple

_OPTIONS: Final = {codec: TableOptions(codec=codec) for codec in Codec}


def encode_wal(rows: list[EntryTuple], *, codec: Codec = Codec.NONE) -> bytes:
    """One WAL file with these rows, which must be in commit order. Raises `InvalidRequest` when there are none."""
    builder = TableBuilder(_OPTIONS[codec], sst_type=SstType.WAL)
    builder.add_rows(rows)
    return builder.finish().data


def decode_wal(stored: bytes, path: str) -> list[EntryTuple]:
    """The rows of a WAL file in commit order; none for a fence. Raises `CorruptData` naming object and offset."""
    if len(stored) <= FOOTER_BYTES:
        return []
    image = decode_sst(stored, path)
    if image.info.sst_type is not SstType.WAL:
        raise CorruptData("a table where a WAL file was expected", object=path, offset=0)
    return [row for block in image.rows() for row in block]
