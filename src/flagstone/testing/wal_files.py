"""WAL files made by hand, for tests that need a log without a writer."""

from __future__ import annotations

from flagstone.format.codec import Codec
from flagstone.format.sst_info import SstType
from flagstone.table.builder import TableBuilder, TableOptions
from flagstone.types import EntryTuple


def encode_wal(rows: list[EntryTuple], *, codec: Codec = Codec.NONE) -> bytes:
    """One WAL file with these rows, which must be in commit order. Raises `InvalidRequest` when there are none."""
    builder = TableBuilder(TableOptions(codec=codec), sst_type=SstType.WAL)
    builder.add_rows(rows)
    return builder.finish().data
