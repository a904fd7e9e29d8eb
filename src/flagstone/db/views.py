"""What readers see of an open database: views over its tables, and the end of all views when it is closed."""

from __future__ import annotations

from typing import Any, NoReturn

from flagstone.errors import Closed
from flagstone.metadata.manifest import Manifest
from flagstone.read.view import ReadView, ViewBuilder
from flagstone.table.builder import EncodedTable
from flagstone.table.table_store import TableStore
from flagstone.types import Ulid


class ClosedView:
    """Stands where the view was: whoever reads through it is told that the database is closed."""

    def __init__(self, reason: Closed) -> None:
        self._reason = reason

    def __getattr__(self, _name: str) -> NoReturn:
        raise Closed(str(self._reason), reason=self._reason.reason)


class Views:
    """Makes the views of one open database. `prepare` is for one thread at a time."""

    def __init__(self, tables: TableStore) -> None:
        self.tables = tables
        self._builder = ViewBuilder(tables)

    def prepare(self, manifest: Manifest) -> ReadView:
        """The tables of a manifest, without memtables."""
        return self._builder.build(manifest)

    def closed(self, reason: Closed) -> Any:
        """The view of a database that was closed."""
        return ClosedView(reason)

    def upload(self, table_id: Ulid, encoded: EncodedTable) -> None:
        self.tables.upload(table_id, encoded)
