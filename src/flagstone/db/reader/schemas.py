"""The stored schemas that a reader shows."""

from __future__ import annotations

from flagstone.db.reader.reader import DbReader
from flagstone.errors import InvalidRequest
from flagstone.lsm.system_rows import SCHEMA_PREFIX
from flagstone.schema import TableSchema


def read_schemas(reader: DbReader, *, retired: bool = False) -> dict[bytes, TableSchema]:
    """The schemas of structured rows, by the prefix of the keys that they are for; with `retired` also those.

    Reads schema rows only: a row behind them could have merge operands, for which the reader may have no operator.

    Raises:
        CorruptData: a schema row is damaged.
        InvalidRequest: a newer release of Flagstone wrote a schema.

    """
    try:
        rows = reader.scan(prefix=SCHEMA_PREFIX, include_system=True)
    except InvalidRequest:
        return {}  # a clone of a key range that does not contain schema rows refuses to read them
    with rows:
        found = {key.removeprefix(SCHEMA_PREFIX): TableSchema.decode(value, key) for key, value in rows}
    return {prefix: each for prefix, each in found.items() if retired or not each.retired}
