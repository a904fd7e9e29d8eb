"""Which former schemas a stored schema keeps, so that rows of them stay readable. Pure.

A load with mode `overwrite` and a restore replace the schema together with all rows. A consumer of changes may still
have rows of the replaced schema before it. So the new schema keeps the replaced one among its former schemas, and
versions get numbers that none of them has. Both need a bound: the newest `MAX_FORMER` schemas are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from flagstone.schema.table_schema import MAX_VERSIONS, TableSchema

MAX_FORMER: Final = 16
_MAX_BYTES: Final = 1024 * 1024


def with_former(schema: TableSchema, replaced: Iterable[TableSchema]) -> TableSchema:
    """The schema with the newest of the `replaced` schemas, those that they kept included, as former ones."""
    known = {each.alone(): None for stored in replaced for each in (*stored.former, stored)}
    known.pop(schema.alone(), None)
    kept: list[TableSchema] = []
    versions = size = 0
    for each in sorted(known, key=lambda each: each.current.number, reverse=True):
        versions, size = versions + len(each.versions), size + len(each.encode())
        if versions > MAX_VERSIONS or size > _MAX_BYTES or len(kept) == MAX_FORMER:
            if not kept:  # its number must never be used again
                kept.append(replace(each, versions=each.versions[-1:]))
            break
        kept.append(each)
    return replace(schema, former=tuple(reversed(kept)))


def after_restore(restored: TableSchema | None, given_up: TableSchema) -> TableSchema:
    """The schema to store when a restore brings back `restored`, and gives up rows of the schema `given_up`."""
    if restored is None:
        return replace(given_up, retired=True)
    kept = with_former(restored, [restored, given_up])
    return replace(kept, retired=restored.retired)
