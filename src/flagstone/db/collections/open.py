"""Declares collections: derives the layout of keys and values, stores the schema, finds the indexes."""
# ruff: noqa: SLF001 - schema and index list are read past the writable range of a clone

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flagstone.db.collections.codecs import plain_values
from flagstone.db.collections.collection import Collection, Declared
from flagstone.db.collections.index import IndexSet
from flagstone.db.collections.parts import KeyParts, collection_prefix, indexes_key
from flagstone.db.mapping import NotSupported
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.keys.tuples import AFTER
from flagstone.schema import (
    Column,
    GivenColumns,
    SchemaVersion,
    TableReader,
    TableSchema,
    given_columns,
    plan_evolution,
    value_arrow_schema,
)

if TYPE_CHECKING:
    from flagstone.db.collections.shapes import Shape
    from flagstone.db.read_methods import Reads


def open_collection(handle: Reads, name: str, *, key: Any, value: Any) -> Collection[Any, Any]:
    """The collection `name` of a database, snapshot or reader.

    A database stores the schema of the collection if it is new, or if it gets new columns.

    Raises:
        InvalidRequest: a type has no columns, or does not fit the schema that the database has.

    """
    prefix = collection_prefix(name)
    stored = handle.schema(prefix)
    parts = KeyParts(key, prefix, () if stored is None else stored.key)
    values = plain_values(value)
    if values is None:
        # Imported here: these import PyArrow, which bytes and JSON do not need.
        from flagstone.db.collections.shapes import shape_of  # noqa: PLC0415

        shape = shape_of(value)
        if stored is None:
            _refuse_other_rows(handle, name, prefix)
        values = RowValues(handle, parts, shape)
    elif stored is not None:
        raise InvalidRequest(
            f"the collection {name!r} has values with columns: declare it with their type, not as bytes or 'json'"
        )
    return Collection(handle, Declared(name, parts, values, _indexes_of(handle, name)))


def _refuse_other_rows(handle: Reads, name: str, prefix: bytes) -> None:
    """Raise `InvalidRequest` if there are rows without columns: with a schema, their own program would be refused."""
    from flagstone.values.row_codec import UNVERSIONED, VERSIONED  # noqa: PLC0415 - it imports PyArrow

    with handle.scan(prefix, prefix + AFTER, limit=1) as rows:
        found = next(rows, None)
    if found is not None and found[1][:1] not in (bytes([UNVERSIONED]), bytes([VERSIONED])):
        raise InvalidRequest(
            f"the collection {name!r} has values without columns: declare it as 'json' or bytes, as they were written, "
            "or choose another name"
        )


def _indexes_of(handle: Reads, name: str) -> IndexSet:
    """The indexes of a collection: one object for all handles of a database that is open for writing."""
    shared: dict[str, IndexSet] | None = getattr(handle, "_index_sets", None)
    if shared is None:
        return IndexSet(name, handle._schema_row(indexes_key(name)))
    # `setdefault` is atomic: two threads that open the same collection get the same object.
    return shared.get(name) or shared.setdefault(name, IndexSet(name, handle._schema_row(indexes_key(name))))


class RowValues:
    """Values with columns, in the format `row`: each names the version of the schema that it was written with.

    The schema may change while the collection is in use: a bulk load adds columns, or replaces all rows. So before a
    write after each new manifest the version is looked up again.
    """

    def __init__(self, handle: Reads, parts: KeyParts, shape: Shape) -> None:
        self._handle: Any = handle
        self._prefix = parts.prefix
        self._shape = shape
        self._given = _given(parts, shape)
        self._writes = hasattr(handle, "ensure_schema")
        self._manifest: object = None
        self._version: SchemaVersion | None = None
        self._reader: TableReader | None = None
        self._absent: dict[str, None] = {}
        if self._writes:
            self._follow_schema()
        else:
            self._read_schema()

    def encode(self, value: Any) -> bytes:
        if not self._writes:
            raise NotSupported("this collection is only read; write through the one of the database")
        if self._handle.manifest() is not self._manifest:
            self._follow_schema()
        row = self._shape.store(value)
        codec, never_null = self._form
        for name in never_null:
            if row.get(name) is None:
                raise InvalidRequest(f"field {name!r} is None, and the stored schema says that it never is")
        return codec.encode(row)

    def decode(self, stored: bytes) -> Any:
        reader = self._reader
        if reader is None or self._absent:
            # The stored schema lacks columns of the type: a writer may have added them since it was read.
            reader = self._read_schema()
        if reader is None:
            raise CorruptData("the database has a row of this collection, but not its schema")
        try:
            row = reader.decode_value(stored)
        except CorruptData:
            # Another process may have added a version since.
            now = self._read_schema()
            if now is None or now.schema == reader.schema:
                raise
            row = now.decode_value(stored)
        return self._shape.restore({**self._absent, **row})

    def _follow_schema(self) -> None:
        """Store the schema if need be, and write rows of a version that it has.

        A crash leaves a schema without rows.
        """
        from flagstone.values.row_codec import RowCodec  # noqa: PLC0415 - it imports PyArrow

        manifest = self._handle.manifest()
        stored = self._handle.schema(self._prefix)
        if self._version is None or stored is None or stored.find(self._version.number) != self._version:
            evolution = self._handle.ensure_schema(completed(self._given, stored), prefix=self._prefix)
            version = self._version = evolution.version
            # In one assignment: another thread may be encoding.
            self._form = (
                RowCodec(value_arrow_schema(version.columns), version.number),
                [column.name for column in version.columns if not column.nullable],
            )
        self._read_schema()
        self._manifest = manifest

    def _read_schema(self) -> TableReader | None:
        """Prepare to read rows of all versions that are stored now; None without any. Absent fields are None."""
        schema: TableSchema | None = self._handle.schema(self._prefix)
        plan_evolution(schema, completed(self._given, schema))  # refuses types that do not fit
        if schema is None:
            return None
        columns = self._shape.columns
        known = [field for field in columns if schema.latest_column(field.name) is not None]
        self._absent = dict.fromkeys({*columns.names} - {field.name for field in known})
        self._reader = TableReader(
            schema, columns.empty_table().select([each.name for each in known]).schema, prefix=self._prefix
        )
        return self._reader


def completed(given: GivenColumns, stored: TableSchema | None) -> GivenColumns:
    """The columns of a type and those that the database has besides: a program that does not know them writes nulls.

    Raises `InvalidRequest` if such a column may not be null.
    """
    if stored is None:
        return given
    names = {column.name for column in given.value}
    others = [column for column in stored.current.columns if column.name not in names]
    for column in others:
        if not column.nullable:
            raise InvalidRequest(
                f"the type of the values has no field {column.name!r}, which the database has and which is never null: "
                "add the field"
            )
    return GivenColumns(given.key, (*given.value, *others), given.value_format)


def _given(parts: KeyParts, shape: Shape) -> GivenColumns:
    clash = sorted({part.name for part in parts.parts} & set(shape.columns.names))
    if clash:
        raise InvalidRequest(
            f"a part of the key and a field of the value are called {clash[0]!r}: name the parts of the key, as in "
            'key={"region": str, "id": int}'
        )
    key = tuple(Column(part.name, part.type, nullable=False) for part in parts.parts)
    return GivenColumns(key, given_columns(shape.columns, ()).value)
