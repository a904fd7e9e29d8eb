"""The schema of structured rows, which the database stores beside them. `docs/schema.md` describes it for users.

`TableSchema` says what a schema row holds: the key columns, and each version of the value columns. `plan_evolution`
decides whether rows with other columns may be written, and what the schema is afterwards. `TableWriter` encodes rows
and `TableReader` decodes them, as Arrow columns or one by one.

A version never changes its meaning, and every row of the format `row` names its version. So a reader decodes each row
with the columns that it was written with, and gives all of them as the columns of one version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flagstone.schema.commit import SchemaChanged, SchemaCommit
from flagstone.schema.evolution import Evolution, GivenColumns, plan_evolution, plan_projection
from flagstone.schema.table_schema import Column, SchemaVersion, TableSchema, schema_key

if TYPE_CHECKING:
    from flagstone.schema.arrow import given_columns, key_arrow_schema, value_arrow_schema
    from flagstone.schema.rows import TableReader, TableWriter

__all__ = [
    "Column",
    "Evolution",
    "GivenColumns",
    "SchemaChanged",
    "SchemaCommit",
    "SchemaVersion",
    "TableReader",
    "TableSchema",
    "TableWriter",
    "given_columns",
    "key_arrow_schema",
    "plan_evolution",
    "plan_projection",
    "schema_key",
    "value_arrow_schema",
]

# These modules need PyArrow, which takes half a second to import.
_LAZY = {
    "given_columns": "arrow",
    "key_arrow_schema": "arrow",
    "value_arrow_schema": "arrow",
    "TableReader": "rows",
    "TableWriter": "rows",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'flagstone.schema' has no attribute {name!r}")
    return getattr(importlib.import_module(f"flagstone.schema.{_LAZY[name]}"), name)
