"""Whether the tables of a load fit together, and into the database. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from flagstone.errors import InvalidRequest
from flagstone.metadata.manifest import SsTable
from flagstone.types import KeyRange


def order_tables(tables: Sequence[SsTable]) -> tuple[SsTable, ...]:
    """The tables by key. Raises `InvalidRequest` when two share keys: the rows were not partitioned by key."""
    ordered = sorted(tables, key=lambda table: table.info.first_entry or b"")
    for one, following in pairwise(ordered):
        if (one.info.last_entry or b"") >= (following.info.first_entry or b""):
            raise InvalidRequest(
                f"two tasks wrote overlapping keys: one up to {one.info.last_entry!r}, another from "
                f"{following.info.first_entry!r}. Partition the rows by key range: use flagstone.spark.bulk_load, or "
                'df.repartitionByRange("key").sortWithinPartitions("key") before write'
            )
    return tuple(ordered)


def check_writable(tables: Sequence[SsTable], ranges: Sequence[KeyRange] | None) -> None:
    """Raise `InvalidRequest` for a table with keys that a clone of a range does not take."""
    for table in tables if ranges is not None else ():
        first, last = table.info.first_entry or b"", table.info.last_entry or b""
        if not any(first in keys and last in keys for keys in ranges or ()):
            raise InvalidRequest(
                f"the keys from {first!r} to {last!r} are not all within what this clone was cut out for; "
                "load them into the database that holds their range"
            )
